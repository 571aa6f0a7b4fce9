"""Trains the small classifier that judges class-conditional samples:
`python -m eval.classifier --data.source cifar10.zip --out runs/classifier` writes and reports it.

What it says of samples is in `eval.quality`. The same command continues a training that was
interrupted, and prints the report of a finished one.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock
from tqdm import tqdm

from softvq import checkpoint
from softvq.data import DataConfig, ImageSet, load_images, to_float
from softvq.evaluation import Sums
from softvq.program import (
    Interrupted,
    Progress,
    find_device,
    interruptions,
    parse_flags,
    resume,
    run_program,
    save_state,
)
from softvq.training import (
    NonFiniteLoss,
    WarmupRecipe,
    epoch_order,
    set_warmup_learning_rate,
)

_SHIFT = 4  # pixels that a training image is moved by at most, each way
_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Options of the network."""

    classes: tuple[str, ...]
    """Names of the classes."""
    widths: tuple[int, ...] = (32, 64, 128, 256)
    """Channels of the stem at full size, and of each residual block, which halves the size."""

    def __post_init__(self) -> None:
        if len(self.classes) < 2:
            raise ValueError(f"classes must be at least 2, got {self.classes}")
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"widths must each be at least 1, got {self.widths}")


@dataclass(frozen=True, kw_only=True)
class ClassifierTrainConfig(WarmupRecipe):
    """The recipe: AdamW, a linear warm-up and a cosine to zero, images mirrored and moved."""

    epochs: int = 10
    """Passes over the training images."""
    batch_size: int = 128
    """Images in a step."""
    lr: float = 3e-3
    """Learning rate after the warm-up."""
    warmup: float = 0.1
    """Fraction of the training, in [0, 1), in which the learning rate rises from 0."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A classifier and how it is trained."""

    out: str
    """Folder of the classifier."""
    widths: tuple[int, ...] = (32, 64, 128, 256)
    """Channels of the stem at full size, and of each residual block, which halves the size."""
    data: DataConfig = field(default_factory=lambda: DataConfig(source="cifar10"))
    """Images, which have classes: folders inside train/ and test/."""
    train: ClassifierTrainConfig = field(default_factory=ClassifierTrainConfig)
    """Recipe."""
    device: str = "auto"
    """cpu, cuda, or auto for cuda where there is one."""


class _Norm(nn.BatchNorm2d):
    """Uses its running statistics for a single position, which has no variance."""

    def forward(self, input: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if input.numel() > self.num_features:
            return super().forward(input)
        statistics = self.running_mean, self.running_var
        return F.batch_norm(input, *statistics, self.weight, self.bias, eps=self.eps)


class Classifier(nn.Module):
    """A residual network (He et al. 2016) for small images, of torchvision's blocks."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        first, *rest = config.widths
        layers: list[nn.Module] = [
            nn.Conv2d(3, first, 3, padding=1, bias=False),
            _Norm(first),
            nn.ReLU(),
        ]
        for before, after in zip(config.widths, rest, strict=False):
            shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=2, bias=False), _Norm(after)
            )
            layers.append(BasicBlock(before, after, 2, shortcut, norm_layer=_Norm))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(config.widths[-1], len(config.classes))

    def forward(self, x: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b classes"]:
        """Logits of the classes of images in [-1, 1]."""
        return self.head(self.features(x))


def load_classifier(folder: str, device: torch.device) -> Classifier:
    """A trained classifier, in eval mode. Raises ValueError for a folder that holds none."""
    content = checkpoint.read_config(folder)
    if "classifier" not in content:
        raise ValueError(f"{folder} holds a run of another kind, no classifier")
    if not (Path(folder) / checkpoint.REPORT).exists():
        raise ValueError(f"the training of the classifier in {folder} is not finished")
    classifier = Classifier(checkpoint.decode_config(content["classifier"], ClassifierConfig))
    checkpoint.load_weights(classifier, Path(folder) / checkpoint.MODEL)
    return classifier.to(device).eval()


@torch.no_grad()
def predictions(classifier: Classifier, pixels: UInt8[Tensor, "n 3 h w"]) -> Int[Tensor, "n"]:
    """The most probable class of every image, on the CPU."""
    device = next(classifier.parameters()).device
    parts = [classifier(to_float(part.to(device))).argmax(1) for part in pixels.split(_AT_ONCE)]
    return torch.cat(parts).cpu()


def augment(x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Each image mirrored or not, and all of them moved by up to 4 pixels, edges repeated."""
    mirrored = rearrange(torch.rand(len(x)) < 0.5, "b -> b 1 1 1").to(x.device)
    x = torch.where(mirrored, x.flip(3), x)
    top, left = torch.randint(0, 2 * _SHIFT + 1, (2,)).tolist()
    padded = F.pad(x, (_SHIFT,) * 4, mode="replicate")
    return padded[:, :, top : top + x.shape[2], left : left + x.shape[3]]


def train_classifier(options: Training) -> dict[str, Any]:
    """Trains or continues the classifier and returns its report.

    Raises ValueError for what a user can mend, NonFiniteLoss when the training breaks down, and
    Interrupted after SIGINT.
    """
    out, device = Path(options.out), find_device(options.device)
    train, test = load_images(options.data, "train"), load_images(options.data, "test")
    classes = tuple(sorted(set(train.labels)))
    if "" in classes or not set(test.labels) <= set(classes):
        raise ValueError(
            f"{options.data.source} needs the same class folders inside train/ and test/"
        )
    config = ClassifierConfig(classes=classes, widths=options.widths)
    checkpoint.write_config(out, classifier=config, data=options.data, train=options.train)
    if (out / checkpoint.REPORT).exists():
        print(f"{out} is finished", file=sys.stderr)
        return checkpoint.read_json(out / checkpoint.REPORT)
    torch.manual_seed(options.train.seed)
    classifier = Classifier(config).to(device)
    _train_epochs(classifier, train, test, options.train, out)
    records = checkpoint.read_records(out)
    report = {
        "data": test.description,
        "classes": list(classes),
        "epochs": options.train.epochs,
        "seed": options.train.seed,
        "parameters": sum(parameter.numel() for parameter in classifier.parameters()),
        "train_images": len(train),
        "test_images": len(test),
        "seconds": sum(record["seconds"] for record in records),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "test/accuracy": accuracy(classifier, test),
    }
    checkpoint.write_json(out / checkpoint.REPORT, report)
    return report


def accuracy(classifier: Classifier, images: ImageSet) -> float:
    """Share of the images that are classified as their class, in eval mode."""
    classifier.eval()
    labels, right = _labels(images, classifier.config.classes), 0
    order = torch.arange(len(images))
    for rows, pixels in zip(order.split(_AT_ONCE), images.batches(order, _AT_ONCE), strict=True):
        right += (predictions(classifier, pixels) == labels[rows]).sum().item()
    return right / len(images)


def _labels(images: ImageSet, classes: tuple[str, ...]) -> Int[Tensor, "n"]:
    return torch.tensor([classes.index(name) for name in images.labels])


def _train_epochs(
    classifier: Classifier,
    images: ImageSet,
    test: ImageSet,
    config: ClassifierTrainConfig,
    out: Path,
) -> None:
    """Every epoch that is still to do, logged and saved one by one."""
    optimizer = torch.optim.AdamW(
        classifier.parameters(), lr=config.lr, weight_decay=config.weight_decay
    )
    labels = _labels(images, classifier.config.classes)
    steps = -(-len(images) // config.batch_size)
    epoch, step, seconds, sums = resume(out, classifier, optimizer)
    records = [record for record in checkpoint.read_records(out) if record["epoch"] <= epoch]
    with interruptions() as interrupted:
        while epoch < config.epochs:
            order = epoch_order(images, config.seed, epoch)[step * config.batch_size :]
            started, name = time.monotonic(), f"epoch {epoch + 1}/{config.epochs}"
            classifier.train()
            with tqdm(total=steps, initial=step, desc=name, mininterval=1) as bar:
                parts = order.split(config.batch_size)
                pixels = images.batches(order, config.batch_size)
                for rows, batch in zip(parts, pixels, strict=True):
                    done = (epoch * steps + step) / (config.epochs * steps)
                    set_warmup_learning_rate(optimizer, config, done)
                    loss = _train_step(classifier, optimizer, batch, labels[rows])
                    sums.add(images=float(len(rows)), loss=loss * len(rows))
                    step += 1
                    bar.update()
                    if interrupted():
                        seconds += time.monotonic() - started
                        save_state(out, classifier, optimizer, Progress(epoch, step, seconds, sums))
                        raise Interrupted(f"{out}: stopped in epoch {epoch + 1}, step {step}")
            seconds += time.monotonic() - started
            record = {
                "epoch": epoch + 1,
                "seconds": seconds,
                "train/loss": sums.mean("loss", "images"),
                "test/accuracy": accuracy(classifier, test),
            }
            records.append(record)
            checkpoint.write_records(out, records)
            epoch, step, sums, seconds = epoch + 1, 0, Sums(), 0.0
            save_state(out, classifier, optimizer, Progress(epoch, step, seconds, sums))
            print(f"{name}: test accuracy {record['test/accuracy']:.4f}", file=sys.stderr)
    checkpoint.write_tensors(out / checkpoint.MODEL, checkpoint.weights(classifier))


def _train_step(
    classifier: Classifier, optimizer: torch.optim.Optimizer, pixels: Tensor, labels: Tensor
) -> Tensor:
    """One update by the cross-entropy, which is returned."""
    device = next(classifier.parameters()).device
    logits = classifier(augment(to_float(pixels.to(device))))
    loss = F.cross_entropy(logits, labels.to(device))
    if not loss.isfinite():
        raise NonFiniteLoss(f"the loss is {loss.item()}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""

    def action() -> dict[str, Any]:
        return train_classifier(
            parse_flags(lambda: tyro.cli(Training, args=arguments, description=__doc__))
        )

    return run_program(action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
