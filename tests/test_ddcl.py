"""The streaming core against the plain formula, and what THEORY says of the split and collapse."""

import math
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import pytest
import torch
from einops import einsum, rearrange
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from eval.benchmark import extra_peak_bytes
from softvq import ddcl
from softvq.ddcl import (
    SoftAssignment,
    competitive_loss,
    covariance,
    critical_temperature,
    distinct_codes,
    effective_rank,
    nearest,
    separation,
    soft_assignment,
)

F64 = torch.float64
TEMPERATURES = (1.0, 1e-2, 1e-6, 1e-20, 1e-38, 1e-40)
# (leading axes, codes, dim): one code, codes beside a multiple of 32, no token, several blocks
SHAPES = (
    ((5,), 1, 3),
    ((3, 4), 7, 2),
    ((0,), 5, 3),
    ((), 33, 4),
    ((1100,), 40, 3),
    ((300,), 512, 8),
)


class Naive(NamedTuple):
    q: Tensor
    distances: Tensor
    mu: Tensor
    reconstruction: Tensor
    variance: Tensor
    free_energy: Tensor
    entropy: Tensor
    usage: Tensor
    indices: Tensor


def naive(z: Tensor, p: Tensor, t: float | Tensor, detach: bool = False) -> Naive:
    """The definitions, with an explicit n x k matrix; `detach` keeps q fixed."""
    distances = (rearrange(z, "... d -> ... 1 d") - p).square().sum(-1)
    q = torch.softmax(-distances / t, -1)
    q = q.detach() if detach else q
    mu = einsum(q, p, "... k, k d -> ... d")
    reconstruction = (z - mu).square().sum(-1)
    variance = (q * (p - rearrange(mu, "... d -> ... 1 d")).square().sum(-1)).sum(-1)
    free_energy = -t * torch.logsumexp(-distances / t, -1)
    entropy = -torch.special.xlogy(q, q).sum(-1).detach()
    usage = rearrange(q, "... k -> (...) k").sum(0)
    indices = distances.argmin(-1)
    return Naive(q, distances, mu, reconstruction, variance, free_energy, entropy, usage, indices)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def mix(soft: SoftAssignment | Naive) -> Tensor:
    """A scalar that sends a different gradient into every entry of every output."""
    outputs = (soft.mu, soft.reconstruction, soft.variance, soft.free_energy, soft.usage)
    return sum((x * draw(*x.shape, seed=9 + i).to(x)).sum() for i, x in enumerate(outputs))


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal to `tolerance` of the largest expected entry, at least 1."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    assert_close(actual.to(F64), expected.to(F64), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("temperature", [0.3, 2.0, 50.0])
@pytest.mark.parametrize(("leading", "codes", "dim"), SHAPES)
def test_values_and_gradients_equal_the_plain_formula(
    leading, codes, dim, temperature, dtype, tolerance
):
    inputs = draw(*leading, dim), draw(codes, dim, seed=1), torch.tensor(temperature, dtype=F64)
    inputs = [x.to(dtype) for x in inputs]
    ours, theirs = leaves(*inputs), leaves(*(x.to(F64) for x in inputs))
    soft, expected = soft_assignment(*ours), naive(*theirs)
    for name in ("mu", "reconstruction", "variance", "free_energy", "entropy", "usage"):
        close(getattr(soft, name), getattr(expected, name), tolerance)
    assert_close(soft.indices, expected.indices)
    mix(soft).backward()
    mix(expected).backward()
    for actual, wanted in zip(ours, theirs, strict=True):
        assert actual.grad.dtype == dtype
        # That of T is a sum over tokens that cancels: the plain formula loses 3e-5 in float32.
        close(actual.grad, wanted.grad, 10 * tolerance if actual is ours[2] else tolerance)


def test_entropy_is_in_bounds_and_neither_it_nor_the_index_carries_a_gradient():
    z, p = leaves(draw(50, 4), draw(64, 4, seed=1))
    for temperature in (1e-20, 1.0, 1e30):
        soft = soft_assignment(z, p, temperature)
        assert not soft.entropy.requires_grad
        assert not soft.indices.requires_grad
        assert (soft.entropy >= 0).all()
        assert (soft.entropy <= math.log(64) + 1e-12).all()


@pytest.mark.parametrize("filling", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_masked_tokens_count_for_nothing_whatever_they_hold(filling, dtype):
    mask = draw(4, 30, seed=3) > 0
    mask[2] = False
    z = torch.where(mask[..., None], draw(4, 30, 5, dtype=dtype), filling)
    (z, p), (real, p_real) = (
        leaves(z, draw(40, 5, seed=1, dtype=dtype)),
        leaves(z[mask], draw(40, 5, seed=1, dtype=dtype)),
    )
    soft, expected = soft_assignment(z, p, 1.5, mask), soft_assignment(real, p_real, 1.5)
    for name in ("mu", "reconstruction", "variance", "free_energy", "entropy"):
        assert_close(getattr(soft, name)[mask], getattr(expected, name))
        assert (getattr(soft, name)[~mask] == 0).all()
    assert_close(soft.usage, expected.usage)
    assert_close(soft.indices[mask], expected.indices)
    assert (soft.indices[~mask] == -1).all()
    for x in (soft, expected):
        (x.mu.sin() + x.reconstruction[..., None]).sum().backward(retain_graph=True)
        (x.variance.sum() + x.free_energy.sum() + (x.usage**2).sum()).backward()
    assert_close(z.grad[mask], real.grad)
    assert (z.grad[~mask] == 0).all()
    assert_close(p.grad, p_real.grad)


def test_commitment_weight_scales_what_the_free_energy_gives_to_z_and_nothing_else():
    z, p = leaves(draw(20, 3), draw(7, 3, seed=1))
    for part in ("free_energy", "mu", "reconstruction", "variance"):
        whole, quarter = (
            torch.autograd.grad(
                getattr(soft_assignment(z, p, 0.7, None, weight), part).sum(), (z, p)
            )
            for weight in (1.0, 0.25)
        )
        assert_close(quarter[0], whole[0] * (0.25 if part == "free_energy" else 1))
        assert_close(quarter[1], whole[1])


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, 1e30])
def test_one_odd_token_or_far_prototype_leaves_the_other_tokens_alone(odd):
    z, p = draw(50, 4, dtype=torch.float32), draw(70, 4, seed=1, dtype=torch.float32)
    expected = soft_assignment(z, p, 0.1)
    z[7] = odd
    others = torch.arange(50) != 7
    soft = soft_assignment(z, p, 0.1)
    assert_close(soft.mu[others], expected.mu[others])
    assert_close(soft.indices[others], expected.indices[others])
    assert_close(nearest(z, p)[others], expected.indices[others])
    assert 0 <= soft.indices[7] < 70
    assert 0 <= nearest(z, p)[7] < 70
    far = torch.cat([p, torch.full((1, 4), 1e6)])
    assert_close(soft_assignment(z, far, 0.1).mu[others], expected.mu[others])


def test_all_tokens_masked_gives_zeros_and_zero_gradients():
    z, p = leaves(torch.full((3, 2), math.nan), draw(4, 2, dtype=torch.float32))
    soft = soft_assignment(z, p, 1.0, torch.zeros(3, dtype=torch.bool))
    mix(soft).backward()
    assert (soft.usage == 0).all()
    assert (z.grad == 0).all()
    assert (p.grad == 0).all()


@pytest.mark.parametrize("codes", [1, 5, 33])
def test_gradcheck_of_every_output_and_of_the_full_loss(codes):
    def outputs(z, p, t):
        soft = soft_assignment(z, p, t)
        split = competitive_loss(soft, "full")
        return soft.mu, soft.variance, soft.free_energy, soft.usage, *split

    inputs = leaves(draw(6, 3), draw(codes, 3, seed=1), torch.tensor(0.8, dtype=F64))
    assert torch.autograd.gradcheck(outputs, inputs)


def test_full_gradient_is_autograd_of_the_plain_loss():
    ours, theirs = (leaves(draw(40, 3), draw(9, 3, seed=1), torch.tensor(0.7)) for _ in range(2))
    competitive_loss(soft_assignment(*ours), "full").loss.sum().backward()
    plain = naive(*theirs)
    (plain.q * plain.distances).sum().backward()
    for actual, expected in zip(ours, theirs, strict=True):
        assert_close(
            actual.grad, expected.grad, rtol=1e-5 if actual.ndim == 0 else 1e-10, atol=1e-10
        )


def test_detached_gradient_is_that_of_the_free_energy_and_of_soft_k_means():
    z, p, t = draw(40, 3), draw(9, 3, seed=1), 0.7
    by_loss, by_energy = leaves(z, p), leaves(z, p)
    competitive_loss(soft_assignment(*by_loss, t)).loss.sum().backward()
    soft_assignment(*by_energy, t).free_energy.sum().backward()
    assert_close([x.grad for x in by_loss], [x.grad for x in by_energy], rtol=0, atol=0)
    plain = naive(z, p, t)
    pull = 2 * plain.q[..., None] * (p - z[:, None])
    assert_close(by_loss[1].grad, pull.sum(0), rtol=1e-10, atol=1e-10)
    assert_close(by_loss[0].grad, 2 * (z - plain.mu), rtol=1e-10, atol=1e-10)


def test_both_gradients_have_the_same_values_and_unknown_ones_are_refused():
    z, p = draw(20, 3), draw(9, 3, seed=1)
    soft = soft_assignment(z, p, 0.7)
    assert_close(competitive_loss(soft, "full"), competitive_loss(soft), rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="gradient must be one of"):
        competitive_loss.__wrapped__(soft, "half")


@pytest.mark.parametrize("temperature", [1e-3, 0.5, 1e3])
def test_loss_splits_exactly(temperature):
    z, p = draw(200, 6), draw(50, 6, seed=1)
    split = competitive_loss(soft_assignment(z, p, temperature))
    plain = naive(z, p, temperature)
    expected = (plain.q * plain.distances).sum(-1)
    assert_close(split.loss, expected, rtol=1e-10, atol=1e-10)
    assert_close(split.reconstruction + split.variance, expected, rtol=1e-10, atol=1e-10)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(1e-6, 1e6),
    offset=st.floats(-1e4, 1e4),
    tau=st.floats(1e-3, 1e3),
    kind=st.sampled_from(["any", "duplicates", "all equal"]),
)
def test_variance_is_never_negative_and_an_offset_costs_nothing(seed, scale, offset, tau, kind):
    z, p = draw(20, 4, seed=seed) * scale, draw(12, 4, seed=seed + 1) * scale
    if kind == "duplicates":
        p = p[[0, 0, 0, 1, 1, 2] * 2]
    if kind == "all equal":
        p = p[:1].expand(12, 4)
    z, p = (z + offset).float(), (p + offset).float()
    temperature = tau * scale**2
    soft = soft_assignment(z, p, temperature)
    split = competitive_loss(soft)
    assert (soft.variance >= 0).all()
    assert (split.loss >= 0).all()
    # The oracle reads the same rounded inputs: what float32 loses in them is not the core's. Nor is
    # the rounding of mu, an output that holds the offset.
    plain = naive(z.to(F64), p.to(F64), temperature)
    spread = (z - p.mean(0)).norm(dim=1).max().item() + (p - p.mean(0)).norm(dim=1).max().item()
    rounding = 1e-7 * (abs(offset) + scale)
    squares = {"rtol": 1e-4, "atol": 1e-4 * spread**2 + 1e-12 * rounding**2}
    assert_close(soft.variance.to(F64), plain.variance, **squares)
    floor = temperature * math.log(12)
    energies = (x.to(F64) + floor for x in (soft.free_energy, plain.free_energy))
    assert_close(*energies, rtol=1e-4, atol=squares["atol"] + 1e-6 * floor)  # F itself is rounded
    assert_close(soft.usage.to(F64), plain.usage, rtol=0, atol=1e-2)
    assert_close(soft.mu.to(F64), plain.mu, rtol=0, atol=1e-4 * spread + rounding)
    squares["atol"] += 4 * rounding * (spread + rounding)
    assert_close(split.loss.to(F64), (plain.q * plain.distances).sum(1), **squares)


@pytest.mark.parametrize("inside", ["half", "autocast", "bfloat16 tokens", "float16 tokens"])
def test_half_precision_neither_overflows_nor_clashes(inside):
    z, p = leaves(torch.full((1, 64), 40.0), torch.full((2, 64), 40.0))
    with torch.no_grad():
        p[0] = 41
    autocast = torch.autocast("cpu", dtype=torch.float16, enabled=inside == "autocast")
    if inside == "half":
        z, p = leaves(z.half(), p.half())
    if inside.endswith("tokens"):
        (z,) = leaves(z.to(getattr(torch, inside.split()[0])))
    with autocast:
        soft = soft_assignment(z, p, 1.0)
        split = competitive_loss(soft)
    assert soft.mu.dtype == split.loss.dtype == torch.float32
    assert soft.indices.item() == 1
    assert_close(soft.usage, torch.tensor([math.exp(-64), 1.0]))
    assert_close(split.loss, torch.zeros(1), rtol=0, atol=1e-6)
    (soft.mu.sum() + split.loss.sum()).backward()
    assert z.grad.dtype == z.dtype
    assert z.grad.isfinite().all()
    assert p.grad.isfinite().all()
    assert nearest(z, p).item() == 1


def test_usage_counts_beyond_the_largest_float16():
    z = torch.zeros(70_000, 2, dtype=torch.float16)
    assert soft_assignment(z, z[:1], 1.0).usage.item() == 70_000


def test_temperature_divides_the_squared_distance():
    p = torch.tensor([[0.0], [1.0]])
    usage = soft_assignment(torch.zeros(1, 1), p, 0.5).usage
    assert_close(usage, torch.tensor([0.8808, 0.1192]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, F64])
def test_every_positive_temperature_is_finite(temperature, dtype):
    z, p = leaves(torch.tensor([[5.0]], dtype=dtype), torch.tensor([[0.0], [1.0]], dtype=dtype))
    soft = soft_assignment(z, p, temperature)
    first = 1 / (1 + math.exp(min(9 / temperature, 700)))
    assert_close(soft.usage.to(F64), torch.tensor([first, 1 - first], dtype=F64), rtol=0, atol=1e-7)
    split = competitive_loss(soft, "full")
    (split.loss + soft.mu.sum() + soft.usage[0] + soft.free_energy).sum().backward()
    for x in (*soft, *split, z.grad, p.grad):
        assert x.isfinite().all()
    assert_close(split.loss.item(), 16 + 9 * first, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_no_weight_of_a_cold_codebook_is_a_denormal_number(dtype):
    # With denormal numbers a step takes two to five times as long on many processors.
    z = torch.tensor([[0.0], [40.0]], dtype=dtype)
    p = torch.arange(512, dtype=dtype)[:, None] / 16
    for temperature in (1e-3, 1.0, 1e3):
        usage = soft_assignment(z[:1], p, temperature).usage
        assert usage.min() >= torch.finfo(dtype).tiny ** 0.9
        exact = (-p[:, 0].square() / temperature).softmax(0)
        assert_close(usage, exact, rtol=1e-4, atol=1e-29)


@pytest.mark.parametrize("temperature", [1e-3, 1e-4])
def test_a_float16_temperature_is_finite(temperature):
    t = torch.tensor(temperature, dtype=torch.float16)
    z, p = torch.tensor([[5.0]]).half(), torch.tensor([[0.0], [1.0]]).half()
    assert_close(soft_assignment(z, p, t).usage, torch.tensor([0.0, 1.0]))


def test_a_learned_log_temperature_of_minus_200_is_finite():
    z, p, log_t = leaves(draw(9, 2), draw(5, 2, seed=1), torch.tensor(-200.0, dtype=F64))
    soft = soft_assignment(z, p, log_t.exp())
    mix(soft).backward()
    assert all(x.grad.isfinite().all() for x in (z, p, log_t))
    single = soft_assignment(z.float(), p.float(), log_t.exp())
    assert_close(single.indices, soft.indices)
    assert single.mu.isfinite().all()


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf, torch.tensor(0.0), torch.tensor(-1.0)])
def test_other_temperatures_are_refused_by_name(bad):
    with pytest.raises(ValueError, match="temperature must be positive and finite"):
        soft_assignment(draw(3, 2), draw(4, 2), bad if isinstance(bad, Tensor) else float(bad))


def test_widths_that_differ_are_refused_with_both():
    # __wrapped__ is the function as users call it, without the suite's check of annotations.
    for function, options in ((nearest, ()), (soft_assignment, (1.0,))):
        with pytest.raises(ValueError, match=r"width 2 .* width 3"):
            function.__wrapped__(draw(3, 2), draw(4, 3), *options)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_exact_ties_share_equally(temperature):
    p = torch.tensor([[1.0], [-1.0], [1.0], [9.0]])
    usage = soft_assignment(torch.tensor([[1.0]]), p[[0, 2]], temperature).usage
    assert_close(usage, torch.tensor([0.5, 0.5]))
    mirrored = soft_assignment(torch.zeros(1, 1), torch.tensor([[2.0], [-2.0]]), temperature)
    assert_close(mirrored.usage, torch.tensor([0.5, 0.5]))
    assert mirrored.indices.item() == 0


def test_a_huge_temperature_weighs_all_codes_equally():
    z, p, t = leaves(
        draw(5, 3, dtype=torch.float32), draw(7, 3, seed=1, dtype=torch.float32), torch.tensor(1e30)
    )
    soft = soft_assignment(z, p, t)
    assert_close(soft.usage, torch.full((7,), 5 / 7))
    assert_close(soft.mu, p.mean(0).expand(5, 3))
    assert_close(soft.entropy, torch.full((5,), math.log(7)))
    mix(soft).backward()
    assert all(x.grad.isfinite().all() for x in (z, p, t))


def test_gradient_of_the_variance_at_fixed_weights_is_two_p_sigma():
    z, (p,) = draw(1, 3), leaves(draw(6, 3, seed=1))
    plain = naive(z, p, 0.9, detach=True)
    (grad,) = torch.autograd.grad(plain.variance.sum(), p)
    q = soft_assignment(z, p, 0.9).usage.detach()
    sigma = q.diag() - torch.outer(q, q)
    assert_close(grad, 2 * sigma @ p.detach(), rtol=1e-10, atol=1e-12)
    assert_close((grad * p).sum(), 2 * plain.variance.sum(), rtol=1e-10, atol=1e-12)


def fields(z: Tensor, p: Tensor, t: float) -> dict[str, Tensor]:
    """The mean of every loss whose slope moves the prototypes."""
    soft = soft_assignment(z, p, t)
    full = competitive_loss(soft, "full")
    fixed = naive(z, p, t, detach=True)
    return {
        "F": competitive_loss(soft).loss.mean(),
        "L_q full": full.loss.mean(),
        "L_OLS full": full.reconstruction.mean(),
        "L_OLS detached": (z - fixed.mu).square().sum(-1).mean(),
        "V": full.variance.mean(),
    }


@pytest.mark.parametrize("share", [0.5, 1.1, 1.9, 2.1])
def test_curvature_at_collapse_says_which_loss_separates(share):
    k, z = 4, draw(500, 3) * torch.tensor([2.0, 1.0, 0.5], dtype=F64)
    z = z - z.mean(0)
    spectrum = torch.linalg.eigh(covariance(z))
    lam, axis = spectrum.eigenvalues[-1].item(), spectrum.eigenvectors[:, -1]
    t = share * critical_temperature(z).item()
    mode = torch.outer(torch.tensor([0.5, 0.5, -0.5, -0.5], dtype=F64), axis)

    def slopes(step: float) -> dict[str, float]:
        (p,) = leaves(step * mode)
        losses = fields(z, p, t)
        grads = {x: torch.autograd.grad(losses[x], p, retain_graph=True)[0] for x in losses}
        return {name: (grad * mode).sum().item() for name, grad in grads.items()}

    ahead, behind = slopes(1e-3), slopes(-1e-3)
    measured = {name: (ahead[name] - behind[name]) / 2e-3 for name in ahead}
    expected = {
        "F": 2 / k * (1 - 2 * lam / t),
        "L_q full": 2 / k * (1 - 4 * lam / t),
        "L_OLS full": -8 * lam / (k * t),
        "L_OLS detached": -4 * lam / (k * t),
        "V": 2 / k,
    }
    assert_close(measured, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("gradient", "critical"), [("detached", 1.0), ("full", 2.0)])
@pytest.mark.parametrize(("share", "separated"), [(0.98, True), (1.02, False)])
def test_two_clusters_separate_below_the_critical_temperature_alone(
    gradient, critical, share, separated
):
    z = torch.tensor([[1.0], [-1.0]], dtype=F64)
    t = share * critical * critical_temperature(z).item()
    (p,) = leaves(torch.tensor([[0.2], [-0.2]], dtype=F64))
    for _ in range(300):
        loss = competitive_loss(soft_assignment(z, p, t), gradient).loss.mean()
        (grad,) = torch.autograd.grad(loss, p)
        p.data -= 1.5 * grad
    s_min = separation(p).minimum.item()
    assert s_min > 0.3 if separated else s_min < 1e-3


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), tau=st.floats(1e-3, 1e3))
def test_hard_error_exceeds_soft_error_by_at_most_the_variance(seed, tau):
    z, p = draw(30, 3, seed=seed), draw(10, 3, seed=seed + 1)
    split = competitive_loss(soft_assignment(z, p, tau))
    hard = (z - p[nearest(z, p)]).square().sum(1)
    assert (hard - split.reconstruction <= split.variance + 1e-12).all()


def test_cooling_lowers_f_plus_t_log_k_but_not_f():
    z, (p,) = draw(60, 3), leaves(draw(8, 3, seed=1))
    energies, corrected = [], []
    for t in np.geomspace(4.0, 0.05, 60):
        free_energy = soft_assignment(z, p, t).free_energy.mean()
        energies.append(free_energy.item())
        corrected.append(free_energy.item() + t * math.log(8))
        p.data -= 0.5 * torch.autograd.grad(free_energy, p)[0]
    assert (np.diff(corrected) <= 1e-12).all()
    assert (np.diff(energies) > 0).any()


def grid(n: int) -> np.ndarray:
    return np.linspace(0, n - 1, n)[:, None] * np.array([[0.6, 0.8]])


@pytest.mark.parametrize("codes", [2, 3, 70])
def test_separation_is_the_smallest_and_the_mean_pair_distance(codes):
    p = draw(codes, 5)
    pairs = torch.pdist(p)
    s = separation(p)
    assert_close(s.minimum, pairs.min())
    assert_close(s.mean, pairs.mean())


def test_separation_of_duplicates_and_of_one_code_is_zero():
    p = draw(5, 3)
    s = separation(torch.cat([p, p[:1]]))
    assert s.minimum == 0
    assert s.mean > 0
    assert separation(p[:1]) == (0, 0)
    assert separation(p[:1].expand(4, 3)) == (0, 0)


def test_separation_over_several_blocks_and_far_from_the_origin(monkeypatch):
    p = draw(2500, 2, dtype=torch.float32) + 1000
    pairs = torch.pdist(p.to(F64))
    s = separation(p)
    assert_close(s.minimum.to(F64), pairs.min(), rtol=1e-5, atol=0)
    assert_close(s.mean.to(F64), pairs.mean(), rtol=1e-5, atol=0)


def test_a_chain_is_one_group_as_soon_as_its_links_hold():
    order = np.random.default_rng(0).permutation(100)
    chain = torch.from_numpy(grid(100)[order])
    assert distinct_codes(chain, 1.0 + 1e-9) == 1
    assert distinct_codes(chain, 1.0 - 1e-9) == 100
    cut = torch.cat([chain, chain + 1000])
    assert distinct_codes(cut, torch.tensor(1.01)) == 2


def test_long_chains_take_few_rounds(monkeypatch):
    rounds, original = [], ddcl._pair_distances
    monkeypatch.setattr(ddcl, "_pair_distances", lambda p: (rounds.append(1), original(p))[1])
    torch.manual_seed(0)
    even = torch.arange(4096, dtype=F64)
    for p in (draw(4096, 1)[:, 0], even, even[torch.randperm(4096)], torch.rand(4096, dtype=F64)):
        gaps = p.sort().values.diff()
        tolerance = gaps.median() * 1.001
        rounds.clear()
        assert distinct_codes(p[:, None], tolerance) == (gaps > tolerance).sum() + 1
        assert len(rounds) <= 16


def test_codes_that_are_not_finite_are_groups_of_their_own():
    p = torch.tensor([[0.0], [math.nan], [0.1], [math.nan], [math.inf]])
    assert distinct_codes(p, 0.5) == 4
    assert distinct_codes(torch.full((5, 3), math.nan), 0.5) == 5


def count_groups(p: np.ndarray, tolerance: float) -> int:
    unseen, groups = set(range(len(p))), 0
    while unseen:
        stack, groups = [unseen.pop()], groups + 1
        while stack:
            x = p[stack.pop()]
            near = {j for j in unseen if np.linalg.norm(p[j] - x) <= tolerance}
            unseen -= near
            stack += near
    return groups


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), tolerance=st.floats(0, 2))
def test_distinct_codes_are_the_single_link_groups(seed, tolerance):
    p = draw(40, 2, seed=seed)
    p[20:25] = p[:5]
    assert distinct_codes(p, tolerance) == count_groups(p.numpy(), tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_covariance_and_critical_temperature_see_real_tokens_only(dtype):
    mask = draw(6, 20, seed=2) > 0
    z = torch.where(mask[..., None], draw(6, 20, 4, dtype=dtype) + 3, math.nan)
    expected = np.cov(z[mask].double().numpy().T, bias=True)
    cov = covariance(z, mask)
    assert_close(cov.double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)
    lam = np.linalg.eigvalsh(expected)[-1]
    assert_close(critical_temperature(z, mask).item(), 2 * lam, rtol=1e-4, atol=0)
    everything = draw(30, 4, dtype=dtype)
    expected = np.cov(everything.double().numpy().T, bias=True)
    assert_close(covariance(everything).double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5)


def test_critical_temperature_is_zero_without_tokens_and_survives_any_scale():
    assert critical_temperature(torch.zeros(0, 3)) == 0
    assert critical_temperature(torch.full((2, 3), math.nan), torch.tensor([False, False])) == 0
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    for scale in (1e-15, 1.0, 1e15):
        assert_close(critical_temperature(z * scale).item(), 2 * scale**2, rtol=1e-5, atol=0)
    assert not critical_temperature(z.requires_grad_()).requires_grad


def test_effective_rank_is_between_zero_for_a_constant_and_the_dimension():
    assert effective_rank(torch.ones(9, 3)) == 0
    assert_close(effective_rank(torch.cat([torch.eye(4), -torch.eye(4)])).item(), 4.0)
    assert_close(effective_rank(draw(9, 1) * torch.ones(3, dtype=F64)).item(), 1.0)
    z = draw(50, 3) * torch.tensor([3.0, 1.0, 0.1], dtype=F64)
    eigenvalues = np.linalg.eigvalsh(np.cov(z.numpy().T))
    share = eigenvalues / eigenvalues.sum()
    assert_close(effective_rank(z).item(), math.exp(-(share * np.log(share)).sum()))


@pytest.mark.parametrize(("leading", "codes", "dim"), SHAPES)
def test_nearest_is_the_argmin_and_the_most_probable_code(leading, codes, dim):
    z, p = draw(*leading, dim), draw(codes, dim, seed=1)
    indices = nearest(z, p)
    assert_close(indices, naive(z, p, 1.0).distances.argmin(-1))
    assert_close(indices, soft_assignment(z, p, 0.3).indices)
    z, p = z.float(), p.float()
    assert_close(nearest(z, p), soft_assignment(z, p, 0.3).indices)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("codes", [1, 20, 37, 100, 2000])
def test_the_lowest_index_wins_a_tie(codes, dtype):
    p = draw(codes, 3, seed=1, dtype=dtype)
    doubled = torch.cat([p, p])
    z = draw(700, 3, dtype=dtype)
    assert (nearest(z, doubled) < codes).all()
    assert (soft_assignment(z, doubled, 0.1).indices < codes).all()
    assert (nearest(z, p[:1].expand(codes, 3)) == 0).all()


@pytest.mark.parametrize("codes", [16384, pytest.param(65536, marks=pytest.mark.slow)])
def test_memory_stays_under_128_mib(codes):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        peak = pool.submit(extra_peak_bytes, "streaming", 8192, codes, 8, 1).result()
    assert 0 < peak < 128 * 2**20


TRACED = """
import sys, torch
from softvq.ddcl import competitive_loss, nearest, soft_assignment

def loss(z, p, t):
    soft = soft_assignment(z, p, t)
    split = competitive_loss(soft)
    return split.loss.mean() + soft.mu.sin().sum() + soft.usage.square().sum(), soft.indices

def gradients(function):
    torch.manual_seed(0)
    inputs = [torch.randn(70, 5), torch.randn(40, 5), torch.tensor(0.7)]
    inputs = [x.requires_grad_() for x in inputs]
    value, indices = function(*inputs)
    return value, indices, *torch.autograd.grad(value, inputs)

compiled = torch.compile(loss, fullgraph=True, backend=sys.argv[1])
torch.testing.assert_close(gradients(compiled), gradients(loss))

class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.randn(40, 5))

    def forward(self, z):
        return soft_assignment(z, self.p, 0.5).mu, nearest(z, self.p)

encoder = Encoder()
batch = torch.export.Dim("batch", min=2)
program = torch.export.export(encoder, (torch.randn(3, 4, 5),), dynamic_shapes=({0: batch},))
z = torch.randn(7, 4, 5)
torch.testing.assert_close(program.module()(z), encoder(z))
"""


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_as_one_graph_and_exports(backend):
    # In its own process: there the annotations are not checked, which no graph could hold.
    command = [sys.executable, "-c", TRACED, backend]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck looks at it itself
def test_custom_operators_keep_torch_library_s_promises():
    z, p, t = leaves(draw(9, 3), draw(5, 3, seed=1), torch.tensor(0.7, dtype=F64))
    torch.library.opcheck(torch.ops.softvq.soft_assignment, (z, p, t, z.new_ones(9), 0.5))
    torch.library.opcheck(torch.ops.softvq.nearest, (z.detach(), p.detach()))


def test_results_repeat_bit_for_bit_and_do_not_depend_on_threads():
    z, p, t = draw(3000, 8, dtype=torch.float32), draw(700, 8, seed=1, dtype=torch.float32), 2.0

    def everything() -> list[Tensor]:
        inputs = leaves(z, p, torch.tensor(t))
        soft = soft_assignment(*inputs)
        return [*soft, *torch.autograd.grad(mix(soft), inputs)]

    one = everything()
    assert all(torch.equal(a, b) for a, b in zip(one, everything(), strict=True))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        more = everything()
    finally:
        torch.set_num_threads(threads)
    for a, b in zip(one, more, strict=True):
        close(b, a, 1e-5)
