"""The codes of a data set: got once from a trained tokenizer and kept with what they belong to.

They are the hard indices, those that the decoder will see. Which model learns them is in
`softvq.prior.transformer`.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from softvq import checkpoint
from softvq.autoencoder import Autoencoder
from softvq.data import ImageSet, float_batches
from softvq.prior.transformer import Grids
from softvq.quantizers import codebooks


@dataclass(frozen=True)
class Tokenizer:
    """What codes and a prior belong to."""

    digest: str
    """SHA-256 of the tokenizer's weights file."""
    codebook_sizes: tuple[int, ...]
    """Number of codes of each level, coarsest first."""
    grids: tuple[tuple[int, int], ...]
    """Height and width of each level's grid."""

    def check(self, other: "Tokenizer", what: str) -> None:
        """Raises ValueError, with both values, if `what` belongs to another tokenizer."""
        for field, name in (
            ("codebook_sizes", "codebook sizes"),
            ("grids", "grids"),
            ("digest", "the weights with SHA-256"),
        ):
            own, its = getattr(self, field), getattr(other, field)
            if own != its:
                raise ValueError(f"{what} is of another tokenizer: {name} {its}, not {own}")


@dataclass(frozen=True)
class CodeSet:
    """The codes of one split."""

    indices: Grids
    """Grids (n, h, w) of each level, coarsest first."""
    labels: Int[Tensor, "n"]
    """Class of each image as an index into `classes`; -1 if it has none."""
    classes: tuple[str, ...]
    """Names of the classes, sorted."""
    tokenizer: Tokenizer
    """Whose codes they are."""

    def __len__(self) -> int:
        return len(self.labels)


def read_tokenizer(run: str, model: Autoencoder, image_shape: tuple[int, int, int]) -> Tokenizer:
    """What the codes of images (c, h, w) belong to when the run's model makes them."""
    device = next(model.parameters()).device
    with torch.no_grad():
        levels = model.encode(torch.zeros(1, *image_shape, device=device))
    heights_widths = [tuple(level.indices.shape[1:]) for level in levels]
    return Tokenizer(
        hashlib.sha256((Path(run) / checkpoint.MODEL).read_bytes()).hexdigest(),
        tuple(codebook.codebook_size for codebook in codebooks(model)),
        tuple((int(height), int(width)) for height, width in heights_widths),
    )


@torch.no_grad()
def extract(
    model: Autoencoder, images: ImageSet, classes: tuple[str, ...], tokenizer: Tokenizer
) -> CodeSet:
    """The most probable codes of every image; without `classes`, no image has one.

    Raises ValueError for a label that is none of them.
    """
    model.eval()
    unknown = sorted(set(images.labels) - {"", *classes})
    if classes and unknown:
        raise ValueError(f"labels must be among {', '.join(classes)}; got {', '.join(unknown)}")
    number = {name: index for index, name in enumerate(classes)}
    labels = [number.get(name, -1) for name in images.labels]
    batches = []
    with tqdm(total=len(images), desc="codes", leave=False, delay=2) as bar:
        for x in float_batches(images, next(model.parameters()).device):
            batches.append([level.indices.cpu() for level in model.encode(x)])
            bar.update(len(x))
    indices = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    return CodeSet(indices, torch.tensor(labels), classes, tokenizer)


def write_codes(path: Path, codes: CodeSet) -> None:
    """One safetensors file with the codes as int32, and all else as JSON in its header."""
    tensors = {
        f"level{number + 1}": grid.to(torch.int32) for number, grid in enumerate(codes.indices)
    }
    header = {"classes": codes.classes, **vars(codes.tokenizer)}
    metadata = {"codes": json.dumps(header)}
    checkpoint.write_tensors(path, {**tensors, "labels": codes.labels}, metadata)


def read_codes(path: Path, tokenizer: Tokenizer) -> CodeSet:
    """Inverts `write_codes`. Raises ValueError for a damaged file and for another tokenizer's."""
    tensors, metadata = checkpoint.read_tensors(path)
    try:
        header = json.loads(metadata["codes"])
        stored = Tokenizer(
            header["digest"],
            tuple(header["codebook_sizes"]),
            tuple((height, width) for height, width in header["grids"]),
        )
        labels = tensors.pop("labels")
        indices = tuple(tensors[f"level{n + 1}"].long() for n in range(len(tensors)))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of codes: {error!r}") from None
    tokenizer.check(stored, str(path))
    return CodeSet(indices, labels, tuple(header["classes"]), stored)
