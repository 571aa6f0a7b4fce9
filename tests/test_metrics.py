"""The metrics: exact over a split whatever its batches and ranks, and the published LPIPS."""

import copy
import inspect
import math
import os
import pickle
import re
from pathlib import Path

import lpips
import pytest
import torch
from torch.testing import assert_close
from torchmetrics.functional.image import structural_similarity_index_measure

from softvq.metrics import CodebookUsage, Reconstruction, load_perceptual

DATA = os.environ.get("SOFTVQ_TEST_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="SOFTVQ_TEST_DATA is not set")
BATCH_SIZES = pytest.mark.parametrize("batch_size", [1, 4, 13])
# C14: 13 one-vector images, drawn so that batches of four hold one code each
CODES = torch.tensor([0] * 4 + [1] * 4 + [2] * 4 + [3])


@pytest.fixture(autouse=True)
def _no_cached_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


def usage_of(weights: torch.Tensor, batch_size: int) -> dict[str, float]:
    usage = CodebookUsage(weights.shape[1])
    for q in weights.split(batch_size):
        usage.update(torch.bincount(q.argmax(1), minlength=q.shape[1]), q.sum(0))
    return {name: value.item() for name, value in usage.compute().items()}


def images(n: int = 21, side: int = 16, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, channels, side, side, generator=generator, dtype=torch.float64) * 2 - 1
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return 0.9 * x + 0.1 * noise, x


def measured(y: torch.Tensor, x: torch.Tensor, batch_size: int = 7, **options):
    metric = Reconstruction(channels=x.shape[1], **options)
    for pair in zip(y.split(batch_size), x.split(batch_size), strict=True):
        metric.update(*pair)
    return metric.compute(), metric


@BATCH_SIZES
def test_perplexity_and_utilisation_are_those_of_the_split(batch_size):
    one_hot = torch.nn.functional.one_hot(CODES, 4).float()
    values = usage_of(one_hot, batch_size)
    assert values["perplexity"] == pytest.approx(3.6157, abs=5e-5)
    assert values["perplexity_soft"] == pytest.approx(values["perplexity"], rel=1e-12)
    assert values["bits_per_code"] == pytest.approx(
        12 / 13 * math.log2(13 / 4) + math.log2(13) / 13, rel=1e-12
    )
    assert values["utilisation"] == 1.0
    assert values["tokens"] == 13
    assert usage_of(one_hot[:12], batch_size)["perplexity"] == pytest.approx(3)
    assert usage_of(torch.eye(4).repeat(4, 1), batch_size)["perplexity"] == pytest.approx(4)


@BATCH_SIZES
def test_soft_perplexity_is_that_of_the_mean_weights(batch_size):
    values = usage_of(torch.tensor([[0.6, 0.4]]).expand(13, 2), batch_size)
    assert values["perplexity_soft"] == pytest.approx(1.9601, abs=5e-5)
    assert values["perplexity"] == 1.0
    assert values["bits_per_code"] == 0.0
    assert values["utilisation"] == 0.5


@BATCH_SIZES
def test_the_last_batch_of_one_image_does_not_weigh_more(batch_size):
    x = torch.zeros(13, 1, 1, 1)
    y = torch.cat([torch.zeros(12), torch.tensor([1.3**0.5])]).reshape(13, 1, 1, 1)
    values, _ = measured(y, x, batch_size)
    assert_close(values["mse"].item(), 0.1, rtol=1e-6, atol=0)


def test_usage_starts_afresh_after_a_reset():
    usage = CodebookUsage(2)
    usage.update(torch.tensor([5, 0]), torch.tensor([5.0, 0.0]))
    usage.compute()
    usage.reset()
    usage.update(torch.tensor([0, 2]), torch.tensor([0.0, 2.0]))
    assert usage.compute()["tokens"] == 2
    assert usage.compute()["utilisation"] == 0.5


def test_counts_of_a_long_split_stay_exact():
    usage = CodebookUsage(2)
    for _ in range(3):
        usage.update(torch.tensor([2.0**24, 1.0]), torch.tensor([2.0**24, 1.0]))
    assert usage.counts.tolist() == [3 * 2**24, 3]
    assert usage.usage.tolist() == [3 * 2**24, 3]


def test_usage_of_no_tokens_is_refused():
    usage = CodebookUsage(3)
    with pytest.raises(ValueError, match="no tokens"):
        usage.compute()
    usage.update(torch.zeros(3, dtype=torch.int64), torch.zeros(3))
    with pytest.raises(ValueError, match="no tokens"):
        usage.compute()


@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        ([0.5, 0.5], ValueError, "over 8 tokens"),
        ([float("nan"), 8.0], ArithmeticError, "the usage is nan"),
    ],
)
def test_usage_that_is_no_sum_over_the_tokens_is_refused(weights, kind, message):
    usage = CodebookUsage(2)
    usage.update(torch.tensor([4, 4]), torch.tensor(weights))
    with pytest.raises(kind, match=message):
        usage.compute()


def test_usage_of_another_codebook_is_refused():
    with pytest.raises(ValueError, match=r"expected 4 codes, got counts of 3"):
        CodebookUsage(4).update(torch.ones(3), torch.ones(3))


def test_reconstruction_equals_naive_loops():
    y, x = images()
    error = sum(float((a - b) ** 2) for a, b in zip(y.flatten(), x.flatten(), strict=True))
    deviation = 0.0
    for channel in range(3):
        pixels = [float(p) for p in x[:, channel].flatten()]
        mean = sum(pixels) / len(pixels)
        deviation += sum((p - mean) ** 2 for p in pixels)
    values, _ = measured(y, x)
    assert_close(values["mse"].item(), error / x.numel(), rtol=1e-12, atol=0)
    assert_close(values["nmse"].item(), error / deviation, rtol=1e-12, atol=0)
    psnr = 10 * torch.log10(torch.tensor(4 * x.numel() / error, dtype=torch.float64))
    assert_close(values["psnr"], psnr, rtol=1e-12, atol=0)
    whole = structural_similarity_index_measure(y, x, data_range=2.0)
    assert_close(values["ssim"], whole, rtol=1e-12, atol=0)


@pytest.mark.parametrize("batch_size", [1, 7, 8, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reconstruction_does_not_depend_on_the_batches(batch_size, dtype):
    y, x = (t.to(dtype) for t in images())
    values, _ = measured(y, x, batch_size)
    whole, _ = measured(y, x, len(x))
    ssim_tolerance = 1e-6 if dtype == torch.float32 else 1e-9
    assert values.keys() == {"mse", "psnr", "nmse", "ssim"}
    for name, value in values.items():
        tolerance = ssim_tolerance if name == "ssim" else 1e-9
        assert_close(value, whole[name], rtol=tolerance, atol=0)


def test_the_mean_colour_has_a_normalised_error_of_one():
    _, x = images()
    x = 0.1 * x + torch.tensor([0.5, -0.5, 0.0], dtype=x.dtype).reshape(3, 1, 1)
    values, _ = measured(x.mean((0, 2, 3), keepdim=True).expand_as(x), x)
    assert_close(values["nmse"].item(), 1.0, rtol=1e-12, atol=0)


def test_an_exact_reconstruction_has_no_error():
    _, x = images()
    values, _ = measured(x, x)
    assert values["mse"] == 0
    assert values["nmse"] == 0
    assert values["psnr"] == float("inf")
    assert_close(values["ssim"].item(), 1.0)


@pytest.mark.parametrize("kind", ["usage", "reconstruction"])
def test_two_ranks_equal_one(kind):
    y, x = images()
    whole = CodebookUsage(4) if kind == "usage" else Reconstruction()
    ranks = [copy.deepcopy(whole), copy.deepcopy(whole), copy.deepcopy(whole)]  # the last is idle
    for i in range(len(x)):
        counts = torch.eye(4)[i**2 % 3]
        batch = (counts, 0.7 * counts + 0.075) if kind == "usage" else (y[i : i + 1], x[i : i + 1])
        whole.update(*batch)
        ranks[i >= 8].update(*batch)
    ranks[2].merge_state(ranks[0])
    ranks[2].merge_state(ranks[1])
    assert_close(ranks[2].compute(), whole.compute(), rtol=1e-12, atol=0)


def test_reconstruction_of_no_images_is_refused():
    metric = Reconstruction()
    with pytest.raises(ValueError, match="no images"):
        metric.compute()
    metric.update(torch.zeros(0, 3, 32, 32), torch.zeros(0, 3, 32, 32))
    with pytest.raises(ValueError, match="no images"):
        metric.compute()


def test_images_of_another_channel_count_are_refused():
    with pytest.raises(ValueError, match="expected images of 1 channels, got 3"):
        Reconstruction(channels=1).update(torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8))


def test_what_cannot_be_had_is_left_out_with_its_reason():
    values, metric = measured(*images(side=4))
    assert values.keys() == {"mse", "psnr", "nmse"}
    assert metric.absent == {
        "ssim": "some images are smaller than 11 x 11 pixels",
        "lpips": "not asked for",
    }
    metric.reset()
    metric.update(torch.zeros(2, 3, 11, 64), torch.full((2, 3, 11, 64), 0.1))
    assert metric.compute().keys() == {"mse", "psnr", "ssim"}
    assert metric.absent["nmse"] == "all pixels have the same colour"


def test_half_precision_and_autocast_leave_the_sums_alone():
    y, x = (t.bfloat16() for t in images())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values, _ = measured(y, x)
    assert_close(values, measured(y.float(), x.float())[0], rtol=1e-12, atol=0)


def test_without_weights_lpips_is_absent_and_says_why(tmp_path):
    perceptual = load_perceptual()
    assert isinstance(perceptual, str)
    assert str(tmp_path / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth") in perceptual
    _, metric = measured(*images(side=32), perceptual=perceptual)
    assert metric.absent == {"lpips": perceptual}


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_hostile_weights_file_is_refused_and_not_executed(tmp_path):
    trace = tmp_path / "PWNED"
    torch.save(Hostile(trace), tmp_path / "zip.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Hostile(trace)))
    for name in ("zip.pth", "plain.pth"):
        with pytest.raises(ValueError, match=f"{name}: not a file of plain tensors") as caught:
            load_perceptual(str(tmp_path / name))
        assert len(str(caught.value)) < 300
    assert not trace.exists()


def test_weights_that_are_not_alexnets_are_refused_by_name(tmp_path):
    path = tmp_path / "weights.pth"
    with pytest.raises(ValueError, match=rf"{path}: no such file"):
        load_perceptual(str(path))
    for state, message in [
        (torch.zeros(2), "holds a Tensor, no state dict"),
        ({}, "no entry 'features.0.weight' of shape (64, 3, 11, 11)"),
        ({"features.0.weight": torch.zeros(2)}, "no entry 'features.0.weight' of shape"),
        ({"features.0.weight": 1.0}, "no entry 'features.0.weight' of shape"),
        ({"layer1.weight": torch.zeros(2)}, "unexpected entry 'layer1.weight'"),
    ]:
        torch.save(state, path)
        with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
            load_perceptual(str(path))
    path.write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ValueError, match=rf"{path}: not a file of plain tensors"):
        load_perceptual(str(path))


@pytest.fixture(scope="module")
def perceptual() -> lpips.LPIPS:
    folder = Path(DATA, "perceptual-weights")
    loaded = load_perceptual(str(folder / "alexnet-imagenet-features-fp32.pth"))
    assert isinstance(loaded, lpips.LPIPS)
    return loaded


def lpips_by_hand(a: torch.Tensor, b: torch.Tensor) -> float:
    """LPIPS of one pair in float64, from torchvision's layer list and the file of the heads."""
    file = Path(DATA, "perceptual-weights", "alexnet-imagenet-features-fp32.pth")
    backbone = torch.load(file, weights_only=True)
    file = Path(lpips.__file__).parent / "weights" / "v0.1" / "alex.pth"
    heads = torch.load(file, map_location="cpu", weights_only=True)
    shift = torch.tensor([-0.030, -0.088, -0.188], dtype=torch.float64)
    scale = torch.tensor([0.458, 0.448, 0.450], dtype=torch.float64)
    x = (torch.stack([a, b]).double() - shift[:, None, None]) / scale[:, None, None]
    total = 0.0
    for i, (index, stride, padding) in enumerate(
        [(0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1)]
    ):
        if index in (3, 6):
            x = torch.nn.functional.max_pool2d(x, 3, 2)
        weight, bias = (backbone[f"features.{index}.{k}"].double() for k in ("weight", "bias"))
        x = torch.nn.functional.conv2d(x, weight, bias, stride, padding).relu()
        unit = x / x.norm(dim=1, keepdim=True)
        head = heads[f"lin{i}.model.1.weight"].double()[0]
        total += float(((unit[0] - unit[1]) ** 2 * head).sum(0).mean())
    return total


@needs_data
@pytest.mark.parametrize("side", [31, 32, 64])
def test_lpips_is_the_mean_of_the_published_formula(perceptual, side):
    y, x = images(5, side)
    expected = sum(lpips_by_hand(a, b) for a, b in zip(y, x, strict=True)) / 5
    for batch_size in (1, 2, 5):
        values, metric = measured(y.float(), x.float(), batch_size, perceptual=perceptual)
        assert_close(values["lpips"].item(), expected, rtol=1e-5, atol=0)
        assert metric.absent == {}


@needs_data
def test_lpips_needs_31_pixels_and_colour_or_grey(perceptual):
    _, metric = measured(*images(1, 30), perceptual=perceptual)
    assert metric.absent == {"lpips": "some images are smaller than 31 x 31 pixels"}
    _, metric = measured(*images(1, 32, channels=4), perceptual=perceptual)
    assert metric.absent == {"lpips": "LPIPS takes 1 or 3 channels, not 4"}
    y, x = images(2, 32, channels=1)
    grey, _ = measured(y, x, perceptual=perceptual)
    rgb, _ = measured(y.expand(-1, 3, -1, -1), x.expand(-1, 3, -1, -1), perceptual=perceptual)
    assert_close(grey["lpips"], rgb["lpips"])


@needs_data
def test_two_metrics_share_one_silent_network_without_dropout(perceptual, capfd):
    soft, hard = Reconstruction(perceptual), Reconstruction(perceptual)
    assert soft.perceptual is hard.perceptual
    y, x = (t.float() for t in images(2, 32))
    soft.train()
    for metric in (soft, hard):
        metric.update(y, x)
    assert_close(soft.compute(), hard.compute(), rtol=0, atol=0)
    assert capfd.readouterr() == ("", "")


@needs_data
def test_torchvisions_cache_is_used_and_random_numbers_are_left_alone(tmp_path, capfd):
    cache = tmp_path / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth"
    cache.parent.mkdir(parents=True)
    file = Path(DATA, "perceptual-weights", "alexnet-imagenet-features-fp32.pth")
    state = torch.load(file, weights_only=True)
    torch.save({**state, "classifier.6.bias": torch.zeros(1000)}, cache)
    before = torch.get_rng_state()
    network = load_perceptual()
    assert isinstance(network, lpips.LPIPS)
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(dict(network.net.named_parameters())["slice2.3.bias"], state["features.3.bias"])
    assert not any(p.requires_grad for p in network.parameters())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (1, 3, 32, 32), (2, 3, 1, 32)])
def test_a_reconstruction_of_another_shape_is_refused(shape):
    unchecked = inspect.unwrap(Reconstruction.update)
    with pytest.raises(ValueError, match="must have the same shape"):
        unchecked(Reconstruction(with_ssim=False), torch.zeros(shape), torch.zeros(2, 3, 32, 32))
