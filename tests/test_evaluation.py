"""The sums of an epoch and the measures of a split, against naive formulas."""

import copy
import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close

from softvq import data, training
from softvq.autoencoder import VQVAE, Autoencoder, VQVAEConfig
from softvq.data import ImageArray, to_float
from softvq.evaluation import Sums, add_step, evaluate, train_record
from softvq.metrics import Reconstruction
from softvq.quantizers import (
    CodebookConfig,
    DDCLCodebook,
    DDCLConfig,
    EMAConfig,
    StraightThroughConfig,
    build,
)
from softvq.temperature import FixedTemperature
from softvq.training import TrainConfig

RECIPE = TrainConfig(epochs=2, batch_size=16, lr=1e-3, eps=0.1)


@pytest.mark.parametrize("batch", [1, 4, 13])
def test_sums_give_the_mean_of_the_images_whatever_the_batches(batch):
    # C14: squared error 0 for the first twelve images and 1.3 for the last
    sums = Sums()
    for errors in torch.tensor([0.0] * 12 + [1.3]).split(batch):
        sums.add(images=float(len(errors)), mse=errors.mean() * len(errors))
    assert sums.mean("mse", "images") == pytest.approx(0.1, rel=1e-7)


def test_sums_of_float32_values_are_exact_and_keep_no_graph():
    sums = Sums()
    for value in (2.0**24, 1.0, 1.0):
        sums.add(total=torch.tensor(value, requires_grad=True), count=1.0)
    assert sums.tensors["total"].item() == 2**24 + 2
    assert sums.tensors["total"].dtype == torch.float64
    assert not sums.tensors["total"].requires_grad


@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (30, 30, 4), (63, 1)])
def test_the_record_of_an_epoch_does_not_depend_on_its_batches(tiny_config, noise_images, sizes):
    torch.manual_seed(0)
    model = VQVAE(dataclasses.replace(tiny_config, normalize=False))
    images = noise_images(64)
    training.prepare(model, images, total_steps=8)
    records = []
    for parts in ((64,), sizes):
        sums = Sums()
        for pixels in images.pixels.split(parts):
            x = to_float(pixels)
            with torch.no_grad():
                output = model(x)
            add_step(sums, output, (output.reconstruction - x).square().mean())
        record = train_record(sums, model)
        # The KL of the mean weights and the batch's own spread are no means over images
        records.append(
            {k: v for k, v in record.items() if k not in ("train/quantizer_loss", "train/spread")}
        )
    assert_close(*records, rtol=1e-5, atol=1e-6)


def evaluation(model, images) -> dict[str, float]:
    return evaluate(model, images, Reconstruction(), Reconstruction())


def test_evaluation_equals_the_naive_formulas(model, noise_images, naive_latents, naive_quantizer):
    images = noise_images(21, size=12)
    optimizer = training.build_optimizer(model, RECIPE)
    for pixels in noise_images(48).pixels.split(16):
        training.train_step(model.train(), optimizer, pixels, 0.3, RECIPE)
    record = evaluation(model, images)
    with torch.no_grad():
        x = to_float(images.pixels)
        z = naive_latents(model, x, train=False)
        soft, hard, *_ = naive_quantizer(model.quantizer, z)
        for label, codes in (("soft", soft), ("hard", hard)):
            error = (model.decoder(codes.movedim(-1, 1)) - x).double().square().mean().item()
            assert record[f"test/mse_{label}"] == pytest.approx(error, rel=1e-5)
            assert record[f"test/psnr_{label}"] == pytest.approx(
                10 * math.log10(4 / error), rel=1e-6
            )
        p = model.quantizer.prototypes
        nearest = (z[..., None, :] - p).square().sum(-1).argmin(-1)
    share = torch.bincount(nearest.flatten(), minlength=8).double() / nearest.numel()
    bits = -(share[share > 0] * share[share > 0].log2()).sum().item()
    assert record["test/tokens"] == 21 * 9
    assert record["test/bits_per_code"] == pytest.approx(bits, rel=1e-9)
    assert record["test/bits_per_image"] == pytest.approx(9 * bits, rel=1e-9)
    assert record["test/perplexity"] == pytest.approx(2**bits, rel=1e-9)
    assert record["test/utilisation"] == (share > 0).double().mean().item()
    assert record["test/l_ols"] == pytest.approx(
        (z - soft).square().sum(-1).mean().item(), rel=1e-4
    )
    spread = z.flatten(0, 2).var(0, correction=0).sum().item()
    assert record["test/spread"] == pytest.approx(spread, rel=1e-4)
    if isinstance(model.quantizer, DDCLCodebook):
        assert record["test/psnr_soft"] != record["test/psnr_hard"]
        assert record["test/variance"] > 0
    else:
        assert record["test/psnr_soft"] == record["test/psnr_hard"]
        assert record["test/variance"] == 0
        assert record["test/token_perplexity"] == 1
        assert record["test/perplexity_soft"] == pytest.approx(record["test/perplexity"])


class Colours(Autoencoder):
    """Pixels are latents and codes are colours: nothing but the quantizer is between them."""

    stride = 1

    def __init__(self, config: CodebookConfig, codes: torch.Tensor) -> None:
        super().__init__()
        self.config = VQVAEConfig(quantizer=config)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.quantizer = build(config)
        self.quantizer.initialize(codes)
        with torch.no_grad():
            self.quantizer.prototypes.copy_(codes)

    def latents(self, x, level=0):
        return self.scale * x.movedim(1, -1)

    def encode(self, x):
        return (self.quantizer.assign(self.latents(x)),)

    def decode(self, quantized):
        return quantized[0].movedim(-1, 1)


def colours(method: str, codes: torch.Tensor, temperature: float) -> Colours:
    options = dict(dim=3, codebook_size=len(codes))
    policy = FixedTemperature(value=temperature)
    configs = {
        "ddcl": DDCLConfig(temperature=policy, **options),
        "straight_through": StraightThroughConfig(**options),
        "ema": EMAConfig(**options),
    }
    return Colours(configs[method], codes)


METHODS = pytest.mark.parametrize("method", ["ddcl", "straight_through", "ema"])


@METHODS
@pytest.mark.parametrize("batch", [1, 4, 13])
def test_perplexity_and_error_of_single_tokens_are_those_of_the_split(method, batch, monkeypatch):
    # C14: thirteen images of one token, sorted by their code; an error of 1.3 in the last alone
    levels = torch.tensor([[0, 0, 0]] * 4 + [[0, 0, 255]] * 4 + [[0, 255, 0]] * 4 + [[255] * 3])
    images = ImageArray(levels[:, :, None, None].to(torch.uint8), "colours", [""] * 13)
    codes = to_float(images.pixels[::4])[:, :, 0, 0].contiguous()
    codes[3] -= 1.3**0.5
    monkeypatch.setattr(data, "_FLOAT_BATCH", batch)
    record = evaluation(colours(method, codes, 1e-3), images)
    for label in ("soft", "hard"):
        assert record[f"test/mse_{label}"] == pytest.approx(0.1, rel=1e-5)
    assert record["test/perplexity"] == pytest.approx(3.6157, abs=5e-5)
    assert record["test/perplexity_soft"] == pytest.approx(3.6157, abs=5e-5)
    assert record["test/utilisation"] == 1.0
    assert record["test/tokens"] == 13
    assert record["test/l_ols"] == pytest.approx(0.3, rel=1e-5)


@METHODS
@pytest.mark.parametrize("batch", [1, 4, 13])
def test_soft_perplexity_is_reported_beside_that_of_the_indices(method, batch, monkeypatch):
    # C14: weights of 0.6 and 0.4 everywhere
    images = ImageArray(torch.zeros(13, 3, 1, 1, dtype=torch.uint8), "black", [""] * 13)
    codes = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0 + math.log(1.5) ** 0.5]])
    monkeypatch.setattr(data, "_FLOAT_BATCH", batch)
    record = evaluation(colours(method, codes, 1.0), images)
    assert record["test/perplexity"] == 1.0
    soft = 1.9601 if method == "ddcl" else 1.0
    assert record["test/perplexity_soft"] == pytest.approx(soft, abs=5e-5)
    assert record["test/utilisation"] == 0.5


@pytest.mark.parametrize("batch", [1, 8, 20])
def test_evaluation_does_not_depend_on_the_batches(autoencoder, noise_images, monkeypatch, batch):
    images = noise_images(21, size=12)
    whole = evaluation(autoencoder, images)
    monkeypatch.setattr(data, "_FLOAT_BATCH", batch)
    parts = evaluation(autoencoder, images)
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        # The spread is the small difference of float32 means of an untrained encoder.
        assert parts[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_evaluation_changes_nothing_in_the_model_and_draws_nothing(autoencoder, noise_images):
    before, generator = copy.deepcopy(autoencoder.state_dict()), torch.get_rng_state()
    record = evaluation(autoencoder, noise_images(9))
    assert_close(autoencoder.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert record == evaluation(autoencoder, noise_images(9))


def test_an_evaluation_knows_nothing_of_the_one_before(autoencoder, noise_images):
    metrics = Reconstruction(), Reconstruction()
    evaluate(autoencoder, noise_images(9, seed=1), *metrics)
    again = evaluate(autoencoder, noise_images(5), *metrics)
    assert again == evaluation(autoencoder, noise_images(5))
