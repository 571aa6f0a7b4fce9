"""What the experiments share: figures over seeds, and the check of the split L_q = L_OLS + V.

Each experiment is a program of its own beside this file.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softvq.ddcl import assignment_weights, soft_assignment

# Largest difference between the two sides that counts as equal in float64
TOLERANCE = 1e-10


def summarize(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread of every number: sample standard deviation, None for a single seed.

    The mean is None when a seed has no value or none that is finite, such as one that never came to
    full use.
    """
    summary = {}
    for name in reports[0]:
        given = [report.get(name) for report in reports]
        if not all(isinstance(value, int | float | None) for value in given):
            continue
        values = [value for value in given if value is not None and math.isfinite(value)]
        whole = len(values) == len(given)
        summary[name] = {
            "mean": statistics.fmean(values) if whole else None,
            "sd": statistics.stdev(values) if whole and len(values) > 1 else None,
        }
    return summary


@dataclass
class SplitCheck:
    """How often L_q = L_OLS + V was looked at, how often it failed, and the largest difference."""

    checks: int = 0
    """Batches looked at."""
    violations: int = 0
    """Those that differ by more than `TOLERANCE` of the largest L_q, or have a negative V."""
    largest: float = 0.0
    """The largest difference of a token, relative to the largest L_q of its batch."""

    @torch.no_grad()
    def add(
        self,
        z: Float[Tensor, "*n d"],
        prototypes: Float[Tensor, "k d"],
        temperature: float | Float[Tensor, ""],
        mask: Bool[Tensor, "*n"] | None = None,
    ) -> None:
        """Looks at one batch in float64: the left side is the plain sum over all prototypes."""
        z = (z if mask is None else z[mask]).double()
        if z.numel() == 0:
            return
        p, t = prototypes.double(), torch.as_tensor(temperature).double()
        q = assignment_weights(z, p, t)
        squared = torch.cdist(z, p, compute_mode="donot_use_mm_for_euclid_dist").square()
        loss = (q * squared).sum(-1)
        soft = soft_assignment(z, p, t)
        scale = loss.max().clamp_min(torch.finfo(loss.dtype).tiny)
        difference = ((loss - soft.reconstruction - soft.variance).abs().max() / scale).item()
        self.checks += 1
        self.violations += not (difference <= TOLERANCE and bool((soft.variance >= 0).all()))
        self.largest = max(self.largest, difference)

    def merge(self, others: Iterable["SplitCheck"]) -> None:
        """Adds what others have looked at."""
        for other in others:
            self.checks += other.checks
            self.violations += other.violations
            self.largest = max(self.largest, other.largest)
