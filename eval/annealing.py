"""Where and how prototypes separate when the temperature falls: `python -m eval.annealing`.

Measures the first transition on data whose covariance is exact, and what never rises on the way
down (deterministic annealing: Rose 1998, Proc. IEEE 86); the formulas are in `softvq.ddcl`.
"""

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from eval.ensemble import descend, ensemble_assignment
from eval.experiment import SplitCheck, summarize
from eval.report import ReportConfig, check_positive, map_cases, run_experiment
from eval.synthetic import Data, exact_tokens, simplex_clusters
from softvq.ddcl import (
    Gradient,
    competitive_loss,
    covariance,
    critical_temperature,
    distinct_codes,
    separation,
)
from softvq.figures import Panel, Series

GRADIENTS: tuple[Gradient, ...] = ("detached", "full")
# Theory: all prototypes sit in the mean, stably, for T above this many lambda_max(Cov z)
THRESHOLD = {"detached": 2.0, "full": 4.0}
# Kick of the prototypes that breaks the symmetry, and S_mean that counts as separated, both in
# units of sqrt(trace Cov z)
KICK, SEPARATED = 1e-3, 0.05
# Rises below this share of the trace of Cov z are rounding
ROUNDING = 1e-12
QUANTITIES = ("free_energy", "free_energy_plus_t_log_k", "loss")


@dataclass(frozen=True, kw_only=True)
class AnnealingConfig(ReportConfig):
    """Locates the first transition, and cools from above it to nearly hard weights."""

    dims: tuple[int, ...] = (2, 8, 32)
    """Dimensions of the tokens for the transitions."""
    codes: tuple[int, ...] = (2, 4, 16)
    """Numbers of prototypes for the transitions."""
    tokens: int = 128
    """Tokens of a data set, even and at least twice the largest dimension plus 2."""
    descents: int = 300
    """Steps of descent at each temperature of the cooling through the transition."""
    steps: int = 1000
    """Temperatures of the cooling, in a geometric series."""
    tolerance: float = 0.02
    """Relative error of a transition temperature that counts as agreement."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "dims", "codes", "descents", "tolerance")
        if min(self.codes) < 2:
            raise ValueError(f"codes must be at least 2, got {min(self.codes)}")
        if self.tokens % 2 or self.tokens < 2 * max(self.dims) + 2:
            raise ValueError(
                f"tokens must be even and at least twice the largest dim plus 2, got {self.tokens}"
            )
        if self.steps < 2:
            raise ValueError(f"steps must be at least 2, got {self.steps}")


def growth(
    z: Float[Tensor, "m n d"],
    prototypes: Float[Tensor, "m k d"],
    temperature: Float[Tensor, "m"],
    gradient: Gradient,
) -> Float[Tensor, "m"]:
    """Factor by which the fastest small separation of collapsed prototypes grows in one step.

    Power iteration from `prototypes`: in each of 20 steps they are at a separation of 1e-5.
    """
    p, _ = _rescaled(prototypes)
    factor = torch.ones_like(temperature)
    for _ in range(20):
        p, factor = _rescaled(descend(z, p, temperature, gradient))
    return factor


def _rescaled(p: Tensor) -> tuple[Tensor, Tensor]:
    """The relative positions at a norm of 1e-5, and the norm that they had in that unit."""
    p = p - reduce(p, "m k d -> m 1 d", "mean")
    norm = torch.linalg.vector_norm(p, dim=(1, 2)) / 1e-5
    return p / rearrange(norm, "m -> m 1 1"), norm


def transition_by_growth(
    z: Float[Tensor, "m n d"], codes: int, gradient: Gradient
) -> Float[Tensor, "m"]:
    """Temperature at which a small separation neither grows nor shrinks, by bisection of log T.

    Searched from 0.5 to 16 lambda_max(Cov z), to 1e-4 of its value.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(len(z), codes, z.shape[2], generator=generator, dtype=z.dtype)
    largest = torch.stack([critical_temperature(x) for x in z]) / 2
    low, high = 0.5 * largest, 16 * largest
    while (high / low).max() > 1 + 1e-4:
        middle = (low * high).sqrt()
        grows = growth(z, start, middle, gradient) > 1
        low, high = torch.where(grows, middle, low), torch.where(grows, high, middle)
    return (low * high).sqrt()


def transition_by_cooling(
    z: Float[Tensor, "m n d"], codes: int, gradient: Gradient, descents: int, check: SplitCheck
) -> tuple[list[float], list[float], list[list[float]]]:
    """Temperature at which prototypes that are cooled, and kicked at every one, first separate.

    From 1.06 to 0.94 of the theory's threshold in steps of 0.5 %, with `descents` steps at
    each; separated means S_mean > 0.05 sqrt(trace Cov z). Also every T / lambda_max, and for each
    problem the S_mean / sqrt(trace Cov z) there. A temperature is infinite without separation.
    """
    generator = torch.Generator().manual_seed(0)
    largest = torch.stack([critical_temperature(x) for x in z]) / 2
    scale = torch.stack([covariance(x).trace().sqrt() for x in z])
    p = repeat(reduce(z, "m n d -> m d", "mean"), "m d -> m k d", k=codes)
    ratios = [THRESHOLD[gradient] * 1.06 * 0.995**i for i in range(25)]
    sizes: list[list[float]] = [[] for _ in z]
    for ratio in ratios:
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p = p + KICK * rearrange(scale, "m -> m 1 1") / math.sqrt(z.shape[2]) * noise
        for _ in range(descents):
            p = descend(z, p, ratio * largest, gradient)
        for x, own, t, unit, size in zip(z, p, ratio * largest, scale, sizes, strict=True):
            check.add(x, own, t)
            size.append((separation(own).mean / unit).item())
    found = [
        next((r for r, x in zip(ratios, size, strict=True) if x > SEPARATED), math.inf) * top
        for size, top in zip(sizes, largest.tolist(), strict=True)
    ]
    return found, ratios, sizes


class Cooling(NamedTuple):
    """What the coolings of m problems gave."""

    rises: dict[str, Int[Tensor, "m"]]
    """How often each quantity rose as T fell and the prototypes took their step."""
    trace: dict[str, list[list[float]]]
    """Each quantity / trace Cov z and the distinct codes at every temperature, by problem."""
    ratios: list[float]
    """T / threshold."""


def cool(
    z: Float[Tensor, "m n d"], gradient: Gradient, kick: float, steps: int, check: SplitCheck
) -> Cooling:
    """Cools 8 prototypes from 2.5 to 0.02 of the threshold, one step of descent each.

    They start from tokens. A kick of `kick` sqrt(trace Cov z) comes before each step, outside of
    what is counted.
    """
    generator = torch.Generator().manual_seed(0)
    codes, dim = 8, z.shape[2]
    total = torch.stack([covariance(x).trace() for x in z])
    top = THRESHOLD[gradient] / 2 * torch.stack([critical_temperature(x) for x in z])
    p = z[:, torch.randperm(z.shape[1], generator=generator)[:codes]]
    rises = {name: torch.zeros(len(z), dtype=torch.int64) for name in QUANTITIES}
    trace: dict[str, list[list[float]]] = {n: [[] for _ in z] for n in ("distinct", *QUANTITIES)}
    ratios = [2.5 * (0.02 / 2.5) ** (step / (steps - 1)) for step in range(steps)]
    for previous, ratio in zip([ratios[0], *ratios], ratios, strict=False):
        noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        p = p + kick * rearrange((total / dim).sqrt(), "m -> m 1 1") * noise
        before = _energies(z, p, previous * top)
        # Half of the step of soft k-means: the full gradient has twice the curvature
        p = (p + descend(z, p, ratio * top, gradient)) / 2
        after = _energies(z, p, ratio * top)
        for name in QUANTITIES:
            rises[name] += after[name] > before[name] + ROUNDING * total
            for values, value in zip(trace[name], after[name] / total, strict=True):
                values.append(value.item())
        for x, own, t, size, groups in zip(
            z, p, ratio * top, total, trace["distinct"], strict=True
        ):
            check.add(x, own, t)
            groups.append(distinct_codes(own, 0.01 * size.sqrt()))
    return Cooling(rises, trace, ratios)


@torch.no_grad()
def _energies(z: Tensor, p: Tensor, temperature: Tensor) -> dict[str, Tensor]:
    soft = ensemble_assignment(z, p, temperature)
    energy = soft.free_energy.mean(-1)
    loss = competitive_loss(soft).loss.mean(-1)
    values = (energy, energy + temperature * math.log(p.shape[1]), loss)
    return dict(zip(QUANTITIES, values, strict=True))


class Setting(NamedTuple):
    """One case of `transitions`."""

    data: Data
    dim: int
    codes: int
    gradient: Gradient


def stack_tokens(config: AnnealingConfig, data: Data, dim: int) -> Float[Tensor, "m n d"]:
    """The data sets of all seeds."""
    return torch.stack([exact_tokens(data, config.tokens, dim, seed) for seed in config.seeds])


def transition(config: AnnealingConfig, setting: Setting) -> dict[str, Any]:
    """The transition that growth shows, over the seeds."""
    z = stack_tokens(config, setting.data, setting.dim)
    return _entry(setting, transition_by_growth(z, setting.codes, setting.gradient).tolist())


def _entry(setting: Setting, found: Sequence[float]) -> dict[str, Any]:
    """The temperatures that the seeds gave, beside the one of theory (lambda_max is 1)."""
    expected = THRESHOLD[setting.gradient]
    return {
        **setting._asdict(),
        "expected": expected,
        **summarize([{"temperature": temperature} for temperature in found]),
        "largest_error": max(abs(temperature / expected - 1) for temperature in found),
    }


Part = tuple[list[dict[str, Any]], Mapping[str, Series], SplitCheck]


def first_separation(config: AnnealingConfig, gradient: Gradient) -> Part:
    """The transition that a cooling meets on both kinds of data, and S_mean on the way.

    At the median of the dimensions and of the numbers of codes.
    """
    entries, series, check = [], {}, SplitCheck()
    dim, codes = (sorted(sizes)[len(sizes) // 2] for sizes in (config.dims, config.codes))
    kinds, seeds = get_args(Data), len(config.seeds)
    z = torch.cat([stack_tokens(config, data, dim) for data in kinds])
    found, ratios, sizes = transition_by_cooling(z, codes, gradient, config.descents, check)
    for i, data in enumerate(kinds):
        own = slice(i * seeds, (i + 1) * seeds)
        entries.append(_entry(Setting(data, dim, codes, gradient), found[own]))
        series[f"{data}, {gradient}"] = (ratios, sizes[own])
    return entries, series, check


def cooling(config: AnnealingConfig, way: tuple[Gradient, float]) -> Part:
    """Rises and distinct codes of one gradient and kick, and what the figure shows of them."""
    gradient, kick = way
    check = SplitCheck()
    clusters = [simplex_clusters(4, config.tokens, 6, 0.5, seed).z for seed in config.seeds]
    run = cool(torch.stack(clusters), gradient, kick, config.steps, check)
    reports = [
        {f"rises_{name}": int(run.rises[name][i]) for name in QUANTITIES}
        | {"distinct_codes": run.trace["distinct"][i][-1]}
        for i in range(len(clusters))
    ]
    entry = {"gradient": gradient, "kick": kick, "steps": config.steps, **summarize(reports)}
    series = {name: (run.ratios, values) for name, values in run.trace.items()}
    return [entry], series, check


def pictures(
    first: Sequence[Part], ways: Sequence[tuple[Gradient, float]], cooled: Sequence[Part]
) -> list[Panel]:
    """The first separation, the energies of the kicked detached cooling, and the groups of all."""
    x = "T / threshold of the gradient"
    energies = cooled[ways.index(("detached", KICK))][1]
    names = {"F": "free_energy", "F + T log K": "free_energy_plus_t_log_k", "L_q": "loss"}
    chosen = {label: energies[name] for label, name in names.items()}
    groups = {
        f"{gradient}, {'kicked' if kick else 'no kicks'}": series["distinct"]
        for (gradient, kick), (_, series, _) in zip(ways, cooled, strict=True)
    }
    return [
        Panel(
            title="the first separation",
            x="T / largest eigenvalue of Cov z",
            y="S_mean / sqrt(trace Cov z)",
            series={name: line for _, series, _ in first for name, line in series.items()},
            marks=tuple(THRESHOLD.values()),
        ),
        Panel("cooling, detached gradient", x, "/ trace Cov z", chosen, True, False, (1.0,)),
        Panel("groups of 8 prototypes", x, "distinct codes", groups, True, False, (1.0,)),
    ]


def annealing(config: AnnealingConfig) -> tuple[dict[str, Any], Sequence[Panel]]:
    """The whole report, ready for JSON, and the panels of its figure."""
    settings = [
        Setting(*setting)
        for setting in itertools.product(get_args(Data), config.dims, config.codes, GRADIENTS)
    ]
    ways = list(itertools.product(GRADIENTS, (0.0, KICK)))
    with tqdm(total=len(settings) + len(GRADIENTS) + len(ways), unit="case") as bar:
        grown = map_cases(partial(transition, config), settings, config, bar)
        first = map_cases(partial(first_separation, config), GRADIENTS, config, bar)
        coolings = map_cases(partial(cooling, config), ways, config, bar)
    met = [entry for entries, _, _ in first for entry in entries]
    cooled = [entry for entries, _, _ in coolings for entry in entries]
    check = SplitCheck()
    check.merge(part for _, _, part in (*first, *coolings))
    largest = {
        "by_growth": max(entry["largest_error"] for entry in grown),
        "by_cooling": max(entry["largest_error"] for entry in met),
    }
    own = {"detached": "free_energy_plus_t_log_k", "full": "loss"}
    rises = {
        gradient: [e[f"rises_{own[gradient]}"]["mean"] for e in cooled if e["gradient"] == gradient]
        for gradient in GRADIENTS
    }
    verdict = {
        "transitions_agree": all(error <= config.tolerance for error in largest.values()),
        "largest_error": largest,
        "free_energy_is_monotone": all(e["rises_free_energy"]["mean"] == 0 for e in cooled),
        "free_energy_plus_t_log_k_is_monotone_for_detached": not any(rises["detached"]),
        "loss_is_monotone_for_full": not any(rises["full"]),
    }
    report = {
        "verdict": verdict,
        "split": vars(check),
        "transitions_by_growth": grown,
        "transitions_by_cooling": met,
        "coolings": cooled,
    }
    return report, pictures(first, ways, coolings)


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    return run_experiment("annealing", AnnealingConfig, annealing, arguments, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
