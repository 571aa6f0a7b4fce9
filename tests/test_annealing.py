"""Annealing: data with an exact covariance, transitions where theory has them, what never rises."""

import json
import math

import pytest
import torch
from torch.testing import assert_close

from eval import annealing
from eval.annealing import cool, transition_by_cooling, transition_by_growth
from eval.ensemble import ensemble_assignment
from eval.experiment import SplitCheck
from eval.synthetic import exact_tokens, simplex_clusters
from softvq.ddcl import competitive_loss, covariance, soft_assignment

TINY = ("--seeds", "0", "1", "--dims", "2", "--codes", "2", "--tokens", "16")
TINY += ("--descents", "4", "--steps", "12")


@pytest.mark.parametrize("dim", [1, 2, 7])
@pytest.mark.parametrize("data", ["pair", "gaussian"])
def test_exact_tokens_have_the_spectrum_that_is_promised(data, dim):
    z = exact_tokens(data, 64, dim, seed=3)
    rest = 0.1 if data == "pair" else 0.5
    spectrum = torch.linalg.eigvalsh(covariance(z))
    assert_close(
        spectrum, torch.tensor([rest] * (dim - 1) + [1.0], dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert_close(z.mean(0), torch.zeros(dim).double())
    assert not torch.equal(z, exact_tokens(data, 64, dim, seed=4))


def test_clusters_lie_where_they_should():
    clusters = simplex_clusters(3, 30, 5, 1e-3, seed=0)
    assert clusters.labels.tolist() == [0] * 10 + [1] * 10 + [2] * 10
    assert_close(clusters.z[10:20].mean(0), 3 * torch.eye(5).double()[1], rtol=0, atol=1e-2)


@pytest.mark.parametrize("gradient", ["detached", "full"])
def test_many_problems_at_once_are_the_library_s_each(gradient):
    generator = torch.Generator().manual_seed(0)
    z, p = (torch.randn(3, n, 4, generator=generator).double() for n in (9, 5))
    t = torch.tensor([0.3, 1.0, 5.0]).double()
    z, p = z.requires_grad_(), p.requires_grad_()
    soft = ensemble_assignment(z, p, t)
    together = torch.autograd.grad(competitive_loss(soft, gradient).loss.sum(), (z, p))
    usage = torch.zeros(5).double()
    for i in range(3):
        own = soft_assignment(z[i], p[i], t[i])
        usage += own.usage
        for name in ("mu", "reconstruction", "variance", "free_energy", "entropy", "indices"):
            assert_close(getattr(soft, name)[i], getattr(own, name), rtol=1e-9, atol=1e-10)
        alone = torch.autograd.grad(competitive_loss(own, gradient).loss.sum(), (z, p))
        assert_close(tuple(x[i] for x in together), tuple(x[i] for x in alone))
    assert_close(soft.usage, usage)


@pytest.mark.parametrize(("gradient", "threshold"), [("detached", 2.0), ("full", 4.0)])
@pytest.mark.parametrize("data", ["pair", "gaussian"])
def test_a_small_separation_grows_below_the_threshold_alone(data, gradient, threshold):
    z = torch.stack([exact_tokens(data, 24, 3, seed) * scale for seed, scale in ((0, 1), (1, 7))])
    found = transition_by_growth(z, 4, gradient)
    assert_close(found, threshold * torch.tensor([1.0, 49.0]).double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("gradient", "threshold"), [("detached", 2.0), ("full", 4.0)])
def test_cooling_meets_the_transition_within_two_per_cent(gradient, threshold):
    check = SplitCheck()
    z = exact_tokens("pair", 24, 2, seed=0)[None]
    (found,), ratios, ((*sizes,),) = transition_by_cooling(z, 2, gradient, 250, check)
    assert found == pytest.approx(threshold, rel=0.02)
    assert len(sizes) == len(ratios) == check.checks == 25
    assert check.violations == 0
    assert sizes[0] < 0.01 < 0.3 < sizes[-1]


def test_without_time_to_separate_there_is_no_transition():
    z = exact_tokens("pair", 8, 2, seed=0)[None]
    (found,), _, _ = transition_by_cooling(z, 2, "detached", 1, SplitCheck())
    assert found == math.inf


@pytest.mark.parametrize(
    ("gradient", "never"), [("detached", "free_energy_plus_t_log_k"), ("full", "loss")]
)
def test_each_gradient_has_a_quantity_that_never_rises_and_it_is_not_f(gradient, never):
    check = SplitCheck()
    z = torch.stack([simplex_clusters(4, 32, 6, 0.5, seed).z for seed in (0, 1)])
    run = cool(z, gradient, 1e-3, 150, check)
    assert run.rises[never].tolist() == [0, 0]
    assert (run.rises["free_energy"] > 100).all()
    assert (check.checks, check.violations) == (300, 0)
    assert run.ratios[0] == 2.5
    assert run.ratios[-1] == pytest.approx(0.02)
    assert [groups[-1] > 1 for groups in run.trace["distinct"]] == [True, True]


def test_the_program_writes_report_and_figure(tmp_path, capsys):
    assert annealing.main([*TINY, "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"annealing.json", "annealing.png"}
    assert report == json.loads((tmp_path / "annealing.json").read_text())
    assert report["command"].startswith("python -m eval.annealing --seeds 0 1 --dims 2")
    assert report["verdict"]["largest_error"]["by_growth"] < 1e-3
    assert report["verdict"]["largest_error"]["by_cooling"] is None
    assert report["verdict"]["transitions_agree"] is False
    assert report["split"]["violations"] == 0
    assert report["split"]["checks"] == 2 * 25 * 4 + 4 * 12 * 2
    first = report["transitions_by_growth"][0]
    assert (first["data"], first["dim"], first["codes"], first["gradient"]) == (
        *("pair", 2, 2),
        "detached",
    )
    assert first["temperature"]["sd"] < 1e-3


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--tokens", "33"), "tokens must be even and at least twice the largest dim plus 2"),
        (("--dims", "0"), "dims must be positive and finite, got 0"),
        (("--codes", "1"), "codes must be at least 2, got 1"),
        (("--seeds", "1", "1"), "seeds must be given, each once, got (1, 1)"),
        (("--processes", "0"), "processes must be at least 1, got 0"),
        (("--out", "/dev/null/folder"), "out must be a folder, got /dev/null/folder"),
        (("--colour", "red"), "--colour"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(capsys, flags, complaint):
    assert annealing.main(flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert complaint in captured.err
    assert captured.err.count("\n") == 1
