import io
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from softvq import data
from softvq.data import DataConfig, ImageArray, ImageStream, load_images, to_float, to_uint8

# A machine with one core is warned about two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

RAMP = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
RAMP_LEVELS = np.arange(256, dtype=np.uint8).reshape(16, 16)


def encode(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(seed, size=16):
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def raw_png(pixels, depth, color, *chunks):
    """A PNG of kinds that Pillow reads but does not write."""

    def chunk(name, body):
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.astype(f">u{depth // 8}").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    body = [chunk(b"IHDR", header), *(chunk(*c) for c in chunks)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        [*body, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    )


def raw_tiff(pixels, sample_format, photometric):
    """A grey TIFF: sample format 1 unsigned, 2 signed, 3 float; photometric 0: white is 0."""
    height, width = pixels.shape
    body = pixels.tobytes()
    tags = [(256, width), (257, height), (258, pixels.itemsize * 8), (259, 1), (262, photometric)]
    tags += [(273, 8), (277, 1), (278, height), (279, len(body)), (339, sample_format)]
    directory = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    start = struct.pack("<I", 8 + len(body))
    return b"II*\0" + start + body + struct.pack("<H", len(tags)) + directory + bytes(4)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_zip(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def pngs(count, folder="", size=16):
    return {f"{folder}{i:03d}.png": encode(noise(i, size)) for i in range(count)}


def load(source, split="train", image_size=16, workers=0, **options):
    config = DataConfig(source=str(source), image_size=image_size, workers=workers, **options)
    return load_images(config, split)


def everything(images, batch_size=64):
    return torch.cat(list(images.batches(torch.arange(len(images)), batch_size)))


def as_set(pixels):
    return {image.numpy().tobytes() for image in pixels}


def decoded(tmp_path, name, content, image_size=16):
    """The pixels h w c of one file, loaded as the only training image."""
    files = {f"train/{name}": content, "test/other.png": encode(noise(0))}
    (pixels,) = everything(load(write(tmp_path, files), image_size=image_size))
    return pixels.permute(1, 2, 0).numpy()


def grey(levels):
    return np.repeat(np.asarray(levels, dtype=np.uint8)[..., None], 3, axis=-1)


# Values


def test_levels_survive_the_round_trip_through_floats():
    levels = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    floats = to_float(levels)
    assert floats.dtype == torch.float32
    assert (floats.min().item(), floats.max().item()) == (-1, 1)
    assert torch.equal(to_uint8(floats), levels)
    assert torch.equal(to_uint8(floats.double()), levels)


def test_floats_outside_the_range_are_clamped_and_others_rounded():
    floats = torch.tensor([-3.0, 3.0, 0.0039, -0.0039]).reshape(1, 1, 2, 2)
    assert to_uint8(floats).flatten().tolist() == [0, 255, 128, 127]


@pytest.mark.parametrize(
    ("name", "content", "right"),
    [
        ("grey.png", encode(Image.fromarray(RAMP_LEVELS)), grey(RAMP_LEVELS)),
        ("bits.png", encode(Image.fromarray(RAMP_LEVELS > 99)), grey((RAMP_LEVELS > 99) * 255)),
        ("grey16.png", encode(Image.fromarray(RAMP)), grey(RAMP_LEVELS)),
        ("grey16.tif", encode(Image.fromarray(RAMP), "TIFF"), grey(RAMP_LEVELS)),
        ("big.tiff", encode(Image.fromarray(RAMP.astype(">u2")), "TIFF"), grey(RAMP_LEVELS)),
        ("g.pgm", b"P5 16 16 65535\n" + RAMP.astype(">u2").tobytes(), grey(RAMP_LEVELS)),
        ("int.tif", encode(Image.fromarray(RAMP.astype(np.int32)), "TIFF"), grey(RAMP_LEVELS)),
        ("float.tif", raw_tiff((RAMP / 65535).astype("<f4"), 3, 1), grey(RAMP_LEVELS)),
        ("rgb16.png", raw_png(np.stack([RAMP] * 3, axis=-1), 16, 2), grey(RAMP_LEVELS)),
        ("white8.tif", raw_tiff(RAMP_LEVELS, 1, 0), grey(255 - RAMP_LEVELS)),
        ("white16.tif", raw_tiff(RAMP, 1, 0), grey(255 - RAMP_LEVELS)),
        ("white.tif", raw_tiff((RAMP / 65535).astype("<f4"), 3, 0), grey(255 - RAMP_LEVELS)),
        ("100.png", encode(Image.fromarray(np.full_like(RAMP, 100))), grey(np.zeros((16, 16)))),
        (
            "32768.PNG",
            encode(Image.fromarray(np.full_like(RAMP, 32768))),
            grey(np.full((16, 16), 128)),
        ),
        (
            "cmyk.tif",
            encode(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "TIFF"),
            np.tile(np.uint8([0, 255, 255]), (16, 16, 1)),
        ),
    ],
)
def test_every_kind_of_pixel_has_its_right_level(tmp_path, name, content, right):
    np.testing.assert_array_equal(decoded(tmp_path, name, content), right)


@pytest.mark.parametrize("level", [100, 257, 32767, 32768, 65535])
def test_grey_and_rgb_of_16_bits_agree_within_one_level(tmp_path, level):
    alone = decoded(tmp_path, "a.png", encode(Image.fromarray(np.full_like(RAMP, level))))
    rgb = decoded(tmp_path, "a.png", raw_png(np.full((16, 16, 3), level), 16, 2))
    assert np.abs(alone.astype(int) - rgb).max() <= 1


def transparent(mode):
    """The left half opaque with level 40, the right half fully transparent."""
    alpha = np.zeros((16, 16), dtype=np.uint8)
    alpha[:, :8] = 255
    image = Image.merge("LA", [Image.new("L", (16, 16), 40), Image.fromarray(alpha)])
    return image.convert(mode)


def palette_png():
    index = np.zeros((16, 16), dtype=np.uint8)
    index[:, 8:] = 1
    chunks = [(b"PLTE", bytes([40] * 6)), (b"tRNS", bytes([255, 0]))]
    return raw_png(index, 8, 3, *chunks)


@pytest.mark.parametrize(
    "content",
    [
        encode(transparent("LA")),
        encode(transparent("RGBA")),
        palette_png(),
        raw_png(np.where(np.arange(16) < 8, 40, 7)[None].repeat(16, 0), 8, 0, (b"tRNS", b"\0\x07")),
    ],
    ids=["grey+alpha", "rgba", "palette", "grey with a key"],
)
def test_transparency_is_laid_over_white(tmp_path, content):
    pixels = decoded(tmp_path, "a.png", content)
    assert (pixels[:, :8] == 40).all()
    assert (pixels[:, 8:] == 255).all()


def test_half_transparency_is_mixed_with_white(tmp_path):
    pixels = decoded(tmp_path, "a.png", encode(Image.new("RGBA", (16, 16), (0, 0, 200, 102))))
    assert pixels[0, 0].tolist() == [153, 153, 233]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.tif", raw_tiff(np.full((16, 16), 1.5, "<f4"), 3, 1), "must lie in 0..1"),
        ("a.tif", raw_tiff(np.full((16, 16), -0.1, "<f4"), 3, 1), "must lie in 0..1"),
        ("a.tif", raw_tiff(np.full((16, 16), np.nan, "<f4"), 3, 1), "must lie in 0..1"),
        ("a.tif", raw_tiff(np.full((16, 16), 65536, "<i4"), 2, 1), "must lie in 0..65535"),
        ("a.tif", raw_tiff(np.full((16, 16), -1, "<i2"), 2, 1), "must lie in 0..65535"),
        ("a.tif", raw_tiff(np.full((16, 16), 2**31, "<u4"), 1, 1), "must lie in 0..65535"),
        ("a.png", raw_png(RAMP, 16, 0, (b"tRNS", b"\1\1")), "transparency in 16-bit grey"),
        (
            "a.png",
            raw_png(np.zeros((16, 16, 3)), 16, 2, (b"tRNS", b"\1\1" * 3)),
            "transparent colour of 16 bits",
        ),
    ],
)
def test_pixels_without_a_known_scale_are_refused_by_file_name(tmp_path, name, content, reason):
    with pytest.raises(ValueError, match=rf"1 of 1 images cannot be used.*train/{name}.*{reason}"):
        decoded(tmp_path, name, content)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_exif_orientation_is_applied_once(tmp_path, format):
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    pixels[:8] = 255  # white above black; turned by a quarter the white is on the right
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"lossless": True} if format == "WEBP" else {}
    content = encode(Image.fromarray(pixels), format, exif=exif, **options)
    turned = decoded(tmp_path, f"a.{format.lower()}", content)
    np.testing.assert_array_equal(turned, np.rot90(pixels, -1))


def test_an_animation_gives_its_first_frame(tmp_path):
    frames = [Image.new("L", (16, 16), level) for level in (30, 200)]
    content = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decoded(tmp_path, "a.gif", content) == 30).all()


def test_a_picture_of_absurd_size_is_refused_by_name(tmp_path, monkeypatch):
    for limit in (200, 100):  # Pillow only warns up to twice its limit, and raises above
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(ValueError, match=r"train/a\.png .*decompression bomb"):
            decoded(tmp_path, "a.png", encode(noise(1)))


def test_images_of_the_right_size_are_untouched(tmp_path):
    np.testing.assert_array_equal(
        decoded(tmp_path, "a.png", encode(noise(1))), np.asarray(noise(1))
    )


def test_others_are_resized_by_their_shorter_side_and_cropped_in_the_centre(tmp_path):
    pixels = np.zeros((32, 96, 3), dtype=np.uint8)
    pixels[:, 32:64] = 200
    inner = decoded(tmp_path, "a.png", encode(Image.fromarray(pixels)))[:, 2:-2]
    assert (inner == 200).all()
    tall = decoded(tmp_path, "a.png", encode(Image.new("RGB", (1, 300), (1, 2, 3))))
    assert (tall == [1, 2, 3]).all()


def test_shrinking_is_antialiased(tmp_path):
    board = (np.indices((128, 128)).sum(0) % 2 * 255).astype(np.uint8)
    pixels = decoded(tmp_path, "a.png", encode(Image.fromarray(board)))[2:-2, 2:-2]
    assert np.abs(pixels.astype(int) - 127).max() <= 2


# Damaged files


def damaged():
    jpeg = encode(noise(1, 64), "JPEG")
    png = encode(noise(1, 64))
    return {
        "cut.jpg": jpeg[: len(jpeg) * 6 // 10],
        "cut.png": png[: len(png) * 6 // 10],
        "empty.png": b"",
        "text.png": b"not an image\n",
        "zeros.jpg": jpeg[: len(jpeg) * 6 // 10] + bytes(len(jpeg) * 4 // 10),
    }


@pytest.mark.parametrize("memory_mib", [4096, 0], ids=["memory", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_files_are_all_named_before_anything_is_used(
    tmp_path, monkeypatch, workers, memory_mib
):
    monkeypatch.setattr(data, "CHUNK", 4)
    files = {**pngs(10, "train/good/"), **pngs(2, "test/")}
    files |= {f"train/bad/{name}": content for name, content in damaged().items()}
    with pytest.raises(ValueError, match="5 of 15 images cannot be used") as caught:
        load(write(tmp_path, files), workers=workers, memory_mib=memory_mib)
    message = str(caught.value)
    positions = [message.index(f"train/bad/{name}") for name in sorted(damaged())]
    assert positions == sorted(positions)
    assert "good" not in message
    assert "0x" not in message
    assert len(load(tmp_path, "test", workers=workers, memory_mib=memory_mib)) == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_of_damaged_files_alone_is_refused_with_ten_names(tmp_path, workers):
    files = {f"{i:02d}.png": b"" for i in range(40)}
    with pytest.raises(ValueError, match="36 of 36 images cannot be used") as caught:
        load(write(tmp_path, files), workers=workers)
    assert str(caught.value).count(".png") == 10
    assert str(caught.value).endswith("; ...")


def test_a_file_that_goes_bad_later_is_named_and_yields_no_pixels(tmp_path):
    images = load(write(tmp_path, pngs(20)), memory_mib=0)
    name = images.pictures.names[3]
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"1 of 18 .*{name} \(empty file\)"):
        list(images.batches(torch.arange(18), 4))


def test_a_jpeg_with_a_thumbnail_and_bytes_after_its_end_is_whole(tmp_path):
    exif = Image.Exif()
    exif[0x9286] = encode(noise(2), "JPEG")
    content = encode(noise(1), "JPEG", exif=exif)
    assert decoded(tmp_path, "a.jpg", content + b"more").shape == (16, 16, 3)
    with pytest.raises(ValueError, match="no end"):
        decoded(tmp_path, "a.jpg", content[:-100] + bytes(100))


# Batches


@pytest.mark.parametrize("memory_mib", [4096, 0], ids=["memory", "stream"])
def test_batches_follow_the_order_and_miss_nothing(tmp_path, memory_mib):
    files = {**pngs(65, "train/", size=8), **pngs(1, "test/", size=8)}
    images = load(write(tmp_path, files), image_size=8, memory_mib=memory_mib)
    assert len(images) == 65
    assert images.image_shape == (3, 8, 8)
    pixels = everything(images)
    assert len(as_set(pixels)) == 65

    order = torch.randperm(65, generator=torch.Generator().manual_seed(0))
    batches = list(images.batches(order, 64))
    assert [len(batch) for batch in batches] == [64, 1]
    assert {(batch.dtype, batch.is_contiguous()) for batch in batches} == {(torch.uint8, True)}
    assert torch.equal(torch.cat(batches), pixels[order])
    assert torch.equal(torch.cat(list(images.batches(order[:3], 1))), pixels[order[:3]])
    assert list(images.batches(order[:0], 4)) == []


def test_a_set_smaller_than_a_batch_gives_one_small_batch(tmp_path):
    images = load(write(tmp_path, pngs(5)))
    (batch,) = images.batches(torch.arange(len(images)), 64)
    assert batch.shape == (4, 3, 16, 16)
    assert len(load(tmp_path, "test")) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_streamed_pixels_equal_those_in_memory(tmp_path, monkeypatch, packed, workers):
    monkeypatch.setattr(data, "CHUNK", 8)
    files = pngs(40, size=24)
    source = write_zip(tmp_path / "a.zip", files) if packed else write(tmp_path, files)
    held = load(source, workers=workers)
    streamed = load(source, workers=workers, memory_mib=0)
    assert isinstance(held, ImageArray)
    assert isinstance(streamed, ImageStream)
    assert len(streamed) == len(held) == 36
    assert streamed.image_shape == held.image_shape
    assert torch.equal(held.pixels, load(source).pixels)
    order = torch.randperm(36, generator=torch.Generator().manual_seed(0))
    pairs = zip(streamed.batches(order, 5), held.batches(order, 5), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


def test_two_walks_through_one_zip_do_not_disturb_each_other(tmp_path):
    source = write_zip(tmp_path / "a.zip", pngs(40))
    images = load(source, workers=2, memory_mib=0)
    order = torch.arange(36)
    walks = zip(images.batches(order, 4), images.batches(order, 4), strict=True)
    assert all(torch.equal(left, right) for left, right in walks)


def test_a_stream_can_be_sent_to_another_process(tmp_path):
    images = load(write_zip(tmp_path / "a.zip", pngs(10)), memory_mib=0)
    assert torch.equal(everything(pickle.loads(pickle.dumps(images))), everything(images))


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_and_streaming_draw_no_global_random_numbers(tmp_path, workers):
    write(tmp_path, pngs(5))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    everything(load(tmp_path, workers=workers, memory_mib=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_split_is_streamed_only_above_the_memory_limit(tmp_path):
    write(tmp_path, {**pngs(4, "train/"), **pngs(5, "test/")})
    assert 4 * 3 * 295**2 < 2**20 < 5 * 3 * 295**2
    assert isinstance(load(tmp_path, "train", image_size=295, memory_mib=1), ImageArray)
    assert isinstance(load(tmp_path, "test", image_size=295, memory_mib=1), ImageStream)


# Splits


def test_a_folder_and_its_zip_give_the_same_splits(tmp_path):
    files = {**pngs(9, "cat/"), **pngs(12, "dog/old/", size=18)}
    folder = write(tmp_path / "set", files)
    flat = write_zip(tmp_path / "flat.zip", files)
    wrapped = write_zip(tmp_path / "w.zip", {f"set/{name}": c for name, c in files.items()})
    for split, count in (("train", 19), ("test", 2)):
        expected = load(folder, split).pixels
        assert len(expected) == count
        assert torch.equal(load(flat, split).pixels, expected)
        assert torch.equal(load(wrapped, split).pixels, expected)


def test_own_folders_are_the_split_at_the_top_and_inside_a_wrapper(tmp_path):
    files = {**pngs(3, "train/a/"), **pngs(2, "test/a/", size=18), **pngs(4, "extra/", size=20)}
    for source in (
        write(tmp_path / "x", files),
        write(tmp_path / "y", {f"wrap/{name}": content for name, content in files.items()}),
        write_zip(tmp_path / "z.zip", {f"wrap/{name}": c for name, c in files.items()}),
    ):
        assert as_set(load(source).pixels) == {
            np.asarray(noise(i)).transpose(2, 0, 1).tobytes() for i in range(3)
        }
        assert len(load(source, "test")) == 2
        assert "split by its folders" in load(source, "test").description


def test_train_without_test_is_split_by_the_rule(tmp_path):
    plain = load(write(tmp_path / "plain", pngs(20)), "test")
    below = load(write(tmp_path / "below", pngs(20, "train/")), "test")
    assert len(plain) == len(below) == 2
    assert "split by hash of the path" in below.description


def test_a_class_of_the_name_train_is_not_taken_for_the_split(tmp_path):
    files = {**pngs(10, "train/"), **pngs(10, "car/", size=18)}
    assert len(load(write(tmp_path, files))) == 18


def test_splits_are_disjoint_and_a_new_file_moves_at_most_one(tmp_path):
    write(tmp_path, pngs(50))
    train, test = as_set(load(tmp_path).pixels), as_set(load(tmp_path, "test").pixels)
    assert (len(train), len(test), len(train & test)) == (45, 5, 0)
    for i in range(50, 60):
        write(tmp_path, {f"{i:03d}.png": encode(noise(i))})
        new_test = as_set(load(tmp_path, "test").pixels)
        assert len(test - new_test) <= 1
        assert len((new_test - test) & train) <= 1
        train, test = as_set(load(tmp_path).pixels), new_test
    assert (len(train), len(test)) == (54, 6)


def test_a_subset_is_spread_over_the_classes_and_nested(tmp_path):
    files = {
        f"{part}/{level}/{i}.png": encode(Image.new("L", (16, 16), level))
        for part, count in (("train", 100), ("test", 10))
        for level in (0, 100, 200)
        for i in range(count)
    }
    write(tmp_path, files)
    subset = load(tmp_path, train_images=60, test_images=7)
    counts = subset.pixels[:, 0, 0, 0].bincount()
    assert counts.sum() == 60
    assert counts[[0, 100, 200]].min() >= 10
    assert torch.equal(subset.pixels, load(tmp_path).pixels[:60])
    assert subset.description.endswith("train: 60 of 300 used")
    assert len(load(tmp_path, "test", train_images=60, test_images=7)) == 7


def test_hidden_files_and_other_kinds_are_ignored(tmp_path):
    others = {".a.png": b"", "__MACOSX/a.png": b"", ".git/b.png": b"", "notes.txt": b"", "c": b""}
    files = {**pngs(10, "x/"), "x/last.JPEG": encode(noise(99), "JPEG"), **others}
    for source in (write(tmp_path / "f", files), write_zip(tmp_path / "f.zip", files)):
        assert len(load(source)) + len(load(source, "test")) == 11


# What is refused


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "holds 0 images"),
        ({"notes.txt": b""}, "holds 0 images"),
        (pngs(1), "gives 0 train, 1 test images; both need at least 1"),
        (pngs(1, "train/"), "gives 0 train, 1 test images"),
        ({**pngs(3, "train/"), "test/notes.txt": b""}, "gives 3 train, 0 test images"),
        ({**pngs(3, "test/"), "train/notes.txt": b""}, "gives 0 train, 3 test images"),
        (pngs(3, "test/"), "has a folder test/ but no folder train/"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_sets_that_cannot_be_split_are_refused_with_their_counts(tmp_path, files, reason, split):
    (tmp_path / "f").mkdir()
    for source in (write(tmp_path / "f", files), write_zip(tmp_path / "f.zip", files)):
        with pytest.raises(ValueError, match=reason) as caught:
            load(source, split)
        assert str(source) in str(caught.value)


def test_an_empty_test_folder_is_refused(tmp_path):
    write(tmp_path, pngs(3, "train/"))
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="3 train, 0 test images"):
        load(tmp_path)


def test_unknown_sources_are_refused_with_what_is_allowed(tmp_path):
    with pytest.raises(ValueError, match=r"cifar10, photos or the path.*cifra10 does not exist"):
        load("cifra10")
    path = tmp_path / "a.zip"
    path.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"a\.zip is neither folder nor zip"):
        load(path)
    whole = bytearray(write_zip(path, pngs(3)).read_bytes())
    whole[whole.index(b"PK\x01\x02")] = 0
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a\.zip is a damaged zip"):
        load(path)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(source=""), "source must be"),
        (dict(image_size=0), "image_size must be at least 1, got 0"),
        (dict(train_images=-1), "train_images must be at least 0, got -1"),
        (dict(test_images=-1), "test_images must be at least 0, got -1"),
        (dict(memory_mib=-5), "memory_mib must be at least 0, got -5"),
        (dict(workers=-1), "workers must be at least 0, got -1"),
    ],
)
def test_the_config_names_field_bound_and_value(options, reason):
    with pytest.raises(ValueError, match=reason):
        DataConfig(**options)


def test_more_images_than_there_are_is_refused(tmp_path):
    write(tmp_path, pngs(20))
    with pytest.raises(ValueError, match=r"train_images must be at most 18 for .*, got 19"):
        load(tmp_path, train_images=19)


# Named sets


def test_photos_are_crops_and_no_train_crop_reaches_the_test_region():
    config = DataConfig()
    right = {}
    for split, count in (("train", 8192), ("test", 2048)):
        names = data._photos(config, split).names
        corners = np.array([[int(part) for part in name.split(",")] for name in names])
        assert len(corners) == count
        assert set(corners[:, 0]) == {0, 1}
        assert corners[:, 2].min() >= 0
        assert corners[:, 2].max() + 32 <= 427
        right[split] = corners[:, 1]
    assert right["train"].max() + 32 <= 512 <= right["test"].min()
    assert right["test"].max() + 32 <= 640


def test_photos_load_the_same_each_time():
    first = load("photos", image_size=32, train_images=300)
    assert first.image_shape == (3, 32, 32)
    assert torch.equal(first.pixels, load("photos", image_size=32, train_images=300).pixels)
    assert len(as_set(first.pixels)) > 290
    assert len(load("photos", "test", image_size=32)) == 2048
    from sklearn.datasets import load_sample_images

    photo, x, y = map(
        int, sorted(data._photos(DataConfig(), "train").names, key=data._hash)[0].split(",")
    )
    crop = load_sample_images().images[photo][y : y + 32, x : x + 32]
    np.testing.assert_array_equal(first.pixels[0].permute(1, 2, 0).numpy(), crop)


def test_photos_allow_no_crop_wider_than_the_test_region():
    assert len(load("photos", "test", image_size=128, test_images=4)) == 4
    with pytest.raises(ValueError, match="image_size must be at most 128 for photos, got 129"):
        load("photos", image_size=129)


@pytest.mark.parametrize("error", [RuntimeError("not\xa0found"), OSError("no network")])
def test_a_failed_download_names_the_folder_and_the_way_out(tmp_path, monkeypatch, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("torchvision.datasets.CIFAR10", fail)
    with pytest.raises(ValueError, match="could not be downloaded") as caught:
        load("cifar10", root=str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "zip" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_cifar10_comes_from_torchvision(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), dtype=np.uint8)

    class Downloaded:
        def __init__(self, root, train, download):
            warnings.warn("old pickle", np.exceptions.VisibleDeprecationWarning, stacklevel=1)
            assert (root, download) == (str(tmp_path), True)
            self.data = pixels[:20] if train else pixels[20:]

    monkeypatch.setattr("torchvision.datasets.CIFAR10", Downloaded)
    images = {s: load("cifar10", s, image_size=32, root=str(tmp_path)) for s in ("train", "test")}
    for split, expected in (("train", pixels[:20]), ("test", pixels[20:])):
        assert as_set(images[split].pixels) == as_set(torch.tensor(expected.transpose(0, 3, 1, 2)))
    streamed = load("cifar10", image_size=32, root=str(tmp_path), memory_mib=0)
    assert torch.equal(everything(streamed), images["train"].pixels)


@pytest.fixture
def cifar10_zip():
    folder = os.environ.get("SOFTVQ_TEST_DATA")
    if not folder:
        pytest.skip("SOFTVQ_TEST_DATA is not set")
    return Path(folder) / "cifar10.zip"


def test_the_zip_of_cifar10_has_the_published_channel_means(cifar10_zip):
    images = load(cifar10_zip, image_size=32, workers=2)
    assert len(images) == 50000
    means = [images.pixels[:, channel].double().mean() / 255 for channel in range(3)]
    expected = torch.tensor([0.49139968, 0.48215841, 0.44653091], dtype=torch.float64)
    torch.testing.assert_close(torch.stack(means), expected, rtol=0, atol=1e-8)


def test_a_subset_of_the_zip_of_cifar10_reads_no_more_than_it_needs(cifar10_zip):
    images = load(cifar10_zip, "test", image_size=32, test_images=100)
    assert images.pixels.shape == (100, 3, 32, 32)
    assert images.description.endswith("test: 100 of 10000 used")
