import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from softvq import image_files

# A machine with one core is warned about two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

RAMP = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
RAMP_LEVELS = np.arange(256, dtype=np.uint8).reshape(16, 16)
THREE = {part: [f"{part}/{i}.png" for i in range(3)] for part in ("train", "test")}


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


def open_pictures(source, split="train"):
    return image_files.stored_files(image_files.open_store(str(source)), str(source), split, 16)


def load(source, split="train", workers=0):
    return torch.cat(list(image_files.decode_all(open_pictures(source, split), workers)))


def as_set(pixels):
    return {image.numpy().tobytes() for image in pixels}


@pytest.fixture
def decoded(tmp_path, store):
    """The pixels h w c of one file, read as the only training image of a folder."""

    def decode(name, content):
        files = {f"train/{name}": content, "test/other.png": encode(noise(0))}
        (pixels,) = load(store(tmp_path, files))
        return pixels.permute(1, 2, 0).numpy()

    return decode


def grey(levels):
    return np.repeat(np.asarray(levels, dtype=np.uint8)[..., None], 3, axis=-1)


# Values


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
def test_every_kind_of_pixel_has_its_right_level(decoded, name, content, right):
    np.testing.assert_array_equal(decoded(name, content), right)


@pytest.mark.parametrize("level", [100, 257, 32767, 32768, 65535])
def test_grey_and_rgb_of_16_bits_agree_within_one_level(decoded, level):
    alone = decoded("a.png", encode(Image.fromarray(np.full_like(RAMP, level))))
    rgb = decoded("a.png", raw_png(np.full((16, 16, 3), level), 16, 2))
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
def test_transparency_is_laid_over_white(decoded, content):
    pixels = decoded("a.png", content)
    assert (pixels[:, :8] == 40).all()
    assert (pixels[:, 8:] == 255).all()


def test_half_transparency_is_mixed_with_white(decoded):
    pixels = decoded("a.png", encode(Image.new("RGBA", (16, 16), (0, 0, 200, 102))))
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
def test_pixels_without_a_known_scale_are_refused_by_file_name(decoded, name, content, reason):
    with pytest.raises(ValueError, match=rf"1 of 1 images cannot be used.*train/{name}.*{reason}"):
        decoded(name, content)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_exif_orientation_is_applied_once(decoded, format):
    pixels = np.zeros((16, 16, 3), dtype=np.uint8)
    pixels[:8] = 255  # white above black; turned by a quarter the white is on the right
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {"lossless": True} if format == "WEBP" else {}
    content = encode(Image.fromarray(pixels), format, exif=exif, **options)
    turned = decoded(f"a.{format.lower()}", content)
    np.testing.assert_array_equal(turned, np.rot90(pixels, -1))


def test_an_animation_gives_its_first_frame(decoded):
    frames = [Image.new("L", (16, 16), level) for level in (30, 200)]
    content = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decoded("a.gif", content) == 30).all()


def test_a_picture_of_absurd_size_is_refused_by_name(decoded, monkeypatch):
    # Pillow only warns up to twice its limit, of pictures of large cameras too, and raises above.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200)
    assert decoded("a.png", encode(noise(1))).shape == (16, 16, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"train/a\.png .*decompression bomb"):
        decoded("a.png", encode(noise(1)))


def test_images_of_the_right_size_are_untouched(decoded):
    np.testing.assert_array_equal(decoded("a.png", encode(noise(1))), np.asarray(noise(1)))


def test_others_are_resized_by_their_shorter_side_and_cropped_in_the_centre(decoded):
    pixels = np.zeros((32, 96, 3), dtype=np.uint8)
    pixels[:, 32:64] = 200
    inner = decoded("a.png", encode(Image.fromarray(pixels)))[:, 2:-2]
    assert (inner == 200).all()
    tall = decoded("a.png", encode(Image.new("RGB", (1, 300), (1, 2, 3))))
    assert (tall == [1, 2, 3]).all()


def test_shrinking_is_antialiased(decoded):
    board = (np.indices((128, 128)).sum(0) % 2 * 255).astype(np.uint8)
    pixels = decoded("a.png", encode(Image.fromarray(board)))[2:-2, 2:-2]
    assert np.abs(pixels.astype(int) - 127).max() <= 2


# Damaged files


def damaged():
    jpeg = encode(noise(1, 64), "JPEG")
    png, smooth = encode(noise(1, 64)), encode(noise(1, 8).resize((64, 64)))
    return {
        "cut.jpg": jpeg[: len(jpeg) * 6 // 10],
        "cut.png": png[: len(png) * 6 // 10],
        "empty.png": b"",
        "text.png": b"not an image\n",
        "zeros.jpg": jpeg[: len(jpeg) * 6 // 10] + bytes(len(jpeg) * 4 // 10),
        # Which Pillow decodes without complaint, though four tenths of the pixels are missing.
        "zeros.png": smooth[: len(smooth) * 6 // 10] + bytes(len(smooth) * 4 // 10),
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_files_are_all_named(tmp_path, store, noise_pngs, monkeypatch, workers):
    monkeypatch.setattr(image_files, "CHUNK", 4)
    files = {**noise_pngs(10, "train/good/"), **noise_pngs(2, "test/")}
    files |= {f"train/bad/{name}": content for name, content in damaged().items()}
    with pytest.raises(ValueError, match="6 of 16 images cannot be used") as caught:
        load(store(tmp_path, files), workers=workers)
    message = str(caught.value)
    positions = [message.index(f"train/bad/{name}") for name in sorted(damaged())]
    assert positions == sorted(positions)
    assert "good" not in message
    assert "0x" not in message
    assert len(load(tmp_path, "test", workers=workers)) == 2


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    ("format", "options"),
    [
        *((name, {}) for name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "JPEG2000", "PPM")),
        *((name, {}) for name in ("TGA", "AVIF", "DIB")),
        ("JPEG", dict(progressive=True)),
        ("TIFF", dict(compression="tiff_lzw")),
        ("TIFF", dict(compression="tiff_deflate")),
        ("WEBP", dict(lossless=True)),
        ("TGA", dict(compression="tga_rle")),
    ],
)
@pytest.mark.parametrize("smooth", [False, True], ids=["noise", "smooth"])
def test_a_file_that_is_cut_short_is_refused_whatever_its_format(
    decoded, format, options, share, smooth
):
    picture = noise(1, 4).resize((64, 64)) if smooth else noise(1, 64)
    content = encode(picture, format, **options)
    assert decoded("a.png", content).shape == (16, 16, 3)
    with pytest.raises(ValueError, match=r"1 of 1 images cannot be used.*train/a\.png"):
        decoded("a.png", content[: int(share * len(content))])


def test_pixels_of_a_png_with_a_wrong_checksum_are_refused_and_odd_notes_are_not(decoded):
    pixels = np.asarray(noise(1))
    whole = raw_png(pixels, 8, 2)
    np.testing.assert_array_equal(decoded("a.png", whole + b"more"), pixels)
    noted = raw_png(pixels, 8, 2, (b"tEXt", b"Comment\0none"))
    np.testing.assert_array_equal(decoded("a.png", noted), pixels)
    place = whole.index(b"IDAT") + 40  # in the middle of the pixels
    flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for damaged in (flipped, whole[: whole.index(b"IEND") - 4], whole[:-14]):
        with pytest.raises(ValueError, match="the PNG data is damaged or has no end"):
            decoded("a.png", damaged)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_of_damaged_files_alone_is_refused_with_ten_names(tmp_path, store, workers):
    files = {f"{i:02d}.png": b"" for i in range(40)}
    with pytest.raises(ValueError, match="36 of 36 images cannot be used") as caught:
        load(store(tmp_path, files), workers=workers)
    assert str(caught.value).count(".png") == 10
    assert str(caught.value).endswith("; ...")


def test_a_jpeg_with_a_thumbnail_and_bytes_after_its_end_is_whole(decoded):
    exif = Image.Exif()
    exif[0x9286] = encode(noise(2), "JPEG")
    content = encode(noise(1), "JPEG", exif=exif)
    for more in (b"more", b"\xff\xda more", b"\xff\xd8\xff\xda" + bytes(99), b"\xff" * 9):
        assert decoded("a.jpg", content + more).shape == (16, 16, 3)
    noisy = np.random.default_rng(0).bytes(200_000)  # a film, as behind the pictures of telephones
    for options in ({}, {"progressive": True}, {"restart_marker_blocks": 1}):
        picture = encode(noise(1), "JPEG", **options)
        assert decoded("a.jpg", picture + noisy).shape == (16, 16, 3)
        for cut in range(2, len(picture) - 2, 37):
            with pytest.raises(ValueError, match=r"a\.jpg"):
                decoded("a.jpg", picture[:cut] + bytes(100))
    with pytest.raises(ValueError, match="no end"):
        decoded("a.jpg", content[:-100] + bytes(100))


# Splits


def test_a_folder_and_its_zip_give_the_same_splits(tmp_path, store, noise_pngs):
    files = {**noise_pngs(9, "cat/"), **noise_pngs(12, "dog/old/", size=18)}
    folder = store(tmp_path / "set", files)
    flat = store(tmp_path / "flat.zip", files)
    wrapped = store(tmp_path / "w.zip", {f"set/{name}": c for name, c in files.items()})
    for split, count in (("train", 19), ("test", 2)):
        expected = load(folder, split)
        assert len(expected) == count
        assert torch.equal(load(flat, split), expected)
        assert torch.equal(load(wrapped, split), expected)


@pytest.mark.parametrize(
    "written", [lambda name: f"./{name}", lambda name: name.replace("/", "\\")], ids=["./", "\\"]
)
def test_a_zip_with_names_as_some_writers_have_them_is_that_with_plain_ones(
    tmp_path, store, noise_pngs, written
):
    files = {**noise_pngs(3, "set/train/a/"), **noise_pngs(2, "set/test/b/", size=18)}
    plain = store(tmp_path / "plain.zip", files)
    odd = store(tmp_path / "odd.zip", {written(name): content for name, content in files.items()})
    for split in ("train", "test"):
        assert torch.equal(load(odd, split), load(plain, split))
        assert "split by its folders" in open_pictures(odd, split).origin


def test_own_folders_are_the_split_at_the_top_and_inside_a_wrapper(tmp_path, store, noise_pngs):
    files = {
        **noise_pngs(3, "train/a/"),
        **noise_pngs(2, "test/a/", size=18),
        **noise_pngs(4, "extra/", size=20),
    }
    for source in (
        store(tmp_path / "x", files),
        store(tmp_path / "y", {f"wrap/{name}": content for name, content in files.items()}),
        store(tmp_path / "z.zip", {f"wrap/{name}": c for name, c in files.items()}),
    ):
        assert as_set(load(source)) == {
            np.asarray(noise(i)).transpose(2, 0, 1).tobytes() for i in range(3)
        }
        assert len(load(source, "test")) == 2
        assert "split by its folders" in open_pictures(source, "test").origin


@pytest.mark.parametrize("name", ["val", "valid", "Validation"])
def test_val_is_the_test_split_where_there_is_no_test(tmp_path, store, noise_pngs, name):
    files = {**noise_pngs(3, "train/cat/"), **noise_pngs(2, f"{name}/cat/", size=18)}
    for source in (
        store(tmp_path / "x", files),
        store(tmp_path / "y.zip", {f"wrap/{path}": content for path, content in files.items()}),
    ):
        for split, count in (("train", 3), ("test", 2)):
            pictures = open_pictures(source, split)
            assert len(load(source, split)) == count
            assert {pictures.label(path) for path in pictures.names} == {"cat"}
            assert f"split into train/ and {name.lower()}/" in pictures.origin
    store(tmp_path / "x", noise_pngs(4, "test/cat/", size=20))
    assert len(load(tmp_path / "x", "train")) == 3
    assert len(load(tmp_path / "x", "test")) == 4
    assert "split by its folders" in open_pictures(tmp_path / "x").origin


def test_train_without_test_is_split_by_the_rule(tmp_path, store, noise_pngs):
    plain = load(store(tmp_path / "plain", noise_pngs(20)), "test")
    below = load(store(tmp_path / "below", noise_pngs(20, "train/")), "test")
    assert len(plain) == len(below) == 2
    assert "split by hash of the path" in open_pictures(tmp_path / "below").origin


def test_a_class_of_the_name_train_is_not_taken_for_the_split(tmp_path, store, noise_pngs):
    files = {**noise_pngs(10, "train/"), **noise_pngs(10, "car/", size=18)}
    assert len(load(store(tmp_path, files))) == 18


def test_splits_are_disjoint_and_a_new_file_moves_at_most_one(tmp_path, store, noise_pngs):
    store(tmp_path, noise_pngs(50))
    train, test = as_set(load(tmp_path)), as_set(load(tmp_path, "test"))
    assert (len(train), len(test), len(train & test)) == (45, 5, 0)
    for i in range(50, 60):
        store(tmp_path, {f"{i:03d}.png": encode(noise(i))})
        new_test = as_set(load(tmp_path, "test"))
        assert len(test - new_test) <= 1
        assert len((new_test - test) & train) <= 1
        train, test = as_set(load(tmp_path)), new_test
    assert (len(train), len(test)) == (54, 6)


def test_a_link_to_a_folder_around_it_shows_no_image_twice(tmp_path, store, noise_pngs):
    store(tmp_path / "set", {**noise_pngs(10, "a/"), **noise_pngs(10, "b/", size=18)})
    store(tmp_path / "more", noise_pngs(5, "", size=20))
    (tmp_path / "set" / "loop").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "a" / "up").symlink_to("..")
    (tmp_path / "set" / "c").symlink_to(tmp_path / "more")
    names = [open_pictures(tmp_path / "set", split).names for split in ("train", "test")]
    assert sorted(map(len, names)) == [2, 23]
    assert {name.split("/")[0] for part in names for name in part} == {"a", "b", "c"}


def test_hidden_files_and_other_kinds_are_ignored(tmp_path, store, noise_pngs):
    others = {".a.png": b"", "__MACOSX/a.png": b"", ".git/b.png": b"", "notes.txt": b"", "c": b""}
    files = {**noise_pngs(10, "x/"), "x/last.JPEG": encode(noise(99), "JPEG"), **others}
    for source in (store(tmp_path / "f", files), store(tmp_path / "f.zip", files)):
        assert len(load(source)) + len(load(source, "test")) == 11


# What is refused


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "holds 0 images"),
        (["notes.txt"], "holds 0 images"),
        (["0.png"], "gives 0 train, 1 test images; both need at least 1"),
        (["train/0.png"], "gives 0 train, 1 test images"),
        ([*THREE["train"], "test/notes.txt"], "gives 3 train, 0 test images"),
        ([*THREE["test"], "train/notes.txt"], "gives 0 train, 3 test images"),
        (THREE["test"], "has a folder test/ but no folder train/"),
        ([f"val/{n}.png" for n in range(3)], "has a folder val/ but no folder train/"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_sets_that_cannot_be_split_are_refused_with_their_counts(
    tmp_path, store, names, reason, split
):
    (tmp_path / "f").mkdir()
    files = dict.fromkeys(names, b"")
    for source in (store(tmp_path / "f", files), store(tmp_path / "f.zip", files)):
        with pytest.raises(ValueError, match=reason) as caught:
            open_pictures(source, split)
        assert str(source) in str(caught.value)


def test_an_empty_test_folder_is_refused(tmp_path, store, noise_pngs):
    store(tmp_path, noise_pngs(3, "train/"))
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="3 train, 0 test images"):
        load(tmp_path)


def test_what_is_no_folder_and_no_whole_zip_is_refused(tmp_path, store, noise_pngs):
    path = tmp_path / "a.zip"
    with pytest.raises(ValueError, match=r"a\.zip does not exist"):
        open_pictures(path)
    path.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"a\.zip is neither folder nor zip"):
        open_pictures(path)
    whole = bytearray(store(path, noise_pngs(3)).read_bytes())
    whole[whole.index(b"PK\x01\x02")] = 0
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a\.zip is a damaged zip"):
        open_pictures(path)
