"""Readouts of a frozen text encoder compared: `python -m eval.text` prints one JSON object.

Nothing is trained or chosen with labels but the linear probes. Data and features are in
`eval.corpus`, the training of DDCL in `eval.cooling`, that of Slot Attention in `eval.pooling`.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from einops import rearrange
from torch import Tensor

from eval.clustering import clustering_scores, kmeans, probe
from eval.cooling import Cooling, fit_readout
from eval.corpus import Corpus, CorpusConfig, load_corpus
from eval.experiment import SplitCheck, summarize
from eval.features import TokenFeatures, centered_unit, first_token, mean_pool
from eval.pooling import AttentionPooling, Layer, SlotAttention, train_layer
from eval.prototypes import claim, save_readout
from eval.report import check_positive, run_experiment
from softvq.figures import Panel
from softvq.readout import DDCLReadout, DDCLReadoutConfig
from softvq.temperature import AnnealedTemperature

Method = Literal[
    "kmeans-cls", "kmeans-mean", "kmeans-tokens", "ddcl-cls", "ddcl-mean", "ddcl-tokens",
    "slot-attention", "attention-pooling",
]  # fmt: skip
Pair = tuple[Tensor, Tensor]
Row = dict[str, Any]

# What is compared on the same features
_RIVALS = {
    "ddcl-cls": "kmeans-cls",
    "ddcl-mean": "kmeans-mean",
    "ddcl-tokens": "kmeans-tokens",
}
# "ACC" of arXiv 2604.03850, as a results index and summaries of the paper give it
_PAPER = {
    "sst2": {"accuracy": 0.867, "codebook_size": 2},
    "imdb": {"accuracy": 0.913, "codebook_size": 4},
    "20newsgroups": {"accuracy": 0.175, "codebook_size": None},
}
_PAPER_NOTE = (
    "the paper's encoder is a frozen BERT and its accuracy is not defined: neither how clusters "
    "are matched with classes nor what a document's cluster is"
)
# Documents that are read at once
_READ = 64


@dataclass(frozen=True, kw_only=True)
class TextStudy(CorpusConfig):
    """Compares the readouts of a frozen encoder."""

    methods: tuple[Method, ...] = get_args(Method)
    """What is compared; `-cls`, `-mean` and `-tokens` say what is clustered: the first token, the
    mean of the tokens, or the tokens, a document's cluster then being the one with most of it."""
    codebook_size: int = 0
    """Prototypes, clusters, slots or seeds; 0 is the number of classes."""
    steps: int = 150
    """Optimizer steps of Slot Attention and attention pooling."""
    batch_size: int = 64
    """Documents in such a step."""
    cooling: Cooling = field(default_factory=Cooling)
    """How DDCL is trained; k-means has as many restarts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "steps", "batch_size")
        if self.codebook_size != 0 and self.codebook_size < 2:
            raise ValueError(f"codebook_size must be 0 or at least 2, got {self.codebook_size}")
        if not self.methods:
            raise ValueError("methods must be given")


@dataclass(frozen=True)
class Inputs:
    """The features, centred by the training split and brought to unit length for every method."""

    corpus: Corpus
    train: TokenFeatures
    test: TokenFeatures
    cls: Pair
    mean: Pair
    k: int

    def row(self, clusters: tuple[list[int], list[int]], features: Pair | None = None) -> Row:
        """Agreement of clusters with classes on both splits, and the probe of `features`."""
        labels = self.corpus.train_documents.labels, self.corpus.test_documents.labels
        row: Row = {}
        for split, given, classes in zip(("train", "test"), clusters, labels, strict=True):
            row |= {f"{split}/{k}": v for k, v in clustering_scores(classes, given).items()}
        return row if features is None else row | {"probe": self.probe(features)}

    def probe(self, features: Pair) -> float:
        """Accuracy of a linear probe on the test split."""
        train, test = self.corpus.train_documents.labels, self.corpus.test_documents.labels
        return probe(features[0], train, features[1], test)


def prepare(study: TextStudy) -> Inputs:
    """Encodes or finds the features, and normalises them. Raises ValueError as `load_corpus`."""
    corpus = load_corpus(study)
    cls, mean = (_pooled(corpus, pool) for pool in (first_token, mean_pool))
    center = corpus.train.mean()
    k = study.codebook_size or len(corpus.train_documents.classes)
    if len(corpus.train) < k:
        raise ValueError(f"{k} clusters need as many training documents, got {len(corpus.train)}")
    return Inputs(
        corpus=corpus,
        train=corpus.train.centered(center),
        test=corpus.test.centered(center),
        cls=cls,
        mean=mean,
        k=k,
    )


def _pooled(corpus: Corpus, pool: Callable[[Tensor, Tensor], Tensor]) -> Pair:
    train, test = corpus.train.pooled(pool), corpus.test.pooled(pool)
    center = train.mean(0)
    return centered_unit(train, center), centered_unit(test, center)


def readout(study: TextStudy, inputs: Inputs) -> DDCLReadout:
    """A new readout, whose configuration says from where to where it is cooled."""
    ends = AnnealedTemperature(start=study.cooling.hottest, end=study.cooling.coldest)
    config = DDCLReadoutConfig(
        dim=inputs.train.dim,
        codebook_size=inputs.k,
        temperature=ends,
        usage_weight=0.0,
        schedule_steps=study.cooling.steps,
    )
    return DDCLReadout.from_config(config)


def _kmeans(study: TextStudy, inputs: Inputs, features: Pair, seed: int) -> Row:
    """k-means on one vector a document."""
    find, loss = kmeans(features[0], inputs.k, seed, study.cooling.restarts)
    train, test = features
    return inputs.row((find(train), find(test))) | {"loss": loss}


def _kmeans_tokens(study: TextStudy, inputs: Inputs, seed: int) -> Row:
    """k-means on tokens; a document belongs to the cluster of most of its tokens."""
    find, loss = kmeans(inputs.train.sample(seed), inputs.k, seed, study.cooling.restarts)
    clusters: tuple[list[int], list[int]] = ([], [])
    for found, features in zip(clusters, (inputs.train, inputs.test), strict=True):
        for x, mask in features.batches(_READ):
            nearest = torch.zeros(mask.shape, dtype=torch.int64)
            nearest[mask] = torch.tensor(find(x[mask]))
            counts = torch.nn.functional.one_hot(nearest, inputs.k) * mask[..., None]
            found += counts.sum(1).argmax(-1).tolist()
    return inputs.row(clusters) | {"loss": loss}


def _ddcl_documents(
    study: TextStudy, inputs: Inputs, features: Pair, seed: int, check: SplitCheck
) -> Row:
    """DDCL on documents of one token, their pooled features."""
    layer = readout(study, inputs)
    loss = fit_readout(layer, features[0], study.cooling, seed, check)
    train, test = (TokenFeatures.of_rows(rows) for rows in features)
    shares, summaries = _read(layer, (train, test))
    clusters = shares[0].argmax(-1).tolist(), shares[1].argmax(-1).tolist()
    return inputs.row(clusters, summaries) | {"loss": loss}


@torch.no_grad()
def _read(layer: DDCLReadout, splits: tuple[TokenFeatures, TokenFeatures]) -> tuple[Pair, Pair]:
    """Histograms and summaries of the documents of both splits."""
    outputs = [[layer(x, mask) for x, mask in features.batches(_READ)] for features in splits]
    train, test = (
        (
            torch.cat([rearrange(output.histogram, "b h k -> b (h k)") for output in part]),
            torch.cat([output.summary for output in part]),
        )
        for part in outputs
    )
    return (train[0], test[0]), (train[1], test[1])


def _ddcl_tokens(study: TextStudy, inputs: Inputs, seed: int, check: SplitCheck) -> dict[str, Row]:
    """DDCL on tokens, and k-means on what it makes of documents."""
    layer = readout(study, inputs)
    loss = fit_readout(layer, inputs.train.sample(seed), study.cooling, seed, check)
    shares, summaries = _read(layer, (inputs.train, inputs.test))
    clusters = shares[0].argmax(-1).tolist(), shares[1].argmax(-1).tolist()
    if study.out is not None and seed == study.seeds[0]:
        save_readout(study.out, layer, inputs.corpus, inputs.train)
    return {
        "ddcl-tokens": inputs.row(clusters) | {"loss": loss},
        "ddcl-tokens, k-means on summary": _kmeans(study, inputs, summaries, seed)
        | {"probe": inputs.probe(summaries)},
        "ddcl-tokens, k-means on histogram": _kmeans(study, inputs, shares, seed)
        | {"probe": inputs.probe(shares)},
    }


def _attention(
    study: TextStudy, inputs: Inputs, build: Callable[[int, int], Layer], seed: int
) -> Row:
    """k-means on the summaries of a layer that was trained to rebuild the tokens."""
    torch.manual_seed(seed)
    layer = build(inputs.train.dim, inputs.k)
    loss = train_layer(layer, inputs.train, study.steps, study.batch_size, seed)
    with torch.no_grad():
        train, test = (
            features.pooled(lambda x, mask: layer(x, mask).summary)
            for features in (inputs.train, inputs.test)
        )
    row = _kmeans(study, inputs, (train, test), seed)
    return row | {"loss": loss, "probe": inputs.probe((train, test))}


def measure(
    study: TextStudy, inputs: Inputs, method: Method, seed: int, check: SplitCheck
) -> dict[str, Row]:
    """The rows of the result that a method gives for a seed, by name."""
    features = inputs.cls if method.endswith("-cls") else inputs.mean
    match method:
        case "kmeans-cls" | "kmeans-mean":
            return {method: _kmeans(study, inputs, features, seed)}
        case "kmeans-tokens":
            return {method: _kmeans_tokens(study, inputs, seed)}
        case "ddcl-cls" | "ddcl-mean":
            return {method: _ddcl_documents(study, inputs, features, seed, check)}
        case "ddcl-tokens":
            return _ddcl_tokens(study, inputs, seed, check)
        case "slot-attention":
            return {method: _attention(study, inputs, SlotAttention, seed)}
        case "attention-pooling":
            return {method: _attention(study, inputs, AttentionPooling, seed)}


def against_kmeans(summaries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """DDCL less k-means on the same features, on the test split, in units of accuracy.

    `ahead` is whether the difference of the means exceeds the larger of the two spreads.
    """
    result: dict[str, Any] = {}
    for ours, theirs in _RIVALS.items():
        if ours not in summaries or theirs not in summaries:
            continue
        for name in ("accuracy", "majority", "nmi"):
            mine, other = (summaries[method][f"test/{name}"] for method in (ours, theirs))
            difference = mine["mean"] - other["mean"]
            spread = None if mine["sd"] is None else max(mine["sd"], other["sd"])
            result.setdefault(f"{ours} - {theirs}", {})[name] = {
                "difference": difference,
                "spread": spread,
                "ahead": None if spread is None else difference > spread,
            }
    return result


def text(study: TextStudy) -> tuple[dict[str, Any], Sequence[Panel]]:
    """The whole comparison, ready for JSON, and the panels of its figure."""
    start = time.perf_counter()
    inputs, check = prepare(study), SplitCheck()
    if study.out is not None:
        claim(study.out, readout(study, inputs), inputs.corpus)
    encoded = time.perf_counter()
    rows: dict[str, list[Row]] = {}
    for seed in study.seeds:
        for method in study.methods:
            began = time.perf_counter()
            for name, row in measure(study, inputs, method, seed, check).items():
                rows.setdefault(name, []).append(row | {"seconds": time.perf_counter() - began})
            print(f"seed {seed}: {method}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    summaries = {name: summarize(part) for name, part in rows.items()}
    report = {
        "data": study.data,
        **inputs.corpus.description(),
        "codebook_size": inputs.k,
        "cooling": asdict(study.cooling),
        "split": vars(check),
        "seconds_to_load": encoded - start,
        "methods": summaries,
        "probe_of_cls": inputs.probe(inputs.cls),
        "probe_of_mean": inputs.probe(inputs.mean),
        "against_kmeans": against_kmeans(summaries),
        "paper": _PAPER.get(study.data, {}),
        "paper_note": _PAPER_NOTE,
    }
    series = {
        name: (list(study.seeds), [[row["test/accuracy"] for row in part]])
        for name, part in rows.items()
    }
    return report, [Panel(f"{study.data}, K={inputs.k}", "seed", "accuracy (one to one)", series)]


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    return run_experiment("text", TextStudy, text, arguments, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
