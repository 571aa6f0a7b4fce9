"""The temperature policies against their closed forms; how the codebook drives them is in
`test_ddcl_codebook`, and the bounds of their options in `test_contract`."""

import math

import pytest
import torch
from torch.testing import assert_close

from softvq.ddcl import critical_temperature
from softvq.temperature import AnnealedTemperature, EntropyTemperature, FixedTemperature

SCALES = pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def moved(policy, temperature=1.0, progress=0.0, perplexity=2.0, critical=10.0, k=512) -> float:
    """T after one step of the policy."""
    entropy = scalar(math.log(perplexity))
    return policy.next(scalar(temperature), scalar(progress), entropy, scalar(critical), k).item()


def perplexity(z: torch.Tensor, p: torch.Tensor, temperature: torch.Tensor) -> float:
    """exp of the mean entropy of the weights, by the plain formula."""
    distances = torch.cdist(z.double(), p.double(), compute_mode="donot_use_mm_for_euclid_dist")
    log_q = (-distances.square() / temperature.double()).log_softmax(1)
    return (-(log_q.exp() * log_q).sum(1).mean()).exp().item()


@pytest.fixture
def mixture() -> tuple[torch.Tensor, torch.Tensor]:
    """(2000 tokens around 64 centres of 4 dimensions, the centres)."""
    torch.manual_seed(0)
    centres = torch.randn(64, 4)
    return centres[torch.randint(64, (2000,))] + 0.1 * torch.randn(2000, 4), centres


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_fixed_is_constant(mixture, progress):
    policy = FixedTemperature(value=0.3)
    assert policy.initial(*mixture).item() == pytest.approx(0.3)
    assert moved(policy, temperature=7.0, progress=progress) == 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "policy",
    [
        *(FixedTemperature(value=value) for value in (1e-300, 1e-40, 1e300)),
        AnnealedTemperature(start=1e-3, end=1e-300),
        AnnealedTemperature(start=1e300, end=1e-300),
        AnnealedTemperature(start=1e300, end=1e300),
        EntropyTemperature(start=1e300),
        EntropyTemperature(start=2.0, warm=1 + 1e-15, end=1 + 1e-15),
    ],
)
def test_any_option_gives_a_positive_and_finite_temperature(mixture, policy, dtype):
    for z in (mixture[0].to(dtype), torch.ones(9, 4, dtype=dtype)):
        p = mixture[1].to(dtype)
        temperature = policy.initial(z, p)
        for progress in (0.0, 0.5, 1.0):
            assert 0 < temperature < math.inf
            given = (torch.tensor(x, dtype=dtype) for x in (progress, 0.1))
            temperature = policy.next(temperature, *given, critical_temperature(z), 64)
    # In float32, what lies outside of its numbers is as good as at their ends.
    assert FixedTemperature(value=1e-300).initial(z.float(), p.float()) < 1e-30
    assert FixedTemperature(value=1e300).initial(z.float(), p.float()) > 1e30


@pytest.mark.parametrize("progress", [0.0, 0.2, 0.35, 0.7, 0.85, 1.0])
@pytest.mark.parametrize("critical", [1e-6, 4.0])
def test_annealed_falls_geometrically_in_units_of_tc_and_then_stays(progress, critical):
    policy = AnnealedTemperature(start=0.5, end=0.02, cooling=0.7)
    expected = critical * 0.5 * 0.04 ** min(progress / 0.7, 1)
    assert moved(policy, progress=progress, critical=critical) == pytest.approx(expected)


def test_annealed_starts_in_units_of_tc(mixture):
    z, p = mixture
    covariance = torch.cov(z.double().T, correction=0)
    expected = 0.5 * 2 * torch.linalg.eigvalsh(covariance)[-1]
    assert_close(AnnealedTemperature().initial(z, p).double(), expected, rtol=1e-5, atol=0)


@SCALES
@pytest.mark.parametrize("target", [1.02, 2.0, 4.0])
def test_steered_starts_at_its_first_target(mixture, scale, target):
    z, p = (scale * x for x in mixture)
    temperature = EntropyTemperature(start=target, warm=1.01, end=1.01).initial(z, p)
    assert perplexity(z, p, temperature) == pytest.approx(target, rel=0.01)


def test_steered_starts_no_higher_than_the_root_of_the_codebook_size(mixture):
    z, p = mixture[0], mixture[1][:2]
    temperature = EntropyTemperature(start=4.0).initial(z, p)
    assert perplexity(z, p, temperature) == pytest.approx(math.sqrt(2), rel=0.01)


def test_steered_starts_below_tc_when_the_target_is_out_of_reach(mixture):
    z, _ = mixture
    far = torch.tensor([[0.0, 0, 0, 0], [0, 0, 0, 100]])
    temperature = EntropyTemperature().initial(z, far)
    assert_close(temperature, 0.9 * critical_temperature(z), rtol=1e-4, atol=0)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_constant_tokens_start_at_a_positive_temperature(k):
    for policy in (EntropyTemperature(), AnnealedTemperature()):
        temperature = policy.initial(torch.ones(16, 4), torch.randn(k, 4))
        assert 0 < temperature < 1e-30


@pytest.mark.parametrize(
    ("perplexity", "sign"), [(3.9, 1), (1.001, 1), (1.0, 1), (4.0, 0), (4.1, -1), (500.0, -1)]
)
def test_steering_heats_below_the_target_and_cools_above(perplexity, sign):
    step = math.log(moved(EntropyTemperature(start=4.0), perplexity=perplexity))
    assert step * sign > 0 or step == sign == 0


def test_a_small_step_of_steering_is_the_gain_times_the_relative_error():
    step = math.log(moved(EntropyTemperature(start=4.0, gain=0.25), perplexity=3.5))
    assert step == pytest.approx(0.25 * math.log(math.log(4) / math.log(3.5)))


@pytest.mark.parametrize(("perplexity", "step"), [(1.0001, 0.2), (1e5, -0.2)])
def test_one_step_of_steering_is_limited(perplexity, step):
    policy = EntropyTemperature(start=2.0, warm=2.0, gain=1.0)
    assert math.log(moved(policy, perplexity=perplexity)) == pytest.approx(step)


@pytest.mark.parametrize(
    ("progress", "target"),
    [(0.0, 4.0), (0.4, 8**0.5), (0.8, 2.0), (0.9, (2 * 1.02) ** 0.5), (1.0, 1.02)],
)
def test_the_target_falls_geometrically_to_warm_and_then_to_the_end(progress, target):
    policy = EntropyTemperature(start=4.0, warm=2.0, end=1.02, hardening=0.8)
    assert moved(policy, progress=progress, perplexity=target) == pytest.approx(1.0)


@pytest.mark.parametrize("k", [2, 9])
def test_the_target_is_never_above_the_root_of_the_codebook_size(k):
    assert moved(EntropyTemperature(), perplexity=math.sqrt(k), k=k) == pytest.approx(1.0)


@pytest.mark.parametrize(("temperature", "expected"), [(1e9, 0.9 * 3.0), (1e-9, 1e-6 * 3.0)])
def test_steering_stays_between_its_bounds_in_units_of_tc(temperature, expected):
    got = moved(EntropyTemperature(), temperature=temperature, critical=3.0)
    assert got == pytest.approx(expected)


def test_one_code_cools_to_the_lower_bound():
    temperature = 1.0
    for _ in range(200):
        temperature = moved(EntropyTemperature(), temperature, perplexity=1.0, k=1)
    assert temperature == pytest.approx(10 * 1e-6)
