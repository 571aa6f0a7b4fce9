"""How good the samples of a prior are: `python -m eval.quality RUN --alexnet-weights FILE` prints
distances of their features from those of test images, and with `--classifier` how many are of
their class, beside what real images and reconstructions reach.

Sampling is in `eval.sample`, the networks in `eval.feature_networks` and `eval.classifier`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from eval.classifier import Classifier, load_classifier, predictions
from eval.distances import frechet_distance, kernel_distance
from eval.experiment import summarize
from eval.feature_networks import FeatureNetwork, features, load_feature_network
from eval.report import check_each_once, check_out_file, run_measurement
from eval.sample import DrawConfig, Generative, class_labels, draw, load_generative
from softvq.autoencoder import Autoencoder, crop
from softvq.checkpoint import REPORT, read_json
from softvq.data import ImageSet, load_images, to_float, to_uint8
from softvq.metrics import ALEXNET_SIDE
from softvq.prior.loading import prior_folder
from softvq.program import find_device

_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class QualityConfig(DrawConfig):
    """What to sample and what to compare it with."""

    num: int = 0
    """Samples, test images and training images that are compared; 0 is as many as there are test
    images."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One set of samples for each; figures are mean and sample standard deviation over them."""
    data: str = ""
    """A data set by name, a folder or a zip; by default the one that the run was trained on."""
    inception_weights: str = ""
    """File of FID's InceptionV3; by default the one in torch's cache, if it is there."""
    alexnet_weights: str = ""
    """File of torchvision's AlexNet, in place of InceptionV3."""
    resize: int = 64
    """Side that images are brought to for AlexNet; for InceptionV3 it is 299."""
    kid_subsets: int = 100
    """Subsets that the kernel distance is the mean over."""
    kid_subset_size: int = 1000
    """Images in such a subset."""
    classifier: str = ""
    """Folder of `eval.classifier`, to tell how many samples are of the class asked for."""
    out: Path | None = None
    """The JSON object is also written to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num != 0 and self.num < 2:
            raise ValueError(f"num must be at least 2, or 0 for all, got {self.num}")
        check_each_once(self, "seeds")
        if not all(0 <= seed < 2**63 for seed in self.seeds):
            raise ValueError(f"seeds must lie in [0, 2**63), got {self.seeds}")
        if self.resize < ALEXNET_SIDE:
            raise ValueError(f"resize must be at least {ALEXNET_SIDE}, got {self.resize}")
        if self.kid_subsets < 1:
            raise ValueError(f"kid_subsets must be at least 1, got {self.kid_subsets}")
        if self.out is not None:
            check_out_file(self.out)


@torch.no_grad()
def reconstructed(model: Autoencoder, pixels: UInt8[Tensor, "n c h w"]) -> UInt8[Tensor, "n c h w"]:
    """What the hard decoding makes of the images."""
    device = next(model.parameters()).device
    parts = []
    for part in pixels.split(_AT_ONCE):
        x = to_float(part.to(device))
        levels = model.encode(x)
        decoded = model.decode_indices(tuple(level.indices for level in levels))
        parts.append(to_uint8(crop(decoded, x)).cpu())
    return torch.cat(parts)


def quality(config: QualityConfig) -> dict[str, Any]:
    """The report. Raises ValueError for what a user can mend."""
    # What is quick to check comes before what is slow to compute.
    generative, device = load_generative(config), find_device(config.device)
    network = load_feature_network(config.inception_weights, config.alexnet_weights, config.resize)
    network.network.to(device)
    classifier = None
    if config.classifier:
        classifier = load_classifier(config.classifier, device)
        _check_classes(classifier, generative)
    test, train = _real_images(config, generative)
    labels = torch.full((len(test),), -1)
    if generative.prior.config.classes:
        labels = class_labels(generative.prior, test.labels)
    without = int((labels < 0).sum())
    if classifier is not None and without:
        raise ValueError(
            f"{without} of {len(test)} test images have no class that the classifier knows"
        )
    real = _all_pixels(test)
    reference = features(network.network, real, device, "test images")

    def distances(pixels: UInt8[Tensor, "n c h w"], name: str) -> dict[str, float]:
        other = features(network.network, pixels, device, name)
        sizes = (config.kid_subsets, config.kid_subset_size)
        return {
            network.frechet: frechet_distance(reference, other),
            network.kid: kernel_distance(reference, other, *sizes),
        }

    decoded = reconstructed(generative.model, real)
    floor = distances(_all_pixels(train), "training images")
    reconstruction = distances(decoded, "reconstructions")
    samples, right = [], []
    for seed in config.seeds:
        drawn = draw(generative, labels, config, seed).pixels
        samples.append(distances(drawn, f"samples of seed {seed}"))
        if classifier is not None:
            right.append(_is_class(classifier, drawn, labels))
    spread = summarize(samples)
    report = {
        **_conditions(config, test, network),
        **{
            name: {
                "samples": spread[name],
                "reconstruction": reconstruction[name],
                "train_against_test": floor[name],
            }
            for name in (network.frechet, network.kid)
        },
    }
    if classifier is not None:
        report["class_accuracy"] = {
            **_class_accuracy(right, labels, generative.prior.config.classes),
            "real": _share(_is_class(classifier, real, labels)),
            "reconstruction": _share(_is_class(classifier, decoded, labels)),
            "classifier": config.classifier,
            "classifier_test_accuracy": _test_accuracy(config.classifier),
        }
    return report


def _check_classes(classifier: Classifier, generative: Generative) -> None:
    known, asked = classifier.config.classes, generative.prior.config.classes
    if known != asked:
        raise ValueError(
            f"the classifier knows the classes {', '.join(known)}, "
            f"the prior {', '.join(asked) or 'none'}"
        )


def _real_images(config: QualityConfig, generative: Generative) -> tuple[ImageSet, ImageSet]:
    """As many test images as training images, each a sample over all classes."""
    data = replace(generative.data, source=config.data or generative.data.source)
    test = load_images(replace(data, test_images=config.num or data.test_images), "test")
    if not 2 <= config.kid_subset_size <= len(test):
        raise ValueError(
            f"kid_subset_size must lie between 2 and the number of images {len(test)}, "
            f"got {config.kid_subset_size}"
        )
    return test, load_images(replace(data, train_images=len(test)), "train")


def _all_pixels(images: ImageSet) -> UInt8[Tensor, "n c h w"]:
    return torch.cat(list(images.batches(torch.arange(len(images)), _AT_ONCE)))


def _conditions(config: QualityConfig, test: ImageSet, network: FeatureNetwork) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "run": config.run,
        "prior": str(prior_folder(config.run, config.prior)),
        "data": test.description,
        "n": len(test),
        "seeds": list(config.seeds),
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "features": network.description,
        "kid_subsets": config.kid_subsets,
        "kid_subset_size": config.kid_subset_size,
        "torch": torch.__version__,
    }


def _is_class(
    classifier: Classifier, pixels: UInt8[Tensor, "n c h w"], labels: Int[Tensor, "n"]
) -> Bool[Tensor, "n"]:
    """Whether each image is classified as its class."""
    return predictions(classifier, pixels) == labels


def _share(right: Bool[Tensor, "n"]) -> float:
    return right.double().mean().item()


def _class_accuracy(
    right: Sequence[Bool[Tensor, "n"]], labels: Int[Tensor, "n"], classes: Sequence[str]
) -> dict[str, Any]:
    """Share of the samples that are classified as their class, and that of one answer for all."""
    counts = labels.bincount(minlength=len(classes))
    return {
        **summarize([{"samples": _share(part)} for part in right]),
        "samples_by_class": {
            name: _share(torch.cat([part[labels == number] for part in right]))
            for number, name in enumerate(classes)
            if counts[number]
        },
        "chance": counts.max().item() / len(labels),
    }


def _test_accuracy(folder: str) -> float:
    """On all images that the classifier was tested on, as its own report says."""
    return read_json(Path(folder) / REPORT)["test/accuracy"]


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    return run_measurement(QualityConfig, quality, arguments, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
