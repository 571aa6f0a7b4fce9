"""One training step, the groups and the schedule, and the evaluation, against naive formulas.

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

from softvq import training
from softvq.autoencoder import VQVAE
from softvq.checkpoint import read_tensors, write_tensors
from softvq.data import ImageArray, to_float
from softvq.metrics import Reconstruction
from softvq.quantizers import EMAVQ, DDCLCodebook, StraightThroughVQ
from softvq.training import NonFiniteLoss, Sums, TrainConfig

RECIPE = TrainConfig(epochs=2, batch_size=16, lr=1e-3, eps=0.1)


@pytest.fixture
def model(tiny_config, noise_images) -> VQVAE:
    torch.manual_seed(0)
    model = VQVAE(tiny_config)
    training.prepare(model, noise_images(64), total_steps=8)
    return model


def steps(model, optimizer, images, sums, numbers) -> Sums:
    for number in numbers:
        training.set_learning_rate(optimizer, RECIPE, number / 8)
        (pixels,) = images.batches(torch.arange(16) + 16 * (number % 4), 16)
        training.add_step(sums, *training.train_step(model.train(), optimizer, pixels, 0.3, RECIPE))
    return sums


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert_close(state, other, rtol=0, atol=0, equal_nan=True)


def naive_latents(model: VQVAE, x: torch.Tensor, train: bool) -> torch.Tensor:
    z = model.encoder(x)
    if isinstance(model.norm, nn.BatchNorm2d):
        mean, variance = model.norm.running_mean, model.norm.running_var
        if train:
            mean, variance = z.mean((0, 2, 3)), z.var((0, 2, 3), correction=0)
        z = (z - mean[:, None, None]) / (variance[:, None, None] + model.norm.eps).sqrt()
    return z.movedim(1, -1)


def naive_quantizer(codebook, z: torch.Tensor):
    """(soft, hard, what the decoder of a training step sees, the quantizer's loss)."""
    p, d = codebook.prototypes, codebook.dim
    distance = (z[..., None, :] - p).square().sum(-1)
    hard = p[distance.argmin(-1)]
    if isinstance(codebook, DDCLCodebook):
        q = torch.softmax(-distance / codebook.temperature.clone(), -1)
        soft, fixed = q @ p, q.detach()
        for_codes = (fixed * (z.detach()[..., None, :] - p).square().sum(-1)).sum(-1).mean()
        for_encoder = (fixed * (z[..., None, :] - p.detach()).square().sum(-1)).sum(-1).mean()
        usage = q.mean((0, 1, 2))
        loss = for_codes + 0.05 * (for_encoder - for_encoder.detach())
        loss = loss / d + 0.1 * (usage * (usage * len(p)).log()).sum()
        return soft, hard, soft + (hard - soft).detach(), loss
    loss = 0.25 * (z - hard.detach()).square().mean()
    if isinstance(codebook, StraightThroughVQ):
        loss = loss + (z.detach() - hard).square().mean()
    return hard, hard, z + (hard - z).detach(), loss


def test_a_step_has_the_loss_and_the_gradients_of_the_naive_formula(model, noise_images):
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
        assert_close(parameter.grad, wanted.grad, rtol=1e-3, atol=1e-4 * scale)
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
        assert value.dtype in (torch.float32, torch.int64, torch.bool)
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
        assert rates[id(parameter)] == (1e-2 if name == "quantizer.prototype" else 1e-3)
    learned = not isinstance(model.quantizer, EMAVQ)
    names = ["network", "prototypes"] if learned else ["network"]
    assert [group["name"] for group in groups] == names


def test_two_codebooks_share_the_group_of_the_prototypes():
    bank, other = DDCLCodebook(dim=2, codebook_size=3), StraightThroughVQ(dim=2, codebook_size=3)
    network, prototypes = training.param_groups(
        nn.ModuleList([nn.Linear(2, 2), bank, EMAVQ(dim=2, codebook_size=3), other]), 1.0, 0.5
    )
    assert [id(p) for p in prototypes["params"]] == [id(bank.prototype), id(other.prototype)]
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
    monkeypatch.setattr(training, "_EVALUATION_BATCH", batch)
    images = noise_images(21)
    images.pixels[:, 0] //= 4
    expected = np.var(to_float(images.pixels).numpy().astype(np.float64))
    assert training.pixel_variance(images) == pytest.approx(expected, rel=1e-12)


def test_images_of_one_colour_have_a_scale_of_one(noise_images):
    images = noise_images(3)
    images.pixels.fill_(200)
    assert training.pixel_variance(images) == 1.0


def test_prepare_starts_from_the_data_once(tiny_config, noise_images, monkeypatch):
    monkeypatch.setattr(training, "_EVALUATION_BATCH", 16)
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
    assert_same(before, snapshot(model))
    if isinstance(model.quantizer, DDCLCodebook):
        assert model.quantizer.schedule_steps == 99


def test_prepare_gives_running_statistics_that_are_plain_means(noise_images, monkeypatch):
    from softvq.autoencoder import VQVAEConfig
    from softvq.quantizers import DDCLConfig

    monkeypatch.setattr(training, "_EVALUATION_BATCH", 16)
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


def test_fewer_images_than_the_start_wants_are_all_used(tiny_config, noise_images):
    torch.manual_seed(0)
    model = VQVAE(tiny_config)
    training.prepare(model, noise_images(1), total_steps=1)
    assert model.quantizer.initialized
    assert len(model.quantizer.prototypes.unique(dim=0)) == 8


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
            training.add_step(sums, output, (output.reconstruction - x).square().mean())
        record = training.train_record(sums, model)
        # The KL of the mean weights and the batch's own spread are no means over images
        records.append(
            {k: v for k, v in record.items() if k not in ("train/quantizer_loss", "train/spread")}
        )
    assert_close(*records, rtol=1e-5, atol=1e-6)


def evaluation(model, images) -> dict[str, float]:
    return training.evaluate(model, images, Reconstruction(), Reconstruction())


def test_evaluation_equals_the_naive_formulas(model, noise_images):
    images = noise_images(21, size=12)
    steps(model, training.build_optimizer(model, RECIPE), noise_images(64), Sums(), range(3))
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


@pytest.mark.parametrize("batch", [1, 8, 20])
def test_evaluation_does_not_depend_on_the_batches(model, noise_images, monkeypatch, batch):
    images = noise_images(21, size=12)
    whole = evaluation(model, images)
    monkeypatch.setattr(training, "_EVALUATION_BATCH", batch)
    parts = evaluation(model, images)
    assert parts.keys() == whole.keys()
    for name, value in whole.items():
        # The spread is the small difference of float32 means of an untrained encoder.
        assert parts[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_evaluation_changes_nothing_in_the_model_and_draws_nothing(model, noise_images):
    before, generator = snapshot(model), torch.get_rng_state()
    record = evaluation(model, noise_images(9))
    assert_same(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), generator)
    assert record == evaluation(model, noise_images(9))


def test_an_evaluation_knows_nothing_of_the_one_before(model, noise_images):
    metrics = Reconstruction(), Reconstruction()
    training.evaluate(model, noise_images(9, seed=1), *metrics)
    again = training.evaluate(model, noise_images(5), *metrics)
    assert again == evaluation(model, noise_images(5))


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
    record = training.train_record(sums, model)
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
    assert training.train_record(other_sums, other) == record
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
    TrainConfig(epochs=1, batch_size=1, lr=1e-30, eps=1.0, seed=2**32 - 1, precision="bfloat16")


def test_batches_are_all_images_in_order(model, noise_images, monkeypatch):
    monkeypatch.setattr(training, "_EVALUATION_BATCH", 4)
    images: ImageArray = noise_images(10)
    parts = list(training.batches(model, images))
    assert [len(part) for part in parts] == [4, 4, 2]
    assert torch.equal(torch.cat(parts), to_float(images.pixels))
