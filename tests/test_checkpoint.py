"""Run folders: what is written can be read back bit for bit, and what is damaged is refused.

What the programs do with a damaged folder is in test_programs.
"""

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from softvq import checkpoint, training
from softvq.autoencoder import VQVAE, VQVAEConfig
from softvq.checkpoint import load, save_model
from softvq.data import DataConfig, to_float
from softvq.quantizers import DDCLConfig, EMAConfig, StraightThroughConfig
from softvq.temperature import AnnealedTemperature, EntropyTemperature, FixedTemperature
from softvq.training import TrainConfig

QUANTIZERS = {
    "entropy": DDCLConfig(dim=4, codebook_size=8, temperature=EntropyTemperature(start=3.0)),
    "annealed": DDCLConfig(dim=4, codebook_size=8, temperature=AnnealedTemperature(end=0.02)),
    "fixed": DDCLConfig(
        dim=4, codebook_size=8, temperature=FixedTemperature(value=0.3), gradient="full"
    ),
    "straight_through": StraightThroughConfig(dim=4, codebook_size=8, init="data"),
    "ema": EMAConfig(dim=4, codebook_size=8, decay=0.9),
}
SMALL = VQVAEConfig(quantizer=QUANTIZERS["entropy"], hidden=6, residual_blocks=1)


@pytest.fixture(params=QUANTIZERS.values(), ids=QUANTIZERS)
def trained(request, noise_images) -> VQVAE:
    torch.manual_seed(0)
    images = noise_images(32)
    model = VQVAE(dataclasses.replace(SMALL, quantizer=request.param))
    training.prepare(model, images, total_steps=4)
    recipe = TrainConfig(lr=1e-3, eps=0.1)
    optimizer = training.build_optimizer(model, recipe)
    for pixels in images.batches(torch.arange(32), 16):
        training.train_step(model.train(), optimizer, pixels, 0.3, recipe)
    return model


@pytest.fixture
def run(tmp_path) -> Path:
    torch.manual_seed(0)
    save_model(tmp_path / "run", VQVAE(SMALL))
    return tmp_path / "run"


def edit_config(run: Path, *path: str, **values) -> None:
    """Changes entries of the part of config.json that `path` leads to; `...` removes one."""
    content = part = json.loads((run / "config.json").read_text())
    for name in path:
        part = part[name]
    part.update(values)
    for name in [name for name, value in part.items() if value is ...]:
        del part[name]
    (run / "config.json").write_text(json.dumps(content))


def test_a_loaded_model_gives_the_same_output_bit_for_bit(trained, tmp_path, noise_images):
    save_model(tmp_path, trained)
    loaded = load(tmp_path)
    assert not loaded.training
    assert loaded.config == trained.config
    assert_close(loaded.state_dict(), trained.state_dict(), rtol=0, atol=0)
    trained.eval()
    x = to_float(noise_images(5, size=13, seed=1).pixels)
    with torch.no_grad():
        (level,), (expected,) = loaded.encode(x), trained.encode(x)
        for name, value in expected._asdict().items():
            assert torch.equal(getattr(level, name), value), name
        for output, wanted in (
            (loaded(x).reconstruction, trained(x).reconstruction),
            (loaded.decode((level.soft,)), trained.decode((expected.soft,))),
            (loaded.decode_indices((level.indices,)), trained.decode((expected.quantized,))),
        ):
            assert torch.equal(output, wanted)


def test_any_model_comes_back_bit_for_bit_and_is_not_started_again(
    autoencoder, tmp_path, noise_images
):
    save_model(tmp_path, autoencoder)
    loaded, x = load(tmp_path), to_float(noise_images(3, size=16).pixels)
    assert type(loaded) is type(autoencoder)
    assert_close(loaded.state_dict(), autoencoder.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(loaded(x).reconstruction, autoencoder.eval()(x).reconstruction)
    training.prepare(loaded, noise_images(32, seed=3), total_steps=10_000)
    assert_close(loaded.state_dict(), autoencoder.state_dict(), rtol=0, atol=0)


def test_a_loaded_model_trains_on_and_does_not_start_anew(trained, tmp_path, noise_images):
    save_model(tmp_path, trained)
    loaded = load(tmp_path)
    before = {name: value.clone() for name, value in loaded.state_dict().items()}
    training.prepare(loaded, noise_images(32, seed=3), total_steps=99)
    if "quantizer.length" in before:
        before["quantizer.length"].fill_(99)
    assert_close(loaded.state_dict(), before, rtol=0, atol=0)


def test_a_configuration_comes_back_from_its_plain_form(trained):
    content = checkpoint.encode_config(trained.config)
    assert content["type"] == "VQVAEConfig"
    through_a_file = json.loads(json.dumps(content))
    assert checkpoint.decode_config(through_a_file, VQVAEConfig) == trained.config


def test_every_option_is_in_the_file_and_comes_back(tmp_path):
    options = DDCLConfig(
        dim=3,
        codebook_size=5,
        temperature=AnnealedTemperature(start=0.4, end=0.1, cooling=0.3),
        gradient="full",
        commitment_weight=0.7,
        usage_weight=0.0,
        straight_through_weight=0.3,
        dead_below=0.2,
        hard_forward_after=1.0,
        init="uniform",
        schedule_steps=7,
    )
    config = VQVAEConfig(
        quantizer=options,
        channels=1,
        hidden=5,
        residual_blocks=0,
        residual_hidden=2,
        downsamplings=1,
        normalize=False,
    )
    for part, default in ((options, DDCLConfig()), (config, VQVAEConfig())):
        for field in dataclasses.fields(part):
            assert getattr(part, field.name) != getattr(default, field.name), field.name
    save_model(tmp_path, VQVAE(config), data=DataConfig(image_size=9))
    assert load(tmp_path).config == config
    assert checkpoint.read_config(tmp_path)["data"]["image_size"] == 9


def test_names_are_those_of_the_plain_module_whatever_wraps_it(tmp_path):
    model = VQVAE(SMALL)
    plain = list(model.state_dict())
    compiled = torch.compile(model)
    inner = VQVAE(SMALL)
    inner.encoder = torch.compile(inner.encoder)
    parallel = torch.nn.Module()  # the prefix of DataParallel and DistributedDataParallel
    parallel.module = model
    for wrapped in (model, compiled, inner, parallel, torch.compile(parallel)):
        assert list(checkpoint.weights(wrapped)) == plain
    assert not any("module." in name or "_orig_mod." in name for name in plain)
    save_model(tmp_path, model)
    checkpoint.write_tensors(tmp_path / "model.safetensors", checkpoint.weights(compiled))
    assert_close(load(tmp_path).state_dict(), model.state_dict(), rtol=0, atol=0)


def test_the_file_is_plain_safetensors_and_half_precision_keeps_its_codebook(tmp_path):
    from safetensors.torch import load_file

    model = VQVAE(SMALL).bfloat16()
    save_model(tmp_path, model)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["encoder.0.weight"].dtype == torch.bfloat16
    assert stored["quantizer.prototypes"].dtype == torch.float32
    assert load(tmp_path).quantizer.prototypes.equal(model.quantizer.prototypes)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ((), {"format": 2}, "has format 2; this version reads 1"),
        ((), {"format": ...}, "has format None; this version reads 1"),
        ((), {"model": ...}, "holds a run of another kind, no autoencoder"),
        ((), {"model": "VQVAE"}, "expected a NetworkConfig, got 'VQVAE'"),
        (("model",), {"type": "os.system"}, "unknown configuration 'os.system'; known are VQVAE"),
        (("model",), {"type": ...}, "unknown configuration None"),
        (("model",), {"type": "EMAConfig"}, "expected a NetworkConfig, got a EMAConfig"),
        (("model",), {"width": 3}, "same fields in this version: width"),
        (("model",), {"hidden": ...}, "same fields in this version: hidden"),
        (("model",), {"hidden": "6"}, "VQVAEConfig.hidden cannot be '6'"),
        (("model",), {"hidden": 6.5}, "VQVAEConfig.hidden cannot be 6.5"),
        (("model",), {"hidden": None}, "VQVAEConfig.hidden cannot be None"),
        (("model",), {"hidden": 0}, "hidden must be at least 2, got 0"),
        (("model",), {"quantizer": 3}, "VQVAEConfig.quantizer cannot be 3"),
        (("model", "quantizer"), {"gradient": "half"}, "DDCLConfig.gradient cannot be 'half'"),
        (("model", "quantizer"), {"beta": 1, "dim": ...}, "in this version: beta, dim"),
        (
            ("model",),
            {"quantizer": {"type": "FixedTemperature", "value": 1.0}},
            "got a FixedTemperature",
        ),
        (
            ("model", "quantizer"),
            {"codebook_size": 16},
            r"quantizer.prototypes has shape (8, 4) in .*; the model has (16, 4)",
        ),
        (("model", "quantizer"), {"dim": 5}, r"has shape (4, 6, 1, 1) in .*; the model has (5, 6"),
        (("model",), {"residual_blocks": 2}, "is missing from .*model.safetensors"),
        (("model",), {"normalize": False}, "is unknown, but in .*model.safetensors"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(run, path, change, message):
    edit_config(run, *path, **change)
    pattern = re.escape(message).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=pattern) as caught:
        load(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "text", "folder", "list"])
def test_a_damaged_file_is_refused_by_name(run, name, damage):
    path = run / name
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        whole = {"empty": b"", "cut": content[:-30], "text": b"hello \xff", "list": b"[1]"}
        path.write_bytes(whole[damage])
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load(run)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=rf"{path}/config.json does not exist"):
            load(path)


def test_a_pickle_under_the_name_of_a_checkpoint_is_refused_and_not_executed(run, hostile):
    pickles, trace = hostile
    for content in pickles:
        (run / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file"):
            load(run)
    (run / "config.json").write_bytes(pickles[0])
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        load(run)
    assert not trace.exists()


def test_a_folder_with_another_configuration_is_refused_and_kept(run):
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    for other, difference in (
        (dataclasses.replace(SMALL, hidden=8), "model.hidden is 6 there and 8 here"),
        (
            dataclasses.replace(SMALL, quantizer=QUANTIZERS["annealed"]),
            "model.quantizer.temperature.type is 'EntropyTemperature' there and "
            "'AnnealedTemperature' here",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(difference)):
            save_model(run, VQVAE(other))
    with pytest.raises(ValueError, match="holds a run of another kind: model; not model, train"):
        checkpoint.write_config(run, model=SMALL, train=TrainConfig())
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_configuration_without_work_gives_way_to_another(tmp_path):
    checkpoint.write_config(tmp_path, model=SMALL)
    other = dataclasses.replace(SMALL, hidden=8)
    checkpoint.check_config(tmp_path, model=other)
    assert checkpoint.read_config(tmp_path)["model"]["hidden"] == 6
    checkpoint.write_config(tmp_path, model=other)
    assert checkpoint.read_config(tmp_path)["model"]["hidden"] == 8
    with pytest.raises(ValueError, match="holds a run of another kind: model; not prior"):
        checkpoint.write_config(tmp_path, prior=SMALL)
    for name in (checkpoint.STATE, checkpoint.METRICS, checkpoint.MODEL):
        (tmp_path / name).touch()
        with pytest.raises(ValueError, match="hidden is 8 there and 6 here"):
            checkpoint.write_config(tmp_path, model=SMALL)
        (tmp_path / name).unlink()


def test_saving_the_same_model_again_writes_its_new_weights(run):
    model = load(run)
    with torch.no_grad():
        model.decoder[0].weight.add_(1)
    save_model(run, model)
    assert torch.equal(load(run).decoder[0].weight, model.decoder[0].weight)


WRITERS = {
    "config.json": lambda run: checkpoint.write_json(run / "config.json", {"a": 1}),
    "metrics.jsonl": lambda run: checkpoint.write_records(run, [{"epoch": 1}]),
    "model.safetensors": lambda run: checkpoint.write_tensors(
        run / "model.safetensors", {"a": torch.ones(3)}
    ),
    "notes.md": lambda run: checkpoint.write_text(run / "notes.md", "new"),
}


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, name, failing):
    path = tmp_path / name
    path.write_bytes(b"old")

    def fail(*arguments):
        raise OSError("no space left on device")

    if failing == "write":
        real = Path.open

        def open_full(self, *arguments):
            file = real(self, *arguments)
            os.write(file.fileno(), b"half")
            file.close()  # the write that follows fails
            return file

        monkeypatch.setattr(Path, "open", open_full)
    else:
        monkeypatch.setattr(os, failing, fail)
    with pytest.raises((OSError, ValueError)):
        WRITERS[name](tmp_path)
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    WRITERS[name](tmp_path)
    assert path.read_bytes() != b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_makes_the_folders_it_needs(tmp_path):
    checkpoint.write_text(tmp_path / "a" / "b" / "c.txt", "ü\n")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == "ü\n".encode()


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")


def test_json_is_strict_and_numbers_that_are_not_finite_are_null(tmp_path):
    path = tmp_path / "a.json"
    bad = [math.nan, math.inf, -math.inf]
    checkpoint.write_json(path, {"x": bad, "y": {"z": math.inf, "w": (1.5, {"v": math.nan})}})
    content = json.loads(path.read_text(), parse_constant=refuse)
    assert content == {"x": [None] * 3, "y": {"z": None, "w": [1.5, {"v": None}]}}
    assert checkpoint.read_json(path) == content
    records = [{"epoch": 1, "psnr": math.inf}, {"epoch": 2, "psnr": 0.1 + 0.2}]
    checkpoint.write_records(tmp_path, records)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"epoch": 1, "psnr": None},
        records[1],
    ]
    assert checkpoint.read_records(tmp_path)[1] == records[1]


def test_a_run_without_records_has_none_and_damaged_ones_are_named(tmp_path):
    assert checkpoint.read_records(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epo')
    with pytest.raises(ValueError, match=r"metrics.jsonl is damaged"):
        checkpoint.read_records(tmp_path)


def test_tensors_and_their_notes_come_back_bit_for_bit(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {
        "turned": torch.randn(3, 5).T,
        "empty": torch.zeros(0, 2),
        "double": torch.randn((), dtype=torch.float64),
        "long": torch.tensor([2**62 + 1]),
        "flag": torch.tensor(True),
        "random": torch.get_rng_state(),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    checkpoint.write_tensors(path, tensors, {"epoch": "3"})
    found, notes = checkpoint.read_tensors(path)
    assert_close(found, tensors, rtol=0, atol=0)
    assert notes == {"epoch": "3"}
