"""Do clusters of orbital elements find the regimes LEO, MEO, GEO and HEO? `python -m eval.debris`.

Compares a DDCL codebook with k-means and Gaussian mixtures on a synthetic catalogue or CelesTrak's;
the orbits and the rule behind their labels are in `eval.orbits`.
"""

import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from eval.clustering import clustering_scores, kmeans
from eval.cooling import Cooling, soft_kmeans
from eval.experiment import SplitCheck, summarize
from eval.orbits import REALISTIC_SHARES, REGIMES, Orbits, read_catalogue, regime, synthetic_orbits
from eval.report import ReportConfig, check_positive, map_cases, run_experiment
from softvq.ddcl import nearest
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
    cooling: Cooling = field(default_factory=Cooling)
    """How the prototypes of DDCL are trained; k-means and the mixture have as many restarts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "codes")
        if self.objects < max(2, self.codes):
            raise ValueError(f"objects must be at least codes, got {self.objects}")


def features(orbits: Orbits) -> Float[np.ndarray, "n f"]:
    """The columns `FEATURES`, each with mean 0 and variance 1 (unless it is constant)."""
    return StandardScaler().fit_transform(
        np.stack([getattr(orbits, name) for name in FEATURES], axis=1)
    )


def cluster(
    method: str, x: Float[np.ndarray, "n f"], config: DebrisConfig, seed: int, check: SplitCheck
) -> Int[np.ndarray, "n"]:
    """The cluster of every object by one method, the best of its starts by its own loss."""
    z, restarts = torch.from_numpy(x), config.cooling.restarts
    if method == "ddcl":
        cooled = soft_kmeans(z, config.codes, config.cooling, seed, check)
        return nearest(z, cooled.prototypes).numpy()
    if method == "kmeans":
        find, _ = kmeans(z, config.codes, seed, restarts)
        return np.array(find(z))
    with warnings.catch_warnings():
        # An unconverged start is only one of several; it loses if it is worse
        warnings.simplefilter("ignore", ConvergenceWarning)
        mixture = GaussianMixture(config.codes, n_init=restarts, random_state=seed)
        return np.asarray(mixture.fit_predict(x))


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
        "ddcl_beats_kmeans_by_more_than_the_spread": bool(difference > spread)
        if len(trials) > 1
        else None,
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
        "cooling": asdict(config.cooling),
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
