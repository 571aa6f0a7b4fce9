"""The programs, run for real with small settings: what they write, how they end, how they go on.

Where a process of its own is not the point, `main` is called in the process of the tests.
"""

import importlib
import io
import itertools
import json
import math
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
import torchvision
from PIL import Image

import train_vqvae
from eval import classifier, compare, explain, quality, reconstruct, sample, sampling_speed
from models import MODELS
from softvq import checkpoint, loop
from softvq.prior import __main__ as prior
from softvq.program import Interrupted, run_program
from softvq.quantizers import EMAConfig, build, codebooks

ROOT = Path(__file__).parents[1]
MODEL = ("--model.hidden", "8", "--model.quantizer.codebook-size", "16")
TWO_LEVELS = ("--model.hidden", "8", "--model.top.codebook-size", "8")
TWO_LEVELS += ("--model.bottom.codebook-size", "16", "--data.source", "photos")
IMAGES = ("--data.train-images", "48", "--data.test-images", "16", "--data.workers", "0")
REST = (*IMAGES, "--train.batch-size", "16", "--train.epochs", "3")
FLAGS = (*MODEL, *REST)
METHODS = ("photos-ddcl", "photos-vq", "photos-ema")
RUNS = (*METHODS, "cifar10-ddcl-2level")
EVERY = (*RUNS, "cifar10-vq-2level", "cifar10-ema-2level")


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


def test_weights_for_lpips_complete_the_report_of_a_finished_run(finished, tmp_path, capsys):
    copy, weights = tmp_path / "run", tmp_path / "alexnet.pth"
    shutil.copytree(finished["photos-ddcl"], copy)
    torch.manual_seed(0)
    torch.save(torchvision.models.alexnet().state_dict(), weights)
    before, kept = contents(copy), {"report.json", "curves.png", "reconstructions.png", "atlas.png"}
    assert train(copy, "--lpips-weights", tmp_path / "nowhere.pth") == 2
    assert contents(copy) == before
    assert train(copy, "--lpips-weights", weights) == 0
    report, old = (json.loads(part["report.json"]) for part in (contents(copy), before))
    assert "lpips" in old["absent"]
    assert "lpips" not in report["absent"]
    capsys.readouterr()
    given = ("--lpips-weights", weights, "--test-images", 16)
    assert status_of(reconstruct.main, copy, *given) == 0
    measured = json.loads(capsys.readouterr().out)
    for key in ("test/lpips_soft", "test/lpips_hard"):
        assert report[key] == measured[key] > 0
    same = old.keys() - {"absent", "figures"}
    assert {key: report[key] for key in same} == {key: old[key] for key in same}
    after = contents(copy)
    assert {name for name in after if after[name] != before.get(name)} <= kept
    assert train(copy, "--lpips-weights", weights) == 0
    assert contents(copy) == after


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
        (("--train.eps", "0.5"), "train.eps is 0.1 there and 0.5 here"),
        (("--model.quantizer.codebook-size", "17"), "codebook_size is 16 there and 17 here"),
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
        (("--model.quantizer.temperature.start", "nan"), "<= start, got nan, 1.3"),
        (("--model.quantizer.temperature.gain", "0"), "gain must lie in (0, 1], got 0.0"),
        (("--model.quantizer.commitment-weight", "-1"), "commitment_weight must be 0 or more, got"),
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


PROGRAMS = sorted(
    f"eval.{path.stem}"
    for path in (ROOT / "eval").glob("*.py")
    if "def main(" in path.read_text() and path.stem != "__init__"
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [*PROGRAMS, "softvq.prior.__main__"])
def test_several_processes_are_refused_where_they_are_not_known(
    tmp_path, capsys, monkeypatch, name, rank
):
    assert len(PROGRAMS) > 12
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.chdir(tmp_path)
    assert importlib.import_module(name).main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: this program runs in one process; start it without torchrun\n"
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model.hidden", "100000000"), "error: too little memory: "),
        (("--device", "meta"), "error: device 'meta' cannot be used: "),
        (("--model.hidden", "-1"), "error: Error parsing model: hidden must be at least 2, got -1"),
        (("--nope", "1"), "error: Unrecognized options: --nope, 1"),
    ],
)
def test_what_the_machine_or_a_model_cannot_have_is_one_line(tmp_path, capsys, flags, message):
    assert train(tmp_path, *flags) == (1 if "memory" in message else 2)
    line = error_of(capsys.readouterr())
    assert line.startswith(message)
    assert "---" not in line


def test_only_too_little_memory_is_told_in_one_line(capsys):
    assert run_program(lambda: np.empty(10**15)) == 1
    assert error_of(capsys.readouterr()).startswith("error: too little memory: Unable to allocate")
    with pytest.raises(RuntimeError, match="shape"):
        run_program(lambda: torch.zeros(3).view(4))


def test_a_reader_that_goes_away_gets_no_traceback(finished):
    command = [sys.executable, "-m", "eval.reconstruct", str(finished["photos-vq"])]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 1


def test_help_names_every_option_with_its_meaning(capsys):
    assert status_of(train_vqvae.main, "photos-ddcl", "--help") == 0
    text = capsys.readouterr().out
    for option in ("--train.eps", "--data.source", "--model.quantizer.usage-weight", "--device"):
        assert option in text
    assert status_of(train_vqvae.main, "--help") == 0
    assert "cifar10-ema" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train_vqvae.py", "-m eval.compare", "-m eval.benchmark"])
@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}], ids=["default", "given"])
def test_torch_is_loaded_with_threads_that_do_not_wait_long(python, tmp_path, command, given):
    (tmp_path / "torch.py").write_text(
        "import os\nprint(os.environ['GOMP_SPINCOUNT'], flush=True)\nos._exit(0)"
    )
    printed, _ = python(*command.split(), PYTHONPATH=str(tmp_path), **given)
    assert printed.split() == [given.get("GOMP_SPINCOUNT", "1000")]


def test_the_run_folder_is_named_after_model_and_seed():
    name, run = train_vqvae.parse(["photos-vq", "--train.seed", "7"])
    assert (name, run.out) == ("photos-vq", "runs/photos-vq-seed7")


def test_a_loss_that_is_not_finite_ends_with_status_1_and_names_the_step(tmp_path, capsys):
    assert train(tmp_path, "--train.lr", "1e30") == 1
    line = error_of(capsys.readouterr())
    assert re.search(r"the loss is (nan|inf) in epoch 1, step 2; no state was saved", line)
    assert contents(tmp_path).keys() == {"config.json"}


def test_the_folder_of_a_start_that_failed_serves_the_mended_command(tmp_path, no_figures):
    assert train(tmp_path, "--train.lr", "1e30") == 1
    assert train(tmp_path) == 0
    assert json.loads((tmp_path / "config.json").read_text())["train"]["lr"] == 1e-3


@pytest.mark.parametrize("model", RUNS)
@pytest.mark.parametrize("broken", ["weights", "record"])
def test_a_last_step_that_breaks_the_model_is_no_success(
    tmp_path, capsys, monkeypatch, model, broken
):
    """No loss is computed after it."""
    original, numbers = train_vqvae.train_step, itertools.count(1)

    def breaking(model, *arguments):
        result = original(model, *arguments)
        if next(numbers) == 9 and broken == "weights":
            with torch.no_grad():
                model.decoder[0].bias[0] = math.inf
        return result

    monkeypatch.setattr(train_vqvae, "train_step", breaking)
    if broken == "record":
        monkeypatch.setattr(train_vqvae, "evaluate", lambda *_: {"test/psnr_hard": math.nan})
    assert train(tmp_path, model=model) == 1
    epoch, name = {"weights": (3, "decoder.0.bias"), "record": (1, "test/psnr_hard")}[broken]
    line = error_of(capsys.readouterr())
    assert re.search(rf"{name} is (not finite|nan) after epoch {epoch}; ", line)
    assert not (tmp_path / "report.json").exists()
    assert not (tmp_path / "model.safetensors").exists()


def test_latents_that_are_not_finite_are_no_mistake_of_the_user(tmp_path, capsys, monkeypatch):
    original = train_vqvae.settle

    def breaking(model, images):
        original(model, images)
        model.norm.running_mean.fill_(math.nan)

    monkeypatch.setattr(train_vqvae, "settle", breaking)
    assert train(tmp_path) == 1
    assert "the usage is nan: the model has latents that are" in error_of(capsys.readouterr())


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


def test_the_commitment_weight_on_the_command_line_is_that_of_z():
    # C03, through the flags
    for name in METHODS:
        slopes = []
        for weight in ("0.25", "0.5"):
            flags = ("dim", "1", "codebook-size", "1", "commitment-weight", weight)
            named = [f"--model.quantizer.{x}" if n % 2 == 0 else x for n, x in enumerate(flags)]
            config = train_vqvae.parse([name, *named])[1].model.quantizer
            codebook = build(config)
            codebook.initialize(torch.zeros(4, 1))
            with torch.no_grad():
                codebook.prototypes.zero_()
            z = torch.ones(1, 1, requires_grad=True)
            codebook(z).loss.backward()
            slopes.append(z.grad.item())
            if not isinstance(config, EMAConfig):
                assert codebook.prototypes.grad.item() == pytest.approx(-2.0)
        assert slopes == pytest.approx([0.5, 1.0])
        levels = [name.replace("photos", "cifar10") + "-2level"]
        levels += ["--model.top.commitment-weight", "0.5", "--model.bottom.commitment-weight", "2"]
        weights = [q.commitment_weight for q in train_vqvae.parse(levels)[1].model.quantizers]
        assert weights == [0.5, 2.0]


@pytest.mark.parametrize("model", RUNS)
def test_bfloat16_runs_like_float32_with_codes_in_float32(finished, tmp_path, model, no_figures):
    assert train(tmp_path / "run", "--train.precision", "bfloat16", model=model) == 0
    found, expected = records(tmp_path / "run"), records(finished[model])
    for record, wanted in zip(found, expected, strict=True):
        assert all(math.isfinite(value) for value in record.values())
        for name in ("test/psnr_hard", "test/psnr_soft"):
            assert record[name] == pytest.approx(wanted[name], abs=0.3)
    state, _ = checkpoint.read_tensors(tmp_path / "run" / "model.safetensors")
    assert not any(value.dtype == torch.bfloat16 for value in state.values())
    for codebook in codebooks(checkpoint.load(tmp_path / "run")):
        assert codebook.prototypes.dtype == torch.float32
        assert codebook.prototypes.isfinite().all()


@pytest.mark.parametrize("model", EVERY)
def test_images_of_one_colour_give_a_finite_model(tmp_path, model, no_figures):
    # C05: the start finds fewer distinct tokens than codes.
    for part, count in (("train", 12), ("test", 3)):
        (tmp_path / "images" / part).mkdir(parents=True)
        for number in range(count):
            picture = Image.new("RGB", (16, 16), (200, 100, 50))
            picture.save(tmp_path / "images" / part / f"{number}.png")
    flags = ("--data.source", tmp_path / "images", "--data.image-size", "16", *SMALL_DATA)
    assert train(tmp_path / "run", *flags, model=model) == 0
    for codebook in codebooks(checkpoint.load(tmp_path / "run")):
        assert codebook.prototypes.shape == (codebook.codebook_size, codebook.dim)
        assert codebook.prototypes.isfinite().all()
        assert len(codebook.prototypes.unique(dim=0)) == codebook.codebook_size
    for record in records(tmp_path / "run"):
        assert all(math.isfinite(value) for value in record.values())
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["absent"]["nmse"] == "all pixels have the same colour"
    assert report["test/psnr_hard"] > 0


RATES = (
    1e-3,
    9.755e-4,
    9.045e-4,
    7.939e-4,
    6.545e-4,
    5e-4,
    3.4549e-4,
    2.0611e-4,
    9.549e-5,
    2.447e-5,
)


@pytest.mark.parametrize("model", RUNS)
def test_the_learning_rates_after_a_pause_are_those_without_one(
    tmp_path, model, no_figures, monkeypatch
):
    # C12: ten epochs of one step, stopped after the fifth
    used: list[list[float]] = []
    step = train_vqvae.train_step

    def noting(trained, optimizer, *arguments):
        used.append([group["lr"] for group in optimizer.param_groups])
        return step(trained, optimizer, *arguments)

    flags = ("--train.epochs", 10, "--train.batch-size", 16, "--train.eps", "0.1")
    flags += ("--data.train-images", 16, "--data.test-images", 4)
    monkeypatch.setattr(train_vqvae, "train_step", noting)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, "evaluate", 4, press_ctrl_c)
        assert train(tmp_path, *flags, model=model) == 130
    assert len(used) == 5
    assert train(tmp_path, *flags, model=model) == 0
    assert len(used) == 10
    learned = "ema" not in model
    for epoch, (rates, rate) in enumerate(zip(used, RATES, strict=True)):
        exact = 1e-3 * math.cos(math.pi * epoch / 20) ** 2
        assert rate == pytest.approx(exact, abs=5e-8)
        assert rates == pytest.approx([exact, 10 * exact] if learned else [exact], abs=1e-12)


@pytest.mark.parametrize("model", EVERY)
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
    assert tokens_of(record, "train") == 5 * 64
    changed = checkpoint.load(tmp_path / "run").state_dict()
    still = [name for name in changed if torch.equal(changed[name], seen[0][name])]
    moving = ("weight", "bias", "prototypes")
    assert not [name for name in still if name.endswith(moving)]


def tokens_of(record: dict, split: str) -> int:
    """Of the finest level."""
    return record.get(f"{split}/tokens", record.get(f"{split}/tokens_level2"))


@pytest.mark.parametrize("model", RUNS)
def test_a_last_batch_of_one_is_seen_like_the_others(tmp_path, model, no_figures):
    images = split_folder(tmp_path / "images", 65, 3)
    flags = ("--data.source", images, *SMALL_DATA, "--train.epochs", "2")
    assert train(tmp_path / "run", *flags, model=model) == 0
    log = records(tmp_path / "run")
    assert [record["steps"] for record in log] == [2, 4]
    assert [tokens_of(record, "train") for record in log] == [65 * 64] * 2
    assert [tokens_of(record, "test") for record in log] == [3 * 64] * 2


@pytest.mark.parametrize("model", EVERY)
@pytest.mark.parametrize("size", [32, 4])
def test_one_image_trains_be_it_of_one_token(tmp_path, model, size, no_figures):
    images = split_folder(tmp_path / "images", 1, 1)
    flags = ("--data.source", images, *SMALL_DATA, "--data.image-size", size)
    assert train(tmp_path / "run", *flags, model=model) == 0
    log = records(tmp_path / "run")
    assert [record["steps"] for record in log] == [1, 2, 3]
    tokens = (size // 4) ** 2 if model in METHODS else max(4, (size // 4) ** 2)
    assert [tokens_of(record, "train") for record in log] == [tokens] * 3
    assert all(math.isfinite(value) for record in log for value in record.values())


def test_an_empty_split_is_refused_before_anything_is_written(tmp_path, capsys):
    images = pngs(tmp_path / "images" / "train", 3).parent
    (images / "test").mkdir()
    assert train(tmp_path / "run", "--data.source", images, *SMALL_DATA) == 2
    assert "gives 3 train, 0 test images; both need at least 1" in error_of(capsys.readouterr())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("count", "message"), [(0, "holds 0 images"), (1, "gives 0 train, 1 test images; both need")]
)
def test_too_few_images_are_refused_before_anything_is_written(tmp_path, capsys, count, message):
    images = pngs(tmp_path / "images", count)
    assert train(tmp_path / "run", "--data.source", images, *SMALL_DATA) == 2
    assert message in error_of(capsys.readouterr())
    assert not (tmp_path / "run").exists()


def with_broken_files(folder: Path, good: int) -> Path:
    """C10: a JPEG cut at 60 % of its bytes and an empty PNG, among good files; none is a test."""
    pngs(folder / "test" / "a", 2, seed=1)
    pngs(folder / "train" / "a", good)
    file = io.BytesIO()
    pixels = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    (folder / "train" / "a" / "cut.jpg").write_bytes(file.getvalue()[: file.tell() * 6 // 10])
    (folder / "train" / "a" / "zero.png").write_bytes(b"")
    return folder


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*use of fork")
@pytest.mark.parametrize("good", [10, 0], ids=["among good ones", "all bad"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("memory", [4096, 0], ids=["in memory", "streamed"])
def test_broken_files_are_named_and_no_run_is_written(tmp_path, capsys, workers, memory, good):
    images = with_broken_files(tmp_path / "images", good)
    flags = ("--data.source", images, *SMALL_DATA)
    flags += ("--data.workers", workers, "--data.memory-mib", memory)
    assert train(tmp_path / "run", *flags) == 2
    line = error_of(capsys.readouterr())
    assert f"2 of {good + 2} images cannot be used" in line
    assert "train/a/cut.jpg" in line
    assert "train/a/zero.png (empty file)" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("good", [10, 0], ids=["among good ones", "all bad"])
def test_broken_files_are_named_by_every_program_that_reads_images(
    finished, generative_run, tmp_path, capsys, good
):
    images = with_broken_files(tmp_path / "images", good)
    (images / "train").rename(tmp_path / "train")
    (images / "test").rename(images / "train")  # for the programs that read the test split alone
    (tmp_path / "train").rename(images / "test")
    run, out = finished["photos-ddcl"], tmp_path / "out"
    cut, count = images / "test" / "a" / "cut.jpg", good + 2
    small = ("--data.image-size", 16, "--data.workers", 0, "--out", out)
    commands = [
        (reconstruct.main, (run, "--data", images), ("cut.jpg", "zero.png")),
        (classifier.main, ("--data.source", images, *small), ("cut.jpg", "zero.png")),
        (
            sample.main,
            (
                generative_run,
                "--complete",
                "--images",
                images / "test",
                "--num",
                count,
                *small[-2:],
            ),
            ("cut.jpg", "zero.png"),
        ),
        (explain.main, (run, "--image", cut, "--html", out), ("cut.jpg",)),
        (
            explain.main,
            (run, "--image", cut.with_name("zero.png"), "--html", out),
            ("zero.png (empty file)",),
        ),
    ]
    for main, arguments, named in commands:
        assert status_of(main, *arguments) == 2
        line = error_of(capsys.readouterr())
        assert f"{len(named)} of {1 if main is explain.main else count} images cannot" in line
        assert all(name in line for name in named)
        assert not out.exists()


def test_a_jpeg_with_an_invented_end_is_refused_by_name(finished, tmp_path, capsys):
    # A broken copy whose tail is zeros; Pillow would make grey rows of it.
    file = io.BytesIO()
    pixels = np.random.default_rng(2).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "JPEG")
    whole, path = file.getvalue(), tmp_path / "zeros.jpg"
    path.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) // 2))
    arguments = ("--image", path, "--html", tmp_path / "page.html")
    assert status_of(explain.main, finished["photos-ddcl"], *arguments) == 2
    assert f"{path} (the JPEG data has no end)" in error_of(capsys.readouterr())


RAMP = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
DEEP = {
    "16-bit grey": lambda levels: (Image.fromarray(levels), "PNG"),
    "float TIFF": lambda levels: (Image.fromarray((levels / 65535).astype(np.float32)), "TIFF"),
    "32-bit TIFF": lambda levels: (Image.fromarray(levels.astype(np.int32)), "TIFF"),
}


def deep_images(folder: Path, deep: Callable | None) -> Path:
    """C09: ramps over all levels, and the constants 32768 and 100; of 8 bits without `deep`."""
    pictures = [np.roll(RAMP, 16 * n, 1 if n % 2 else 0) for n in range(6)]
    pictures += [np.full_like(RAMP, 32768), np.full_like(RAMP, 100)]
    for number, levels in enumerate(pictures):
        path = folder / ("train" if number % 2 else "test") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        eight = Image.fromarray(np.rint(levels / 257).astype(np.uint8))
        picture, format = deep(levels) if deep else (eight, "PNG")
        picture.save(path, format)
    return folder


@pytest.mark.parametrize("deep", DEEP.values(), ids=DEEP)
def test_deep_pixels_are_those_of_eight_bits_to_every_program(
    finished, generative_run, tmp_path, capsys, deep, no_figures
):
    eight, sixteen = deep_images(tmp_path / "8", None), deep_images(tmp_path / "16", deep)
    run, results = finished["photos-ddcl"], []
    for images in (eight, sixteen):
        out = tmp_path / f"out{images.name}"
        flags = ("--data.image-size", 16, *SMALL_DATA, "--train.epochs", 1)
        assert train(out, "--data.source", images, *flags) == 0
        capsys.readouterr()
        stem = tmp_path / f"completed{images.name}"
        flags = ("--complete", "--images", images / "test", "--num", 4, "--out", stem)
        evaluated(capsys, generative_run, *flags, main=sample.main)
        with np.load(f"{stem}.npz") as arrays:
            originals, completed = arrays["originals"], arrays["images"]
        explained = evaluated(
            capsys, run, "--image", images / "test" / "0.png", "--html", tmp_path / "x",
            main=explain.main,
        )  # fmt: skip
        results.append(
            (
                (out / "model.safetensors").read_bytes(),
                evaluated(capsys, run, "--data", images) | {"data": ""},
                originals.tolist(),
                completed.tolist(),
                explained["levels"],
            )
        )
    assert results[0] == results[1]
    ramp, _, _, middle = (np.array(picture) for picture in results[1][2])
    assert sorted(ramp[..., 0].flatten().tolist()) == list(range(256))
    assert (middle == 128).all()


def evaluated(capsys, *arguments: object, main=reconstruct.main) -> dict:
    assert status_of(main, *arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == "" or main is not reconstruct.main
    return json.loads(captured.out)


@pytest.mark.parametrize("model", RUNS)
def test_reconstruct_finds_the_numbers_of_the_report(finished, capsys, model):
    report = json.loads((finished[model] / "report.json").read_text())
    before = contents(finished[model])
    found = evaluated(capsys, finished[model], "--test-images", 16)
    assert contents(finished[model]) == before
    assert (found["run"], found["images"]) == (str(finished[model]), 16)
    keys = [name for name in report if name.startswith("test/")]
    assert len(keys) > 15
    for key in keys:
        assert found[key] == pytest.approx(report[key], rel=1e-9, abs=1e-12), key
    assert found["absent"] == report["absent"]


@pytest.mark.parametrize("batch", [1, 4, 13])
@pytest.mark.parametrize("model", RUNS)
def test_reconstruct_finds_the_same_whatever_the_batches(
    finished, capsys, model, batch, monkeypatch
):
    # C14: 13 images in one batch, in ones, and in fours with a last one
    whole = evaluated(capsys, finished[model], "--test-images", 13)
    monkeypatch.setattr("softvq.data._FLOAT_BATCH", batch)
    parts = evaluated(capsys, finished[model], "--test-images", 13)
    assert parts.keys() == whole.keys()
    for key, value in whole.items():
        # Distances of prototypes are in units of the tokens' deviation, a small difference.
        expected = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
        assert parts[key] == expected, key


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


PRIOR_FLAGS = ("--width", 16, "--depth", 1, "--heads", 2, "--device", "cpu")
PRIOR_FLAGS += ("--train.epochs", 1, "--train.batch-size", 8)


@pytest.fixture
def generative_programs(generative_run, tmp_path):
    """A copy of a run with its prior, whose training is not finished, and what reads which file."""
    run = tmp_path / "generative"
    shutil.copytree(generative_run, run)
    (run / "prior" / "report.json").unlink()
    picture = pngs(tmp_path / "picture", 1) / "0.png"
    of_prior = (prior.main, (run, *PRIOR_FLAGS))
    drawing = [
        (sample.main, (run, "--num", 1, "--out", tmp_path / "x")),
        (quality.main, (run,)),
    ]
    reading = [
        of_prior,
        *drawing,
        (reconstruct.main, (run,)),
        (explain.main, (run, "--image", picture, "--html", tmp_path / "x")),
    ]
    speed = (sampling_speed.main, ("--prior", run / "prior"))
    files = {
        "config.json": reading,
        "model.safetensors": reading,
        "prior/config.json": [*drawing, of_prior, speed],
        "prior/model.safetensors": drawing,
        "prior/state.safetensors": [of_prior],
        "prior/codes-train.safetensors": [of_prior],
        "prior/codes-test.safetensors": [of_prior],
    }
    return run, files


def test_a_pickle_is_refused_by_every_program_that_reads_a_prior_or_a_run(
    generative_programs, hostile, capsys
):
    run, files = generative_programs
    stored = {str(path.relative_to(run)) for path in run.rglob("*.*") if path.suffix != ".lock"}
    assert files.keys() == stored - {"prior/metrics.jsonl", "prior/.lock"}
    pickles, trace = hostile
    for (name, commands), content in itertools.product(files.items(), pickles):
        before = (run / name).read_bytes()
        (run / name).write_bytes(content)
        for main, arguments in commands:
            assert status_of(main, *arguments) == 2
            line = error_of(capsys.readouterr())
            assert re.search(rf"{name} (is not a whole safetensors file|cannot be read)", line)
        (run / name).write_bytes(before)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("model", {"codebook_size": 9}, r"has shape \(6, 4\) in .*; the model has \(9, 4\)"),
        ("model", {"dim": 5}, r"has shape \(4, .* in .*; the model has \(5, "),
        ("file", {"format": 7}, "has format 7; this version reads 1"),
    ],
    ids=["K", "D", "format"],
)
def test_another_size_or_format_is_refused_by_every_program_with_both_values(
    generative_programs, capsys, part, change, message
):
    run, files = generative_programs
    config = json.loads((run / "config.json").read_text())
    options = config
    if part == "model":
        options = config["model"].get("quantizer", config["model"].get("bottom"))
    options.update(change)
    (run / "config.json").write_text(json.dumps(config))
    for main, arguments in files["config.json"]:
        assert status_of(main, *arguments) == 2
        assert re.search(message, error_of(capsys.readouterr()))


def test_a_prior_for_images_of_another_size_is_refused_with_both_grids(generative_programs, capsys):
    # C15: the weights of the tokenizer are the same, and so is the size of its codebook.
    run, files = generative_programs
    config = json.loads((run / "config.json").read_text())
    config["data"]["image_size"] = 32
    (run / "config.json").write_text(json.dumps(config))
    for main, arguments in files["prior/config.json"][:3]:
        assert status_of(main, *arguments) == 2
        line = error_of(capsys.readouterr())
        assert re.search(
            r"of another tokenizer: grids \(.*\(4, 4\).*, not \(.*\(8, 8\)"
            r"|prior\.grids is \[.*\[4, 4\]\] there and \[.*\[8, 8\]\] here",
            line,
        )


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
        (("photos-ddcl", "--seeds"), "seeds must be at least one"),
        (("photos-ddcl", "--", "--train.seed", "7"), "has --seeds and --out, before the --"),
        (("photos-ddcl", "--", "--out", "x"), "has --seeds and --out, before the --"),
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


def test_a_table_says_never_of_full_use_alone():
    summary = {name: {"mean": None, "sd": None} for name in compare.COLUMNS}
    summary["test/psnr_hard"] = {"mean": 20.0, "sd": 0.5}
    summary["test/perplexity"] = {"mean": 15013.4, "sd": 123.4}
    head, _, row = (line.split(" | ") for line in compare.table({"m": summary}).splitlines())
    cells = dict(zip(head, row, strict=True))
    assert cells["PSNR hard [dB]"] == "20 ± 0.5"
    assert cells["perplexity"] == "15013 ± 123"
    assert cells["epochs to 100 %"] == "never"
    assert cells["LPIPS hard"] == cells["codes in use [%]"] == "-"


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
