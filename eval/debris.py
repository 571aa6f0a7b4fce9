"""Do clusters of orbital elements find the regimes LEO, MEO, GEO and HEO? `python -m eval.debris`.

Compares a DDCL codebook with k-means and Gaussian mixtures on a synthetic catalogue or CelesTrak's;
the orbits and the rule behind their labels are in `eval.orbits`.
"""

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from einops import rearrange, reduce
from jaxtyping import Float, Int
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from tqdm import tqdm

from eval.clustering import clustering_scores
from eval.experiment import SplitCheck, summarize
from eval.orbits import REALISTIC_SHARES, REGIMES, Orbits, read_catalogue, regime, synthetic_orbits
from eval.report import ReportConfig, check_positive, map_cases, run_experiment
from softvq.ddcl import assignment_weights, critical_temperature, nearest
from softvq.figures import Panel

METHODS = ("ddcl", "kmeans", "gaussian_mixture")
FEATURES = ("apogee", "perigee", "eccentricity", "inclination", "period")
MEASURED = (
    "agreement of unsupervised clusters with regimes that are (nearly) a rule of period and "
    "eccentricity: a supervised rule is right for almost all, so this says what an unsupervised "
    "distance sees in the features, not how hard the regimes are to tell apart"
)


@dataclass(frozen=True, kw_only=True)
class DebrisConfig(ReportConfig):
    """Clusters orbits by each method and scores the clusters against the regimes."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Each draws another catalogue (or sample of the given one) and another start."""
    catalogue: Path | None = None
    """CelesTrak's satcat.csv; by default the catalogue is synthetic."""
    objects: int = 2000
    """Objects of a catalogue; of a given one, a sample of so many, or all when it has fewer."""
    shares: Literal["equal", "realistic"] = "equal"
    """Sizes of the regimes in the synthetic catalogue."""
    codes: int = 4
    """Clusters of every method."""
    start: float = 1.2
    """First temperature of the DDCL codebook, in units of Tc: above 1, all prototypes are one."""
    end: float = 0.005
    """Last temperature, in units of Tc."""
    steps: int = 120
    """Temperatures on the way, in a geometric series."""
    restarts: int = 10
    """Starts of k-means and of the mixture, of which the best by their own loss is taken."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "codes", "start", "end", "steps", "restarts")
        if self.end > self.start:
            raise ValueError(f"end must be at most start = {self.start}, got {self.end}")
        if self.objects < max(2, self.codes):
            raise ValueError(f"objects must be at least codes, got {self.objects}")


def features(orbits: Orbits) -> Float[np.ndarray, "n f"]:
    """The columns `FEATURES`, each with mean 0 and variance 1 (unless it is constant)."""
    return StandardScaler().fit_transform(
        np.stack([getattr(orbits, name) for name in FEATURES], axis=1)
    )


def anneal(
    z: Float[Tensor, "n d"], config: DebrisConfig, seed: int, check: SplitCheck
) -> Float[Tensor, "k d"]:
    """Prototypes that were cooled across Tc, from the mean of the tokens.

    At each temperature, a kick of 1e-3 a coordinate breaks symmetry, and three steps of soft
    k-means follow: the detached gradient of L_q, taken to where it vanishes for fixed weights.
    Neither labels nor restarts are used.
    """
    generator = torch.Generator().manual_seed(seed)
    critical = critical_temperature(z).item()
    p = z.mean(0).expand(config.codes, -1)
    for step in range(config.steps):
        progress = step / max(config.steps - 1, 1)
        temperature = critical * config.start * (config.end / config.start) ** progress
        p = p + 1e-3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for _ in range(3):
            q = assignment_weights(z, p, temperature)
            usage = rearrange(reduce(q, "n k -> k", "sum"), "k -> k 1")
            # A prototype out of every token's reach stays where it is
            p = torch.where(usage > 1e-12, q.T @ z / usage.clamp_min(1e-12), p)
        check.add(z, p, temperature)
    return p


def cluster(
    method: str, x: Float[np.ndarray, "n f"], config: DebrisConfig, seed: int, check: SplitCheck
) -> Int[np.ndarray, "n"]:
    """The cluster of every object by one method."""
    if method == "ddcl":
        z = torch.from_numpy(x)
        return nearest(z, anneal(z, config, seed, check)).numpy()
    options: dict[str, Any] = {"n_init": config.restarts, "random_state": seed}
    with warnings.catch_warnings():
        # An unconverged start is only one of several; it loses if it is worse
        warnings.simplefilter("ignore", ConvergenceWarning)
        if method == "kmeans":
            return KMeans(config.codes, **options).fit_predict(x)
        return GaussianMixture(config.codes, **options).fit_predict(x)


def inertia(x: Float[np.ndarray, "n f"], clusters: Int[np.ndarray, "n"]) -> float:
    """Mean squared distance to the mean of the own cluster: the loss of k-means."""
    parts = (x[clusters == c] for c in np.unique(clusters))
    return sum(float(((part - part.mean(0)) ** 2).sum()) for part in parts) / len(x)


def sample(config: DebrisConfig, seed: int) -> tuple[Orbits, dict[str, int]]:
    """The orbits of one seed, and the lines of a given catalogue that were left out."""
    if config.catalogue is None:
        shares = REALISTIC_SHARES if config.shares == "realistic" else (1.0,) * len(REGIMES)
        return synthetic_orbits(config.objects, shares, seed), {}
    orbits, skipped = read_catalogue(config.catalogue)
    chosen = np.random.default_rng(seed).permutation(len(orbits.labels))[: config.objects]
    return Orbits(*(values[chosen] for values in orbits)), skipped


def trial(config: DebrisConfig, seed: int) -> dict[str, Any]:
    """Scores and losses of all methods on the catalogue of one seed, and what it holds."""
    orbits, skipped = sample(config, seed)
    if len(orbits.labels) < config.codes:
        raise ValueError(f"{config.codes} clusters need as many orbits, got {len(orbits.labels)}")
    x, check = features(orbits), SplitCheck()
    scores = {}
    for method in METHODS:
        clusters = cluster(method, x, config, seed, check)
        scores[method] = clustering_scores(orbits.labels, clusters) | {
            "inertia": inertia(x, clusters)
        }
    rule = [
        regime(axis, e) for axis, e in zip(orbits.semi_major_axis, orbits.eccentricity, strict=True)
    ]
    right = [REGIMES[label] == name for label, name in zip(orbits.labels, rule, strict=True)]
    counts = np.bincount(orbits.labels, minlength=len(REGIMES))
    return {
        "scores": scores,
        "rule": float(np.mean(right)),
        "objects": dict(zip(REGIMES, counts.tolist(), strict=True)),
        "skipped": skipped,
        "check": check,
    }


def compare(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """DDCL against k-means: the means, the spread that a difference must exceed, and the pairs."""
    ours, theirs = (
        np.array([trial["scores"][name]["accuracy"] for trial in trials]) for name in METHODS[:2]
    )
    spread = max(ours.std(ddof=1), theirs.std(ddof=1)) if len(trials) > 1 else math.nan
    difference = float(ours.mean() - theirs.mean())
    lower = [t["scores"]["kmeans"]["inertia"] < t["scores"]["ddcl"]["inertia"] for t in trials]
    return {
        "accuracy_difference": difference,
        "largest_spread": float(spread),
        "ddcl_beats_kmeans_by_more_than_the_spread": bool(difference > spread),
        "seeds_with_ddcl_ahead": int((ours > theirs + 0.005).sum()),
        "seeds_with_kmeans_ahead": int((theirs > ours + 0.005).sum()),
        "seeds_with_lower_inertia_of_kmeans": sum(lower),
    }


def debris(config: DebrisConfig) -> tuple[dict[str, Any], Sequence[Panel]]:
    """The whole report, ready for JSON, and the panels of its figure."""
    with tqdm(total=len(config.seeds), unit="seed") as bar:
        trials = map_cases(partial(trial, config), config.seeds, config, bar)
    check = SplitCheck()
    check.merge(result["check"] for result in trials)
    report = {
        "measured": MEASURED,
        "catalogue": str(config.catalogue or f"synthetic, {config.shares} shares"),
        "features": FEATURES,
        "objects": [result["objects"] for result in trials],
        "skipped": trials[0]["skipped"],
        "agreement_of_labels_with_the_rule": [result["rule"] for result in trials],
        "split": vars(check),
        "scores": {
            method: summarize([result["scores"][method] for result in trials]) for method in METHODS
        },
        "by_seed": {
            method: [result["scores"][method]["accuracy"] for result in trials]
            for method in METHODS
        },
        "verdict": compare(trials),
    }
    series = {
        method: (list(config.seeds), [[result["scores"][method]["accuracy"] for result in trials]])
        for method in METHODS
    }
    title = f"{config.codes} clusters, {report['catalogue']}"
    return report, [Panel(title, "seed", "accuracy (one to one)", series)]


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    return run_experiment("debris", DebrisConfig, debris, arguments, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
