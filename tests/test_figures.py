"""The pictures, read back as pixels."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from softvq.figures import atlas, curves, reconstructions, samples

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
BLUE_LINE, VERMILION_LINE = (0, 114, 178), (213, 94, 0)


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB")).copy()


def centres(picture: np.ndarray, colour: tuple[int, int, int]) -> tuple[float, float]:
    """Mean row and column of the pixels of one colour, nan where there are none."""
    found = np.argwhere((picture == colour).all(-1))
    return tuple(found.mean(0)) if len(found) else (math.nan, math.nan)


def rows(*images: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(("original", "soft", "hard", "no level 1"), images, strict=False))


def count(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((picture == colour).all(-1).sum())


def plain(*colours: tuple[int, int, int], side: int = 4) -> torch.Tensor:
    values = torch.tensor(colours, dtype=torch.float32) / 127.5 - 1
    return values[:, :, None, None].expand(-1, -1, side, side)


def records(values: list[float | None], key: str = "test/psnr_hard") -> list[dict]:
    return [{"epoch": epoch, key: value} for epoch, value in enumerate(values, start=1)]


def test_reconstructions_are_rows_of_enlarged_originals_soft_and_hard(tmp_path):
    path = reconstructions(
        rows(plain(RED, RED), plain(GREEN, RED), plain(BLUE, BLUE)), tmp_path / "r.png"
    )
    assert path == tmp_path / "r.png"
    picture = pixels(path)
    assert (
        centres(picture, RED)[0] < centres(picture, GREEN)[0] < centres(picture, BLUE)[0]
    )  # top to bottom
    assert centres(picture, GREEN)[1] < centres(picture, RED)[1]  # left to right
    tile = 128**2
    assert [count(picture, c) for c in (RED, GREEN, BLUE)] == [3 * tile, tile, 2 * tile]


def test_reconstructions_are_not_smoothed_and_clip_to_the_range(tmp_path):
    image = torch.full((1, 1, 2, 2), -3.0)
    image[0, 0, 0, 1] = 0.0
    image[0, 0, 1, 0] = float("nan")
    picture = pixels(reconstructions(rows(image, image, image), tmp_path / "r.png"))
    tile = picture[8 : 8 + 128, 90 : 90 + 128]  # 18 + 9 letters of "original"
    assert np.unique(tile).tolist() == [0, 128]
    assert (tile[:64, 64:] == 128).all()
    assert (tile[64:, :64] == 128).all()
    assert (tile[:64, :64] == 0).all()


def test_reconstructions_name_their_rows(tmp_path):
    named = rows(*4 * [plain(RED)])
    picture = pixels(reconstructions(named, tmp_path / "r.png"))
    left = np.argwhere((picture == RED).all(-1))[:, 1].min()
    assert left >= 9 * len("original")
    dark = np.argwhere((picture[:, : left - 2] < 128).all(-1))[:, 0]
    assert {int(row) // 132 for row in dark - 8} == {0, 1, 2, 3}


def test_a_picture_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="need a row"):
        reconstructions({}, tmp_path / "r.png")


@pytest.mark.parametrize(
    ("key", "title"),
    [
        ("test/psnr_hard", "test PSNR, hard [dB]"),
        ("test/psnr_hard_level2", "test PSNR, hard, level 2 [dB]"),
        ("train/utilisation_level1", "train codes in use, level 1 [%]"),
        ("test/distinct_codes", "test distinct codes"),
        ("loss", "loss"),
    ],
)
def test_panels_name_split_measure_decoding_and_level(tmp_path, monkeypatch, key, title):
    titles = []
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **_: titles.append(text))
    curves({"run": records([0.5, 0.25], key)}, [key], tmp_path / "c.png")
    assert titles == [title]


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 2, 4, 4), (1, 3, 0, 4)])
def test_what_is_no_picture_is_refused(shape, tmp_path):
    images = torch.zeros(shape)
    with pytest.raises(ValueError, match="expected images of 1 or 3 channels"):
        reconstructions(rows(images, images, images), tmp_path / "r.png")
    with pytest.raises(ValueError, match="expected images of 1 or 3 channels"):
        atlas(images, torch.ones(len(images)), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("usage", [torch.tensor([1, 7, 2]), torch.tensor([0.1, 0.7, 0.2])])
def test_the_atlas_is_sorted_by_usage(usage, tmp_path):
    picture = pixels(atlas(plain(RED, GREEN, BLUE), usage, tmp_path / "a.png"))
    (green, blue, red) = (centres(picture, colour) for colour in (GREEN, BLUE, RED))
    assert green[0] == blue[0] < red[0]  # two rows
    assert green[1] == red[1] < blue[1]
    assert count(picture, GREEN) == 128**2


def test_unused_codes_are_pale_and_crossed_out(tmp_path):
    used = pixels(atlas(plain(RED, BLUE), torch.tensor([5, 1]), tmp_path / "a.png"))
    picture = pixels(atlas(plain(RED, BLUE), torch.tensor([5, 0]), tmp_path / "a.png"))
    assert (count(used, BLUE), count(used, VERMILION_LINE)) == (128**2, 0)
    assert count(picture, BLUE) == 0
    assert count(picture, RED) == 128**2
    assert count(picture, VERMILION_LINE) > 500
    assert centres(picture, VERMILION_LINE)[1] > centres(picture, RED)[1]


@pytest.mark.parametrize(("size", "shown"), [(1, 1), (2, 2), (512, 512), (4096, 1024)])
def test_the_atlas_shows_at_most_1024_codes(size, shown, tmp_path):
    usage = torch.zeros(size) if size == 1 else torch.arange(1, size + 1)
    colours = [(10, 20, 30)] * (size - shown) + [RED] * shown  # the rarest first
    path = atlas(plain(*colours), usage, tmp_path / "a.png")
    picture = pixels(path)
    side = {1: 128, 2: 128, 512: 40, 1024: 28}[shown]
    # the one code of K = 1 is unused here: pale red, less its cross
    colour = (255, 170, 170) if size == 1 else RED
    assert count(picture, (10, 20, 30)) == 0
    assert count(picture, colour) == shown * side**2 - count(picture, VERMILION_LINE)
    assert picture.shape[1] <= 1100


def test_a_wide_tile_fits(tmp_path):
    wide = plain(RED).expand(1, 3, 4, 4).repeat(1, 1, 1, 16)
    picture = pixels(atlas(wide, torch.tensor([9]), tmp_path / "a.png"))
    assert count(picture, RED) == 128 * 8


def test_curves_draw_one_line_a_run_over_the_epochs(tmp_path):
    runs = {"low": records([1.0, 1.0, 1.0]), "high": records([2.0, 2.0, 2.0])}
    picture = pixels(curves(runs, ["test/psnr_hard"], tmp_path / "c.png"))
    panel = picture[: int(0.75 * len(picture))]
    low, high = centres(panel, BLUE_LINE), centres(panel, VERMILION_LINE)
    assert high[0] < low[0] - 50
    assert abs(high[1] - low[1]) < 2


def test_a_run_without_a_key_has_no_line_and_a_panel_may_be_empty(tmp_path):
    runs = {"ddcl": records([0.3, 0.1], "train/temperature_ratio"), "ema": records([20.0, 21.0])}
    seen = {}
    for key in ("train/temperature_ratio", "test/psnr_hard", "test/lpips"):
        picture = pixels(curves(runs, [key], tmp_path / "c.png"))
        seen[key] = [count(picture, colour) > 0 for colour in (BLUE_LINE, VERMILION_LINE)]
    assert list(seen.values()) == [[True, False], [False, True], [False, False]]
    together = pixels(curves(runs, list(seen), tmp_path / "c.png"))
    assert count(together, BLUE_LINE) > 0
    assert count(together, VERMILION_LINE) > 0
    assert centres(together, BLUE_LINE)[1] < centres(together, VERMILION_LINE)[1]


def test_seeds_are_a_mean_with_a_band_over_the_epochs_all_have(tmp_path):
    one = {"a": records([2.0, 2.0, 2.0])}
    three = {"a": [records([1.0, 1.0, 1.0]), records([3.0, 3.0, 3.0]), records([2.0, 2.0])]}
    pale = np.array([204, 227, 240])  # a fifth of the blue, on white
    single, banded = (
        (abs(pixels(curves(runs, ["test/psnr_hard"], tmp_path / "c.png")) - pale) <= 2).all(-1)
        for runs in (one, three)
    )
    assert single.sum() < 100
    assert banded.sum() > 5000
    picture = pixels(tmp_path / "c.png")
    line = (picture[: int(0.85 * len(picture))] == BLUE_LINE).all(-1)
    spans = [np.argwhere(found)[:, 1] for found in (banded, line)]
    assert abs(spans[0].min() - spans[1].min()) < 10
    assert abs(spans[0].max() - spans[1].max()) < 10
    rows = [np.argwhere(found)[:, 0] for found in (banded, line)]
    assert rows[0].mean() == pytest.approx(rows[1].mean(), abs=10)


def test_utilisation_is_drawn_in_percent_from_0_to_100(tmp_path):
    heights = []
    for value in (0.0, 0.5, 1.0):
        runs = {"a": records([value, value], "test/utilisation")}
        picture = pixels(curves(runs, ["test/utilisation"], tmp_path / "c.png"))
        heights.append(centres(picture[: int(0.85 * len(picture))], BLUE_LINE)[0])
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=1.5)
    assert heights[0] - heights[2] > 180


def test_missing_and_infinite_values_leave_a_gap(tmp_path):
    values = [1.0, None, float("inf"), float("nan"), 1.0]
    whole = pixels(curves({"a": records([1.0] * 5)}, ["test/psnr_hard"], tmp_path / "c.png"))
    gap = pixels(curves({"a": records(values)}, ["test/psnr_hard"], tmp_path / "c.png"))
    assert 0 < count(gap, BLUE_LINE) < 0.7 * count(whole, BLUE_LINE)
    nothing = pixels(
        curves({"a": records([None]), "b": []}, ["test/psnr_hard"], tmp_path / "c.png")
    )
    assert count(nothing, BLUE_LINE) == 0


def test_curves_of_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got 0 runs, 1 keys"):
        curves({}, ["test/mse"], tmp_path / "c.png")
    with pytest.raises(ValueError, match="got 1 runs, 0 keys"):
        curves({"a": records([1.0])}, [], tmp_path / "c.png")


def test_writing_replaces_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    atlas(plain(RED), torch.ones(1), str(path))
    assert count(pixels(path), RED) > 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    def half(self, file, **options):
        file.write(b"half")
        raise OSError("no space left on device")

    path = tmp_path / "a.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(FigureCanvasAgg, "print_png", half)
    with pytest.raises(OSError, match="no space left"):
        atlas(plain(RED), torch.ones(1), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_samples_stand_row_by_row_below_their_caption(tmp_path):
    images = plain(RED, GREEN, BLUE)
    picture = pixels(samples(images, 2, "three", tmp_path / "s.png"))
    assert [count(picture, colour) for colour in (RED, GREEN, BLUE)] == [64 * 64] * 3
    red, green, blue = (centres(picture, colour) for colour in (RED, GREEN, BLUE))
    assert red[0] == green[0]
    assert red[1] == blue[1]
    assert green[1] - red[1] == blue[0] - red[0] == 66
    with pytest.raises(ValueError, match="columns must be at least 1, got 0"):
        samples(images, 0, "three", tmp_path / "s.png")
