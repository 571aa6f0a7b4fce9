"""`python -m softvq.prior`, run for real on a small tokenizer: codes, log, continuation, errors."""

import dataclasses
import json
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from eval import sample
from softvq import DDCLConfig, HierarchicalVQVAEConfig, VQVAEConfig, checkpoint
from softvq.data import DataConfig, ImageSet, load_images, to_float
from softvq.hierarchical import build_autoencoder
from softvq.prior import CodePrior, CodePriorConfig
from softvq.prior import __main__ as program
from softvq.prior.codes import extract, read_codes, read_tokenizer, write_codes
from softvq.prior.training import PriorTrainConfig, bits_per_code
from softvq.quantizers import EMAConfig, StraightThroughConfig, codebooks
from softvq.training import prepare, set_warmup_learning_rate

SMALL = ("--width", "16", "--depth", "1", "--heads", "2", "--device", "cpu")
RECIPE = ("--train.epochs", "2", "--train.batch-size", "8")
CODES = dict(dim=4, codebook_size=6)
CONFIGS = {
    "flat": VQVAEConfig(quantizer=DDCLConfig(**CODES), hidden=8),
    "2level": HierarchicalVQVAEConfig(
        top=DDCLConfig(dim=4, codebook_size=5), bottom=DDCLConfig(**CODES), hidden=8
    ),
}


@pytest.fixture(scope="session", params=CONFIGS)
def tokenizer_run(request, tmp_path_factory):
    """A run folder of a tokenizer with its first prototypes, and its images in two classes."""
    folder = tmp_path_factory.mktemp(request.param)
    data = DataConfig(source="photos", image_size=16, train_images=20, test_images=9, workers=0)
    torch.manual_seed(0)
    model = build_autoencoder(CONFIGS[request.param])
    prepare(model, load_images(data, "train"), 10)
    checkpoint.save_model(folder / "run", model, data=data)
    return folder / "run"


def run_prior(capsys, *arguments) -> tuple[int, str, str]:
    status = program.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def trained(capsys, run, out, *flags) -> dict:
    status, text, err = run_prior(capsys, run, "--out", out, *SMALL, *RECIPE, *flags)
    assert status == 0, err
    return json.loads(text)


def test_the_report_says_the_bits_of_the_prior_it_wrote(tokenizer_run, tmp_path, capsys):
    report = trained(capsys, tokenizer_run, tmp_path)
    assert report["classes"] == ["china", "flower"]
    model = checkpoint.load(tokenizer_run)
    tokenizer = read_tokenizer(str(tokenizer_run), model, (3, 16, 16))
    config = checkpoint.decode_config(checkpoint.read_config(tmp_path)["prior"], CodePriorConfig)
    assert config.classes == ("china", "flower")
    assert config.codebook_sizes == tuple(c.codebook_size for c in codebooks(model))
    prior = CodePrior(config)
    checkpoint.load_weights(prior, tmp_path / checkpoint.MODEL)
    codes = read_codes(tmp_path / "codes-test.safetensors", tokenizer)
    levels = bits_per_code(prior, codes)
    image = sum(b * length for b, length in zip(levels, config.lengths, strict=True))
    assert report["test/bits_per_image"] == pytest.approx(image, rel=1e-6)
    assert report["test/bits_per_code"] == pytest.approx(image / sum(config.lengths), rel=1e-6)
    assert report["test/code_bits_per_dimension"] == pytest.approx(image / (3 * 16 * 16))
    # Any mean squared error costs what a Gaussian of that variance has in bits on 256 levels.
    pixels = report["test/bits_per_dimension"] - report["test/code_bits_per_dimension"]
    mse = (2 / 255) ** 2 * 2 ** (2 * pixels) / (2 * math.pi * math.e)
    test = load_images(DataConfig(source="photos", image_size=16, test_images=9), "test")
    x = test.pixels.float() / 127.5 - 1
    with torch.no_grad():
        decoded = model.decode_indices(tuple(level.indices for level in model.encode(x)))
    assert mse == pytest.approx((decoded - x).square().mean().item(), rel=1e-4)


def test_the_codes_are_those_that_the_decoder_sees(tokenizer_run):
    model = checkpoint.load(tokenizer_run)
    data = DataConfig(source="photos", image_size=16, test_images=9, workers=0)
    images = load_images(data, "test")
    tokenizer = read_tokenizer(str(tokenizer_run), model, images.image_shape)
    codes = extract(model, images, ("china", "flower"), tokenizer)
    x = images.pixels.float() / 127.5 - 1
    for found, level in zip(codes.indices, model.encode(x), strict=True):
        assert torch.equal(found, level.indices)
    assert [codes.classes[label] for label in codes.labels] == images.labels
    with pytest.raises(ValueError, match="labels must be among flower; got china"):
        extract(model, images, ("flower",), tokenizer)


QUANTIZERS = [
    DDCLConfig(**CODES),
    StraightThroughConfig(**CODES, init="data"),
    EMAConfig(**CODES),
]


@pytest.fixture(params=["flat", "2level"])
def one_image(request, tmp_path, noise_pngs, store):
    """A function that makes a run folder of a tokenizer and a set of one image, nine times over."""

    def make(quantizer) -> tuple[Path, ImageSet]:
        (content,) = noise_pngs(1).values()
        names = [f"train/{n}.png" for n in range(8)] + ["test/0.png"]
        source = store(tmp_path / "images", dict.fromkeys(names, content))
        data = DataConfig(source=str(source), image_size=16, workers=0)
        levels = dict(quantizer=quantizer)
        if request.param == "2level":
            levels = dict(top=dataclasses.replace(quantizer, codebook_size=5), bottom=quantizer)
        config = (VQVAEConfig if request.param == "flat" else HierarchicalVQVAEConfig)(
            hidden=8, **levels
        )
        torch.manual_seed(0)
        model = build_autoencoder(config)
        images = load_images(data, "train")
        prepare(model, images, 10)
        checkpoint.save_model(tmp_path / "run", model, data=data)
        return tmp_path / "run", images

    return make


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda config: type(config).__name__)
def test_the_codes_of_the_only_image_are_learned_and_drawn(one_image, quantizer, tmp_path, capsys):
    # C15, with the tokenizers of every quantizer and through both programs
    run, images = one_image(quantizer)
    flags = ("--width", 32, "--depth", 1, "--heads", 2, "--dropout", 0, "--device", "cpu")
    flags += ("--train.epochs", 12, "--train.batch-size", 1, "--train.lr", "1e-2")
    status, text, err = run_prior(capsys, run, *flags)
    assert status == 0, err
    assert json.loads(text)["test/bits_per_code"] < 0.02
    arguments = [str(run), "--num", "3", "--temperature", "0", "--out", str(tmp_path / "x")]
    assert sample.main(arguments) == 0
    model, x = checkpoint.load(run), to_float(images.pixels[:1])
    with np.load(tmp_path / "x.npz") as arrays, torch.no_grad():
        for number, level in enumerate(model.encode(x)):
            drawn = torch.from_numpy(arrays[f"codes_level{number + 1}"])
            assert torch.equal(drawn, level.indices.expand_as(drawn))
            assert len(drawn.unique()) > 1


@pytest.mark.parametrize("count", [1, 5, 9])
def test_codes_of_fewer_images_than_a_batch_and_a_last_batch_of_one_train(
    tokenizer_run, tmp_path, capsys, count
):
    # C08, with batches of eight
    run = tmp_path / "run"
    shutil.copytree(tokenizer_run, run)
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"train_images": count, "test_images": 1}
    (run / "config.json").write_text(json.dumps(config))
    # One training image has one class, and the test image another.
    report = trained(capsys, run, tmp_path / "prior", "--no-class-conditional")
    assert (report["train_images"], report["test_images"]) == (count, 1)
    state, progress = checkpoint.read_tensors(tmp_path / "prior" / checkpoint.STATE)
    assert progress["epoch"] == "2"
    # All images are seen in each epoch: one step for every eight of them, of which none is dropped.
    assert state["optimizer/head.weight/step"] == 2 * -(-count // 8)
    log = checkpoint.read_records(tmp_path / "prior")
    assert all(math.isfinite(value) for record in log for value in record.values())
    torch.manual_seed(0)
    content = checkpoint.read_config(tmp_path / "prior")["prior"]
    fresh = CodePrior(checkpoint.decode_config(content, CodePriorConfig)).state_dict()
    weights, _ = checkpoint.read_tensors(tmp_path / "prior" / checkpoint.MODEL)
    assert not torch.equal(weights["head.weight"], fresh["head.weight"])


@pytest.mark.parametrize("at_once", [1, 4, 9])
def test_bits_of_a_split_do_not_depend_on_the_batches(tokenizer_run, monkeypatch, at_once):
    # C14
    model = checkpoint.load(tokenizer_run)
    data = DataConfig(source="photos", image_size=16, test_images=9, workers=0)
    images = load_images(data, "test")
    tokenizer = read_tokenizer(str(tokenizer_run), model, images.image_shape)
    codes = extract(model, images, ("china", "flower"), tokenizer)
    config = CodePriorConfig(
        codebook_sizes=tokenizer.codebook_sizes,
        grids=tokenizer.grids,
        classes=codes.classes,
        width=16,
        depth=1,
        heads=2,
    )
    torch.manual_seed(0)
    prior = CodePrior(config).eval()
    with torch.no_grad():
        nats = prior.negative_log_likelihood(codes.indices, codes.labels).double().mean(0)
    expected = nats / torch.tensor(config.lengths) / math.log(2)
    monkeypatch.setattr("softvq.prior.training._EVALUATED_AT_ONCE", at_once)
    assert bits_per_code(prior, codes) == pytest.approx(expected.tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (("--train.epochs", "3"), "train.epochs is 2 there and 3 here"),
        (("--train.lr", "0.5"), "train.lr is 0.0005 there and 0.5 here"),
        (("--width", "32"), "prior.width is 16 there and 32 here"),
        (("--no-class-conditional",), "prior.classes is ['china', 'flower'] there and [] here"),
    ],
)
def test_other_flags_in_the_same_folder_are_refused(
    tokenizer_run, tmp_path, capsys, flags, difference
):
    # C12
    trained(capsys, tokenizer_run, tmp_path)
    (tmp_path / checkpoint.REPORT).unlink()
    given = (*SMALL, *RECIPE, *flags)
    status, out, err = run_prior(capsys, tokenizer_run, "--out", tmp_path, *given)
    assert (status, out) == (2, "")
    assert difference in err
    assert err.count("\n") == 1


def test_the_folder_of_the_tokenizer_is_refused_and_kept(tokenizer_run, capsys):
    before = sorted(path.name for path in tokenizer_run.iterdir())
    given = ("--out", tokenizer_run, *SMALL, *RECIPE)
    status, out, err = run_prior(capsys, tokenizer_run, *given)
    assert (status, out) == (2, "")
    assert "holds a run of another kind: model, data; not prior, train, tokenizer" in err
    assert err.count("\n") == 1
    assert {path.name for path in tokenizer_run.iterdir()} <= {*before, checkpoint.LOCK}


def test_a_stopped_training_ends_like_another(tokenizer_run, tmp_path, capsys, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    trained(capsys, tokenizer_run, whole)
    step = program.train_step
    for stop in (1, 2, 3):  # twice within an epoch of three steps, and at its end
        calls = []

        def interrupted(*arguments, stop=stop, calls=calls):
            calls.append(0)
            if len(calls) == stop:
                signal.raise_signal(signal.SIGINT)
            return step(*arguments)

        monkeypatch.setattr(program, "train_step", interrupted)
        status, _, err = run_prior(capsys, tokenizer_run, "--out", parts, *SMALL, *RECIPE)
        if status == 0:
            break
        assert status == 130, err
        assert err.splitlines()[-1].endswith("the same command continues it")
    monkeypatch.setattr(program, "train_step", step)
    trained(capsys, tokenizer_run, parts)
    assert (whole / checkpoint.MODEL).read_bytes() == (parts / checkpoint.MODEL).read_bytes()
    for one, other in zip(*map(checkpoint.read_records, (whole, parts)), strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_a_finished_prior_says_so(tokenizer_run, tmp_path, capsys):
    first = trained(capsys, tokenizer_run, tmp_path)
    status, text, err = run_prior(capsys, tokenizer_run, "--out", tmp_path, *SMALL, *RECIPE)
    assert status == 0
    assert "is finished" in err
    assert json.loads(text) == first


def test_a_prior_of_no_class_can_be_had(tokenizer_run, tmp_path, capsys):
    report = trained(capsys, tokenizer_run, tmp_path, "--no-class-conditional")
    assert report["classes"] == []


def test_codes_of_another_tokenizer_are_refused_with_both_values(tokenizer_run, tmp_path, capsys):
    trained(capsys, tokenizer_run, tmp_path / "prior")
    other = tmp_path / "other"
    shutil.copytree(tokenizer_run, other)
    model = checkpoint.load(other)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    checkpoint.write_tensors(other / checkpoint.MODEL, checkpoint.weights(model))
    status, out, err = run_prior(capsys, other, "--out", tmp_path / "prior", *SMALL, *RECIPE)
    digests = [
        read_tokenizer(str(run), checkpoint.load(run), (3, 16, 16)).digest
        for run in (tokenizer_run, other)
    ]
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert f"tokenizer.digest is '{digests[0]}' there and '{digests[1]}' here" in err
    with pytest.raises(ValueError, match=f"SHA-256 {digests[0]}, not {digests[1]}"):
        read_codes(
            tmp_path / "prior" / "codes-test.safetensors",
            read_tokenizer(str(other), checkpoint.load(other), (3, 16, 16)),
        )


def test_codes_of_a_start_that_failed_are_made_anew(tokenizer_run, tmp_path, capsys):
    given = ("--out", tmp_path, *SMALL, *RECIPE)
    status, _, err = run_prior(capsys, tokenizer_run, *given, "--train.lr", "1e30")
    assert status == 1
    assert "no state was saved" in err
    report = trained(capsys, tokenizer_run, tmp_path, "--no-class-conditional")
    assert report["classes"] == []


def test_codes_of_another_grid_or_size_are_refused_with_both_values(tokenizer_run, tmp_path):
    model = checkpoint.load(tokenizer_run)
    small = read_tokenizer(str(tokenizer_run), model, (3, 16, 16))
    large = read_tokenizer(str(tokenizer_run), model, (3, 32, 32))
    data = DataConfig(source="photos", image_size=16, test_images=2, workers=0)
    write_codes(
        tmp_path / "codes.safetensors",
        extract(model, load_images(data, "test"), ("china", "flower"), small),
    )
    with pytest.raises(ValueError, match=r"grids \(.*4\),?.* not \(.*8\)"):
        read_codes(tmp_path / "codes.safetensors", large)
    sizes = tuple(size + 1 for size in small.codebook_sizes)
    other = type(small)(small.digest, sizes, small.grids)
    with pytest.raises(ValueError, match=r"codebook sizes \(.*6.*\), not \(.*7.*\)"):
        read_codes(tmp_path / "codes.safetensors", other)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--train.epochs", "0"), "epochs must be at least 1, got 0"),
        (("--train.lr", "0"), "lr must be positive and finite, got 0.0"),
        (("--train.warmup", "1"), "warmup must lie in [0, 1), got 1.0"),
        (("--train.label-dropout", "2"), "label_dropout must lie in [0, 1], got 2.0"),
        (("--train.weight-decay", "-1"), "weight_decay must be 0 or more, got -1.0"),
        (("--heads", "3"), "heads must divide width 16, got 3"),
        (("--device", "tpu9"), "device 'tpu9' cannot be used"),
    ],
)
def test_what_cannot_be_trained_is_one_line(tokenizer_run, tmp_path, capsys, flags, complaint):
    status, out, err = run_prior(capsys, tokenizer_run, "--out", tmp_path, *SMALL, *flags)
    assert (status, out) == (2, "")
    assert complaint in err
    assert err.count("\n") == 1
    assert not (tmp_path / checkpoint.CONFIG).exists()


def test_a_folder_that_is_no_run_is_one_line(tmp_path, capsys):
    status, out, err = run_prior(capsys, tmp_path, *SMALL)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1


def test_the_learning_rate_warms_up_and_falls_to_zero():
    config = PriorTrainConfig(lr=1.0, warmup=0.2)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=9.0)
    rates = []
    for done in (0.0, 0.1, 0.2, 0.6, 1.0):
        set_warmup_learning_rate(optimizer, config, done)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0, 0.5, 1, 0.5, 0])
