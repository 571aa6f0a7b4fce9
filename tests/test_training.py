"""One training step, the groups, the schedule and the state, against naive formulas.

Whole runs, with their files and their interruptions, are in test_programs.
"""

import copy
import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch
from einops import rearrange
from torch import nn
from torch.testing import assert_close

from softvq import data, training
from softvq.autoencoder import VQVAE, LatentNorm, VQVAEConfig
from softvq.checkpoint import read_tensors, write_tensors
from softvq.data import to_float
from softvq.evaluation import Sums, add_step, train_record
from softvq.hierarchical import HierarchicalVQVAEConfig, build_autoencoder
from softvq.quantizers import EMAVQ, DDCLCodebook, DDCLConfig, StraightThroughVQ
from softvq.training import NonFiniteLoss, TrainConfig

RECIPE = TrainConfig(epochs=2, batch_size=16, lr=1e-3, eps=0.1)


def steps(model, optimizer, images, sums, numbers) -> Sums:
    for number in numbers:
        training.set_learning_rate(optimizer, RECIPE, number / 8)
        (pixels,) = images.batches(torch.arange(16) + 16 * (number % 4), 16)
        add_step(sums, *training.train_step(model.train(), optimizer, pixels, 0.3, RECIPE))
    return sums


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert_close(state, other, rtol=0, atol=0, equal_nan=True)


def test_a_step_has_the_loss_and_the_gradients_of_the_naive_formula(
    model, noise_images, naive_latents, naive_quantizer
):
    pixels, variance = noise_images(16).pixels, 0.3
    reference, x = copy.deepcopy(model), to_float(pixels)
    *_, seen, quantizer_loss = naive_quantizer(
        reference.quantizer, naive_latents(reference, x, train=True)
    )
    reconstruction = reference.decoder(seen.movedim(-1, 1))
    mse = (reconstruction - x).square().mean()
    (mse / variance + quantizer_loss).backward()

    optimizer = training.build_optimizer(model, RECIPE)
    output, found = training.train_step(model.train(), optimizer, pixels, variance, RECIPE)
    assert_close(found, mse)
    assert_close(output.loss, quantizer_loss)
    assert_close(output.reconstruction, reconstruction, rtol=1e-5, atol=1e-5)
    largest = max(parameter.grad.abs().max().item() for parameter in reference.parameters())
    for (name, parameter), wanted in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        # The bias before the normalisation has no gradient but rounding
        scale = wanted.grad.abs().max().item() + 0.1 * largest
        assert_close(parameter.grad, wanted.grad, rtol=1e-3, atol=1e-3 * scale)
        # Adam's first step is lr along the sign of the gradient, softened by its 1e-8
        rate = 1e-2 if name.startswith("quantizer.") else 1e-3
        moved = wanted.data - rate * parameter.grad / (parameter.grad.abs() + 1e-8)
        assert_close(parameter.data, moved, rtol=1e-5, atol=1e-6)


def test_gradients_of_the_step_before_are_forgotten(model, noise_images):
    pixels = noise_images(16).pixels
    still = dataclasses.replace(RECIPE, lr=1e-30)
    optimizer = training.build_optimizer(model, still)
    before, gradients = snapshot(model), []
    for _ in range(2):
        model.load_state_dict(before)
        training.train_step(model.train(), optimizer, pixels, 0.3, still)
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert_close(*gradients, rtol=0, atol=0)


def test_bfloat16_leaves_the_quantizer_and_the_weights_in_float32(model, noise_images):
    pixels = noise_images(16).pixels
    twin = copy.deepcopy(model)
    half = dataclasses.replace(RECIPE, precision="bfloat16")
    optimizer = training.build_optimizer(twin, half)
    output, mse = training.train_step(twin.train(), optimizer, pixels, 0.3, half)
    assert output.reconstruction.dtype == torch.bfloat16
    for value in (mse, output.loss, *twin.state_dict().values()):
        assert value.dtype in (torch.float32, torch.int64, torch.uint8)
        assert value.isfinite().all()
    _, exact = training.train_step(
        model.train(), training.build_optimizer(model, RECIPE), pixels, 0.3, RECIPE
    )
    assert_close(mse, exact, rtol=0.02, atol=0)
    assert mse != exact


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_updates_nothing(model, noise_images, monkeypatch, value):
    images = noise_images(64)
    optimizer = training.build_optimizer(model, RECIPE)
    steps(model, optimizer, images, Sums(), range(2))
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    original = VQVAE.forward

    def broken(self, x):
        return original(self, x)._replace(loss=torch.tensor(value))

    monkeypatch.setattr(VQVAE, "forward", broken)
    with pytest.raises(NonFiniteLoss, match=f"the loss is {value}"):
        steps(model, optimizer, images, Sums(), [2])
    assert_same(weights, dict(model.named_parameters()))
    assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)


def test_prototypes_have_a_group_of_their_own_and_every_parameter_has_one(model):
    groups = training.param_groups(model, lr=1e-3, eps=0.1)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert rates.keys() == {id(p) for p in model.parameters()}
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == (1e-2 if name == "quantizer.prototypes" else 1e-3)
    learned = not isinstance(model.quantizer, EMAVQ)
    names = ["network", "prototypes"] if learned else ["network"]
    assert [group["name"] for group in groups] == names


def test_two_codebooks_share_the_group_of_the_prototypes():
    bank, other = DDCLCodebook(dim=2, codebook_size=3), StraightThroughVQ(dim=2, codebook_size=3)
    network, prototypes = training.param_groups(
        nn.ModuleList([nn.Linear(2, 2), bank, EMAVQ(dim=2, codebook_size=3), other]), 1.0, 0.5
    )
    assert [id(p) for p in prototypes["params"]] == [id(bank.prototypes), id(other.prototypes)]
    assert (network["lr"], prototypes["lr"]) == (1.0, 2.0)


def rates(lr: float, eps: float, done: float) -> list[float]:
    config = TrainConfig(lr=lr, eps=eps)
    optimizer = training.build_optimizer(DDCLCodebook(dim=2, codebook_size=3), config)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(1))]
    training.set_learning_rate(optimizer, config, done)
    return [group["lr"] for group in optimizer.param_groups]


def test_both_groups_follow_one_cosine():
    # C12: epochs 5 to 9 of 10
    for epoch, rate in zip(
        range(5, 10), (5e-4, 3.4549e-4, 2.0611e-4, 9.549e-5, 2.447e-5), strict=True
    ):
        network, prototypes = rates(1e-3, 0.1, epoch / 10)
        assert network == pytest.approx(rate, abs=5e-9)
        exact = 1e-3 * math.cos(math.pi * epoch / 20) ** 2
        assert network == pytest.approx(exact, abs=1e-12)
        assert prototypes == pytest.approx(10 * exact, abs=1e-12)
    assert rates(1e-3, 0.1, 0.0) == pytest.approx([1e-3, 1e-2], rel=1e-12)
    quarter = (2 + math.sqrt(2)) / 4
    assert rates(1e-3, 0.1, 0.25) == pytest.approx([1e-3 * quarter, 1e-2 * quarter], rel=1e-12)
    assert rates(1e-3, 0.1, 0.5) == pytest.approx([5e-4, 5e-3], rel=1e-12)
    assert rates(1e-3, 0.1, 1.0) == pytest.approx([0, 0], abs=1e-18)


def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone(noise_images):
    images = noise_images(50)
    orders = {}
    for seed, epoch in itertools.product((0, 1, 2**32 - 1), range(3)):
        orders[seed, epoch] = training.epoch_order(images, seed, epoch)
        torch.rand(1)
        assert torch.equal(orders[seed, epoch], training.epoch_order(images, seed, epoch))
        assert torch.equal(orders[seed, epoch].sort().values, torch.arange(50))
    for a, b in itertools.combinations(orders.values(), 2):
        assert not torch.equal(a, b)


def test_the_order_of_an_epoch_leaves_the_random_numbers_alone(noise_images):
    before = torch.get_rng_state()
    training.epoch_order(noise_images(50), 0, 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("batch", [1, 7, 256])
def test_the_variance_of_the_pixels_is_numpys(noise_images, monkeypatch, batch):
    monkeypatch.setattr(data, "_FLOAT_BATCH", batch)
    images = noise_images(21)
    images.pixels[:, 0] //= 4
    expected = np.var(to_float(images.pixels).numpy().astype(np.float64))
    assert training.pixel_variance(images) == pytest.approx(expected, rel=1e-12)


def test_images_of_one_colour_have_a_scale_of_one(noise_images):
    images = noise_images(3)
    images.pixels.fill_(200)
    assert training.pixel_variance(images) == 1.0


def test_prepare_starts_from_the_data_once(tiny_config, noise_images, naive_latents, monkeypatch):
    monkeypatch.setattr(data, "_FLOAT_BATCH", 16)
    images = noise_images(80)
    torch.manual_seed(0)
    model = VQVAE(tiny_config)
    seen, initialize = [], type(model.quantizer).initialize

    def spy(self, z, mask=None):
        seen.append(z.clone())
        return initialize(self, z, mask)

    monkeypatch.setattr(type(model.quantizer), "initialize", spy)
    training.prepare(model, images, total_steps=30)
    # 16 tokens for each of 8 codes are 32 images: two batches of the five
    parts = [naive_latents(model, to_float(images.pixels[i : i + 16]), True) for i in (0, 16)]
    tokens = rearrange(torch.cat(parts), "b h w d -> (b h w) d")
    (given,) = seen
    assert_close(given, tokens, rtol=1e-4, atol=1e-5)
    assert model.quantizer.initialized
    if isinstance(model.quantizer, DDCLCodebook):
        assert torch.cdist(model.quantizer.prototypes, given).min(1).values.max() < 1e-3
    before = snapshot(model)
    training.prepare(model, images, total_steps=99)
    assert len(seen) == 1
    if isinstance(model.quantizer, DDCLCodebook):
        assert model.quantizer.schedule_steps == 99
        model.quantizer.schedule_steps = 30
    assert_same(before, snapshot(model))


def test_prepare_gives_running_statistics_that_are_plain_means(noise_images, monkeypatch):
    from softvq.autoencoder import VQVAEConfig
    from softvq.quantizers import DDCLConfig

    monkeypatch.setattr(data, "_FLOAT_BATCH", 16)
    images = noise_images(80)
    torch.manual_seed(0)
    model = VQVAE(VQVAEConfig(quantizer=DDCLConfig(dim=4, codebook_size=8), hidden=6))
    training.prepare(model, images, total_steps=30)
    parts = [model.encoder(to_float(images.pixels[i : i + 16])) for i in (0, 16)]
    means = torch.stack([z.mean((0, 2, 3)) for z in parts]).mean(0)
    variances = torch.stack([z.var((0, 2, 3)) for z in parts]).mean(0)
    assert_close(model.norm.running_mean, means, rtol=1e-4, atol=1e-6)
    assert_close(model.norm.running_var, variances, rtol=1e-4, atol=0)
    assert model.norm.momentum == 0.1
    assert not model.quantizer.prototypes.grad
    assert model.norm.running_mean.grad_fn is None


@pytest.mark.parametrize("levels", [1, 2])
def test_settled_statistics_are_those_of_the_first_images_now(noise_images, monkeypatch, levels):
    monkeypatch.setattr(data, "_FLOAT_BATCH", 16)
    monkeypatch.setattr(training, "_SETTLING_IMAGES", 32)
    images, codes = noise_images(80), DDCLConfig(dim=4, codebook_size=8)
    torch.manual_seed(0)
    config = (
        VQVAEConfig(hidden=6, quantizer=codes),
        HierarchicalVQVAEConfig(hidden=6, top=codes, bottom=codes),
    )[levels - 1]
    model = build_autoencoder(config)
    training.prepare(model, images, total_steps=30)
    norms = [module for module in model.modules() if isinstance(module, LatentNorm)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)  # the statistics move with the weights
    for norm in norms:
        norm.running_mean.fill_(7.0)
    training.settle(model, images)
    settled = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]
    seen = []
    for norm in norms:
        norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        for start in (0, 16):
            model.latents(to_float(images.pixels[start : start + 16]), levels - 1)
    for number, (mean, variance) in enumerate(settled):
        parts = seen[number::levels]
        assert len(parts) == 2
        assert_close(mean, torch.stack([z.mean((0, 2, 3)) for z in parts]).mean(0))
        assert_close(variance, torch.stack([z.var((0, 2, 3)) for z in parts]).mean(0))
        assert norms[number].momentum == 0.1


def test_fewer_images_than_the_start_wants_are_all_used(tiny_config, noise_images):
    torch.manual_seed(0)
    model = VQVAE(tiny_config)
    training.prepare(model, noise_images(1), total_steps=1)
    assert model.quantizer.initialized
    assert len(model.quantizer.prototypes.unique(dim=0)) == 8


def fresh(config, noise_images) -> tuple[VQVAE, torch.optim.Adam]:
    """Other weights and other random numbers; the groups and what is in them in another order."""
    torch.manual_seed(1)
    model = VQVAE(config)
    groups = training.param_groups(model, RECIPE.lr, RECIPE.eps)
    for group in groups:
        group["params"] = group["params"][::-1]
    return model, torch.optim.Adam(groups[::-1])


def test_a_run_goes_on_from_its_state_bit_for_bit(model, tiny_config, noise_images, tmp_path):
    images, path = noise_images(64), tmp_path / "state.safetensors"
    optimizer = training.build_optimizer(model, RECIPE)
    sums = steps(model, optimizer, images, Sums(), range(3))
    write_tensors(path, training.training_state(model, optimizer, sums))
    saved, _ = read_tensors(path)
    steps(model, optimizer, images, sums, range(3, 6))
    expected = training.training_state(model, optimizer, sums)
    record = train_record(sums, model)
    drawn = torch.rand(3)

    other, other_optimizer = fresh(tiny_config, noise_images)
    other_sums = training.restore(saved, other, other_optimizer)
    for name, parameter in other.named_parameters():
        for key in ("step", "exp_avg", "exp_avg_sq"):
            value = other_optimizer.state[parameter][key]
            assert torch.equal(value, saved[f"optimizer/{name}/{key}"]), name
    training.prepare(other, images, total_steps=8)
    steps(other, other_optimizer, images, other_sums, range(3, 6))
    assert_same(training.training_state(other, other_optimizer, other_sums), expected)
    assert train_record(other_sums, other) == record
    assert torch.equal(torch.rand(3), drawn)


def test_the_state_before_the_first_step_can_be_restored(model, tiny_config, noise_images):
    optimizer = training.build_optimizer(model, RECIPE)
    state = {k: v.clone() for k, v in training.training_state(model, optimizer, Sums()).items()}
    other, other_optimizer = fresh(tiny_config, noise_images)
    assert training.restore(state, other, other_optimizer).tensors == {}
    for pair in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(2)
        steps(*pair, noise_images(64), Sums(), range(2))
    assert_same(snapshot(other), snapshot(model))


def test_the_state_of_a_machine_with_a_gpu_is_continued_without_one(
    model, tiny_config, noise_images, monkeypatch
):
    # C13
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    optimizer = training.build_optimizer(model, RECIPE)
    sums = steps(model, optimizer, noise_images(64), Sums(), range(2))
    state = {k: v.clone() for k, v in training.training_state(model, optimizer, sums).items()}
    assert "random/cuda" not in state
    other, other_optimizer = fresh(tiny_config, noise_images)
    training.restore(
        {**state, "random/cuda": torch.zeros(16, dtype=torch.uint8)}, other, other_optimizer
    )
    training.prepare(other, noise_images(64), total_steps=8)  # as every start of a program does
    for pair in ((model, optimizer), (other, other_optimizer)):
        torch.set_rng_state(state["random/cpu"])
        steps(*pair, noise_images(64), Sums(), range(2, 4))
    assert_same(snapshot(other), snapshot(model))


@pytest.mark.parametrize("size", [(16, 16), (16, 24)])
def test_the_memory_layout_of_the_convolutions_changes_no_result(autoencoder, size):
    # C06
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (8, 3, *size), generator=generator, dtype=torch.uint8)
    found = []
    for channels_last in (True, False):
        model = copy.deepcopy(autoencoder).train()
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
        config = dataclasses.replace(RECIPE, channels_last=channels_last)
        optimizer = training.build_optimizer(model, config)
        output, mse = training.train_step(model, optimizer, pixels, 0.3, config)
        levels = [level.indices for level in output.assignments]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append((levels, output.reconstruction, mse, gradients))
    assert_close(found[0][:-1], found[1][:-1], rtol=1e-4, atol=1e-5)
    # A bias before the normalisation has no gradient but rounding.
    largest = max(gradient.abs().max().item() for gradient in found[0][-1])
    assert_close(found[0][-1], found[1][-1], rtol=1e-3, atol=1e-3 * largest)


def test_a_state_that_does_not_fit_is_refused(model, tiny_config, noise_images):
    optimizer = training.build_optimizer(model, RECIPE)
    steps(model, optimizer, noise_images(64), Sums(), range(1))
    state = training.training_state(model, optimizer, Sums())
    weight = "decoder.0.weight"
    smaller = torch.zeros(1, 2)
    for change, named in [
        ({f"model/{weight}": smaller}, "[1, 2]"),
        ({f"optimizer/{weight}/exp_avg": smaller}, weight),
        ({f"optimizer/{weight}/exp_avg_sq": None}, weight),
        ({"random/cpu": None}, "random/cpu"),
        ({"random/cpu": torch.zeros(3, dtype=torch.uint8)}, ""),
        ({weight: smaller}, weight),
    ]:
        damaged = {k: v for k, v in (state | change).items() if v is not None}
        with pytest.raises(ValueError, match="the training state does not fit") as caught:
            training.restore(damaged, *fresh(tiny_config, noise_images))
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "bounds"),
    [
        ("epochs", 0, "at least 1"),
        ("epochs", -3, "at least 1"),
        ("batch_size", 0, "at least 1"),
        ("lr", 0.0, "positive and finite"),
        ("lr", -1e-3, "positive and finite"),
        ("lr", math.inf, "positive and finite"),
        ("lr", math.nan, "positive and finite"),
        ("eps", 0.0, "(0, 1]"),
        ("eps", 1.01, "(0, 1]"),
        ("eps", math.nan, "(0, 1]"),
        ("precision", "float16", "float32 or bfloat16"),
        ("seed", -1, "[0, 2**32)"),
        ("seed", 2**32, "[0, 2**32)"),
    ],
)
def test_a_recipe_out_of_bounds_is_refused(field, value, bounds):
    config = TrainConfig()
    # Past the constructor, where the checks of the suite would stop a wrong literal first
    object.__setattr__(config, field, value)
    with pytest.raises(ValueError, match=re.escape(field)) as caught:
        config.__post_init__()
    assert bounds in str(caught.value)
    assert str(value) in str(caught.value)


def test_the_bounds_of_a_recipe_belong_to_it():
    least = dict(epochs=1, batch_size=1, lr=1e-30)
    config = TrainConfig(**least, eps=1.0, seed=2**32 - 1, precision="bfloat16")
    assert {name: getattr(config, name) for name in least} == least
    assert (config.eps, config.seed, config.precision) == (1.0, 2**32 - 1, "bfloat16")
