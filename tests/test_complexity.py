"""Complexity: contestants compute what they are named after, exponents are those of the data."""

import json
import sys

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.testing import assert_close

from eval import complexity
from eval.complexity import MODES, NAMES, ProjectedAttention, SlotAttention, exponent, make_step

TINY = ("--seeds", "0", "--smallest", "16", "--largest", "64", "--dim", "8", "--codes", "4")
TINY += ("--repeats", "2", "--tail", "3")


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_exponents_are_the_slopes_of_the_tail(power):
    lengths = [2**i for i in range(8)]
    values = [5.0] * 4 + [3e-6 * n**power for n in lengths[4:]]
    assert exponent(lengths, values, 4) == pytest.approx(power)
    assert exponent(lengths[:1], values[:1], 4) is None
    assert exponent(lengths, [0.0] * 8, 4) is None


def test_both_kernels_are_the_attention_of_torch():
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(8, 1, batch_first=True)
    x = torch.randn(2, 9, 8)
    expected, _ = reference(x, x, x)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        ours = ProjectedAttention(8, backend)
        ours.inputs.weight.data, ours.inputs.bias.data = (
            reference.in_proj_weight.data,
            reference.in_proj_bias.data,
        )
        ours.output.load_state_dict(reference.out_proj.state_dict())
        assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)


def test_slots_do_not_depend_on_the_order_of_the_tokens():
    torch.manual_seed(0)
    layer, x = SlotAttention(8, 3), torch.randn(2, 11, 8)
    slots = layer(x)
    assert slots.shape == (2, 3, 8)
    assert_close(layer(x[:, torch.randperm(11)]), slots, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reaches_the_tokens(name, monkeypatch):
    seen = []
    original = torch.randn

    def remember(*shape, **options):
        x = original(*shape, **options)
        if shape == (1, 20, 8):
            seen.append(x)
        return x

    monkeypatch.setattr(torch, "randn", remember)
    make_step(name, "step", 20, 8, 4, seed=0)()
    (x,) = seen
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    make_step(name, "forward", 20, 8, 4, seed=0)()
    assert seen[1].grad is None


def test_the_program_reports_times_exponents_and_memory(tmp_path, capsys, monkeypatch):
    def peaks(_, names, lengths, *rest):
        return {name: {n: 64 * n**2 for n in lengths} for name in names}

    monkeypatch.setattr(complexity, "in_fresh_process", peaks)
    assert complexity.main([*TINY, "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"complexity.json", "complexity.png"}
    assert report["lengths"] == [16, 32, 64]
    assert report["split"]["checks"] == 3
    assert report["split"]["violations"] == 0
    for mode in MODES:
        assert report[mode].keys() == set(NAMES)
        for times in report[mode].values():
            ranges = zip(
                times["lowest_seconds"],
                times["median_seconds"],
                times["highest_seconds"],
                strict=True,
            )
            assert all(0 < low <= median <= high for low, median, high in ranges)
    if sys.platform == "linux":
        for peaks in report["peak_bytes"].values():
            assert peaks["bytes"] == {str(n): 64 * n**2 for n in (16, 32, 64)}
            assert peaks["exponent"] == pytest.approx(2)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_peak_of_a_process_of_its_own_sees_the_weights():
    lengths = (2048, 1024)
    names = ("attention_math", "ddcl")
    peaks = complexity.in_fresh_process(complexity.peak_bytes, names, lengths, 8, 4, 1)
    for tokens in lengths:
        assert 4 * tokens**2 <= peaks["attention_math"][tokens] < 40 * tokens**2
        assert peaks["ddcl"][tokens] < 4 * tokens**2


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--largest", "64"), "largest must be at least smallest = 128, got 64"),
        (("--tail", "1"), "tail must be at least 2, got 1"),
        (("--repeats", "0"), "repeats must be positive and finite, got 0"),
        (("--dim", "wide"), "--dim"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(capsys, flags, complaint):
    assert complexity.main(flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
