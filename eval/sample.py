"""Draws images from a trained prior, or completes images of which it is given the upper half:
`python -m eval.sample RUN --num 64 --class cat` writes a grid of them and an .npz.

How codes are drawn is in `softvq.prior.sampling`; how good the images are, in `eval.quality`.
"""

import io
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import tyro
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from tqdm import tqdm

from eval.reconstruct import load_run
from eval.report import check_out_file
from softvq import figures
from softvq.autoencoder import Autoencoder
from softvq.checkpoint import write_bytes
from softvq.data import DataConfig, ImageArray, load_files, load_images, to_float, to_uint8
from softvq.prior import CodePrior, SamplingConfig, sample
from softvq.prior.loading import load_prior, prior_folder
from softvq.prior.transformer import Grids
from softvq.program import find_device, parse_flags, run_program, stored_data

_AT_ONCE = 256  # images whose codes are drawn side by side
_GREY = 0.0  # what the half that is not given is shown as
_TRIPLES = 4  # completed images in a row of the grid


@dataclass(frozen=True, kw_only=True)
class DrawConfig(SamplingConfig):
    """A tokenizer, its prior, and how codes are drawn."""

    run: Annotated[str, tyro.conf.Positional]
    """Run folder of the tokenizer."""
    prior: str = ""
    """Folder of the prior; by default RUN/prior."""
    device: str = "auto"
    """cpu, cuda, or auto for cuda where there is one."""


@dataclass(frozen=True, kw_only=True)
class SampleConfig(DrawConfig):
    """Which images to draw or complete."""

    num: int = 64
    """Number of images."""
    class_: Annotated[tuple[str, ...], tyro.conf.arg(name="class")] = ()
    """Class of the images, or several, each of which gets as many; by default none is asked for."""
    seed: int = 0
    """Of the codes drawn."""
    complete: bool = False
    """Complete images from their upper half: those of the run's test split, or --images."""
    images: str = ""
    """Folder or zip whose first images by path are completed."""
    out: str = ""
    """Path without ending of the two files; by default RUN/samples, or RUN/completions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num < 1:
            raise ValueError(f"num must be at least 1, got {self.num}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2**32), got {self.seed}")
        if len(set(self.class_)) < len(self.class_):
            raise ValueError(f"class must be given once each, got {' '.join(self.class_)}")
        if self.class_ and self.num % len(self.class_):
            raise ValueError(
                f"num must be a multiple of the number of classes {len(self.class_)}, "
                f"got {self.num}"
            )
        if self.images and not self.complete:
            raise ValueError("images are completed: give --complete as well as --images")
        if self.out:
            check_out_file(Path(self.out))


class Generative(NamedTuple):
    """A tokenizer and the prior over its codes: together a model of images."""

    model: Autoencoder
    prior: CodePrior
    data: DataConfig
    """What the tokenizer was trained on."""


class Drawn(NamedTuple):
    """Codes and the images that they decode to."""

    indices: Grids
    pixels: UInt8[Tensor, "n c h w"]


def load_generative(config: DrawConfig) -> Generative:
    """Tokenizer and prior. Raises ValueError for a run or prior that cannot be used."""
    model = load_run(config.run, find_device(config.device))
    prior = load_prior(config.run, model, config.prior)
    data = stored_data(config.run)
    assert data is not None  # load_prior refuses a run that does not say
    return Generative(model, prior, data)


def class_labels(prior: CodePrior, names: Sequence[str]) -> Int[Tensor, "n"]:
    """The prior's labels of class names, -1 for an empty one.

    Raises ValueError for a name that the prior was not trained on.
    """
    classes = prior.config.classes
    for name in names:
        if name and name not in classes:
            known = ", ".join(classes) or "none: the prior was trained without classes"
            raise ValueError(f"class must be among {known}; got {name!r}")
    return torch.tensor([classes.index(name) if name else -1 for name in names])


@torch.no_grad()
def draw(
    generative: Generative,
    labels: Int[Tensor, "n"],
    config: SamplingConfig,
    seed: int,
    given: Grids | None = None,
) -> Drawn:
    """An image for each label; `given` has codes that are kept and -1 where one is drawn.

    The same seed and labels give the same images.
    """
    model, prior, data = generative
    device = prior.position.device
    generator = torch.Generator(device).manual_seed(seed)
    size, codes, pixels = data.image_size, [], []
    total = len(labels) * sum(prior.config.lengths)
    with tqdm(total=total, desc="codes", unit="codes", unit_scale=True, leave=False) as bar:
        for start in range(0, len(labels), _AT_ONCE):
            part = labels[start : start + _AT_ONCE].to(device)
            kept = None
            if given is not None:
                kept = tuple(grid[start : start + _AT_ONCE] for grid in given)
            count = len(part)

            def progress(count: int = count) -> None:
                bar.update(count)

            indices = sample(prior, count, config, part, kept, generator, progress=progress)
            images = model.decode_indices(indices)[:, :, :size, :size]
            codes.append(tuple(grid.cpu() for grid in indices))
            pixels.append(to_uint8(images).cpu())
    return Drawn(tuple(map(torch.cat, zip(*codes, strict=True))), torch.cat(pixels))


@torch.no_grad()
def upper_half_codes(model: Autoencoder, x: Float[Tensor, "b c h w"]) -> Grids:
    """The codes of the upper half of each level's grid, -1 below, from the upper h // 2 rows alone.

    The encoder sees their mirror image in place of the rest: codes near the middle look further
    down than they stand, and would tell of what is to be found. Raises ValueError for a grid of
    one row.
    """
    half = x.shape[2] // 2
    rows = [row if row < half else max(2 * half - 1 - row, 0) for row in range(x.shape[2])]
    grids = []
    for level in model.encode(x[:, :, rows]):
        height = level.indices.shape[1]
        if height < 2:
            raise ValueError(f"a grid of {height} row of codes has no upper half")
        lower = torch.arange(height, device=x.device) >= height // 2
        grids.append(level.indices.masked_fill(rearrange(lower, "h -> 1 h 1"), -1))
    return tuple(grids)


def sample_images(config: SampleConfig) -> dict[str, Any]:
    """Draws or completes images, writes both files and returns what to print.

    Raises ValueError for what a user can mend.
    """
    generative = load_generative(config)
    classes = config.class_ or ("",)
    names = [name for name in classes for _ in range(config.num // len(classes))]
    labels = class_labels(generative.prior, names)
    originals = _originals(config, generative.data) if config.complete else None
    given = None
    if originals is not None:
        device = generative.prior.position.device
        given = upper_half_codes(generative.model, to_float(originals.pixels.to(device)))
    started = time.perf_counter()
    drawn = draw(generative, labels, config, config.seed, given)
    seconds = time.perf_counter() - started
    stem = config.out or str(Path(config.run) / ("samples" if originals is None else "completions"))
    arrays = {
        "images": rearrange(drawn.pixels, "b c h w -> b h w c").numpy(),
        "labels": labels.numpy(),
        "classes": np.array(generative.prior.config.classes, dtype=str),
        **{f"codes_level{n + 1}": grid.numpy() for n, grid in enumerate(drawn.indices)},
    }
    if originals is None:
        grid = _sample_grid(drawn, config, Path(f"{stem}.png"))
    else:
        arrays["originals"] = rearrange(originals.pixels, "b c h w -> b h w c").numpy()
        grid = _completion_grid(drawn, originals, Path(f"{stem}.png"))
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_bytes(Path(f"{stem}.npz"), content.getvalue())
    codes = sum(grid.numel() for grid in drawn.indices)
    return {
        "run": config.run,
        "prior": str(prior_folder(config.run, config.prior)),
        "completed": None if originals is None else originals.description,
        "images": config.num,
        "classes": list(config.class_),
        "seed": config.seed,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "codes": codes,
        "seconds": seconds,
        "grid": str(grid),
        "arrays": f"{stem}.npz",
    }


def _originals(config: SampleConfig, data: DataConfig) -> ImageArray:
    """The images to complete, in memory."""
    if config.images:
        return load_files(config.images, config.num, data.image_size)
    images = load_images(replace(data, test_images=config.num), "test")
    (pixels,) = images.batches(torch.arange(config.num), config.num)
    return ImageArray(pixels, images.description, images.labels)


def _sample_grid(drawn: Drawn, config: SampleConfig, path: Path) -> Path:
    images = to_float(drawn.pixels)
    if len(config.class_) > 1:
        parts = images.chunk(len(config.class_))
        return figures.reconstructions(dict(zip(config.class_, parts, strict=True)), path)
    columns = math.ceil(math.sqrt(config.num))
    name = config.class_[0] if config.class_ else "no class"
    caption = f"{name}, temperature {config.temperature:g}"
    return figures.samples(images, columns, caption, path)


def _completion_grid(drawn: Drawn, originals: ImageArray, path: Path) -> Path:
    whole = to_float(originals.pixels)
    lower = torch.arange(whole.shape[2]) >= whole.shape[2] // 2
    given = whole.masked_fill(rearrange(lower, "h -> h 1"), _GREY)
    triples = torch.stack([given, to_float(drawn.pixels), whole], 1)
    columns = 3 * min(_TRIPLES, len(whole))
    images = rearrange(triples, "b three c h w -> (b three) c h w")
    return figures.samples(images, columns, "each: given, completed, original", path)


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""

    def action() -> dict[str, Any]:
        return sample_images(
            parse_flags(lambda: tyro.cli(SampleConfig, args=arguments, description=__doc__))
        )

    return run_program(action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
