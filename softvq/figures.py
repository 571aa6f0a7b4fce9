"""The pictures of runs and experiments: curves, panels, reconstructions, the codebook atlas; PNG.

Only this module imports matplotlib; the numbers, the images and the file's name are the caller's.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from einops import rearrange, repeat
from jaxtyping import Float, Num
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

Records = Sequence[Mapping[str, Any]]  # the lines of one metrics.jsonl, one record an epoch
_DPI = 100
# Okabe and Ito 2008, without the yellow that vanishes on white
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = "osD^vPX"
_NAMES = {  # name and unit of what is logged
    "utilisation": ("codes in use", " [%]"),
    "perplexity": ("perplexity", " [codes]"),
    "bits_per_code": ("entropy of the codes", " [bits]"),
    "psnr": ("PSNR", " [dB]"),
    "ssim": ("SSIM", ""),
    "lpips": ("LPIPS", ""),
    "temperature_ratio": ("temperature / critical", ""),
}
_ATLAS_LIMIT = 1024
Series = tuple[Sequence[float], Sequence[Sequence[float]]]  # x, and the values of every seed there


class Panel(NamedTuple):
    """One system of axes for `panels`."""

    title: str
    x: str
    """Name and unit of the horizontal axis."""
    y: str
    """Name and unit of the vertical axis."""
    series: Mapping[str, Series]
    """Lines by label: the mean over the seeds, within a band from the lowest to the highest."""
    x_log: bool = False
    y_log: bool = False
    marks: Sequence[float] = ()
    """Where a dashed vertical line stands, such as a threshold that theory gives."""


def curves(
    runs: Mapping[str, Records | Sequence[Records]], keys: Sequence[str], path: str | os.PathLike
) -> Path:
    """One panel a key against `epoch`, one line a run; returns the path written.

    `runs` maps a label to the records of one run, or to a list of those, one per seed: the line is
    then the mean and the band spans the seeds, over the epochs that all of them have. Values that
    are missing or not finite leave a gap. Utilisation is a share, drawn as 0 to 100 %; temperatures
    have a log scale. Raises ValueError without keys or runs. The folder of `path` must exist.
    """
    if not runs or not keys:
        raise ValueError(f"curves need a run and a key, got {len(runs)} runs, {len(keys)} keys")
    columns = 2 if len(keys) == 4 else min(len(keys), 3)
    rows = math.ceil(len(keys) / columns)
    height = 2.9 * rows + 0.25 * math.ceil(len(runs) / columns) + 0.2
    figure = Figure(figsize=(max(4.2 * columns, 5), height), dpi=_DPI, layout="constrained")
    handles = {}
    for position, key in enumerate(keys, start=1):
        panel = figure.add_subplot(rows, columns, position)
        for number, (label, run) in enumerate(runs.items()):
            seeds: Any = [run] if run and isinstance(run[0], Mapping) else run
            line = _draw_run(panel, seeds, key, number)
            if line is not None:
                handles[label if len(seeds) == 1 else f"{label} ({len(seeds)} seeds)"] = line
        _finish_panel(panel, key)
    lines, labels = list(handles.values()), list(handles)
    figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False)
    return _write(figure, path)


def panels(contents: Sequence[Panel], path: str | os.PathLike) -> Path:
    """Panels side by side, three to a row, each with a legend of its own; returns the path written.

    Values that are not finite leave a gap. Raises ValueError for no panel, and for a seed whose
    values are not as many as the places on the horizontal axis. The folder of `path` must exist.
    """
    if not contents:
        raise ValueError("panels need at least one panel, got none")
    columns = min(len(contents), 3)
    rows = math.ceil(len(contents) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * rows), dpi=_DPI, layout="constrained")
    for position, content in enumerate(contents, start=1):
        axes = figure.add_subplot(rows, columns, position)
        for number, (label, (places, seeds)) in enumerate(content.series.items()):
            values = np.array(seeds, dtype=float)
            if values.shape != (len(seeds), len(places)) or not values.size:
                raise ValueError(
                    f"{label} needs {len(places)} values a seed, got shape {values.shape}"
                )
            colour = _COLOURS[number % len(_COLOURS)]
            style = f"{_MARKERS[number % len(_MARKERS)]}-" if len(places) <= 25 else "-"
            axes.fill_between(places, values.min(0), values.max(0), color=colour, alpha=0.2, lw=0)
            axes.plot(places, values.mean(0), style, color=colour, markersize=4, label=label)
        for place in content.marks:
            axes.axvline(place, color="0.4", linestyle="--", linewidth=1)
        axes.set_title(content.title, fontsize=11)
        axes.set(xlabel=content.x, ylabel=content.y)
        axes.set_xscale("log" if content.x_log else "linear")
        axes.set_yscale("log" if content.y_log else "linear")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return _write(figure, path)


def _draw_run(panel: Axes, seeds: Sequence[Records], key: str, number: int) -> Any:
    series = [{record["epoch"]: record[key] for record in seed if key in record} for seed in seeds]
    epochs = sorted(set.intersection(*(set(values) for values in series))) if series else []
    values = np.array([[values[epoch] for epoch in epochs] for values in series], dtype=float)
    values[~np.isfinite(values)] = np.nan  # which a None from JSON is already
    if np.isnan(values).all():
        return None
    values *= 100 if _parts(key)[1] == "utilisation" else 1
    colour = _COLOURS[number % len(_COLOURS)]
    style = _MARKERS[number % len(_MARKERS)] if len(epochs) <= 25 else ""
    style += ("-", "--", ":")[number // len(_COLOURS) % 3]
    panel.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
    return panel.plot(epochs, values.mean(0), style, color=colour, markersize=4)[0]


def _finish_panel(panel: Axes, key: str) -> None:
    split, stem, details = _parts(key)
    name, unit = _NAMES.get(stem, (stem.replace("_", " "), ""))
    panel.set_title(f"{split} {name}{details}{unit}".strip(), fontsize=11)
    panel.set_xlabel("epoch")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    if not panel.lines:
        panel.set(xticks=[], yticks=[])
        panel.text(0.5, 0.5, "no values", transform=panel.transAxes, ha="center", color="0.4")
    elif stem == "utilisation":
        panel.set_ylim(-2, 102)
    elif stem.startswith("temperature"):
        panel.set_yscale("log")


def _parts(key: str) -> tuple[str, str, str]:
    """("test", "psnr", ", hard, level 2") for "test/psnr_hard_level2"."""
    split, _, metric = key.rpartition("/")
    match = re.fullmatch(r"(.*?)(_soft|_hard)?(?:_level(\d+))?", metric)
    assert match is not None  # the first group takes anything
    stem, decoding, level = match.groups()
    details = f", {decoding[1:]}" if decoding else ""
    return split, stem, details + (f", level {level}" if level else "")


def reconstructions(rows: Mapping[str, Float[Tensor, "b c h w"]], path: str | os.PathLike) -> Path:
    """One row of images in [-1, 1] for each label, as original, soft, hard; returns the path.

    Pixels are enlarged by a whole factor; values outside the range are clipped. Raises ValueError
    for no rows, no images or other than 1 or 3 channels. The folder of `path` must exist.
    """
    if not rows:
        raise ValueError("reconstructions need a row of images, got none")
    for images in rows.values():
        _check_images(images)
    first = next(iter(rows.values()))
    scale = max(1, round(128 / first.shape[2]))
    tiles = np.concatenate([_pixels(x, scale) for x in rows.values()])
    left = 18 + 9 * max(map(len, rows))
    figure = _framed(_grid(tiles, columns=len(first), gap=4), left=left, right=8, top=8)
    width, height = figure.get_size_inches() * _DPI
    for number, name in enumerate(rows):
        middle = 8 + number * (tiles.shape[1] + 4) + tiles.shape[1] / 2
        position = ((left - 10) / width, 1 - middle / height)
        figure.text(*position, name, ha="right", va="center", fontsize=12)
    return _write(figure, path)


def samples(
    images: Float[Tensor, "b c h w"], columns: int, caption: str, path: str | os.PathLike
) -> Path:
    """Images in [-1, 1] row by row below a caption; returns the path written.

    Pixels are enlarged by a whole factor; values outside the range are clipped. Raises as
    `reconstructions` does, and for fewer than one column. The folder of `path` must exist.
    """
    _check_images(images)
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    scale = max(1, round(64 / images.shape[2]))
    picture = _grid(_pixels(images, scale), columns)
    # Room for the caption, at about 8 pixels a letter
    side = max(8, (8 * len(caption) - picture.shape[1]) // 2)
    figure = _framed(picture, left=side, right=side, top=36)
    figure.text(0.5, 1 - 9 / figure.bbox.height, caption, fontsize=11, ha="center", va="top")
    return _write(figure, path)


def atlas(
    decoded: Float[Tensor, "k c h w"], usage: Num[Tensor, " k"], path: str | os.PathLike
) -> Path:
    """Every code's image in [-1, 1], most used first, row by row; returns the path written.

    `usage` is how often each code was chosen, as argmax counts or shares; codes with 0 are crossed
    out. The title says so when only 1024 are shown. Raises as `reconstructions` does.
    """
    _check_images(decoded)
    k, _, h, w = decoded.shape
    share = usage.double().cpu() / max(usage.sum().item(), 1e-300)
    order = share.argsort(descending=True, stable=True)[:_ATLAS_LIMIT]
    columns = math.ceil(math.sqrt(len(order) * h / w))
    scale = max(1, min(128 // max(h, w), 960 // (columns * w)))
    tiles = _pixels(decoded[order.to(decoded.device)], scale)
    unused = share[order].numpy() == 0
    tiles[unused] = _crossed_out(tiles[unused])
    picture = _grid(tiles, columns)
    side = max(20, (640 - picture.shape[1]) // 2)
    figure = _framed(picture, left=side, right=side, top=64)
    limit = "" if len(order) == k else f"the {len(order):,} most used of "
    title = f"Codebook atlas: {limit}{k:,} {'code' if k == 1 else 'codes'}"
    figure.suptitle(title, fontsize=13, y=1 - 8 / figure.bbox.height, va="top")
    used = [100 * s for s in share[order].tolist() if s > 0]
    spread = f", {used[0]:.3g} % (top left) down to {used[-1]:.3g} % of the tokens" if used else ""
    caption = f"{int((share > 0).sum()):,} in use{spread}" + "; crossed out: unused" * any(unused)
    figure.text(0.5, 1 - 36 / figure.bbox.height, caption, fontsize=10, ha="center", va="top")
    return _write(figure, path)


def _check_images(images: Tensor) -> None:
    if 0 in images.shape or images.shape[1] not in (1, 3):
        raise ValueError(f"expected images of 1 or 3 channels, got shape {tuple(images.shape)}")


def _pixels(images: Tensor, scale: int) -> np.ndarray:
    levels = 127.5 * (images.detach().float().cpu().nan_to_num() + 1)
    tiles = levels.round().clamp(0, 255).byte().numpy()
    rgb = 3 // images.shape[1]
    return repeat(tiles, "b c h w -> b (h y) (w x) (rgb c)", y=scale, x=scale, rgb=rgb)


def _crossed_out(tiles: np.ndarray) -> np.ndarray:
    """Pale tiles with both diagonals in vermilion."""
    h, w = tiles.shape[1:3]
    y, x = (np.arange(h)[:, None] + 0.5) / h, (np.arange(w) + 0.5) / w
    cross = np.minimum(abs(y - x), abs(y + x - 1)) < max(0.5 / min(h, w), 0.03)
    return np.where(cross[..., None], np.array([213, 94, 0], np.uint8), tiles // 3 + np.uint8(170))


def _grid(tiles: np.ndarray, columns: int, gap: int = 2) -> np.ndarray:
    """Tiles `b h w 3` side by side, row by row, on white."""
    margins = [(0, -len(tiles) % columns), (0, gap), (0, gap), (0, 0)]
    tiles = np.pad(tiles, np.array(margins), constant_values=255)
    return rearrange(tiles, "(r s) h w c -> (r h) (s w) c", s=columns)[:-gap, :-gap]


def _framed(picture: np.ndarray, left: int, right: int, top: int) -> Figure:
    """The picture pixel for pixel, within a white frame for the text."""
    height, width = picture.shape[:2]
    size = ((left + width + right) / _DPI, (top + height + 8) / _DPI)
    figure = Figure(figsize=size, dpi=_DPI, facecolor="white")
    figure.figimage(picture, left, 8, origin="upper")
    return figure


def _write(figure: Figure, path: str | os.PathLike) -> Path:
    """Write beside the path and move: a reader sees the old file or the new one, never half."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            FigureCanvasAgg(figure).print_png(file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
