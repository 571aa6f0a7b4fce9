"""The programs, run for real with small settings: what they write, how they end, how they go on.

Where a process of its own is not the point, `main` is called in the process of the tests.
"""

import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import train_vqvae
from eval import compare, reconstruct
from models import MODELS
from softvq import checkpoint, loop
from softvq.prior import __main__ as prior
from softvq.program import Interrupted, run_program
from softvq.quantizers import codebooks

ROOT = Path(__file__).parents[1]
MODEL = ("--model.hidden", "8", "--model.quantizer.codebook-size", "16")
TWO_LEVELS = ("--model.hidden", "8", "--model.top.codebook-size", "8")
TWO_LEVELS += ("--model.bottom.codebook-size", "16", "--data.source", "photos")
IMAGES = ("--data.train-images", "48", "--data.test-images", "16", "--data.workers", "0")
REST = (*IMAGES, "--train.batch-size", "16", "--train.epochs", "3")
FLAGS = (*MODEL, *REST)
METHODS = ("photos-ddcl", "photos-vq", "photos-ema")
RUNS = (*METHODS, "cifar10-ddcl-2level")


def status_of(main: Callable[[Sequence[str]], int], *arguments: object) -> int:
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def train(out: Path, *flags: object, model: str = "photos-ddcl") -> int:
    given = (*TWO_LEVELS, *REST) if model.endswith("2level") else FLAGS
    return status_of(train_vqvae.main, model, *given, "--out", out, *flags)


@pytest.fixture
def no_figures(monkeypatch):
    """Most of the time of a small run goes into its pictures."""
    monkeypatch.setattr(train_vqvae, "_draw", lambda *arguments: [])


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> dict[str, Path]:
    """One finished run for each method and of two levels; the first and last with pictures."""
    runs = {}
    for model in RUNS:
        runs[model] = tmp_path_factory.mktemp("finished") / model
        with pytest.MonkeyPatch.context() as patch:
            if model not in (RUNS[0], RUNS[-1]):
                patch.setattr(train_vqvae, "_draw", lambda *arguments: [])
            assert train(runs[model], model=model) == 0
    return runs


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != checkpoint.LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def records(run: Path) -> list[dict]:
    found = checkpoint.read_records(run)
    return [{k: v for k, v in record.items() if k != "seconds"} for record in found]


def assert_equal_runs(run: Path, other: Path) -> None:
    assert (run / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert records(run) == records(other)
    states = (checkpoint.read_tensors(path / "state.safetensors")[0] for path in (run, other))
    torch.testing.assert_close(*states, rtol=0, atol=0)


def error_of(captured) -> str:
    """The one line that the program ended with."""
    assert captured.out == ""
    assert "Traceback" not in captured.err
    (line,) = [line for line in captured.err.splitlines() if line.startswith("error:")]
    assert captured.err.rstrip().endswith(line)
    return line


def pngs(folder: Path, count: int, size: int = 32, seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    for number in range(count):
        pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def test_a_run_writes_its_configuration_log_model_report_and_figures(finished):
    run = finished["photos-ddcl"]
    names = {"config.json", "metrics.jsonl", "model.safetensors", "state.safetensors"}
    figures = {"curves.png", "reconstructions.png", "atlas.png"}
    assert contents(run).keys() == names | figures | {"report.json"}
    for name in figures:
        with Image.open(run / name) as picture:
            assert picture.format == "PNG"
    config = json.loads((run / "config.json").read_text())
    assert config["model"]["quantizer"]["codebook_size"] == 16
    assert config["data"]["train_images"] == 48
    assert config["train"]["epochs"] == 3
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in log] == [1, 2, 3]
    assert [record["steps"] for record in log] == [3, 6, 9]
    expected = (
        *("train/psnr", "train/quantizer_loss", "train/perplexity", "train/temperature"),
        *("train/temperature_ratio", "train/token_perplexity", "train/variance_ratio"),
        *("test/psnr_soft", "test/psnr_hard", "test/nmse_hard", "test/bits_per_image"),
        *("test/utilisation", "test/perplexity", "test/perplexity_soft", "test/distinct_codes"),
        *("test/effective_rank", "test/separation_min", "test/separation_mean", "seconds"),
    )
    for record in log:
        assert not set(expected) - record.keys()
        assert all(isinstance(value, int | float) for value in record.values())
    report = json.loads((run / "report.json").read_text())
    assert (report["model"], report["seed"], report["epochs"]) == ("photos-ddcl", 0, 3)
    assert (report["train_images"], report["test_images"]) == (48, 16)
    assert report["seconds"] == pytest.approx(sum(record["seconds"] for record in log))
    assert report["figures"] == [
        str(run / name) for name in ("curves.png", "reconstructions.png", "atlas.png")
    ]
    assert report["test/psnr_hard"] == pytest.approx(log[-1]["test/psnr_hard"], rel=1e-6)
    assert "test/ssim_hard" in report
    assert "lpips" in report["absent"] or "test/lpips_hard" in report
    loaded = checkpoint.load(run)
    assert report["parameters"] == sum(p.numel() for p in loaded.parameters())


def test_a_finished_run_says_so_prints_its_report_and_changes_nothing(finished, capsys):
    run = finished["photos-ddcl"]
    before = contents(run)
    assert train(run) == 0
    captured = capsys.readouterr()
    assert captured.err == f"{run} is finished\n"
    assert json.loads(captured.out) == json.loads(before["report.json"])
    assert contents(run) == before


def start(out: Path, *flags: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "train_vqvae.py", "photos-ddcl", *FLAGS, "--out", str(out), *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def read_until(process: subprocess.Popen, text: bytes) -> bytes:
    """What the process says up to `text`, or up to its end."""
    said = b""
    while text not in said:
        part = os.read(process.stderr.fileno(), 4096)
        if not part:
            break
        said += part
    return said


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*use of fork")
def test_ctrl_c_saves_says_how_to_go_on_and_the_run_ends_like_another(tmp_path, capsys, no_figures):
    # Single images make an epoch of a second; Ctrl-C in a terminal reaches the workers as well
    slow = ("--train.batch-size", "1", "--train.epochs", "2")
    streamed = (*slow, "--data.workers", "1", "--data.memory-mib", "0", "--tensorboard")
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    process = start(stopped, *streamed)
    said = read_until(process, b"epoch 1/2")
    os.killpg(process.pid, signal.SIGINT)
    out, rest = process.communicate(timeout=60)
    assert process.returncode == 130, said + rest
    assert out == b""
    assert b"Traceback" not in rest
    line = rest.decode().splitlines()[-1]
    assert line.startswith(f"{stopped}: stopped in epoch 1, step ")
    assert line.endswith("; the same command continues it")
    _, progress = checkpoint.read_tensors(stopped / "state.safetensors")
    assert (progress["epoch"], progress["step"] != "0") == ("0", True)
    # Where the images are kept is another configuration, but must not be another result
    for out, flags in ((stopped, streamed), (whole, slow)):
        assert train(out, *flags) == 0
    assert "continues after epoch 0, step" in capsys.readouterr().err
    assert_equal_runs(stopped, whole)
    assert logged_epochs(stopped / "tensorboard") == {1, 2}


def logged_epochs(folder: Path) -> set[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    assert {"test/psnr_hard", "train/temperature"} <= set(events.Tags()["scalars"])
    return {event.step for event in events.Scalars("test/psnr_hard")}


def test_a_killed_run_goes_on_and_ends_like_another(finished, tmp_path, no_figures):
    process = start(tmp_path / "run")
    read_until(process, b"epoch 1: ")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "report.json").exists()
    assert train(tmp_path / "run") == 0
    assert_equal_runs(tmp_path / "run", finished["photos-ddcl"])


class Killed(BaseException):
    """Ends a run as SIGKILL would: nothing is written after it."""


def interrupt_at(monkeypatch, name: str, call: int, action: Callable[[], None]) -> None:
    """Lets the call of that number, counted from 0, of a function of the training act before."""
    module = loop if hasattr(loop, name) else train_vqvae
    original, numbers = getattr(module, name), itertools.count()

    def acting(*arguments, **options):
        if next(numbers) == call:
            action()
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, acting)


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def kill_at(name: str, call: int, out: Path, model: str = "photos-ddcl") -> None:
    def be_killed() -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, name, call, be_killed)
        with pytest.raises(Killed):
            train(out, model=model)


@pytest.mark.parametrize("model", RUNS)
def test_a_run_stopped_after_each_step_ends_like_another(
    finished, tmp_path, model, no_figures, capsys
):
    for step in range(9):
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, "train_step", 0, press_ctrl_c)
            assert train(tmp_path, model=model) == 130, step
        place = f"stopped in epoch {step // 3 + 1}, step {step % 3 + 1}; the same command"
        assert place in capsys.readouterr().err
    assert train(tmp_path, model=model) == 0
    assert_equal_runs(tmp_path, finished[model])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("model", RUNS)
def test_a_run_killed_in_each_epoch_ends_like_another(finished, tmp_path, model, no_figures):
    for name, call, logged in (
        ("train_step", 1, 0),
        ("train_step", 4, 1),
        ("curve_keys", 0, 2),
        ("save_state", 0, 3),  # the log is ahead of the state
        ("curve_keys", 0, 3),  # the state is complete, and the model is missing
    ):
        kill_at(name, call, tmp_path, model=model)
        assert len(records(tmp_path)) == logged
    assert train(tmp_path, model=model) == 0
    assert_equal_runs(tmp_path, finished[model])


def test_a_run_killed_between_regular_saves_ends_like_another(
    finished, tmp_path, monkeypatch, no_figures
):
    monkeypatch.setattr(loop, "SAVE_EVERY_SECONDS", -1)
    kill_at("train_step", 4, tmp_path)
    _, progress = checkpoint.read_tensors(tmp_path / "state.safetensors")
    assert (progress["epoch"], progress["step"]) == ("1", "1")
    assert train(tmp_path) == 0
    assert_equal_runs(tmp_path, finished["photos-ddcl"])


def test_ctrl_c_while_an_epoch_is_evaluated_ends_the_run_after_it(
    finished, tmp_path, capsys, no_figures
):
    for epoch in (1, 2, 3):
        with pytest.MonkeyPatch.context() as patch:
            interrupt_at(patch, "evaluate", 0, press_ctrl_c)
            assert train(tmp_path) == 130
        assert f"stopped after epoch {epoch}; the same" in capsys.readouterr().err
        assert len(records(tmp_path)) == epoch
    # The images are there and the report is being made: nothing is lost, and no traceback shown
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, "evaluate", 0, press_ctrl_c)
        assert train(tmp_path) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert train(tmp_path) == 0
    assert_equal_runs(tmp_path, finished["photos-ddcl"])


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (("--train.epochs", "4"), "train.epochs is 3 there and 4 here"),
        (("--train.lr", "0.002"), "train.lr is 0.001 there and 0.002 here"),
        (("--data.train-images", "49"), "data.train_images is 48 there and 49 here"),
        (
            ("--model.quantizer.temperature.start", "5"),
            "model.quantizer.temperature.start is 4.0 there and 5.0 here",
        ),
    ],
)
def test_other_flags_in_the_same_folder_are_refused(finished, capsys, flags, difference):
    before = contents(finished["photos-ddcl"])
    assert train(finished["photos-ddcl"], *flags) == 2
    assert difference in error_of(capsys.readouterr())
    assert contents(finished["photos-ddcl"]) == before


def test_another_model_in_the_same_folder_is_refused(finished, capsys):
    assert train(finished["photos-ddcl"], model="photos-ema") == 2
    line = error_of(capsys.readouterr())
    assert "model.quantizer.type is 'DDCLConfig' there and 'EMAConfig' here" in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--train.lr", "-1"), "lr must be positive and finite"),
        (("--train.lr", "fast"), "could not convert string to float"),
        (("--train.eps", "2"), "eps must lie in (0, 1], got 2"),
        (("--train.epochs", "0"), "epochs must be at least 1, got 0"),
        (("--train.seed", "4294967296"), "seed must lie in"),
        (("--train.precision", "float8"), "float8"),
        (("--model.hidden", "1"), "hidden must be at least 2, got 1"),
        (("--model.quantizer.codebook-size", "0"), "codebook_size must be at least 1"),
        (("--model.quantizer.temperature.end", "0.5"), "1 < end <= warm <= start, got 4.0, 1.3"),
        (("--data.image-size", "0"), "image_size must be at least 1, got 0"),
        (("--data.image-size", "1000"), "image_size must be at most 128 for photos"),
        (("--data.train-images", "9999999"), "train_images must be at most 8192"),
        (("--data.source", "nowhere.zip"), "nowhere.zip does not exist"),
        (("--lpips-weights", "nowhere.pth"), "LPIPS weights nowhere.pth: no such file"),
        (("--device", "nonsense"), "device 'nonsense' cannot be used"),
        (("--train.speed", "3"), "--train.speed"),
    ],
)
def test_a_flag_out_of_bounds_ends_with_status_2_and_no_run(tmp_path, capsys, flags, message):
    assert train(tmp_path / "run", *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused_where_they_are_not_known(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compare.main(["photos-ddcl", "--out", str(tmp_path / "study")]) == 2
    assert "eval.compare runs in one process; start it without torchrun" in capsys.readouterr().err
    assert prior.main([str(tmp_path / "run")]) == 2
    assert "softvq.prior runs in one process; start it without torchrun" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_models_are_refused_with_the_known_ones(tmp_path, capsys):
    assert train(tmp_path, model="photos-dcl") == 2
    captured = capsys.readouterr()
    assert "photos-dcl" in captured.err
    assert "Traceback" not in captured.err
    assert all(name in captured.err for name in MODELS)
    # Flags without a model
    assert status_of(train_vqvae.main, "--train.epochs", "2") == 2
    assert status_of(train_vqvae.main, "--train.epochs", "2", "photos-ddcl") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_names_every_option_with_its_meaning(capsys):
    assert status_of(train_vqvae.main, "photos-ddcl", "--help") == 0
    text = capsys.readouterr().out
    for option in ("--train.eps", "--data.source", "--model.quantizer.usage-weight", "--device"):
        assert option in text
    assert status_of(train_vqvae.main, "--help") == 0
    assert "cifar10-ema" in capsys.readouterr().out


def test_the_run_folder_is_named_after_model_and_seed():
    name, run = train_vqvae.parse(["photos-vq", "--train.seed", "7"])
    assert (name, run.out) == ("photos-vq", "runs/photos-vq-seed7")


def test_a_loss_that_is_not_finite_ends_with_status_1_and_names_the_step(tmp_path, capsys):
    assert train(tmp_path, "--train.lr", "1e30") == 1
    line = error_of(capsys.readouterr())
    assert re.search(r"the loss is (nan|inf) in epoch 1, step 2; no state was saved", line)
    assert contents(tmp_path).keys() == {"config.json"}


@pytest.mark.parametrize("model", METHODS)
def test_a_loss_that_is_not_finite_leaves_the_last_good_state(
    finished, tmp_path, capsys, monkeypatch, model, no_figures
):
    original, numbers, good = train_vqvae.train_step, itertools.count(), {}

    def failing(model, *arguments):
        number = next(numbers)
        if number == 3:
            good.update(contents(tmp_path))
        if number == 4:
            with torch.no_grad():
                model.encoder[0].weight.fill_(float("nan"))
        return original(model, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_vqvae, "train_step", failing)
        assert train(tmp_path, model=model) == 1
    line = error_of(capsys.readouterr())
    assert f"the loss is nan in epoch 2, step 2; the last good state is in {tmp_path}" in line
    assert contents(tmp_path) == good
    assert train(tmp_path, model=model) == 0
    assert_equal_runs(tmp_path, finished[model])


def split_folder(root: Path, train_images: int, test_images: int) -> Path:
    pngs(root / "train", train_images)
    pngs(root / "test", test_images, seed=1)
    return root


SMALL_DATA = ("--data.train-images", "0", "--data.test-images", "0", "--train.batch-size", "64")


@pytest.mark.parametrize("model", METHODS)
def test_a_set_smaller_than_a_batch_trains(tmp_path, model, no_figures):
    images = split_folder(tmp_path / "images", 5, 1)
    flags = ("--data.source", images, *SMALL_DATA, "--train.epochs", "1")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        original = train_vqvae.prepare

        def spy(model, *arguments):
            original(model, *arguments)
            seen.append({k: v.clone() for k, v in model.state_dict().items()})

        patch.setattr(train_vqvae, "prepare", spy)
        assert train(tmp_path / "run", *flags, model=model) == 0
    (record,) = records(tmp_path / "run")
    assert record["steps"] == 1
    assert record["train/tokens"] == 5 * 64
    changed = checkpoint.load(tmp_path / "run").state_dict()
    for name in ("encoder.0.weight", "decoder.0.weight"):
        assert not torch.equal(changed[name], seen[0][name])
    assert not torch.equal(
        changed["quantizer.prototypes"],
        seen[0]["quantizer.prototypes"],
    )


def test_a_last_batch_of_one_is_seen_like_the_others(tmp_path, no_figures):
    images = split_folder(tmp_path / "images", 65, 3)
    flags = ("--data.source", images, *SMALL_DATA, "--train.epochs", "2")
    assert train(tmp_path / "run", *flags) == 0
    log = records(tmp_path / "run")
    assert [record["steps"] for record in log] == [2, 4]
    assert [record["train/tokens"] for record in log] == [65 * 64] * 2
    assert [record["test/tokens"] for record in log] == [3 * 64] * 2


@pytest.mark.parametrize(
    ("count", "message"), [(0, "holds 0 images"), (1, "gives 0 train, 1 test images; both need")]
)
def test_too_few_images_are_refused_before_anything_is_written(tmp_path, capsys, count, message):
    images = pngs(tmp_path / "images", count)
    assert train(tmp_path / "run", "--data.source", images, *SMALL_DATA) == 2
    assert message in error_of(capsys.readouterr())
    assert not (tmp_path / "run").exists()


def test_broken_files_are_named_and_no_run_is_written(tmp_path, capsys):
    # C10: one file cut short, one empty, among good ones
    images = pngs(tmp_path / "images", 10)
    whole = (images / "3.png").read_bytes()
    (images / "cut.png").write_bytes(whole[: len(whole) * 6 // 10])
    (images / "zero.png").write_bytes(b"")
    assert train(tmp_path / "run", "--data.source", images, *SMALL_DATA) == 2
    line = error_of(capsys.readouterr())
    assert "cut.png" in line
    assert "zero.png" in line
    assert not (tmp_path / "run").exists()


def evaluated(capsys, *arguments: object) -> dict:
    assert status_of(reconstruct.main, *arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


@pytest.mark.parametrize("model", RUNS)
def test_reconstruct_finds_the_numbers_of_the_report(finished, capsys, model):
    report = json.loads((finished[model] / "report.json").read_text())
    found = evaluated(capsys, finished[model], "--test-images", 16)
    assert (found["run"], found["images"]) == (str(finished[model]), 16)
    keys = [name for name in report if name.startswith("test/")]
    assert len(keys) > 15
    for key in keys:
        assert found[key] == pytest.approx(report[key], rel=1e-9, abs=1e-12), key
    assert found["absent"] == report["absent"]


def test_reconstruct_evaluates_another_folder(finished, tmp_path, capsys):
    images = split_folder(tmp_path / "images", 2, 3)
    found = evaluated(capsys, finished["photos-ddcl"], "--data", images)
    assert found["images"] == 3
    assert str(images) in found["data"]
    known = json.loads((finished["photos-ddcl"] / "report.json").read_text())
    assert found["test/psnr_hard"] != known["test/psnr_hard"]


def test_reconstruct_refuses_what_it_cannot_use(finished, tmp_path, capsys):
    run = finished["photos-ddcl"]
    library = tmp_path / "library"
    checkpoint.save_model(library, checkpoint.load(run))
    strange = tmp_path / "strange"
    shutil.copytree(run, strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"data": {"folder": "a"}}))
    for arguments, message in (
        ((tmp_path / "nowhere",), f"{tmp_path}/nowhere/config.json does not exist"),
        ((run, "--device", "nonsense"), "device 'nonsense' cannot be used"),
        ((run, "--data", "nowhere"), "nowhere does not exist"),
        ((run, "--test-images", "-1"), "test_images must be at least 0, got -1"),
        ((run, "--lpips-weights", "nowhere.pth"), "nowhere.pth: no such file"),
        ((library,), "does not say what it was trained on; give --data"),
        ((strange,), "the data in"),
    ):
        assert status_of(reconstruct.main, *arguments) == 2
        assert message in error_of(capsys.readouterr())


def test_a_pickle_is_refused_by_every_program_and_not_executed(finished, tmp_path, capsys, hostile):
    pickles, trace = hostile
    study, run = tmp_path / "study", tmp_path / "study" / "photos-ddcl-seed0"
    shutil.copytree(finished["photos-ddcl"], run)
    (run / "report.json").unlink()
    for content, name in itertools.product(pickles, ("state.safetensors", "model.safetensors")):
        before = (run / name).read_bytes()
        (run / name).write_bytes(content)
        commands = [
            (train_vqvae.main, ("photos-ddcl", *FLAGS, "--out", run)),
            (compare.main, ("photos-ddcl", "--out", study, "--", *FLAGS)),
        ]
        if name == "model.safetensors":
            commands = [(reconstruct.main, (run, "--data", "photos"))]
        for main, arguments in commands:
            assert status_of(main, *arguments) == 2
            assert f"{name} is not a whole safetensors file" in error_of(capsys.readouterr())
        (run / name).write_bytes(before)
    (tmp_path / "weights.pth").write_bytes(pickles[1])
    assert status_of(reconstruct.main, run, "--lpips-weights", tmp_path / "weights.pth") == 2
    assert "not a file of plain tensors" in error_of(capsys.readouterr())
    assert not trace.exists()


@pytest.mark.parametrize("content", ["model.safetensors", "no notes"])
def test_a_state_that_is_none_is_refused(finished, tmp_path, capsys, content):
    run = tmp_path / "run"
    shutil.copytree(finished["photos-ddcl"], run)
    (run / "report.json").unlink()
    if content == "no notes":
        state, _ = checkpoint.read_tensors(run / "state.safetensors")
        checkpoint.write_tensors(run / "state.safetensors", state)
    else:
        shutil.copy(run / content, run / "state.safetensors")
    assert train(run) == 2
    assert "the training state" in error_of(capsys.readouterr())


def test_programs_end_with_the_status_that_their_error_stands_for(capsys):
    def failing(error: BaseException) -> Callable[[], None]:
        def action() -> None:
            raise error

        return action

    for error, status, line in (
        (ValueError("no"), 2, "error: no"),
        (ArithmeticError("nan"), 1, "error: nan"),
        (OSError("disk full"), 1, "error: disk full"),
        (Interrupted("here"), 130, "here; the same command continues it"),
        (KeyboardInterrupt(), 130, "stopped"),
    ):
        assert run_program(failing(error)) == status
        assert capsys.readouterr() == ("", f"{line}\n")
    assert run_program(lambda: {"a": float("nan"), "b": [1, float("inf")]}) == 0
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, None]}


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """(folder, printed result, order of images of each epoch of each run, weights at the start)."""
    folder = tmp_path_factory.mktemp("study")
    orders: dict[str, list] = {}
    starts: dict[str, dict] = {}
    train, order, prepare = compare.train, loop.epoch_order, train_vqvae.prepare
    current = ""

    def spy_train(name, run):
        nonlocal current
        current = f"{name}-{run.train.seed}"
        return train(name, run)

    def spy_order(*arguments):
        found = order(*arguments)
        orders.setdefault(current, []).append(found.tolist())
        return found

    def spy_prepare(model, *arguments):
        starts[current] = {k: v.clone() for k, v in model.state_dict().items()}
        return prepare(model, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "train", spy_train)
        patch.setattr(loop, "epoch_order", spy_order)
        patch.setattr(train_vqvae, "prepare", spy_prepare)
        patch.setattr(train_vqvae, "_draw", lambda *arguments: [])
        assert status_of(compare.main, *study_arguments(folder)) == 0
    return folder, orders, starts


def study_arguments(folder: Path) -> tuple:
    return (*METHODS, "--seeds", 0, 1, "--out", folder, "--", *FLAGS, "--train.epochs", 2)


def test_a_study_gives_mean_and_spread_of_its_runs(study):
    folder, *_ = study
    summaries = json.loads((folder / "compare.json").read_text())["models"]
    assert list(summaries) == list(METHODS)
    lines = (folder / "compare.md").read_text().splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")]
    assert header[:3] == ["model", "PSNR soft [dB]", "PSNR hard [dB]"]
    assert {"codes in use [%]", "perplexity", "distinct codes", "s / epoch [s]"} & set(header)
    for row, model in zip(lines[2:], METHODS, strict=True):
        runs = [folder / f"{model}-seed{seed}" for seed in (0, 1)]
        reports = [json.loads((run / "report.json").read_text()) for run in runs]
        assert [report["seed"] for report in reports] == [0, 1]
        for key in ("test/psnr_hard", "test/utilisation", "test/perplexity", "seconds"):
            values = [report[key] for report in reports]
            mean, sd = sum(values) / 2, abs(values[0] - values[1]) / 2**0.5
            assert summaries[model][key]["mean"] == pytest.approx(mean, rel=1e-12)
            assert summaries[model][key]["sd"] == pytest.approx(sd, rel=1e-9, abs=1e-15)
        cells = dict(zip(header, (c.strip() for c in row.strip("|").split("|")), strict=True))
        assert cells["model"] == model
        for key, name, scale in (
            ("test/psnr_hard", "PSNR hard [dB]", 1),
            ("test/utilisation", "codes in use [%]", 100),
        ):
            values = [scale * report[key] for report in reports]
            mean, sd = (float(part) for part in cells[name].split(" ± "))
            assert mean == pytest.approx(statistics.fmean(values), rel=1e-3)
            assert sd == pytest.approx(statistics.stdev(values), rel=0.06)
        full = [
            next((r["epoch"] for r in records(run) if r["test/utilisation"] == 1), None)
            for run in runs
        ]
        expected = None if None in full else sum(full) / 2
        assert summaries[model]["epochs_to_full_use"]["mean"] == expected
        assert (cells["epochs to 100 %"] == "never") == (expected is None)


def test_a_run_of_two_levels_logs_and_draws_each(finished):
    run = finished["cifar10-ddcl-2level"]
    report = json.loads((run / "report.json").read_text())
    drawn = ["curves.png", "reconstructions.png", "atlas_level1.png", "atlas_level2.png"]
    assert report["figures"] == [str(run / name) for name in drawn]
    assert all((run / name).exists() for name in drawn)
    assert (report["test/tokens_level1"], report["test/tokens_level2"]) == (16 * 16, 16 * 64)
    for record in (*records(run), report):
        assert "test/utilisation" not in record
        bits = 0.0
        for level, (tokens, codes) in enumerate(((16, 8), (64, 16)), start=1):
            assert record[f"test/variance_level{level}"] >= 0
            assert 0 < record[f"test/utilisation_level{level}"] <= 1
            assert record[f"test/distinct_codes_level{level}"] <= codes
            bits += tokens * record[f"test/bits_per_code_level{level}"]
        assert record["test/bits_per_image"] == pytest.approx(bits)
    model = checkpoint.load(run)
    assert [codebook.codebook_size for codebook in codebooks(model)] == [8, 16]


def test_a_study_of_two_levels_has_columns_for_each(tmp_path, no_figures):
    models = [f"cifar10-{method}-2level" for method in ("ddcl", "ema")]
    flags = (*TWO_LEVELS, *REST, "--train.epochs", 1)
    assert status_of(compare.main, *models, "--out", tmp_path, "--", *flags) == 0
    header, _, *rows = (tmp_path / "compare.md").read_text().splitlines()
    for name in ("codes in use level 1 [%]", "perplexity level 2", "PSNR hard without level 1"):
        assert f"| {name}" in header
    assert [row.split("|")[1].strip() for row in rows] == models
    summaries = json.loads((tmp_path / "compare.json").read_text())["models"]
    for model in models:
        (record,) = records(tmp_path / f"{model}-seed0")
        full = {record[f"test/utilisation_level{level}"] for level in (1, 2)} == {1}
        assert summaries[model]["epochs_to_full_use"]["mean"] == (1 if full else None)


def test_the_runs_of_a_study_are_matched(study):
    folder, orders, starts = study
    for seed in (0, 1):
        first = orders[f"photos-ddcl-{seed}"]
        assert len(first) == 2
        assert first[0] != first[1]
        weights = starts[f"photos-ddcl-{seed}"]
        network = [name for name in weights if name.split(".")[0] in ("encoder", "decoder")]
        for model in METHODS[1:]:
            assert orders[f"{model}-{seed}"] == first
            for name in network:
                assert torch.equal(starts[f"{model}-{seed}"][name], weights[name]), name
    assert orders["photos-ddcl-0"] != orders["photos-ddcl-1"]
    configs = [json.loads(path.read_text()) for path in sorted(folder.glob("*-seed0/config.json"))]
    assert len(configs) == 3
    for config in configs[1:]:
        assert config["data"] == configs[0]["data"]
        for part, apart in (("train", {"eps"}), ("model", {"quantizer", "normalize"})):
            different = {k for k, v in config[part].items() if v != configs[0][part][k]}
            assert different <= apart


def test_a_study_is_the_same_as_its_runs_alone(study, tmp_path, no_figures):
    folder, *_ = study
    assert train(tmp_path, "--train.epochs", 2, "--train.seed", 1, model="photos-vq") == 0
    assert_equal_runs(tmp_path, folder / "photos-vq-seed1")


def test_a_study_goes_on_with_the_runs_that_are_finished(study, tmp_path, capsys, no_figures):
    folder, *_ = study
    copy = tmp_path / "study"
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "photos-ema-seed1")
    (copy / "compare.json").unlink()
    before = contents(copy)
    assert status_of(compare.main, *study_arguments(copy)) == 0
    captured = capsys.readouterr()
    assert captured.err.count(" is finished\n") == 5
    after = contents(copy)
    rewritten = {"compare.md", "curves.png"}
    assert all(after[name] == data for name, data in before.items() if name not in rewritten)
    assert_equal_runs(copy / "photos-ema-seed1", folder / "photos-ema-seed1")
    result = json.loads(captured.out)
    assert result == json.loads((copy / "compare.json").read_text())
    assert result["seeds"] == [0, 1]
    assert str(copy / "curves.png") in captured.err
    assert "| photos-ema |" in captured.err


def test_a_study_with_other_flags_in_the_same_folder_is_refused(study, capsys):
    folder, *_ = study
    before = contents(folder)
    assert status_of(compare.main, *study_arguments(folder), "--train.lr", "0.5") == 2
    line = error_of(capsys.readouterr())
    assert "train.lr is 0.001 there and 0.5 here" in line
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("photos-ddcl", "cifar10-vq"), "cifar10-vq and photos-ddcl cannot be compared: codebook_"),
        (("photos-ddcl", "nope"), "models must be among photos-ddcl, "),
        (("photos-ddcl", "photos-ddcl"), "given twice"),
        (("photos-ddcl", "--seeds", "1", "1"), "given twice"),
        (("photos-ddcl", "--", "--train.epochs", "0"), "epochs must be at least 1, got 0"),
        (("photos-ddcl", "photos-vq", "--", "--model.quantizer.init", "x"), "'x'"),
        (("photos-ddcl", "photos-vq", "--", "--model.quantizer.usage-weight", "1"), "usage-weight"),
    ],
)
def test_a_study_of_what_cannot_be_compared_is_refused(tmp_path, capsys, arguments, message):
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    given = (*arguments[:cut], "--out", tmp_path / "study", *arguments[cut:])
    assert status_of(compare.main, *given) == 2
    captured = capsys.readouterr()
    assert message in re.sub(r"[\s│]+", " ", captured.err)
    assert "Traceback" not in captured.err
    assert not (tmp_path / "study").exists()


def test_a_study_of_one_seed_has_no_spread_and_full_use_may_never_come():
    reports = [{"a": 1.0, "b": None, "name": "x"}]
    assert compare.summarize(reports) == {
        "a": {"mean": 1.0, "sd": None},
        "b": {"mean": None, "sd": None},
    }
    use = [{"epoch": 1, "test/utilisation": 0.9}, {"epoch": 2, "test/utilisation": 1.0}]
    assert compare.epochs_to_full_use(use) == 2
    assert compare.epochs_to_full_use(use[:1]) is None


def test_without_arguments_the_three_methods_are_compared(monkeypatch):
    class Replaced(BaseException):
        pass

    def replace(program: str, command: list[str]) -> None:
        assert program == command[0] == sys.executable
        raise Replaced(command[1:])

    monkeypatch.setattr(os, "execv", replace)
    with pytest.raises(Replaced) as caught:
        train_vqvae.main([])
    (command,) = caught.value.args
    assert command == ["-m", "eval.compare", *METHODS, "--out", "runs/quickstart"]
    assert set(METHODS) <= MODELS.keys()


def test_the_named_models_can_be_compared_within_their_data_set():
    for form in ("photos-{}", "cifar10-{}", "cifar10-{}-2level"):
        names = tuple(form.format(method) for method in ("ddcl", "vq", "ema"))
        assert set(names) <= MODELS.keys()
        compare.plan(compare.Study(models=names), [])


def test_a_command_of_its_own_prints_one_json_object_and_nothing_else(finished, python):
    out, err = python("-m", "eval.reconstruct", finished["photos-vq"], "--test-images", 4)
    assert json.loads(out)["images"] == 4
    assert err == ""
