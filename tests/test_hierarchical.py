"""The two-level VQ-VAE: sizes, the round trip through indices, what each level is made from.

The layers it shares with the flat one are tested there, the quantizers on their own.
"""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from softvq import ddcl
from softvq.autoencoder import VQVAE, NetworkConfig, VQVAEConfig
from softvq.data import ImageArray, to_float
from softvq.evaluation import code_counts, evaluate_without, mean_codes
from softvq.hierarchical import HierarchicalVQVAE, HierarchicalVQVAEConfig, build_autoencoder
from softvq.metrics import Reconstruction
from softvq.quantizers import DDCLConfig, EMAConfig, StraightThroughConfig
from softvq.training import TrainConfig, build_optimizer, prepare, train_step

TOP, BOTTOM = dict(dim=6, codebook_size=8), dict(dim=8, codebook_size=16)
LEVELS = {
    "ddcl": (DDCLConfig(**TOP), DDCLConfig(**BOTTOM)),
    "straight_through": (
        StraightThroughConfig(**TOP, init="data"),
        StraightThroughConfig(**BOTTOM, init="data"),
    ),
    "ema": (EMAConfig(**TOP), EMAConfig(**BOTTOM)),
    "mixed": (EMAConfig(**TOP), DDCLConfig(**BOTTOM)),
}


@pytest.fixture(params=LEVELS.values(), ids=LEVELS)
def model(request) -> HierarchicalVQVAE:
    return small(*request.param)


def small(top=LEVELS["ddcl"][0], bottom=LEVELS["ddcl"][1], **options) -> HierarchicalVQVAE:
    torch.manual_seed(0)
    config = HierarchicalVQVAEConfig(
        top=top, bottom=bottom, hidden=16, residual_hidden=8, **options
    )
    model = HierarchicalVQVAE(config)
    # One training pass is enough for the running statistics.
    model.top_norm.momentum = model.bottom_norm.momentum = 1.0
    return model


def images(*shape: int) -> Tensor:
    batch, height, width = shape
    generator = torch.Generator().manual_seed(1)
    return torch.rand(batch, 3, height, width, generator=generator) * 2 - 1


@pytest.mark.parametrize(
    "shape", [(2, 32, 32), (2, 33, 47), (2, 4, 4), (3, 1, 1), (1, 1, 1)], ids=str
)
def test_every_size_comes_back_in_training_and_evaluation(model, shape):
    x = images(*shape)
    top = tuple(math.ceil(side / 8) for side in shape[1:])
    bottom = tuple(2 * side for side in top)
    for training in (True, False):
        out = model.train(training)(x)
        assert out.reconstruction.shape == x.shape
        assert out.reconstruction.isfinite().all()
        for level, grid in zip(out.assignments, (top, bottom), strict=True):
            assert level.indices.shape == (shape[0], *grid)
            assert level.counts.sum() == shape[0] * grid[0] * grid[1]


@pytest.mark.parametrize("downsamplings", [1, 3])
def test_the_top_is_one_halving_above_the_bottom(downsamplings):
    model = small(downsamplings=downsamplings, residual_blocks=0)
    out = model(images(2, 32, 16))
    assert model.stride == 2 ** (downsamplings + 1)
    top, bottom = (level.indices for level in out.assignments)
    assert top.shape == (2, 32 // model.stride, 16 // model.stride)
    assert bottom.shape == (2, 64 // model.stride, 32 // model.stride)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_indices_decode_to_the_evaluated_forward_pass_bit_for_bit(model, dtype):
    x = images(2, 33, 47)
    model(x)
    model, x = model.eval().to(dtype), x.to(dtype)
    out = model(x)
    decoded = model.decode_indices(tuple(level.indices for level in out.assignments))
    assert torch.equal(decoded[:, :, :33, :47], out.reconstruction)


def test_one_grid_for_two_levels_is_refused():
    model = small()
    top, _ = (level.indices for level in model(images(2, 16, 16)).assignments)
    with pytest.raises(ValueError, match=r"2 grids b h w, got \(2, 2, 2\)"):
        model.decode_indices((top,))


def test_the_bottom_is_encoded_given_the_quantized_top(model):
    x = images(2, 16, 16)
    model(x)
    top, bottom = model.eval().encode(x)
    features = model.bottom_features(x)
    z = model.top_norm(model.top_encoder(features)).movedim(1, -1)
    assert_close(model.latents(x), z)
    assert torch.equal(top.indices, model.top_quantizer.nearest(z))
    codes = model.top_quantizer.prototypes[top.indices].movedim(-1, 1)
    given = torch.cat([features, model.top_decoder(codes)], 1)
    z = model.bottom_norm(model.bottom_encoder(given)).movedim(1, -1)
    assert_close(model.latents(x, 1), z)
    assert torch.equal(bottom.indices, model.bottom_quantizer.nearest(z))


def test_the_decoder_reads_both_levels(model):
    x = images(2, 16, 16)
    model(x)
    top, bottom = (level.quantized.movedim(-1, 1) for level in model.eval().encode(x))
    weight, bias = model.upsample.weight, model.upsample.bias
    upsampled = F.conv_transpose2d(top, weight, bias, stride=2, padding=1)
    expected = model.decoder(torch.cat([upsampled, bottom], 1))
    assert_close(model(x).reconstruction, expected)


def test_the_loss_is_the_sum_over_levels(model):
    out = model(images(2, 16, 16))
    assert_close(out.loss, out.assignments[0].loss + out.assignments[1].loss)


def test_every_layer_receives_the_gradient_of_the_reconstruction(model):
    x = images(4, 32, 32)
    (model(x).reconstruction - x).square().mean().backward()
    for name, parameter in model.named_parameters():
        # The codes of hard quantizers learn from their own loss alone.
        if "quantizer" not in name or model.config.top is LEVELS["ddcl"][0]:
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name


def test_each_level_has_the_temperature_of_its_own_tokens():
    model = small(normalize=False)
    with torch.no_grad():
        model.bottom_encoder.weight /= 1000  # a level of another scale
    x = images(16, 32, 32)
    model(x)
    for level, codebook in enumerate((model.top_quantizer, model.bottom_quantizer)):
        critical = ddcl.critical_temperature(model.latents(x, level))
        assert_close(codebook.critical, critical, rtol=1e-3, atol=0)
        assert 1e-4 < codebook.temperature / critical < 0.9
    assert model.top_quantizer.temperature > 1000 * model.bottom_quantizer.temperature


def test_the_competitive_loss_splits_at_each_level():
    model = small().double()
    x = images(4, 16, 16).double()
    model(x)
    levels = model.eval().encode(x)
    for number, (level, codebook) in enumerate(
        zip(levels, (model.top_quantizer, model.bottom_quantizer), strict=True)
    ):
        z = model.latents(x, number)
        distances = (z[..., None, :] - codebook.prototypes).square().sum(-1)
        q = (-distances / codebook.temperature).softmax(-1)
        assert level.variance > 0
        total = (q * distances).sum(-1).mean()
        assert_close(level.reconstruction + level.variance, total, rtol=0, atol=1e-10)


def test_each_level_starts_from_its_own_tokens(noise_images):
    model = small()
    pictures = noise_images(40, size=16)
    prepare(model, pictures, total_steps=8)
    x = to_float(pictures.pixels)
    for level, codebook in enumerate((model.top_quantizer, model.bottom_quantizer)):
        assert codebook.schedule_steps == 8
        z = model.eval().latents(x, level).reshape(-1, codebook.dim)
        # Seeds are tokens of the buffer, which running statistics normalise a little differently.
        assert torch.cdist(codebook.prototypes, z).amin(1).max() < 0.2 * z.std(0).norm()


def test_what_a_level_carries_is_measured_by_its_mean(noise_images):
    model = small()
    pictures = noise_images(60, size=16)
    prepare(model, pictures, total_steps=8)
    optimizer = build_optimizer(model, TrainConfig(lr=1e-2))
    for _ in range(8):
        train_step(model, optimizer, pictures.pixels, 1.0, TrainConfig())
    x = to_float(pictures.pixels)
    codes = [level.quantized for level in model.eval().encode(x)]
    means = mean_codes(model, code_counts(model, pictures))
    got = evaluate_without(model, pictures, Reconstruction(channels=3, with_ssim=False))
    for level in range(2):
        replaced = list(codes)
        replaced[level] = codes[level].mean((0, 1, 2)).expand_as(codes[level])
        assert_close(means[level], codes[level].mean((0, 1, 2)), rtol=1e-4, atol=1e-5)
        mse = (model.decode(tuple(replaced)) - x).square().mean().item()
        expected = 10 * math.log10(4 / mse)
        assert got[f"test/psnr_hard_without_level{level + 1}"] == pytest.approx(expected, abs=1e-3)


def test_a_flat_model_has_no_level_to_do_without(noise_images):
    model = VQVAE(VQVAEConfig(quantizer=LEVELS["ddcl"][0], hidden=8, residual_hidden=4))
    pictures = noise_images(40)
    prepare(model, pictures, total_steps=8)
    assert evaluate_without(model, pictures, Reconstruction(channels=3)) == {}


def test_the_architecture_follows_the_type_of_the_configuration():
    flat = VQVAEConfig(hidden=8)
    assert type(build_autoencoder(flat)) is VQVAE
    assert type(build_autoencoder(small().config)) is HierarchicalVQVAE
    with pytest.raises(ValueError, match="NetworkConfig"):
        build_autoencoder(NetworkConfig())


def test_exactly_the_split_of_an_image_array(noise_images):
    """`code_counts` counts every token of every image once."""
    model = small()
    pictures: ImageArray = noise_images(37, size=16)
    prepare(model, pictures, total_steps=8)
    top, bottom = code_counts(model, pictures)
    assert (top.sum(), bottom.sum()) == (37 * 4, 37 * 16)
