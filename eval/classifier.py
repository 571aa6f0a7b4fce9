"""Trains the small classifier that judges class-conditional samples:
`python -m eval.classifier --data.source cifar10.zip --out runs/classifier` writes and reports it.

What it says of samples is in `eval.quality`. The same command continues a training that was
interrupted, and prints the report of a finished one.
"""

import sys
from collections.abc import Iterator, Sequence
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

from softvq import checkpoint
from softvq.data import DataConfig, ImageSet, load_images, to_float
from softvq.evaluation import Sums
from softvq.loop import Trainer, train_epochs
from softvq.program import find_device, parse_flags, resume, run_program, tell
from softvq.training import NonFiniteLoss, WarmupRecipe, set_warmup_learning_rate

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
    with checkpoint.only_writer(out):
        return _train(options, config, device, train, test)


def _train(
    options: Training,
    config: ClassifierConfig,
    device: torch.device,
    train: ImageSet,
    test: ImageSet,
) -> dict[str, Any]:
    out, classes = Path(options.out), config.classes
    checkpoint.write_config(out, classifier=config, data=options.data, train=options.train)
    if (out / checkpoint.REPORT).exists():
        tell(f"{out} is finished")
        return checkpoint.read_json(out / checkpoint.REPORT)
    torch.manual_seed(options.train.seed)
    classifier = Classifier(config).to(device)
    trainer = ClassifierTrainer(classifier, train, test, options.train)
    train_epochs(trainer, out, resume(out, classifier, trainer.optimizer))
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


class ClassifierTrainer(Trainer[tuple[Tensor, Tensor]]):
    """A classifier in training on images and their classes."""

    model: Classifier
    items: ImageSet
    config: ClassifierTrainConfig

    def __init__(
        self,
        classifier: Classifier,
        images: ImageSet,
        test: ImageSet,
        config: ClassifierTrainConfig,
    ) -> None:
        optimizer = torch.optim.AdamW(
            classifier.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        super().__init__(classifier, optimizer, images, config)
        self.test = test
        self.labels = _labels(images, classifier.config.classes)

    def batches(self, order: Int[Tensor, "n"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pixels and labels."""
        size = self.config.batch_size
        labels = (self.labels[rows] for rows in order.split(size))
        return zip(self.items.batches(order, size), labels, strict=True)

    def step(self, batch: tuple[Tensor, Tensor], done: float, sums: Sums) -> None:
        """One update by the cross-entropy."""
        set_warmup_learning_rate(self.optimizer, self.config, done)
        loss = _train_step(self.model, self.optimizer, *batch)
        sums.add(images=float(len(batch[1])), loss=loss * len(batch[1]))

    def live(self, sums: Sums) -> str:
        """The mean loss."""
        return f"loss {sums.mean('loss', 'images'):.3f}"

    def record(self, sums: Sums) -> dict[str, Any]:
        """The loss, and the accuracy on test images."""
        return {
            "train/loss": sums.mean("loss", "images"),
            "test/accuracy": accuracy(self.model, self.test),
        }

    def summary(self, record: dict[str, Any]) -> str:
        """The accuracy."""
        return f"test accuracy {record['test/accuracy']:.4f}"


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
