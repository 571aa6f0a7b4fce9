"""Stability: members trained at once are what they are alone, and the verdict follows the grid."""

import json

import pytest
import torch
from torch.testing import assert_close

from eval import stability
from eval.experiment import SplitCheck
from eval.joint import Case, Joint, Member
from eval.stability import StabilityConfig, judge, train

TINY = ("--seeds", "0", "1", "--eps", "0.1", "1", "--commitments", "1", "--clock", "2")
TINY += ("--short-steps", "3", "--tokens", "24", "--tasks", "none", "classes")


def config(**options) -> StabilityConfig:
    return StabilityConfig(**{"seeds": (0, 1), "eps": (0.1, 1.0), "tokens": 24, **options})


def test_steps_give_every_encoder_the_same_rate_times_steps():
    grid = StabilityConfig()
    assert [eps * grid.steps(eps) for eps in grid.eps] == pytest.approx([40] * 5)
    assert grid.steps(0.01) == 4000
    assert config(short_steps=100).steps(1.0) == 100


@pytest.mark.parametrize("task", ["none", "classes", "reconstruction"])
@pytest.mark.parametrize("gradient", ["detached", "full"])
def test_a_member_trained_with_others_ends_as_it_does_alone(task, gradient):
    case = Case(task, gradient, 1.0)
    options = {"clock": 6.0, "short_steps": 2}
    together, check = train(config(commitments=(0.1, 1.0), **options), case)
    alone, _ = train(config(commitments=(1.0,), **options | {"seeds": (1,)}), case)
    assert check.violations == 0
    assert check.checks == 4 * 7
    for ours, theirs in zip(together[Member(1.0, 1)], alone[Member(1.0, 1)], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert [record["step"] for record in alone[Member(1.0, 1)]] == [*range(7)]


def test_the_first_look_is_of_the_start():
    members = [Member(1.0, seed) for seed in (0, 1)]
    model = Joint(Case("classes", "detached", 1.0), members, 24, 0.3)
    for state in model.measures(SplitCheck()):
        assert state["trace"] == 1
        assert state["temperature_ratio"] == pytest.approx(0.3)
        assert state["collapsed"] == 0
        assert 1 / 6 <= state["accuracy"] <= 1
    z = model.encode()
    plain = torch.tanh(model.x[1] @ model.first[1, :-1] + model.first[1, -1])
    assert_close(z[1], plain @ model.second[1, :-1] + model.second[1, -1])


def test_the_commitment_scales_the_encoder_s_share_alone():
    gradients = {}
    for weight in (0.0, 0.5, 1.0):
        model = Joint(Case("none", "detached", 1.0), [Member(weight, 0)], 24, 0.3)
        loss = model.losses().sum()
        gradients[weight] = torch.autograd.grad(loss, (model.second, model.prototypes))
    assert_close(gradients[0.0][0], torch.zeros_like(gradients[0.0][0]))
    assert_close(2 * gradients[0.5][0], gradients[1.0][0])
    assert_close(gradients[0.5][1], gradients[1.0][1])


def entry(eps: float, clock: float, steps: float) -> dict:
    return {
        **{"task": "none", "gradient": "full", "commitment": 1.0, "eps": eps},
        "clock": {"collapsed": {"mean": clock}},
        "steps": {"collapsed": {"mean": steps}},
    }


@pytest.mark.parametrize(
    ("small", "large", "holds", "summary"),
    [
        (0.0, 1.0, True, "depends on eps or seed"),
        (0.5, 1.0, False, "depends on eps or seed"),
        (1.0, 1.0, False, "every eps collapses"),
        (0.0, 0.0, False, "no eps collapses"),
        (0.0, 0.5, False, "depends on eps or seed"),
    ],
)
def test_the_claim_needs_no_collapse_below_and_nothing_else_above(small, large, holds, summary):
    (verdict,) = judge([entry(0.01, small, 0.0), entry(1.0, large, 1.0)])
    assert verdict["claim_holds"] is holds
    assert verdict["at_equal_steps"] is True
    assert verdict["summary"] == summary


def test_without_both_ends_there_is_no_verdict():
    (verdict,) = judge([entry(0.1, 0.0, 0.0)])
    assert verdict["claim_holds"] is None


def test_a_detached_encoder_without_a_task_collapses_whatever_the_clock_says():
    options = {"clock": 60.0, "tokens": 60, "seeds": (0,), "commitments": (1.0,)}
    for eps in (0.5, 1.0):
        records, _ = train(config(**options), Case("none", "detached", eps))
        (run,) = records.values()
        assert run[-1]["trace"] < 0.02
        assert run[-1]["temperature_ratio"] > 10


def test_the_program_judges_its_grid(tmp_path, capsys):
    assert stability.main([*TINY, "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"stability.json", "stability.png"}
    assert report["claim"] == "eps <= 0.1 is stable, eps = 1 collapses"
    assert len(report["verdicts"]) == 4
    assert all(verdict["claim_holds"] is False for verdict in report["verdicts"])
    assert report["claim_holds_somewhere"] is False
    assert {e["steps_at_equal_clock"] for e in report["grid"]} == {2, 20}
    assert report["split"]["violations"] == 0
    supervised = [e for e in report["grid"] if e["task"] == "classes"]
    assert all(0 <= e["clock"]["task_accuracy"]["mean"] <= 1 for e in supervised)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--eps", "-1"), "eps must be positive and finite, got -1"),
        (("--clock", "0"), "clock must be positive and finite, got 0"),
        (("--tokens", "5"), "tokens must be at least 12, got 5"),
        (("--tasks", "chess"), "chess"),
        (("--threads", "0"), "threads must be at least 1, got 0"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(capsys, flags, complaint):
    assert stability.main(flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
