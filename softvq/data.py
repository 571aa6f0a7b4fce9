"""Image data sets by name, folder or zip, in memory or streamed, and the maps between uint8 and
[-1, 1]. How image files are found and decoded is in `softvq.image_files`."""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor

from softvq.image_files import (
    Batch,
    Pictures,
    Split,
    decode_all,
    every_file,
    hash_order,
    open_store,
    refuse,
    stored_files,
)

_FLOAT_BATCH = 256  # images that are float, and go through a network, at once


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, how many, how large, and how they are held."""

    source: str = "photos"
    """A data set by name (cifar10, photos), or the path of a folder or zip of images; write
    ./photos for a folder that has the name of a data set."""
    root: str = "data"
    """Folder into which named data sets are downloaded."""
    image_size: int = 32
    """Height and width in pixels; others are resized (shorter side) and cropped (centre)."""
    train_images: int = 0
    """Number of training images, a sample over all classes; 0 is all."""
    test_images: int = 0
    """Number of test images, a sample over all classes; 0 is all."""
    memory_mib: int = 4096
    """A split that takes more than this when decoded is read from disk in every epoch."""
    workers: int = 2
    """Processes that decode images; 0 decodes in the training process."""

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("source must be a name or a path, got an empty text")
        least = dict(image_size=1, train_images=0, test_images=0, memory_mib=0, workers=0)
        for field, bound in least.items():
            if getattr(self, field) < bound:
                raise ValueError(f"{field} must be at least {bound}, got {getattr(self, field)}")


@runtime_checkable
class ImageSet(Protocol):
    """The RGB images of one split, in an order that depends on nothing but the source."""

    description: str

    @property
    def labels(self) -> Sequence[str]:
        """The class of each image: the folder it lies in, or an empty text if that is unknown."""
        ...

    def __len__(self) -> int: ...

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(c, h, w)."""
        ...

    def batches(self, order: Int[Tensor, "n"], batch_size: int) -> Iterator[Batch]:
        """The images `order[0:b]`, `order[b:2b]`, ... on the CPU; the last batch may be smaller."""
        ...


@dataclass(eq=False)
class ImageArray:
    """A split in memory."""

    pixels: UInt8[Tensor, "n c h w"]
    description: str
    labels: Sequence[str]

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        _, c, h, w = self.pixels.shape
        return c, h, w

    def batches(self, order: Int[Tensor, "n"], batch_size: int) -> Iterator[Batch]:
        for start in range(0, len(order), batch_size):
            yield self.pixels.index_select(0, order[start : start + batch_size])


@dataclass(eq=False)
class ImageStream:
    """A split on disk, decoded anew by worker processes each time it is walked through."""

    pictures: Pictures
    workers: int
    description: str

    @property
    def labels(self) -> list[str]:
        return [self.pictures.label(name) for name in self.pictures.names]

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return 3, self.pictures.size, self.pictures.size

    def batches(self, order: Int[Tensor, "n"], batch_size: int) -> Iterator[Batch]:
        """As in `ImageSet`. Raises ValueError if a file has gone bad since it was checked."""
        for pixels, failures in self.pictures.decoded(order.tolist(), batch_size, self.workers):
            refuse(failures, len(self))
            yield pixels


def load_images(config: DataConfig, split: Split) -> ImageSet:
    """One split of a data set, in memory or streamed, every image of it known to decode.

    Raises ValueError for a source that does not exist, holds too few images for the split or has
    images that cannot be decoded (the first ten are named).
    """
    load = NAMED_SETS.get(config.source, _stored_files)
    pictures = _sample(load(config, split), config, split)
    shape = (len(pictures), 3, config.image_size, config.image_size)
    checked = decode_all(pictures, config.workers)
    if math.prod(shape) > config.memory_mib * 2**20:
        for _ in checked:  # damage is to be found now and not in the middle of the training
            pass
        return ImageStream(pictures, config.workers, f"{pictures.origin}, streamed")
    return _in_memory(pictures, checked)


def load_files(source: str, count: int, image_size: int) -> ImageArray:
    """The first `count` images of a folder or zip, by path and whatever split they are in.

    Raises ValueError for a source that does not exist, holds fewer images or has some among them
    that cannot be decoded.
    """
    pictures = every_file(open_store(source), source, image_size)
    if not 1 <= count <= len(pictures):
        raise ValueError(f"{source} holds {len(pictures)} images, got {count} to take")
    pictures = replace(pictures, names=pictures.names[:count])
    return _in_memory(pictures, decode_all(pictures, workers=0))


def _in_memory(pictures: Pictures, decoded: Iterator[Batch]) -> ImageArray:
    shape = (len(pictures), 3, pictures.size, pictures.size)
    pixels = torch.empty(shape, dtype=torch.uint8)
    start = 0
    for batch in decoded:
        pixels[start : start + len(batch)] = batch
        start += len(batch)
    labels = [pictures.label(name) for name in pictures.names]
    return ImageArray(pixels, pictures.origin, labels)


def to_float(pixels: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Levels 0..255 as float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_uint8(images: Float[Tensor, "b c h w"]) -> UInt8[Tensor, "b c h w"]:
    """The nearest of the levels 0..255, clamped; inverts `to_float` exactly."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def float_batches(
    images: ImageSet, device: torch.device, order: Int[Tensor, "n"] | None = None
) -> Iterator[Float[Tensor, "b c h w"]]:
    """The images in that order, by default their own, as float batches on the device."""
    order = torch.arange(len(images)) if order is None else order
    for pixels in images.batches(order, _FLOAT_BATCH):
        yield to_float(pixels.to(device))


def _sample(pictures: Pictures, config: DataConfig, split: Split) -> Pictures:
    """The first images by hash, as many as the config asks for: a sample over all classes."""
    available = len(pictures)
    wanted = config.train_images if split == "train" else config.test_images
    if wanted > available:
        raise ValueError(
            f"{split}_images must be at most {available} for {pictures.origin}, got {wanted}"
        )
    names = hash_order(pictures.names)[: wanted or available]
    origin = f"{pictures.origin}, {split}: {len(names)} of {available} used"
    return replace(pictures, names=names, origin=origin)


def _cifar10(config: DataConfig, split: Split) -> Pictures:
    from torchvision.datasets import CIFAR10  # slow to import, and of use here only

    try:
        with warnings.catch_warnings():
            # The published files were pickled in a way that NumPy 2.4 deprecates.
            warnings.simplefilter("ignore")
            found = CIFAR10(config.root, train=split == "train", download=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"cifar10 is not in the folder {config.root} and could not be downloaded to it "
            f"({error}); give the path of a folder or zip of its images as the source"
        ) from error
    names = [str(position) for position in range(len(found.data))]
    label = partial(_target, found.classes, found.targets)
    origin = f"cifar10 in {config.root}"
    return Pictures(names, partial(_row, found.data), label, config.image_size, origin)


def _row(images: np.ndarray, name: str) -> Image.Image:
    return Image.fromarray(images[int(name)])


def _target(classes: Sequence[str], targets: Sequence[int], name: str) -> str:
    return classes[targets[int(name)]]


def _photos(config: DataConfig, split: Split) -> Pictures:
    """Random crops of two photographs; the rightmost fifth of each is kept for the test."""
    from sklearn.datasets import load_sample_images  # slow to import, and of use here only

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    size, (width, height) = config.image_size, photos[0].size
    seam = width * 4 // 5
    if size > width - seam:
        raise ValueError(f"image_size must be at most {width - seam} for photos, got {size}")
    count, left, right = (8192, 0, seam) if split == "train" else (2048, seam, width)
    corners = np.random.default_rng(0).integers(
        (0, left, 0), (len(photos), right - size + 1, height - size + 1), (count, 3)
    )
    names = [f"{photo},{x},{y}" for photo, x, y in corners]
    origin = "crops of scikit-learn's photos"
    return Pictures(names, partial(_crop, photos, size), _photo_class, size, origin)


def _photo_class(name: str) -> str:
    return ("china", "flower")[int(name.split(",")[0])]


def _crop(photos: list[Image.Image], size: int, name: str) -> Image.Image:
    photo, x, y = map(int, name.split(","))
    return photos[photo].crop((x, y, x + size, y + size))


NAMED_SETS: dict[str, Callable[[DataConfig, Split], Pictures]] = {
    "cifar10": _cifar10,
    "photos": _photos,
}


def _stored_files(config: DataConfig, split: Split) -> Pictures:
    try:
        store = open_store(config.source)
    except ValueError as error:
        names = ", ".join(NAMED_SETS)
        raise ValueError(
            f"source must be {names} or the path of a folder or zip; {error}"
        ) from None
    return stored_files(store, config.source, split, config.image_size)
