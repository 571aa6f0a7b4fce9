"""Trains a prior on the codes of a run: `python -m softvq.prior RUN` writes it to RUN/prior.

What is trained and evaluated is here, the loop in `softvq.loop`. The same command continues a
training that was interrupted, bit for bit on a CPU as if it had never stopped.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from jaxtyping import Int
from torch import Tensor

from softvq import checkpoint
from softvq.autoencoder import Autoencoder
from softvq.data import ImageSet, load_images
from softvq.evaluation import Sums, evaluate
from softvq.loop import Trainer, train_epochs
from softvq.metrics import Reconstruction
from softvq.prior.codes import (
    CodeSet,
    Tokenizer,
    extract,
    read_codes,
    read_tokenizer,
    write_codes,
)
from softvq.prior.loading import prior_folder
from softvq.prior.training import (
    PriorTrainConfig,
    batches,
    bits_per_code,
    build_optimizer,
    train_step,
)
from softvq.prior.transformer import CodePrior, CodePriorConfig, Grids
from softvq.program import (
    find_device,
    parse_flags,
    resume,
    run_program,
    stored_data,
    tell,
)
from softvq.training import set_warmup_learning_rate

LEVELS = 256  # values of a pixel, over the 2 units from -1 to 1


@dataclass(frozen=True, kw_only=True)
class Training:
    """A prior and how it is trained."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder of the tokenizer."""
    out: str = ""
    """Folder of the prior; by default RUN/prior."""
    class_conditional: bool = True
    """Whether the prior is told the class of each image, where the data have classes: folders
    inside train/ and test/."""
    width: int = 256
    """Width of the transformer."""
    depth: int = 6
    """Number of blocks."""
    heads: int = 8
    """Attention heads."""
    dropout: float = 0.1
    """Share of values dropped in training."""
    train: PriorTrainConfig = field(default_factory=PriorTrainConfig)
    """Recipe."""
    device: str = "auto"
    """cpu, cuda, or auto for cuda where there is one."""


def train_prior(options: Training) -> dict[str, Any]:
    """Trains or continues the prior and returns its report.

    Raises ValueError for what a user can mend, NonFiniteLoss when the training breaks down, and
    Interrupted after SIGINT.
    """
    checkpoint.read_config(options.run)
    out = prior_folder(options.run, options.out)
    with checkpoint.only_writer(out):
        return _train(options, out)


def _train(options: Training, out: Path) -> dict[str, Any]:
    device = find_device(options.device)
    model = checkpoint.load(options.run, device)
    data = stored_data(options.run)
    if data is None:
        raise ValueError(f"{options.run} does not say what it was trained on")
    train, test = load_images(data, "train"), load_images(data, "test")
    tokenizer = read_tokenizer(options.run, model, test.image_shape)
    classes = tuple(sorted(set(train.labels) - {""})) if options.class_conditional else ()
    config = CodePriorConfig(
        codebook_sizes=tokenizer.codebook_sizes,
        grids=tokenizer.grids,
        classes=classes,
        width=options.width,
        depth=options.depth,
        heads=options.heads,
        dropout=options.dropout,
    )
    checkpoint.write_config(out, prior=config, train=options.train, tokenizer=tokenizer)
    splits = {
        name: _codes(out / f"codes-{name}.safetensors", model, images, classes, tokenizer)
        for name, images in (("train", train), ("test", test))
    }
    if (out / checkpoint.REPORT).exists():
        tell(f"{out} is finished")
        return checkpoint.read_json(out / checkpoint.REPORT)
    torch.manual_seed(options.train.seed)
    prior = CodePrior(config).to(device)
    trainer = PriorTrainer(prior, splits["train"], splits["test"], options.train)
    train_epochs(trainer, out, resume(out, prior, trainer.optimizer))
    records = checkpoint.read_records(out)
    report = {
        "run": options.run,
        "epochs": options.train.epochs,
        "seed": options.train.seed,
        "parameters": sum(parameter.numel() for parameter in prior.parameters()),
        "classes": list(classes),
        "train_images": len(train),
        "test_images": len(test),
        "seconds": sum(record["seconds"] for record in records),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **_bits(prior, splits["train"], "train"),
        **_bits(prior, splits["test"], "test"),
    }
    report |= _dimensions(report, model, test)
    checkpoint.write_json(out / checkpoint.REPORT, report)
    return report


def _codes(
    path: Path,
    model: Autoencoder,
    images: ImageSet,
    classes: tuple[str, ...],
    tokenizer: Tokenizer,
) -> CodeSet:
    """The codes of a split, from their file if there is one."""
    # Codes of a start from which nothing came may be those of other flags.
    if not (path.exists() and checkpoint.holds_work(path.parent)):
        write_codes(path, extract(model, images, classes, tokenizer))
    codes = read_codes(path, tokenizer)
    if len(codes) != len(images) or codes.classes != classes:
        raise ValueError(
            f"{path} holds {len(codes)} images of the classes {codes.classes}, "
            f"not {len(images)} of {classes}"
        )
    return codes


class PriorTrainer(Trainer[tuple[Grids, Tensor]]):
    """A prior in training on codes."""

    model: CodePrior
    items: CodeSet
    config: PriorTrainConfig

    def __init__(
        self, prior: CodePrior, codes: CodeSet, test: CodeSet, config: PriorTrainConfig
    ) -> None:
        super().__init__(prior, build_optimizer(prior, config), codes, config)
        self.test = test

    def batches(self, order: Int[Tensor, "n"]) -> Iterator[tuple[Grids, Tensor]]:
        """Codes and classes."""
        return batches(self.items, order, self.config.batch_size)

    def step(self, batch: tuple[Grids, Tensor], done: float, sums: Sums) -> None:
        """One update by `train_step`."""
        set_warmup_learning_rate(self.optimizer, self.config, done)
        indices, labels = batch
        device = self.model.position.device
        grids = tuple(grid.to(device) for grid in indices)
        loss = train_step(self.model, self.optimizer, grids, labels.to(device), self.config)
        sums.add(images=float(len(labels)), nats=loss * len(labels))

    def live(self, sums: Sums) -> str:
        """Bits per code, with dropout."""
        return f"{_mean_bits(sums):.3f} bits"

    def record(self, sums: Sums) -> dict[str, Any]:
        """Bits of training codes, with dropout, and of test codes."""
        return {
            "train/bits_per_code_with_dropout": _mean_bits(sums),
            **_bits(self.model, self.test, "test"),
        }

    def summary(self, record: dict[str, Any]) -> str:
        """Bits per test code."""
        return f"{record['test/bits_per_code']:.4g} bits per code"


def _mean_bits(sums: Sums) -> float:
    return sums.mean("nats", "images") / math.log(2)


def _bits(prior: CodePrior, codes: CodeSet, split: str) -> dict[str, float]:
    """Bits per code, of each level where there are several, and per image."""
    levels, lengths = bits_per_code(prior, codes), prior.config.lengths
    total = sum(bits * length for bits, length in zip(levels, lengths, strict=True))
    record = {
        f"{split}/bits_per_code": total / sum(lengths),
        f"{split}/bits_per_image": total,
    }
    if len(levels) > 1:
        record |= {
            f"{split}/bits_per_code_level{number + 1}": bits for number, bits in enumerate(levels)
        }
    return record


def _dimensions(report: dict[str, Any], model: Autoencoder, test: ImageSet) -> dict[str, float]:
    """Bits per dimension of the images: of the codes alone, and of a model of the images.

    The model draws codes from the prior and pixels from a Gaussian around the decoded image, whose
    variance is the mean squared error of the split; its density times the width of one of 256
    levels bounds what a lossless coder of the images would need from above.
    """
    dimensions = math.prod(test.image_shape)
    device = next(model.parameters()).device
    metrics = [
        Reconstruction(channels=model.config.channels, with_ssim=False).to(device) for _ in range(2)
    ]
    mse = evaluate(model, test, *metrics)["test/mse_hard"]
    rate = report["test/bits_per_image"] / dimensions
    pixels = math.log2(2 * math.pi * math.e * mse) / 2 - math.log2(2 / (LEVELS - 1))
    return {
        "test/code_bits_per_dimension": rate,
        "test/bits_per_dimension": rate + pixels,
    }


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""

    def action() -> dict[str, Any]:
        return train_prior(
            parse_flags(
                lambda: tyro.cli(
                    Training, prog="python -m softvq.prior", args=arguments, description=__doc__
                )
            )
        )

    return run_program(action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
