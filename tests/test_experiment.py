"""What the experiments share: the check of the split finds what is wrong, and only that."""

import torch

from eval import experiment
from eval.experiment import SplitCheck


def tokens():
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3, 40, 5, generator=generator) + 100
    return z, torch.randn(7, 5, generator=generator) + 100


def test_the_split_holds_for_any_temperature_and_mask():
    z, p = tokens()
    check = SplitCheck()
    mask = torch.arange(40) < torch.tensor([[40], [3], [0]])
    z[~mask] = torch.nan
    for temperature in (1e-3, 1.0, torch.tensor(1e3)):
        check.add(z, p, temperature, mask)
    check.add(z[2], p, 1.0, mask[2])  # no token, and so nothing to look at
    assert (check.checks, check.violations) == (3, 0)
    assert 0 < check.largest < 1e-12


def test_a_wrong_part_is_counted(monkeypatch):
    z, p = tokens()
    right = experiment.soft_assignment

    def wrong(*arguments):
        soft = right(*arguments)
        return soft._replace(variance=soft.variance * (1 + 1e-8))

    monkeypatch.setattr(experiment, "soft_assignment", wrong)
    check = SplitCheck()
    check.add(z, p, 1.0)
    assert check.violations == 1
    assert 1e-10 < check.largest < 1e-7
