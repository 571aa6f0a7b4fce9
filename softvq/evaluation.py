"""What is logged of a VQ-VAE: assignments summed over an epoch or a split, and made into values.
The step that is summed up is in `softvq.training`, the metrics themselves in `softvq.metrics`."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import einsum
from torch import Tensor, nn

from softvq import ddcl, distributed
from softvq.autoencoder import Autoencoder, VQVAEOutput, crop
from softvq.data import ImageSet, float_batches
from softvq.metrics import CodebookUsage, Reconstruction
from softvq.quantizers import EMAVQ, Codebook, DDCLCodebook, codebooks

# Of an `Assignment`, what is averaged over tokens
_MEANS = ("reconstruction", "variance", "entropy", "mean")


class Sums:
    """Sums over the batches of an epoch, in float64: means that do not depend on batch sizes."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def add(self, **values: Tensor | float) -> None:
        """Adds each value to the sum of its name."""
        for name, value in values.items():
            value = torch.as_tensor(value).detach().double().cpu()
            self.tensors[name] = self.tensors.get(name, torch.zeros_like(value)) + value

    def joined(self) -> "Sums":
        """The sums over all processes, each of which has added the same names."""
        result = Sums()
        result.tensors = {name: distributed.total(value) for name, value in self.tensors.items()}
        return result

    def mean(self, name: str, count: str) -> float:
        """The sum `name` over the sum `count`."""
        return (self.tensors[name] / self.tensors[count]).item()


def add_step(sums: Sums, output: VQVAEOutput, mse: Tensor) -> None:
    """Adds one training step to the sums of its epoch; a collective, as the step is."""
    images = float(len(output.reconstruction))
    # The loss of the joined batch is the mean of what the processes have of it, however many images
    # each has.
    joined = distributed.total(output.loss.new_tensor(images))
    loss = output.loss * joined / distributed.process_count()
    sums.add(images=images, mse=mse * images, loss=loss)
    for number, level in enumerate(output.assignments):
        _add_level(sums, number, level)


def train_record(sums: Sums, model: nn.Module) -> dict[str, int | float]:
    """The logged values of a training epoch."""
    mse = sums.mean("mse", "images")
    record = {
        "train/psnr": 10 * math.log10(4 / max(mse, 1e-30)),
        "train/quantizer_loss": sums.mean("loss", "images"),
    }
    for number, codebook in enumerate(codebooks(model)):
        values = _level_values(sums, number)
        if isinstance(codebook, DDCLCodebook):
            values |= _temperatures(codebook)
        if isinstance(codebook, DDCLCodebook | EMAVQ):
            values["revived"] = int(sums.tensors[f"{number}/revived"].item())
        record |= _named("train", values, number, len(codebooks(model)))
    return record


@torch.no_grad()
def evaluate(
    model: Autoencoder, images: ImageSet, soft: Reconstruction, hard: Reconstruction
) -> dict[str, int | float]:
    """The logged values of a split, both ways of decoding labelled; the metrics are filled anew.

    `bits_per_image` is what an ideal entropy coder needs for the codes, given their frequencies.
    Processes that train together evaluate a part of the images each, of which there must be one
    for every process, and all return the values of the whole split.
    """
    model.eval()
    soft.reset()
    hard.reset()
    sums, device = Sums(), next(model.parameters()).device
    own = distributed.share(torch.arange(len(images)))
    for x in float_batches(images, device, own):
        levels = model.encode(x)
        for metric, codes in (
            (soft, tuple(level.soft for level in levels)),
            (hard, tuple(level.quantized for level in levels)),
        ):
            metric.update(crop(model.decode(codes), x), x)
        sums.add(images=float(len(x)))
        for number, level in enumerate(levels):
            _add_level(sums, number, level)
    sums, record = sums.joined(), {}
    for metric, label in ((soft, "soft"), (hard, "hard")):
        values = {name: value.item() for name, value in metric.compute().items()}
        record |= {f"test/{name}_{label}": value for name, value in values.items()}
    bits = 0.0
    for number, codebook in enumerate(codebooks(model)):
        values = _level_values(sums, number) | _geometry(codebook, sums, number)
        bits += values["bits_per_code"] * values["tokens"] / sums.tensors["images"].item()
        record |= _named("test", values, number, len(codebooks(model)))
    return record | {"test/bits_per_image": bits}


@torch.no_grad()
def code_counts(model: Autoencoder, images: ImageSet) -> tuple[Tensor, ...]:
    """How often each code is the most probable one in a split, for every level, as (k)."""
    model.eval()
    parts = float_batches(images, next(model.parameters()).device)
    every = [[level.counts for level in model.encode(x)] for x in parts]
    return tuple(torch.stack(counts).sum(0) for counts in zip(*every, strict=True))


def mean_codes(model: Autoencoder, counts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The mean (d) of the codes that occur `counts` times, for every level."""
    return tuple(
        einsum(count.to(codebook.prototypes), codebook.prototypes, "k, k d -> d") / count.sum()
        for count, codebook in zip(counts, codebooks(model), strict=True)
    )


@torch.no_grad()
def decode_without(
    model: Autoencoder, codes: tuple[Tensor, ...], level: int, means: Sequence[Tensor]
) -> Tensor:
    """Images from codes (b, i, j, d) of which one level is replaced by its mean everywhere."""
    return model.decode((*codes[:level], means[level].expand_as(codes[level]), *codes[level + 1 :]))


@torch.no_grad()
def evaluate_without(
    model: Autoencoder, images: ImageSet, hard: Reconstruction
) -> dict[str, float]:
    """PSNR of the hard decoding with each level replaced by its mean: what the others carry.

    Nothing for a model of one level.
    """
    levels = len(codebooks(model))
    if levels == 1:
        return {}
    means = mean_codes(model, code_counts(model, images))
    device = next(model.parameters()).device
    record = {}
    for level in range(levels):
        hard.reset()
        for x in float_batches(images, device):
            codes = tuple(assignment.quantized for assignment in model.encode(x))
            hard.update(crop(decode_without(model, codes, level, means), x), x)
        record[f"test/psnr_hard_without_level{level + 1}"] = hard.compute()["psnr"].item()
    return record


def _add_level(sums: Sums, number: int, level: Any) -> None:
    tokens = level.counts.sum()
    means = {name: getattr(level, name) for name in _MEANS}
    square = level.spread.double() + level.mean.double().square().sum()
    added = {name: value * tokens for name, value in means.items()} | {"square": square * tokens}
    totals = {name: getattr(level, name) for name in ("counts", "usage", "revived")}
    totals["tokens"] = tokens
    if distributed.rank() > 0:
        # Every process knows of every revival.
        totals["revived"] = torch.zeros_like(level.revived)
    sums.add(**{f"{number}/{name}": value for name, value in (added | totals).items()})


def _level_values(sums: Sums, number: int) -> dict[str, int | float]:
    """Usage of the codes, and the split of L_q, of one level."""
    means = {name: sums.mean(f"{number}/{name}", f"{number}/tokens") for name in _MEANS[:3]}
    counts, usage = sums.tensors[f"{number}/counts"], sums.tensors[f"{number}/usage"]
    codes = CodebookUsage(len(counts), sync_on_compute=False)
    codes.update(counts, usage)
    return {
        **{name: value.item() for name, value in codes.compute().items()},
        "l_ols": means["reconstruction"],
        "variance": means["variance"],
        "variance_ratio": means["variance"] / max(means["reconstruction"], 1e-30),
        "token_perplexity": math.exp(means["entropy"]),
        "spread": _spread(sums, number),
    }


def _spread(sums: Sums, number: int) -> float:
    """tr Cov(z) over all tokens, whatever the batches were."""
    tokens = sums.tensors[f"{number}/tokens"]
    mean, square = (sums.tensors[f"{number}/{name}"] / tokens for name in ("mean", "square"))
    return max((square - mean.square().sum()).item(), 0.0)


def _geometry(codebook: Codebook, sums: Sums, number: int) -> dict[str, int | float]:
    """Whether the prototypes are apart, in units of the tokens' standard deviation."""
    scale = math.sqrt(_spread(sums, number))
    separation = ddcl.separation(codebook.prototypes)
    return {
        "distinct_codes": ddcl.distinct_codes(codebook.prototypes, 0.01 * scale),
        "effective_rank": ddcl.effective_rank(codebook.prototypes).item(),
        "separation_min": separation.minimum.item() / max(scale, 1e-30),
        "separation_mean": separation.mean.item() / max(scale, 1e-30),
    }


def _temperatures(codebook: DDCLCodebook) -> dict[str, int | float]:
    temperature, critical = codebook.temperature.item(), codebook.critical.item()
    return {"temperature": temperature, "temperature_ratio": temperature / max(critical, 1e-30)}


def _named(
    split: str, values: dict[str, int | float], number: int, levels: int
) -> dict[str, int | float]:
    """Keys of `metrics.jsonl`; the level is named where there are several."""
    suffix = f"_level{number + 1}" if levels > 1 else ""
    return {f"{split}/{name}{suffix}": value for name, value in values.items()}
