import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from softvq import data, image_files
from softvq.data import (
    DataConfig,
    ImageArray,
    ImageStream,
    float_batches,
    load_files,
    load_images,
    to_float,
    to_uint8,
)

# A machine with one core is warned about two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def load(source, split="train", image_size=16, workers=0, **options):
    config = DataConfig(source=str(source), image_size=image_size, workers=workers, **options)
    return load_images(config, split)


def everything(images, batch_size=64):
    return torch.cat(list(images.batches(torch.arange(len(images)), batch_size)))


def as_set(pixels):
    return {image.numpy().tobytes() for image in pixels}


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


def test_float_batches_are_all_images_in_order(noise_images, monkeypatch):
    monkeypatch.setattr(data, "_FLOAT_BATCH", 4)
    images = noise_images(10)
    parts = list(float_batches(images, torch.device("cpu")))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat(parts), to_float(images.pixels))


@pytest.mark.parametrize("memory_mib", [4096, 0], ids=["memory", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_files_are_named_before_anything_is_used(
    tmp_path, store, noise_pngs, workers, memory_mib
):
    files = {**noise_pngs(10, "train/good/"), **noise_pngs(2, "test/")}
    files |= {"train/bad/b.png": b"", "train/bad/a.png": b"not an image"}
    with pytest.raises(ValueError, match=r"2 of 12 images .*: train/bad/a\.png.*train/bad/b\.png"):
        load(store(tmp_path, files), workers=workers, memory_mib=memory_mib)
    assert len(load(tmp_path, "test", workers=workers, memory_mib=memory_mib)) == 2


# A split in memory or streamed


def test_a_file_that_goes_bad_later_is_named_and_yields_no_pixels(tmp_path, store, noise_pngs):
    images = load(store(tmp_path, noise_pngs(20)), memory_mib=0)
    name = images.pictures.names[3]
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=rf"1 of 18 .*{name} \(empty file\)"):
        list(images.batches(torch.arange(18), 4))


@pytest.mark.parametrize("memory_mib", [4096, 0], ids=["memory", "stream"])
def test_batches_follow_the_order_and_miss_nothing(tmp_path, store, noise_pngs, memory_mib):
    files = {**noise_pngs(65, "train/", size=8), **noise_pngs(1, "test/", size=8)}
    images = load(store(tmp_path, files), image_size=8, memory_mib=memory_mib)
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


def test_a_set_smaller_than_a_batch_gives_one_small_batch(tmp_path, store, noise_pngs):
    images = load(store(tmp_path, noise_pngs(5)))
    (batch,) = images.batches(torch.arange(len(images)), 64)
    assert batch.shape == (4, 3, 16, 16)
    assert len(load(tmp_path, "test")) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("packed", [False, True], ids=["folder", "zip"])
def test_streamed_pixels_equal_those_in_memory(
    tmp_path, store, noise_pngs, monkeypatch, packed, workers
):
    monkeypatch.setattr(image_files, "CHUNK", 8)
    files = noise_pngs(40, size=24)
    source = store(tmp_path / "a.zip", files) if packed else store(tmp_path, files)
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


def test_two_walks_through_one_zip_do_not_disturb_each_other(tmp_path, store, noise_pngs):
    source = store(tmp_path / "a.zip", noise_pngs(40))
    images = load(source, workers=2, memory_mib=0)
    order = torch.arange(36)
    walks = zip(images.batches(order, 4), images.batches(order, 4), strict=True)
    assert all(torch.equal(left, right) for left, right in walks)


def test_a_stream_can_be_sent_to_another_process(tmp_path, store, noise_pngs):
    images = load(store(tmp_path / "a.zip", noise_pngs(10)), memory_mib=0)
    assert torch.equal(everything(pickle.loads(pickle.dumps(images))), everything(images))


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_and_streaming_draw_no_global_random_numbers(tmp_path, store, noise_pngs, workers):
    store(tmp_path, noise_pngs(5))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    everything(load(tmp_path, workers=workers, memory_mib=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_split_is_streamed_only_above_the_memory_limit(tmp_path, store, noise_pngs):
    store(tmp_path, {**noise_pngs(4, "train/"), **noise_pngs(5, "test/")})
    assert 4 * 3 * 295**2 < 2**20 < 5 * 3 * 295**2
    assert isinstance(load(tmp_path, "train", image_size=295, memory_mib=1), ImageArray)
    assert isinstance(load(tmp_path, "test", image_size=295, memory_mib=1), ImageStream)


def test_a_subset_is_spread_over_the_classes_and_nested(tmp_path):
    for level in (0, 100, 200):
        for part, count in (("train", 100), ("test", 10)):
            folder = tmp_path / part / str(level)
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("L", (16, 16), level).save(folder / f"{i}.png")
    subset = load(tmp_path, train_images=60, test_images=7)
    counts = subset.pixels[:, 0, 0, 0].bincount()
    assert counts.sum() == 60
    assert counts[[0, 100, 200]].min() >= 10
    assert torch.equal(subset.pixels, load(tmp_path).pixels[:60])
    assert subset.description.endswith("train: 60 of 300 used")
    assert len(load(tmp_path, "test", train_images=60, test_images=7)) == 7


# What is refused


def test_unknown_sources_are_refused_with_what_is_allowed(tmp_path):
    with pytest.raises(ValueError, match=r"cifar10, photos or the path.*cifra10 does not exist"):
        load("cifra10")
    path = tmp_path / "a.zip"
    path.write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"cifar10, photos or .*a\.zip is neither folder nor zip"):
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


def test_more_images_than_there_are_is_refused(tmp_path, store, noise_pngs):
    store(tmp_path, noise_pngs(20))
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

    names = image_files.hash_order(data._photos(DataConfig(), "train").names)
    photo, x, y = map(int, names[0].split(","))
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
            self.classes = ["even", "odd"]
            self.targets = [int(image.sum()) % 2 for image in self.data]

    monkeypatch.setattr("torchvision.datasets.CIFAR10", Downloaded)
    images = {s: load("cifar10", s, image_size=32, root=str(tmp_path)) for s in ("train", "test")}
    for split, expected in (("train", pixels[:20]), ("test", pixels[20:])):
        assert as_set(images[split].pixels) == as_set(torch.tensor(expected.transpose(0, 3, 1, 2)))
    streamed = load("cifar10", image_size=32, root=str(tmp_path), memory_mib=0)
    assert torch.equal(everything(streamed), images["train"].pixels)
    parity = [("even", "odd")[int(image.sum()) % 2] for image in images["train"].pixels]
    assert parity == images["train"].labels == streamed.labels


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


def test_files_are_the_first_by_path_whatever_their_split(tmp_path, noise_pngs, store):
    files = noise_pngs(2, "train/b/") | noise_pngs(1, "test/a/")
    whole = store(tmp_path / "x.zip", files)
    images = load_files(str(whole), 2, 16)
    assert images.labels == ["a", "b"]
    one = store(tmp_path / "one", noise_pngs(1))
    assert torch.equal(load_files(str(one), 1, 16).pixels, images.pixels[:1])
    with pytest.raises(ValueError, match="holds 1 images, got 2 to take"):
        load_files(str(one), 2, 16)
    with pytest.raises(ValueError, match="does not exist"):
        load_files("/no/such", 1, 16)
