"""Trains a named model: `python train_vqvae.py cifar10-ddcl --train.epochs 5`; without arguments,
the quickstart.

What is trained and evaluated is here; the mathematics and the loop are in `softvq`. The same
command continues a run that was interrupted, bit for bit on a CPU as if it had never stopped.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# As in the package eval: threads that wait leave their core to what else runs on it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import lpips
import torch
import tyro
from einops import repeat
from jaxtyping import Int, UInt8
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models import MODELS
from softvq import checkpoint, distributed, figures
from softvq.autoencoder import Autoencoder, crop
from softvq.data import ImageSet, float_batches, load_images
from softvq.evaluation import (
    Sums,
    add_step,
    code_counts,
    decode_without,
    evaluate,
    evaluate_without,
    mean_codes,
    train_record,
)
from softvq.hierarchical import build_autoencoder
from softvq.loop import Trainer, train_epochs
from softvq.metrics import Reconstruction, load_perceptual
from softvq.program import (
    find_device,
    is_first,
    launched_processes,
    parse_flags,
    process_group,
    resume,
    run_program,
    tell,
)
from softvq.quantizers import codebooks
from softvq.training import (
    Experiment,
    TrainConfig,
    batches,
    build_optimizer,
    pixel_variance,
    prepare,
    set_learning_rate,
    settle,
    train_step,
)

QUICKSTART = ("photos-ddcl", "photos-vq", "photos-ema")
CURVES = (
    "test/utilisation",
    "test/perplexity",
    "test/psnr_hard",
    "test/psnr_soft",
    "test/distinct_codes",
    "train/temperature_ratio",
)
SHOWN_IMAGES = 8


@dataclass(frozen=True, kw_only=True)
class Run(Experiment):
    """An experiment with what its result does not depend on."""

    out: str = ""
    """Run folder; by default runs/NAME-seedSEED."""
    device: str = "auto"
    """cpu, cuda, or auto for cuda where there is one."""
    lpips_weights: str = ""
    """File of torchvision's AlexNet for LPIPS; by default the one in torchvision's cache."""
    tensorboard: bool = False
    """Also write TensorBoard logs into the run folder."""


def parse(
    arguments: Sequence[str], experiments: Mapping[str, Experiment] = MODELS
) -> tuple[str, Run]:
    """The model's name, and its run with the flags applied.

    Raises ValueError for an unknown model, and for flags that do not exist or cannot be.
    """
    name = arguments[0]
    if name not in experiments and not {"-h", "--help"} & set(arguments):
        raise ValueError(f"the first argument must be one of {', '.join(experiments)}; got {name}")
    choices = {
        name: (name, Run(model=experiment.model, data=experiment.data, train=experiment.train))
        for name, experiment in experiments.items()
    }
    run = parse_flags(
        lambda: tyro.extras.overridable_config_cli(
            choices,
            prog="train_vqvae.py",
            description=__doc__,
            args=arguments,
            config=(tyro.conf.AvoidSubcommands,),
        )
    )
    if not run.out:
        run = replace(run, out=f"runs/{name}-seed{run.train.seed}")
    return name, run


def train(name: str, run: Run) -> dict[str, Any]:
    """Trains or continues the run and returns its report.

    Raises ValueError for what a user can mend, NonFiniteLoss when the training breaks down, and
    Interrupted after SIGINT.
    """
    out, device = Path(run.out), find_device(run.device)
    sections = dict(model=run.model, data=run.data, train=run.train)
    checkpoint.check_config(out, **sections)
    perceptual = load_perceptual(run.lpips_weights)
    finished = (out / checkpoint.REPORT).exists()
    if finished:
        tell(f"{out} is finished")
        report = checkpoint.read_json(out / checkpoint.REPORT)
        if not run.lpips_weights or "lpips" not in report["absent"]:
            return report
        tell(f"{out}: its report gets LPIPS")
    images, test = load_images(run.data, "train"), load_images(run.data, "test")
    tell(f"{name}: {images.description}; {test.description}")

    _check_shares(run, test)
    with checkpoint.only_writer(out) if is_first() else nullcontext():
        if not finished:
            if is_first():
                checkpoint.write_config(out, **sections)
            with process_group(device):
                _train_epochs(images, test, run)
        return _report(name, run, images, test, perceptual) if is_first() else {}


def _report(
    name: str, run: Run, images: ImageSet, test: ImageSet, perceptual: lpips.LPIPS | str
) -> dict[str, Any]:
    """Evaluates a run that is trained, draws its figures and writes its report."""
    out, device = Path(run.out), find_device(run.device)
    model = checkpoint.load(out, device)
    if not isinstance(perceptual, str):
        perceptual = perceptual.to(device)
    soft, hard = (Reconstruction(perceptual, run.model.channels) for _ in range(2))
    records = checkpoint.read_records(out)
    if len(records) < run.train.epochs:
        raise ValueError(f"{out / checkpoint.METRICS} lacks epochs of a run that is trained")
    counts = code_counts(model, test)
    report = {
        "model": name,
        "seed": run.train.seed,
        "epochs": run.train.epochs,
        "train_images": len(images),
        "test_images": len(test),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": sum(record["seconds"] for record in records),
        "seconds_per_epoch": sum(record["seconds"] for record in records) / len(records),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **evaluate(model, test, soft.to(device), hard.to(device)),
        **evaluate_without(model, test, _quick_metrics(model)[0]),
        "absent": hard.absent,
        "figures": _draw(model, test, counts, records, name, out),
    }
    checkpoint.write_json(out / checkpoint.REPORT, report)
    return report


def _check_shares(run: Run, test: ImageSet) -> None:
    """Raises ValueError if the images cannot be shared out among the processes."""
    count = launched_processes()
    if run.train.batch_size % count:
        raise ValueError(
            f"{count} processes must divide the batch_size, got {run.train.batch_size}"
        )
    if len(test) < count:
        raise ValueError(f"{count} processes need as many test images, got {len(test)}")


def _train_epochs(images: ImageSet, test: ImageSet, run: Run) -> None:
    """Every epoch that is still to do, logged and saved one by one."""
    out = Path(run.out)
    torch.manual_seed(run.train.seed)
    model = build_autoencoder(run.model).to(find_device(run.device))
    if run.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    trainer = VQVAETrainer(model, images, test, run.train)
    begun = resume(out, model, trainer.optimizer)
    prepare(model, images, trainer.steps * run.train.epochs)
    with _tensorboard(run, out) as log:
        train_epochs(trainer, out, begun, log)


class VQVAETrainer(Trainer[Tensor]):
    """An autoencoder in training on images, alone or as one of several processes."""

    model: Autoencoder
    items: ImageSet
    config: TrainConfig

    def __init__(
        self, model: Autoencoder, images: ImageSet, test: ImageSet, config: TrainConfig
    ) -> None:
        super().__init__(model, build_optimizer(model, config), images, config)
        self.test, self.variance = test, pixel_variance(images)
        self.trained: nn.Module = model
        if distributed.process_count() > 1:
            # Statistics are those of the joined batch in every process: no buffer needs sending.
            self.trained = DistributedDataParallel(model, broadcast_buffers=False)

    def batches(self, order: Int[Tensor, "n"]) -> Iterator[UInt8[Tensor, "b c h w"]]:
        """Of each batch, the part of this process."""
        return batches(self.items, order, self.config.batch_size)

    def step(self, batch: UInt8[Tensor, "b c h w"], done: float, sums: Sums) -> None:
        """One update by `train_step`."""
        set_learning_rate(self.optimizer, self.config, done)
        output, mse = train_step(self.trained, self.optimizer, batch, self.variance, self.config)
        add_step(sums, output, mse)

    def live(self, sums: Sums) -> str:
        """Reconstruction, use of the codes and temperature."""
        record = train_record(sums, self.model)
        parts = [f"{record['train/psnr']:.2f} dB"]
        levels = range(len(codebooks(self.model)))
        for suffix in ("", *(f"_level{number + 1}" for number in levels)):
            if f"train/utilisation{suffix}" in record:
                used, even = (
                    record[f"train/{name}{suffix}"] for name in ("utilisation", "perplexity")
                )
                parts.append(f"{used:.0%} used, perplexity {even:.0f}")
            if f"train/temperature_ratio{suffix}" in record:
                parts.append(f"T/Tc {record[f'train/temperature_ratio{suffix}']:.3g}")
        return ", ".join(parts)

    def record(self, sums: Sums) -> dict[str, Any]:
        """Of the training, and of the test split."""
        settle(self.model, self.items)
        metrics = _quick_metrics(self.model)
        return {
            **train_record(sums, self.model),
            **evaluate(self.model, self.test, *metrics),
        }

    def summary(self, record: dict[str, Any]) -> str:
        """What the curves show."""
        return ", ".join(f"{key} {record[key]:.4g}" for key in curve_keys([record]))


def _quick_metrics(model: Autoencoder) -> list[Reconstruction]:
    """For soft and hard decoding; what is slow waits for the report."""
    device = next(model.parameters()).device
    channels = model.config.channels
    return [Reconstruction(channels=channels, with_ssim=False).to(device) for _ in range(2)]


def curve_keys(records: Sequence[dict[str, Any]]) -> list[str]:
    """The keys of CURVES that a run has logged, those of each level where there are several."""
    names = list(dict.fromkeys(key for record in records for key in record))
    return [
        key for curve in CURVES for key in names if key == curve or key.startswith(f"{curve}_level")
    ]


@torch.no_grad()
def _draw(
    model: Autoencoder,
    test: ImageSet,
    counts: Sequence[Tensor],
    records: list[dict[str, Any]],
    name: str,
    out: Path,
) -> list[str]:
    """Curves, reconstructions and an atlas of the codes of each level; returns the paths."""
    x = next(float_batches(test, next(model.parameters()).device))[:SHOWN_IMAGES]
    levels, means = model.encode(x), mean_codes(model, counts)
    several = len(levels) > 1
    quantized = tuple(level.quantized for level in levels)
    rows = {
        "original": x,
        "soft": crop(model.decode(tuple(level.soft for level in levels)), x),
        "hard": crop(model.decode(quantized), x),
    }
    if several:
        rows |= {
            f"no level {number + 1}": crop(decode_without(model, quantized, number, means), x)
            for number in range(len(levels))
        }
    paths = [
        figures.curves({name: records}, curve_keys(records), out / "curves.png"),
        figures.reconstructions(rows, out / "reconstructions.png"),
    ]
    for number, count in enumerate(counts):
        file = out / (f"atlas_level{number + 1}.png" if several else "atlas.png")
        paths.append(figures.atlas(_tiles(model, number, means), count, file))
    return [str(path) for path in paths]


def _tiles(model: Autoencoder, level: int, means: Sequence[Tensor]) -> Tensor:
    """Every code of a level as a grid of its own, decoded with the other levels at their means."""
    prototypes = codebooks(model)[level].prototypes
    grids = []
    for number, mean in enumerate(means):
        # The coarsest level has 2 x 2 codes, and each further one twice as many.
        side = 2 ** (number + 1)
        codes = prototypes if number == level else mean.expand(len(prototypes), -1)
        grids.append(repeat(codes, "k d -> k h w d", h=side, w=side))
    return model.decode(tuple(grids))


@contextmanager
def _tensorboard(run: Run, out: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that logs one record, or does nothing."""
    if not run.tensorboard or not is_first():
        yield lambda record: None
        return
    from torch.utils.tensorboard import SummaryWriter  # slow to import, and seldom wanted

    with SummaryWriter(str(out / "tensorboard")) as writer:

        def log(record: dict[str, Any]) -> None:
            for key, value in record.items():
                writer.add_scalar(key, value, record["epoch"])

        yield log


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    if not arguments:
        command = [sys.executable, "-m", "eval.compare", *QUICKSTART, "--out", "runs/quickstart"]
        os.execv(sys.executable, command)
    return run_program(lambda: train(*parse(arguments)), with_torchrun=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
