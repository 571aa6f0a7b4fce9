"""Two-level compression of documents: `python -m eval.hierarchy` prints one JSON object.

Tokens go to K1 prototypes and their centroids to K2, once with a temperature for each level and
once with that of the first for both. The readouts themselves are in `softvq.readout`.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm import tqdm

from eval.clustering import clustering_scores
from eval.corpus import Corpus, CorpusConfig, load_corpus
from eval.experiment import SplitCheck, summarize
from eval.features import TokenFeatures
from softvq import ddcl
from softvq.checkpoint import write_json
from softvq.program import parse_flags, run_program
from softvq.quantizers import DDCLCodebook, codebooks
from softvq.readout import DDCLHierarchy, DDCLReadoutConfig, ReadoutOutput
from softvq.temperature import AnnealedTemperature

Temperatures = Literal["own", "shared"]

# Learning rate of the prototypes, relative to the standard deviation of a feature
_RATE = 0.03
# Documents that the prototypes start from
_FIRST = 256
# Batches of 64 documents that Tc and the spread of a level's input are measured on
_SAMPLE = 5
# Prototypes closer than this share of the spread of the level's input count as one
_SAME = 0.01


@dataclass(frozen=True, kw_only=True)
class Compression(CorpusConfig):
    """Options of the program."""

    data: str = "20newsgroups"
    """sst2, imdb or 20newsgroups, or a .tsv or .jsonl file (.xz or not) with text and label."""
    sizes: tuple[int, int] = (64, 20)
    """Prototypes of the first and of the second level."""
    epochs: int = 6
    """Passes over the training documents."""
    batch_size: int = 64
    """Documents in a step."""
    hottest: float = 0.7
    """T / Tc at the beginning, in (0, 1); it falls geometrically over 70 % of the training."""
    coldest: float = 0.1
    """T / Tc at the end."""
    out: str = ""
    """File to which the result is also written."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.sizes) < 2:
            raise ValueError(f"sizes must be at least 2, got {self.sizes}")


def build(config: Compression, dim: int, steps: int) -> DDCLHierarchy:
    """Two levels that cool over `steps`. Raises ValueError for temperatures out of order."""
    temperature = AnnealedTemperature(start=config.hottest, end=config.coldest)
    return DDCLHierarchy(
        tuple(
            DDCLReadoutConfig(
                dim=dim, codebook_size=size, temperature=temperature, schedule_steps=steps
            )
            for size in config.sizes
        )
    )


def compress(
    config: Compression, corpus: Corpus, temperatures: Temperatures, seed: int
) -> list[dict[str, Any]]:
    """Trains one hierarchy without labels; returns a record of the test split for every epoch.

    Raises ArithmeticError when the loss is no longer finite.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    steps = config.epochs * math.ceil(len(corpus.train) / config.batch_size)
    model = build(config, corpus.train.dim, steps)
    levels = [codebook for codebook in codebooks(model) if isinstance(codebook, DDCLCodebook)]
    first = torch.randperm(len(corpus.train), generator=generator)[:_FIRST]
    model(*corpus.train.padded(first))  # starts the prototypes of both levels
    scale = (levels[0].covariance.trace() / corpus.train.dim).sqrt().item()
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE * scale)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    records = []
    for epoch in tqdm(
        range(1, config.epochs + 1), desc=f"{temperatures}, seed {seed}", leave=False
    ):
        for x, mask in corpus.train.batches(config.batch_size, generator):
            if temperatures == "shared":
                levels[1].temperature.copy_(levels[0].temperature)
            loss = torch.stack([level.loss for level in model(x, mask)]).sum()
            if not loss.isfinite():
                raise ArithmeticError(f"the loss is not finite any more in epoch {epoch}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if temperatures == "shared":
            levels[1].temperature.copy_(levels[0].temperature)
        model.eval()
        records.append(
            {"epoch": epoch, **measure(model, corpus.test, corpus.test_documents.labels)}
        )
        model.train()
    return records


@torch.no_grad()
def measure(
    model: DDCLHierarchy, features: TokenFeatures, labels: Sequence[int]
) -> dict[str, float]:
    """For each level: V, L_OLS and L_q a token, checks of the split, scores, collapse.

    A document belongs to the prototype with the largest share of its tokens. `level1` is that on
    the tokens.
    """
    levels = [codebook for codebook in codebooks(model) if isinstance(codebook, DDCLCodebook)]
    sums = [_Sums(codebook) for codebook in levels]
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

    def __init__(self, codebook: DDCLCodebook) -> None:
        self.codebook, self.check = codebook, SplitCheck()
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
            "split_checks": self.check.checks,
            "split_violations": self.check.violations,
            "split_largest_difference": self.check.largest,
            "temperature": self.codebook.temperature.item(),
            "temperature_ratio": self.codebook.temperature.item() / max(critical, 1e-30),
            "distinct_codes": ddcl.distinct_codes(prototypes, _SAME * spread),
            "separation_min": ddcl.separation(prototypes).minimum.item(),
            **clustering_scores(labels, self.clusters),
        }


def run(config: Compression, command: Sequence[str]) -> dict[str, Any]:
    """The whole experiment, written to `out` as well if that is given."""
    corpus = load_corpus(config)
    start = time.perf_counter()
    result: dict[str, Any] = {
        "command": " ".join(["python -m eval.hierarchy", *command]),
        "data": config.data,
        **corpus.description(),
        "sizes": list(config.sizes),
        "seeds": list(config.seeds),
    }
    for temperatures in ("own", "shared"):
        runs = [compress(config, corpus, temperatures, seed) for seed in config.seeds]
        epochs = [summarize(records) for records in zip(*runs, strict=True)]
        briefs = [{"epoch": n, **_brief(epoch)} for n, epoch in enumerate(epochs, start=1)]
        result[temperatures] = {"last": epochs[-1], "epochs": briefs}
    result["seconds"] = time.perf_counter() - start
    if config.out:
        write_json(Path(config.out), result)
    return result


def _brief(epoch: dict[str, Any]) -> dict[str, Any]:
    """What is followed over the epochs: means over the seeds."""
    names = ("variance", "reconstruction", "split_violations", "distinct_codes", "nmi", "majority")
    kept = {key for key in epoch if key.split("/")[-1] in (*names, "temperature_ratio")}
    return {key: value["mean"] for key, value in epoch.items() if key in kept}


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""

    def action() -> dict[str, Any]:
        config = parse_flags(lambda: tyro.cli(Compression, args=arguments, description=__doc__))
        return run(config, arguments)

    return run_program(action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
