"""Image data sets by name, folder or zip, as uint8 batches, and the maps between uint8 and [-1, 1].
What is done with the batches is in `softvq.training` and in the programs."""

import hashlib
import math
import os
import posixpath
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

Split = Literal["train", "test"]
Batch = UInt8[Tensor, "b c h w"]

EXTENSIONS = (
    *(".apng", ".avif", ".bmp", ".dib", ".gif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
    *(".pbm", ".pfm", ".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
)
CHUNK = 256  # images per worker task: small beside memory, large beside the cost of a transfer
SHOWN_FAILURES = 10


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

    pictures: "Pictures"
    workers: int
    description: str

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return 3, self.pictures.size, self.pictures.size

    def batches(self, order: Int[Tensor, "n"], batch_size: int) -> Iterator[Batch]:
        """As in `ImageSet`. Raises ValueError if a file has gone bad since it was checked."""
        for pixels, failures in self.pictures.decoded(order.tolist(), batch_size, self.workers):
            _refuse(failures, len(self))
            yield pixels


def load_images(config: DataConfig, split: Split) -> ImageSet:
    """One split of a data set, in memory or streamed, every image of it known to decode.

    Raises ValueError for a source that does not exist, holds too few images for the split or has
    images that cannot be decoded (the first ten are named).
    """
    load = NAMED_SETS.get(config.source, _stored_files)
    pictures = _sample(load(config, split), config, split)
    shape = (len(pictures), 3, config.image_size, config.image_size)
    checked = _decode_all(pictures, config.workers)
    if math.prod(shape) > config.memory_mib * 2**20:
        for _ in checked:  # damage is to be found now and not in the middle of the training
            pass
        return ImageStream(pictures, config.workers, f"{pictures.origin}, streamed")
    pixels = torch.empty(shape, dtype=torch.uint8)
    start = 0
    for batch in checked:
        pixels[start : start + len(batch)] = batch
        start += len(batch)
    return ImageArray(pixels, pictures.origin)


def to_float(pixels: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
    """Levels 0..255 as float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def to_uint8(images: Float[Tensor, "b c h w"]) -> UInt8[Tensor, "b c h w"]:
    """The nearest of the levels 0..255, clamped; inverts `to_float` exactly."""
    return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


@dataclass(eq=False)
class Pictures(Dataset):
    """One split before decoding: `open(name)` is an image, and a name need not be a file's."""

    names: list[str]
    open: Callable[[str], Image.Image]
    size: int
    origin: str

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, positions: list[int]) -> tuple[Batch, list[str]]:
        """A decoded batch, and a line for each image that failed and left zeros in it."""
        pixels = np.zeros((len(positions), self.size, self.size, 3), dtype=np.uint8)
        failures = []
        with warnings.catch_warnings():
            # Odd metadata is no reason to warn: the pixels are complete. An absurd size is.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            for row, name in enumerate(self.names[position] for position in positions):
                try:
                    pixels[row] = _rgb_pixels(self.open(name), self.size)
                except UnidentifiedImageError:  # its own text shows a memory address
                    failures.append(f"{name} (not an image that Pillow can read)")
                except Exception as error:  # damaged files raise nearly every kind in Pillow
                    failures.append(f"{name} ({error or type(error).__name__})")
        return torch.from_numpy(rearrange(pixels, "b h w c -> b c h w").copy()), failures

    def decoded(
        self, order: list[int], batch_size: int, workers: int
    ) -> Iterator[tuple[Batch, list[str]]]:
        """Batches along `order`, the same for every number of workers."""
        # A list of positions is one item to the loader: a batch crosses processes as a whole.
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        # Without a generator the loader draws from the global one, and whether a split is
        # streamed would change the random numbers of the training.
        own = torch.Generator()
        loader = DataLoader(
            self, sampler=batches, batch_size=None, num_workers=workers, generator=own
        )
        return iter(loader)


def _sample(pictures: Pictures, config: DataConfig, split: Split) -> Pictures:
    """The first images by hash, as many as the config asks for: a sample over all classes."""
    available = len(pictures)
    wanted = config.train_images if split == "train" else config.test_images
    if wanted > available:
        raise ValueError(
            f"{split}_images must be at most {available} for {pictures.origin}, got {wanted}"
        )
    names = sorted(pictures.names, key=_hash)[: wanted or available]
    origin = f"{pictures.origin}, {split}: {len(names)} of {available} used"
    return replace(pictures, names=names, origin=origin)


def _decode_all(pictures: Pictures, workers: int) -> Iterator[Batch]:
    """All images in order; at the end ValueError if any could not be decoded."""
    failures = []
    # delay: no bar for what is done at once
    with tqdm(total=len(pictures), desc="images", leave=False, delay=2) as progress:
        for pixels, failed in pictures.decoded(list(range(len(pictures))), CHUNK, workers):
            failures += failed
            progress.update(len(pixels))
            yield pixels
    _refuse(failures, len(pictures))


def _refuse(failures: list[str], total: int) -> None:
    if failures:
        named = sorted(failures)[:SHOWN_FAILURES]
        more = ["..."] if len(failures) > SHOWN_FAILURES else []
        raise ValueError(
            f"{len(failures)} of {total} images cannot be used, remove or replace them: "
            + "; ".join(named + more)
        )


def _hash(name: str) -> bytes:
    return hashlib.sha1(name.encode(errors="surrogateescape")).digest()


def _rgb_pixels(image: Image.Image, size: int) -> UInt8[np.ndarray, "h w 3"]:
    """Pixels turned as the EXIF orientation says, and brought to size x size if they are not.

    Integers deeper than 8 bits are read on the scale 0..65535, floats on 0..1, and transparency
    is laid over white. Raises ValueError for values outside these ranges, and what Pillow raises.
    """
    image.load()  # a damaged file opens without complaint; only this reads all of it
    ImageOps.exif_transpose(image, in_place=True)  # a copy would lose the TIFF tags
    if image.mode.startswith(("I", "F")):
        image = Image.fromarray(_grey_levels(image))
    elif image.has_transparency_data:
        key = image.info.get("transparency")
        if isinstance(key, tuple) and max(key) > 255:
            raise ValueError("a transparent colour of 16 bits is not supported")
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    if image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
    return np.asarray(image)


def _grey_levels(image: Image.Image) -> UInt8[np.ndarray, "h w"]:
    """Levels 0..255 of grey pixels of 16 or 32 bits, which Pillow would clip and not scale."""
    if "transparency" in image.info:
        raise ValueError("transparency in 16-bit grey is not supported")
    values = np.asarray(image, dtype=np.float64)
    top = 1 if image.mode == "F" else 65535
    if not (values.min() >= 0 and values.max() <= top):  # so written, NaN is refused too
        found = f"{values.min():g}..{values.max():g}"
        raise ValueError(f"pixels of mode {image.mode} must lie in 0..{top}, found {found}")
    levels = np.rint(values * (255 / top)).astype(np.uint8)
    # A TIFF may count from white (tag 262 is 0); Pillow heeds that for 8 bits only.
    return 255 - levels if getattr(image, "tag_v2", {}).get(262) == 0 else levels


def _cifar10(config: DataConfig, split: Split) -> Pictures:
    from torchvision.datasets import CIFAR10  # slow to import, and of use here only

    try:
        with warnings.catch_warnings():
            # The published files were pickled in a way that NumPy 2.4 deprecates.
            warnings.simplefilter("ignore")
            images = CIFAR10(config.root, train=split == "train", download=True).data
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"cifar10 is not in the folder {config.root} and could not be downloaded to it "
            f"({error}); give the path of a folder or zip of its images as the source"
        ) from error
    names = [str(position) for position in range(len(images))]
    return Pictures(names, partial(_row, images), config.image_size, f"cifar10 in {config.root}")


def _row(images: np.ndarray, name: str) -> Image.Image:
    return Image.fromarray(images[int(name)])


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
    return Pictures(names, partial(_crop, photos, size), size, "crops of scikit-learn's photos")


def _crop(photos: list[Image.Image], size: int, name: str) -> Image.Image:
    photo, x, y = map(int, name.split(","))
    return photos[photo].crop((x, y, x + size, y + size))


NAMED_SETS: dict[str, Callable[[DataConfig, Split], Pictures]] = {
    "cifar10": _cifar10,
    "photos": _photos,
}


def _stored_files(config: DataConfig, split: Split) -> Pictures:
    """The image files of one split of a folder or zip, whatever folder wraps them all."""
    source, store = config.source, _store(config.source)
    entries = [entry for entry in store.entries() if not _is_hidden(entry)]
    images = [entry for entry in entries if PurePosixPath(entry).suffix.lower() in EXTENSIONS]
    if not images:
        raise ValueError(f"{source} holds 0 images; endings read are {' '.join(EXTENSIONS)}")
    wrapper = _wrapping_folder(images)
    images = [image.removeprefix(wrapper) for image in images]
    tops = {_top(entry.removeprefix(wrapper)) for entry in entries}
    if {"train", "test"} <= tops:
        parts = {part: [i for i in images if _top(i) == part] for part in ("train", "test")}
        rule = "split by its folders"
    elif all(_top(image) == "test" for image in images):
        raise ValueError(f"{source} has a folder test/ but no folder train/")
    else:
        parts, rule = _hash_split(images), "split by hash of the path"
    if not (parts["train"] and parts["test"]):
        counts = ", ".join(f"{len(names)} {part}" for part, names in parts.items())
        raise ValueError(f"{source} gives {counts} images; both need at least 1")
    read = partial(_open_file, store.read, wrapper)
    return Pictures(parts[split], read, config.image_size, f"{source} ({rule})")


def _store(source: str) -> "_Folder | _Zip":
    path = Path(source).expanduser()
    if path.is_dir():
        return _Folder(path)
    if path.is_file() and zipfile.is_zipfile(path):
        return _Zip(path)
    fault = "is neither folder nor zip" if path.exists() else "does not exist"
    raise ValueError(
        f"source must be {', '.join(NAMED_SETS)} or the path of a folder or zip; {source} {fault}"
    )


def _hash_split(images: list[str]) -> dict[str, list[str]]:
    """The first tenth by SHA-1 of the path, at least one, is test.

    A new file moves at most one old file to the other split.
    """
    ordered = sorted(images, key=_hash)
    tests = max(1, len(ordered) // 10)
    return {"train": ordered[tests:], "test": ordered[:tests]}


def _top(entry: str) -> str:
    return entry.split("/")[0].lower() if "/" in entry else ""


def _wrapping_folder(images: list[str]) -> str:
    """The folders that hold all images, which differ between a folder and a zip of it."""
    common = posixpath.commonpath([posixpath.dirname(image) for image in images])
    parts = takewhile(lambda part: part.lower() not in ("train", "test"), common.split("/"))
    return "".join(f"{part}/" for part in parts if part)


def _is_hidden(entry: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in entry.split("/"))


def _open_file(read: Callable[[str], bytes], wrapper: str, name: str) -> Image.Image:
    data = read(wrapper + name)
    if not data:
        raise ValueError("empty file")
    # Pillow decodes a JPEG whose tail is zeros, as broken copies have it, into invented pixels.
    if data.startswith(b"\xff\xd8") and data.rfind(b"\xff\xd9") < data.rfind(b"\xff\xda"):
        raise ValueError("the JPEG data has no end")
    return Image.open(BytesIO(data))


@dataclass(frozen=True)
class _Folder:
    path: Path

    def entries(self) -> Iterator[str]:
        """Relative paths with forward slashes, those of folders with one at the end."""
        for folder, folders, files in os.walk(self.path, followlinks=True):
            relative = Path(folder).relative_to(self.path)
            yield from (f"{(relative / name).as_posix()}/" for name in folders)
            yield from ((relative / name).as_posix() for name in files)

    def read(self, entry: str) -> bytes:
        return (self.path / entry).read_bytes()


class _Zip:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._archives: dict[int, zipfile.ZipFile] = {}

    def __reduce__(self) -> tuple:
        return _Zip, (self.path,)  # an open archive cannot be sent to another process

    def entries(self) -> Iterator[str]:
        try:
            yield from dict.fromkeys(self._archive().namelist())
        except zipfile.BadZipFile as error:
            raise ValueError(f"{self.path} is a damaged zip: {error}") from error

    def read(self, entry: str) -> bytes:
        return self._archive().read(entry)

    def _archive(self) -> zipfile.ZipFile:
        # One per process: a file opened before a fork shares its position with the child.
        process = os.getpid()
        if process not in self._archives:
            self._archives[process] = zipfile.ZipFile(self.path)
        return self._archives[process]
