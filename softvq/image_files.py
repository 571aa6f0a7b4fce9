"""How the image files of a folder or zip are found, split into train and test, opened and decoded.
Which images make up a data set, and how they are held, is in `softvq.data`."""

import hashlib
import os
import posixpath
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
import torch
from einops import rearrange
from jaxtyping import UInt8
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
_TESTS = ("test", "val", "valid", "validation")  # the first of these folders that is there
_PNG = b"\x89PNG\r\n\x1a\n"
# 0xFF within pixels is followed by 0x00, or is a restart; fill bytes are 0xFF themselves
_JPEG_MARK = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")


@dataclass(eq=False)
class Pictures(Dataset):
    """One split before decoding: `open(name)` is an image and `label(name)` its class, or "".

    A name need not be a file's.
    """

    names: list[str]
    open: Callable[[str], Image.Image]
    label: Callable[[str], str]
    size: int
    origin: str

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, positions: list[int]) -> tuple[Batch, list[str]]:
        """A decoded batch, and a line for each image that failed and left zeros in it."""
        pixels = np.zeros((len(positions), self.size, self.size, 3), dtype=np.uint8)
        failures = []
        with warnings.catch_warnings():
            # Odd metadata is no reason to warn: the pixels are complete. Nor is a large picture;
            # Pillow refuses absurd ones, of twice the size that it warns of.
            warnings.simplefilter("ignore")
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


def decode_all(pictures: Pictures, workers: int) -> Iterator[Batch]:
    """All images in order; at the end ValueError if any could not be decoded."""
    failures = []
    # delay: no bar for what is done at once
    with tqdm(total=len(pictures), desc="images", leave=False, delay=2) as progress:
        for pixels, failed in pictures.decoded(list(range(len(pictures))), CHUNK, workers):
            failures += failed
            progress.update(len(pixels))
            yield pixels
    refuse(failures, len(pictures))


def refuse(failures: list[str], total: int) -> None:
    """Raises ValueError that names the first ten of the images that failed, if any did."""
    if failures:
        named = sorted(failures)[:SHOWN_FAILURES]
        more = ["..."] if len(failures) > SHOWN_FAILURES else []
        raise ValueError(
            f"{len(failures)} of {total} images cannot be used, remove or replace them: "
            + "; ".join(named + more)
        )


def hash_order(names: list[str]) -> list[str]:
    """Names by their SHA-1: the first of them are a sample over all classes."""
    return sorted(names, key=lambda n: hashlib.sha1(n.encode(errors="surrogateescape")).digest())


@dataclass(frozen=True)
class Folder:
    """Image files below a folder."""

    path: Path

    def entries(self) -> Iterator[str]:
        """Relative paths with forward slashes, those of folders with one at the end."""
        for folder, folders, files in os.walk(self.path, followlinks=True):
            # A link to a folder around it would show every image again and again.
            above = {os.path.realpath(path) for path in (folder, *Path(folder).parents)}
            folders[:] = (
                name for name in folders if os.path.realpath(Path(folder, name)) not in above
            )
            relative = Path(folder).relative_to(self.path)
            yield from (f"{(relative / name).as_posix()}/" for name in folders)
            yield from ((relative / name).as_posix() for name in files)

    def read(self, entry: str) -> bytes:
        return (self.path / entry).read_bytes()


class Zip:
    """Image files in a zip, readable from several processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archives: dict[int, zipfile.ZipFile] = {}
        self._names: dict[str, str] = {}

    def __reduce__(self) -> tuple:
        return Zip, (self.path,)  # an open archive cannot be sent to another process

    def entries(self) -> Iterator[str]:
        try:
            yield from self._stored_names()
        except zipfile.BadZipFile as error:
            raise ValueError(f"{self.path} is a damaged zip: {error}") from error

    def read(self, entry: str) -> bytes:
        return self._archive().read(self._stored_names()[entry])

    def _stored_names(self) -> dict[str, str]:
        """The names in the archive by path: some writers begin them with ./, or write \\ for /."""
        if not self._names:
            names = self._archive().namelist()
            self._names = {name.replace("\\", "/").removeprefix("./"): name for name in names}
        return self._names

    def _archive(self) -> zipfile.ZipFile:
        # One per process: a file opened before a fork shares its position with the child.
        process = os.getpid()
        if process not in self._archives:
            self._archives[process] = zipfile.ZipFile(self.path)
        return self._archives[process]


def open_store(source: str) -> Folder | Zip:
    """The folder or zip at a path. Raises ValueError for a path that is neither."""
    path = Path(source).expanduser()
    if path.is_dir():
        return Folder(path)
    if path.is_file() and zipfile.is_zipfile(path):
        return Zip(path)
    fault = "is neither folder nor zip" if path.exists() else "does not exist"
    raise ValueError(f"{source} {fault}")


def stored_files(store: Folder | Zip, source: str, split: Split, size: int) -> Pictures:
    """The image files of one split of a store, whatever folder wraps them all.

    Raises ValueError, about `source`, for too few images or an unfinished split into folders.
    """
    entries, wrapper, images = _listed(store, source)
    tops = {_top(entry.removeprefix(wrapper)) for entry in entries}
    tested = next((name for name in _TESTS if name in tops), "")
    if "train" in tops and tested:
        folders = {"train": "train", "test": tested}
        parts = {part: [i for i in images if _top(i) == top] for part, top in folders.items()}
        rule = "split by its folders" if tested == "test" else f"split into train/ and {tested}/"
    elif tested and all(_top(image) == tested for image in images):
        raise ValueError(f"{source} has a folder {tested}/ but no folder train/")
    else:
        parts, rule = _hash_split(images), "split by hash of the path"
    if not (parts["train"] and parts["test"]):
        counts = ", ".join(f"{len(names)} {part}" for part, names in parts.items())
        raise ValueError(f"{source} gives {counts} images; both need at least 1")
    read = partial(_open_file, store.read, wrapper)
    return Pictures(parts[split], read, _class_folder, size, f"{source} ({rule})")


def every_file(store: Folder | Zip, source: str, size: int) -> Pictures:
    """All image files of a store, whatever its folders are, sorted by path.

    Raises ValueError, about `source`, if there are none.
    """
    _, wrapper, images = _listed(store, source)
    read = partial(_open_file, store.read, wrapper)
    return Pictures(sorted(images), read, _class_folder, size, source)


def one_file(path: Path, size: int) -> Pictures:
    """The image file at a path, whatever its ending."""
    read = partial(_open_file, Folder(Path()).read, "")
    return Pictures([str(path)], read, _class_folder, size, str(path))


def _listed(store: Folder | Zip, source: str) -> tuple[list[str], str, list[str]]:
    """(all entries, the folders that hold all images, the images without these)."""
    entries = [entry for entry in store.entries() if not _is_hidden(entry)]
    images = [entry for entry in entries if PurePosixPath(entry).suffix.lower() in EXTENSIONS]
    if not images:
        raise ValueError(f"{source} holds 0 images; endings read are {' '.join(EXTENSIONS)}")
    wrapper = _wrapping_folder(images)
    return entries, wrapper, [image.removeprefix(wrapper) for image in images]


def _hash_split(images: list[str]) -> dict[str, list[str]]:
    """The first tenth by SHA-1 of the path, at least one, is test.

    A new file moves at most one old file to the other split.
    """
    ordered = hash_order(images)
    tests = max(1, len(ordered) // 10)
    return {"train": ordered[tests:], "test": ordered[:tests]}


def _class_folder(image: str) -> str:
    """The folder that stands first in the path, after that of the split; empty if there is none."""
    folders = image.split("/")[:-1]
    return next((name for name in folders if not _names_a_split(name)), "")


def _names_a_split(folder: str) -> bool:
    return folder.lower() in ("train", *_TESTS)


def _top(entry: str) -> str:
    return entry.split("/")[0].lower() if "/" in entry else ""


def _wrapping_folder(images: list[str]) -> str:
    """The folders that hold all images, which differ between a folder and a zip of it."""
    common = posixpath.commonpath([posixpath.dirname(image) for image in images])
    parts = takewhile(lambda part: not _names_a_split(part), common.split("/"))
    return "".join(f"{part}/" for part in parts if part)


def _is_hidden(entry: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in entry.split("/"))


def _open_file(read: Callable[[str], bytes], wrapper: str, name: str) -> Image.Image:
    data = read(wrapper + name)
    if not data:
        raise ValueError("empty file")
    if data.startswith(b"\xff\xd8"):
        _check_jpeg(data)
    if data.startswith(_PNG):
        _check_png(data)
    return Image.open(BytesIO(data))


def _check_jpeg(data: bytes) -> None:
    """Raises ValueError for data without the mark of its end, whatever follows that.

    Pillow decodes a JPEG whose tail is zeros, as broken copies have it, into invented pixels.
    """
    position = 2
    while mark := _JPEG_MARK.search(data, position):
        kind, position = mark[0][1], mark.end()
        if kind == 0xD9:
            return
        # A segment, which may hold anything, a small JPEG among it; pixels come after the segment.
        position += int.from_bytes(data[position : position + 2])
    raise ValueError("the JPEG data has no end")


def _check_png(data: bytes) -> None:
    """Raises ValueError for pixels whose checksum, which Pillow does not look at, is wrong."""
    start, name = len(_PNG), b""
    while name != b"IEND":
        end = start + 8 + int.from_bytes(data[start : start + 4])
        name = data[start + 4 : start + 8]
        checksum = int.from_bytes(data[end : end + 4])
        if not name or (name == b"IDAT" and zlib.crc32(data[start + 4 : end]) != checksum):
            raise ValueError("the PNG data is damaged or has no end")
        start = end + 4


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
