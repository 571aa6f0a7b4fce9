"""The benchmark program: one JSON object with every ratio, and clean refusals."""

import json
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from eval.benchmark import RATIOS, SHAPES, make_problem, plain_assignment, soft_step
from softvq.ddcl import soft_assignment


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "eval.benchmark", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_small_run_prints_every_ratio_and_writes_the_same_file(tmp_path):
    out = tmp_path / "report.json"
    done = run("--tokens", "64", "--repeats", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads(out.read_text())
    assert list(tmp_path.iterdir()) == [out]
    assert set(report["versions"]) == {"python", "torch", "vector-quantize-pytorch", "faiss-cpu"}
    assert (report["threads"], report["tokens"], report["repeats"]) == (1, 64, 1)
    assert [(shape["codes"], shape["dim"]) for shape in report["shapes"]] == list(SHAPES)
    for shape in report["shapes"]:
        assert set(shape["ratios"]) == {f"{ours}/{theirs}" for ours, theirs in RATIOS}
        assert all(x > 0 for x in shape["seconds"].values())
        assert shape["cores"] > 0
        for ratio in shape["ratios"].values():
            assert 0 < ratio["lowest"] <= ratio["ratio"] <= ratio["highest"]
    for precision in ("float32", "bfloat16"):
        loop = report["loop"][precision]
        medians = loop["seconds"]
        assert loop["ddcl_adds"] == pytest.approx(medians["ddcl"] / medians["none"] - 1)
        assert loop["data_share"] == pytest.approx(medians["data"] / medians["ddcl"])
    if sys.platform == "linux":
        peaks = report["memory"]["peak_bytes"]
        assert peaks.keys() == {"streaming", "vector_quantize"}
        assert all(peak > 0 for peak in peaks.values())
    assert "nearest/faiss" in done.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--threads", "0"), "threads must be at least 1, got 0"),
        (("--repeats", "-1"), "repeats must be at least 1, got -1"),
        (("--tokens", "many"), "--tokens"),
        (("--out", "/no/such/folder/x.json"), "out must be in an existing folder"),
        (("--colour", "red"), "--colour"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(flags, complaint):
    done = run(*flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_plain_contestant_computes_the_same():
    problem = make_problem(50, 64, 8)
    gradients = []
    for assignment in (soft_assignment, plain_assignment):
        soft_step(problem, assignment)()
        gradients.append((problem.z.grad, problem.prototypes.grad))
    assert_close(*gradients, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        both = (f(*problem[:2], problem.temperature) for f in (soft_assignment, plain_assignment))
        assert_close(*map(tuple, both), rtol=1e-4, atol=1e-4)
