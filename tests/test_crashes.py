"""Nothing is lost: runs that are killed, disks that are full, folders that cannot be written or are
in use. The programs run in processes of their own, and die as they would in earnest.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from softvq import checkpoint

ROOT = Path(__file__).parents[1]
FLAGS = (
    *("--model.hidden", "8", "--model.quantizer.codebook-size", "16", "--data.workers", "0"),
    *("--data.train-images", "48", "--data.test-images", "16", "--train.batch-size", "8"),
)
KILLS = 20


def start(out: Path, *flags: str, **options) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "train_vqvae.py", "photos-ddcl", *FLAGS, "--out", str(out), *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    )


def finish(out: Path, *flags: str) -> float:
    """Runs to the end and returns the seconds it took."""
    begun = time.monotonic()
    process = start(out, *flags)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return time.monotonic() - begun


def tensors(run: Path, name: str) -> dict[str, torch.Tensor]:
    return checkpoint.read_tensors(run / name)[0]


@pytest.mark.slow
def test_a_run_killed_at_twenty_random_times_ends_like_one_that_was_not(tmp_path):
    length = ("--train.epochs", "300")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(tmp_path / "short", "--train.epochs", "1")
    begun = time.monotonic()
    finish(tmp_path / "short", "--train.epochs", "1")
    starting = time.monotonic() - begun
    finish(whole, *length)
    draw = random.Random(0)
    for _ in range(KILLS):
        process = start(killed, *length)
        time.sleep(draw.uniform(0, 1.5 * starting))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "ended before it was killed"
    assert 0 < len(checkpoint.read_records(killed)) < 300
    finish(killed, *length)
    for name in (checkpoint.MODEL, checkpoint.STATE):
        for key, value in tensors(whole, name).items():
            assert torch.equal(value, tensors(killed, name)[key]), key
    logs = [
        [{**record, "seconds": 0} for record in checkpoint.read_records(run)]
        for run in (whole, killed)
    ]
    assert logs[0] == logs[1]


def test_a_full_disk_ends_the_run_in_one_line_and_harms_no_file(tmp_path):
    out, length = tmp_path / "run", ("--train.epochs", "2")

    def no_large_files() -> None:
        # As a full disk does, this fails a write in the middle of the file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))

    process = start(out, *length, preexec_fn=no_large_files)
    printed, errors = process.communicate()
    assert process.returncode == 1, errors
    assert printed == ""
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].startswith("error: ")
    assert "large" in errors.splitlines()[-1]
    assert not list(out.glob(".*.tmp"))
    assert not (out / checkpoint.STATE).exists()
    assert len(checkpoint.read_records(out)) == 1
    finish(out, *length)
    finish(tmp_path / "other", *length)
    for key, value in tensors(out, checkpoint.MODEL).items():
        assert torch.equal(value, tensors(tmp_path / "other", checkpoint.MODEL)[key]), key


def test_a_folder_that_cannot_be_written_is_named_in_one_line(tmp_path):
    (tmp_path / "file").write_text("no folder")
    process = start(tmp_path / "file" / "run")
    printed, errors = process.communicate()
    assert process.returncode == 1
    assert printed == ""
    assert "Traceback" not in errors
    assert str(tmp_path / "file") in errors.splitlines()[-1]


def test_a_folder_in_use_is_refused_and_is_free_when_its_process_is_dead(tmp_path):
    out, length = tmp_path / "run", ("--train.epochs", "500")
    first = start(out, *length)
    deadline = time.monotonic() + 120
    while not checkpoint.read_records(out):
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.1)
    second = start(out, *length)
    printed, errors = second.communicate()
    assert second.returncode == 2
    assert printed == ""
    assert errors.splitlines()[-1] == f"error: {out} is in use by another process"
    assert first.poll() is None
    first.kill()
    first.communicate()
    with checkpoint.only_writer(out):
        pass
    assert json.loads((out / checkpoint.CONFIG).read_text())["format"] == checkpoint.FORMAT
