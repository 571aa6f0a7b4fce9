"""Trains a prior on the codes of a run: `python -m softvq.prior RUN` writes it to RUN/prior.

The loop, the log and the files are here. The same command continues a training that was
interrupted, bit for bit on a CPU as if it had never stopped.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from tqdm import tqdm

from softvq import checkpoint
from softvq.autoencoder import Autoencoder
from softvq.data import ImageSet, load_images
from softvq.evaluation import Sums, evaluate
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
from softvq.prior.transformer import CodePrior, CodePriorConfig
from softvq.program import (
    Interrupted,
    Progress,
    find_device,
    interruptions,
    parse_flags,
    resume,
    run_program,
    save_state,
    stored_data,
)
from softvq.training import NonFiniteLoss, epoch_order, set_warmup_learning_rate

REFRESH_EVERY_STEPS = 10
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
    splits = {
        name: _codes(out / f"codes-{name}.safetensors", model, images, classes, tokenizer)
        for name, images in (("train", train), ("test", test))
    }
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
    if (out / checkpoint.REPORT).exists():
        print(f"{out} is finished", file=sys.stderr)
        return checkpoint.read_json(out / checkpoint.REPORT)
    torch.manual_seed(options.train.seed)
    prior = CodePrior(config).to(device)
    _train_epochs(prior, splits["train"], splits["test"], options.train, out)
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
    if not path.exists():
        write_codes(path, extract(model, images, classes, tokenizer))
    codes = read_codes(path, tokenizer)
    if len(codes) != len(images) or codes.classes != classes:
        raise ValueError(
            f"{path} holds {len(codes)} images of the classes {codes.classes}, "
            f"not {len(images)} of {classes}"
        )
    return codes


def _train_epochs(
    prior: CodePrior, codes: CodeSet, test: CodeSet, config: PriorTrainConfig, out: Path
) -> None:
    """Every epoch that is still to do, logged and saved one by one."""
    steps = -(-len(codes) // config.batch_size)
    optimizer = build_optimizer(prior, config)
    device = prior.position.device
    epoch, step, seconds, sums = resume(out, prior, optimizer)
    records = [record for record in checkpoint.read_records(out) if record["epoch"] <= epoch]

    def save() -> None:
        save_state(out, prior, optimizer, Progress(epoch, step, seconds, sums))

    with interruptions() as interrupted:
        while epoch < config.epochs:
            order = epoch_order(codes, config.seed, epoch)[step * config.batch_size :]
            name = f"epoch {epoch + 1}/{config.epochs}"
            prior.train()
            started = time.monotonic()
            with tqdm(total=steps, initial=step, desc=name, mininterval=1) as bar:
                for indices, labels in batches(codes, order, config.batch_size):
                    done = (epoch * steps + step) / (config.epochs * steps)
                    set_warmup_learning_rate(optimizer, config, done)
                    grids = tuple(grid.to(device) for grid in indices)
                    try:
                        loss = train_step(prior, optimizer, grids, labels.to(device), config)
                    except NonFiniteLoss as error:
                        place = f"epoch {epoch + 1}, step {step + 1}"
                        raise NonFiniteLoss(f"{error} in {place}; see {out}") from None
                    sums.add(images=float(len(labels)), nats=loss * len(labels))
                    step += 1
                    bar.update()
                    if step % REFRESH_EVERY_STEPS == 0:
                        bar.set_postfix_str(f"{_mean_bits(sums):.3f} bits", refresh=False)
                    if interrupted():
                        seconds += time.monotonic() - started
                        save()
                        raise Interrupted(f"{out}: stopped in epoch {epoch + 1}, step {step}")
            seconds += time.monotonic() - started
            record = {
                "epoch": epoch + 1,
                "seconds": seconds,
                "train/bits_per_code_with_dropout": _mean_bits(sums),
                **_bits(prior, test, "test"),
            }
            records.append(record)
            checkpoint.write_records(out, records)
            epoch, step, sums, seconds = epoch + 1, 0, Sums(), 0.0
            save()
            print(f"{name}: {record['test/bits_per_code']:.4g} bits per code", file=sys.stderr)
    checkpoint.write_tensors(out / checkpoint.MODEL, checkpoint.weights(prior))


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
