"""Two-level compression of documents: `python -m eval.hierarchy` prints one JSON object.

Tokens go to K1 prototypes and their centroids to K2, once with a temperature for each level and
once with that of the first for both. The readouts are in `softvq.readout`, the training in
`eval.cooling`.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from eval.clustering import clustering_scores
from eval.cooling import Cooling, fit_readout
from eval.corpus import Corpus, CorpusConfig, load_corpus
from eval.experiment import SplitCheck, summarize
from eval.features import TokenFeatures
from eval.report import check_positive, run_experiment
from softvq import ddcl
from softvq.figures import Panel
from softvq.quantizers import DDCLCodebook, codebooks
from softvq.readout import DDCLHierarchy, DDCLReadout, DDCLReadoutConfig, ReadoutOutput
from softvq.temperature import AnnealedTemperature

Temperatures = Literal["own", "shared"]

# Batches of 64 documents that Tc and the spread of a level's input are measured on
_SAMPLE = 5
# Prototypes closer than this share of the spread of the level's input count as one
_SAME = 0.01
# What is drawn against the temperature
_DRAWN = {"variance": "V a token", "majority": "purity of documents", "nmi": "NMI"}


@dataclass(frozen=True, kw_only=True)
class Compression(CorpusConfig):
    """Compresses documents in two levels, down to several temperatures."""

    sizes: tuple[int, int] = (64, 20)
    """Prototypes of the first and of the second level."""
    ends: int = 4
    """Temperatures at which a cooling ends, in a geometric series down to the coldest; each level
    is cooled anew to each of them, by as many steps."""
    cooling: Cooling = field(default_factory=Cooling)
    """How every level is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "ends")
        if min(self.sizes) < 2:
            raise ValueError(f"sizes must be at least 2, got {self.sizes}")

    @property
    def coolings(self) -> list[Cooling]:
        """One for each temperature at the end."""
        ratio = self.cooling.coldest / self.cooling.hottest
        return [
            replace(self.cooling, coldest=self.cooling.hottest * ratio ** (end / self.ends))
            for end in range(1, self.ends + 1)
        ]


def build(sizes: Sequence[int], dim: int, cooling: Cooling) -> DDCLHierarchy:
    """Levels whose configuration says from where to where they are cooled."""
    temperature = AnnealedTemperature(start=cooling.hottest, end=cooling.coldest)
    return DDCLHierarchy(
        tuple(
            DDCLReadoutConfig(
                dim=dim,
                codebook_size=size,
                temperature=temperature,
                usage_weight=0.0,
                schedule_steps=cooling.steps,
            )
            for size in sizes
        )
    )


@torch.no_grad()
def compress(
    sizes: Sequence[int], cooling: Cooling, corpus: Corpus, seed: int, check: SplitCheck
) -> dict[Temperatures, dict[str, Any]]:
    """Trains two levels, one after the other, and measures them on the test split.

    The second is trained twice: with a schedule in units of its own Tc, and in those of the first.
    """
    center = corpus.train.mean()
    train, test = (features.centered(center) for features in (corpus.train, corpus.test))
    model = build(sizes, train.dim, cooling).eval()
    first, second = (level for level in model.levels if isinstance(level, DDCLReadout))
    tokens = train.sample(seed)
    fit_readout(first, tokens, cooling, seed, check)
    centroids = first(tokens[None]).tokens[0]
    units = {"own": None, "shared": ddcl.critical_temperature(tokens).item()}
    found: dict[Temperatures, dict[str, Any]] = {}
    for temperatures in get_args(Temperatures):
        fit_readout(second, centroids, cooling, seed, check, units[temperatures])
        found[temperatures] = measure(model, test, corpus.test_documents.labels, check)
    return found


@torch.no_grad()
def measure(
    model: DDCLHierarchy, features: TokenFeatures, labels: Sequence[int], check: SplitCheck
) -> dict[str, float]:
    """For each level: V, L_OLS and L_q a token, scores, collapse; looks at the split.

    A document belongs to the prototype with the largest share of its tokens. `level1` is that on
    the tokens.
    """
    levels = [codebook for codebook in codebooks(model) if isinstance(codebook, DDCLCodebook)]
    sums = [_Sums(codebook, check) for codebook in levels]
    for x, mask in features.batches(64):
        for part, output in zip(sums, model(x, mask), strict=True):
            part.add(x, mask, output)
            x = output.tokens
    return {
        f"level{number}/{name}": value
        for number, part in enumerate(sums, start=1)
        for name, value in part.compute(labels).items()
    }


class _Sums:
    """What one level does with a split."""

    def __init__(self, codebook: DDCLCodebook, check: SplitCheck) -> None:
        self.codebook, self.check = codebook, check
        self.tokens, self.variance, self.reconstruction = 0, 0.0, 0.0
        self.clusters: list[int] = []
        self.sample: list[Tensor] = []

    def add(
        self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"], output: ReadoutOutput
    ) -> None:
        (head,) = output.heads
        count = int(mask.sum())
        self.tokens += count
        self.variance += count * head.variance.item()
        self.reconstruction += count * head.reconstruction.item()
        self.check.add(x[:1], self.codebook.prototypes, self.codebook.temperature, mask[:1])
        self.clusters += output.histogram[:, 0].argmax(-1).tolist()
        if len(self.sample) < _SAMPLE:
            self.sample.append(x[mask])

    def compute(self, labels: Sequence[int]) -> dict[str, float]:
        variance, reconstruction = (
            total / self.tokens for total in (self.variance, self.reconstruction)
        )
        tokens = torch.cat(self.sample)
        critical = ddcl.critical_temperature(tokens).item()
        spread = ddcl.covariance(tokens).trace().sqrt().item()
        prototypes = self.codebook.prototypes
        return {
            "variance": variance,
            "reconstruction": reconstruction,
            "loss": variance + reconstruction,
            "explained": 1 - reconstruction / max(spread**2, 1e-30),
            "temperature": self.codebook.temperature.item(),
            "temperature_ratio": self.codebook.temperature.item() / max(critical, 1e-30),
            "distinct_codes": ddcl.distinct_codes(prototypes, _SAME * spread),
            "separation_min": ddcl.separation(prototypes).minimum.item(),
            **clustering_scores(labels, self.clusters),
        }


def hierarchy(config: Compression) -> tuple[dict[str, Any], Sequence[Panel]]:
    """The whole report, ready for JSON, and the panels of its figure."""
    corpus, check = load_corpus(config), SplitCheck()
    cases = [(cooling, seed) for cooling in config.coolings for seed in config.seeds]
    runs = [
        compress(config.sizes, cooling, corpus, seed, check)
        for cooling, seed in tqdm(cases, unit="hierarchy")
    ]
    ends, width = [cooling.coldest for cooling in config.coolings], len(config.seeds)
    report: dict[str, Any] = {
        "data": config.data,
        **corpus.description(),
        "sizes": list(config.sizes),
        "cooling": asdict(config.cooling),
        "split": vars(check),
    }
    series: dict[str, dict[str, Any]] = {name: {} for name in _DRAWN}
    for way in get_args(Temperatures):
        by_end = [[run[way] for run in runs[i : i + width]] for i in range(0, len(runs), width)]
        report[way] = [
            {"coldest": end, **summarize(part)} for end, part in zip(ends, by_end, strict=True)
        ]
        for name, level in ((name, level) for name in _DRAWN for level in (1, 2)):
            values = [[record[f"level{level}/{name}"] for record in part] for part in by_end]
            label = f"level {level}, {way} T" if level == 2 else "level 1"
            series[name][label] = (ends, [list(row) for row in zip(*values, strict=True)])
    panels = [
        Panel(f"{config.data}, K = {config.sizes}", "T / Tc of level 1", y, series[name], True)
        for name, y in _DRAWN.items()
    ]
    return report, panels


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    return run_experiment("hierarchy", Compression, hierarchy, arguments, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
