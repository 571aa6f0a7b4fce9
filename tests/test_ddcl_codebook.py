"""The DDCL codebook against the plain formulas: losses and gradients, hard forward, schedule, Tc.

The streaming core has its own tests, and so have the temperature policies' rules.
"""

import math
import warnings

import pytest
import torch
from einops import rearrange, repeat
from sklearn.cluster import KMeans
from torch.testing import assert_close

from softvq.quantizers import DDCLCodebook
from softvq.temperature import AnnealedTemperature, EntropyTemperature, FixedTemperature

GRADIENTS = pytest.mark.parametrize("gradient", ["detached", "full"])
DIM, SIZE, TEMPERATURE = 3, 6, 0.7


def tokens(n: int = 40, dim: int = DIM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, dim, generator=generator, dtype=torch.float64)


def started(z: torch.Tensor, size: int = SIZE, **options) -> DDCLCodebook:
    """In training mode and in the dtype of z; T is fixed unless a policy is given."""
    torch.manual_seed(0)
    options = {"temperature": FixedTemperature(value=TEMPERATURE), **options}
    codebook = DDCLCodebook(dim=z.shape[-1], codebook_size=size, **options).to(z.dtype)
    codebook.initialize(z)
    return codebook


def soft_weights(z: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, squared distances), both n x k."""
    distances = (rearrange(z, "n d -> n 1 d") - p).square().sum(-1)
    return (-distances / TEMPERATURE).softmax(-1), distances


def divergence(q: torch.Tensor) -> torch.Tensor:
    """KL(mean weights || uniform)."""
    share = q.mean(0)
    return (share * (share * len(share)).log()).sum()


def plain_loss(
    z: torch.Tensor, p: torch.Tensor, gradient: str, commitment_weight: float, usage_weight: float
) -> torch.Tensor:
    """The loss of the module by ordinary autograd."""
    usage = usage_weight * divergence(soft_weights(z, p)[0])
    shared = z.detach() + commitment_weight * (z - z.detach())
    q, distances = soft_weights(shared, p)
    if gradient == "detached":
        q = q.detach()
    return (q * distances).sum(1).mean() / DIM + usage


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, inputs, retain_graph=True)


@GRADIENTS
@pytest.mark.parametrize("commitment_weight", [0.0, 0.05, 1.0, 2.0])
@pytest.mark.parametrize("usage_weight", [0.0, 0.3])
def test_loss_and_its_gradients_are_the_plain_formula(gradient, commitment_weight, usage_weight):
    weights = dict(commitment_weight=commitment_weight, usage_weight=usage_weight)
    z = tokens().requires_grad_()
    codebook = started(z, gradient=gradient, **weights)
    p = codebook.prototypes
    loss, expected = codebook.assign(z).loss, plain_loss(z, p, gradient, **weights)
    assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert_close(gradients(loss, z, p), gradients(expected, z, p), rtol=1e-10, atol=1e-10)


@GRADIENTS
def test_commitment_weight_scales_the_encoders_share_and_nothing_else(gradient):
    z, by_weight = tokens().requires_grad_(), {}
    for weight in (1.0, 0.05):
        codebook = started(z, gradient=gradient, commitment_weight=weight, usage_weight=0.0)
        assignment = codebook.assign(z)
        decoder = gradients(assignment.quantized.square().sum(), z, codebook.prototypes)
        by_weight[weight] = (*gradients(assignment.loss, z, codebook.prototypes), *decoder)
    full, small = by_weight[1.0], by_weight[0.05]
    assert_close(small[0], 0.05 * full[0], rtol=1e-10, atol=1e-14)
    assert_close(small[1:], full[1:], rtol=1e-10, atol=1e-14)


@GRADIENTS
def test_the_usage_term_is_the_divergence_of_mean_weights_from_uniform(gradient):
    z = tokens().requires_grad_()
    codebook = started(z, gradient=gradient, usage_weight=0.0)
    other = started(z, gradient=gradient, usage_weight=2.0)
    loss, with_usage = codebook.assign(z).loss, other.assign(z).loss
    q, _ = soft_weights(z, codebook.prototypes)
    assert_close(with_usage - loss, 2 * divergence(q))
    added = [
        b - a
        for a, b in zip(
            gradients(loss, z, codebook.prototypes),
            gradients(with_usage, z, other.prototypes),
            strict=True,
        )
    ]
    assert_close(added, list(gradients(2 * divergence(q), z, codebook.prototypes)))


def test_statistics_are_those_of_the_weights():
    z = tokens()
    codebook = started(z)
    p = codebook.prototypes.detach()
    q, distances = soft_weights(z, p)
    assignment = codebook.assign(z)
    assert_close(assignment.soft, q @ p)
    assert_close(assignment.reconstruction, (z - q @ p).square().sum(1).mean())
    assert_close(assignment.reconstruction + assignment.variance, (q * distances).sum(1).mean())
    assert_close(assignment.entropy, -(q * q.log()).sum(1).mean())
    assert_close(assignment.usage, q.sum(0))


def with_codes(codes: torch.Tensor, temperature: float, **options) -> DDCLCodebook:
    codebook = started(
        codes, len(codes), temperature=FixedTemperature(value=temperature), **options
    )
    with torch.no_grad():
        codebook.prototypes.copy_(codes)
    return codebook


@pytest.mark.parametrize("how", ["cast", "autocast", "float16 tokens", "bfloat16 tokens"])
def test_weights_of_wide_codes_in_half_precision_are_right(how):
    # C01: d = [64, 0] at T = 1, where |z|² overflows float16
    codebook = with_codes(repeat(torch.tensor([41.0, 40.0]), "k -> k d", d=64), 1.0)
    z = torch.full((1, 64), 40.0)
    if how == "cast":
        codebook, z = codebook.half(), z.half()
    if how.endswith("tokens"):
        z = z.to(getattr(torch, how.split()[0]))
    with torch.autocast("cpu", torch.float16, enabled=how == "autocast"):
        assignment = codebook.assign(z)
        weights = codebook.weights(z)
    expected = torch.tensor([math.exp(-64), 1.0])
    assert_close(assignment.usage, expected, rtol=1e-4, atol=0)
    assert_close(weights[0], expected, rtol=1e-4, atol=0)
    assert torch.equal(assignment.soft, z)


# Down to where float32, and then the temperature itself, is out of numbers
COLD = (1e-2, 1e-6, 1e-20, 1e-38, 1e-40, 1e-60, 1e-300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [*COLD, 1e-3, 1e-4])
def test_a_cold_codebook_is_hard_and_finite(temperature, dtype):
    # C02: d = [25, 16]
    codebook = with_codes(torch.tensor([[0.0], [1.0]]), temperature)
    z = torch.tensor([[5.0]], dtype=dtype, requires_grad=True)
    assignment, weights = codebook.assign(z), codebook.weights(z)
    assert_close(assignment.usage, torch.tensor([0.0, 1.0]), rtol=0, atol=1e-7)
    assert_close(weights, torch.tensor([[0.0, 1.0]]), rtol=0, atol=1e-7)
    (assignment.loss + assignment.quantized.sum() + weights[0, 0]).backward()
    for value in (assignment.loss, z.grad, codebook.prototypes.grad, codebook.temperature):
        assert value.isfinite().all()
    assert assignment.reconstruction.item() == pytest.approx(16)
    # Exact ties share equally, be it codes that are the same or tokens in the middle.
    for codes, token in (([[1.0], [1.0]], 1.0), ([[2.0], [-2.0]], 0.0)):
        codebook = with_codes(torch.tensor(codes), temperature)
        z = torch.tensor([[token]], dtype=dtype)
        assert codebook.weights(z).tolist() == [[0.5, 0.5]]
        assert codebook.assign(z).usage.tolist() == [0.5, 0.5]


def test_the_temperature_divides_the_squared_distance():
    codebook = with_codes(torch.tensor([[0.0], [1.0]]), 0.5).eval()
    expected = torch.tensor([0.8808, 0.1192])
    assert_close(codebook.assign(torch.zeros(1, 1)).usage, expected, rtol=0, atol=1e-4)
    assert_close(codebook.weights(torch.zeros(1, 1))[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [1e38, 1e300])
def test_a_hot_codebook_weighs_its_codes_alike(temperature):
    codebook = with_codes(torch.tensor([[0.0], [1.0]]), temperature).eval()
    assignment = codebook.assign(torch.tensor([[5.0]]))
    assert_close(assignment.usage, torch.tensor([0.5, 0.5]))
    assert_close(assignment.soft, torch.tensor([[0.5]]))
    assert assignment.loss.isfinite()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_set_by_hand_that_cannot_be_is_refused(bad):
    codebook = with_codes(torch.tensor([[0.0], [1.0]]), 1.0)
    codebook.temperature.fill_(bad)
    for call in (codebook.assign, codebook.weights):
        with pytest.raises(ValueError, match=f"temperature must be positive and finite, got {bad}"):
            call(torch.zeros(1, 1))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("after", [0.0, 0.5, 1.0])
def test_the_decoder_sees_mu_and_then_codes_with_the_gradients_of_mu_and_z(after, share):
    z = tokens().float().requires_grad_()
    codebook = started(
        z.detach(), hard_forward_after=after, schedule_steps=4, straight_through_weight=share
    )
    weights = torch.rand(len(z), DIM)
    for step in range(6):
        assignment = codebook.assign(z)
        hard = after < 1 and step / 4 >= after
        codes = codebook.indices_to_codes(assignment.indices)
        assert torch.equal(assignment.quantized, codes if hard else assignment.soft)
        found = gradients((assignment.quantized * weights).sum(), z, codebook.prototypes)
        through_mu = gradients((assignment.soft * weights).sum(), z, codebook.prototypes)
        assert_close(found[0], through_mu[0] + (share if hard else 0) * weights)
        assert torch.equal(found[1], through_mu[1])
    out = codebook.eval()(z)
    assert torch.equal(out.quantized, codebook.indices_to_codes(out.indices))


def test_the_schedule_counts_training_passes_with_gradient_only():
    z = tokens()
    codebook = started(z)
    codebook.schedule_steps = 4
    seen = []
    for _ in range(5):
        codebook.eval()(z)
        codebook.train()
        with torch.no_grad():
            codebook(z)
        codebook(z)
        seen.append(codebook.progress.item())
    assert seen == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert codebook.step == 5


def test_the_critical_temperature_is_tracked():
    torch.manual_seed(2)
    z = 1e-3 * torch.randn(64, 8) * torch.tensor([1.0, 1, 1, 2, 1, 1, 1, 1.7])
    # From the tokens of another covariance.
    codebook = started(1e-3 * torch.eye(8), temperature=AnnealedTemperature())
    for _ in range(600):
        codebook(z)
    covariance = torch.cov(z.double().T, correction=0)
    expected = 2 * torch.linalg.eigvalsh(covariance)[-1]
    assert_close(codebook.critical.double(), expected, rtol=0.01, atol=0)
    assert_close(codebook.temperature, codebook.critical * 0.5 * 0.02 ** (0.06 / 0.7))


@pytest.mark.parametrize(
    ("gradient", "ratio", "expected"),
    [("detached", 1.1, 1), ("detached", 0.9, 0), ("full", 2.2, 1), ("full", 1.8, 0)],
)
def test_a_temperature_above_the_threshold_of_its_gradient_warns_once(gradient, ratio, expected):
    z = tokens().float()
    critical = 2 * torch.linalg.eigvalsh(torch.cov(z.T, correction=0))[-1]
    policy = FixedTemperature(value=ratio * critical.item())
    codebook = started(z, gradient=gradient, temperature=policy)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        codebook.eval()(z)
        assert not caught
        codebook.train()
        for _ in range(250):
            codebook(z)
    assert [w.category for w in caught] == [UserWarning] * expected
    assert all("above" in str(w.message) and gradient in str(w.message) for w in caught)


@pytest.fixture(scope="module")
def mixture() -> torch.Tensor:
    """1024 tokens of 16 Gaussian clusters in 8 dimensions."""
    torch.manual_seed(0)
    centres = torch.randn(16, 8)
    return repeat(centres, "k d -> (k n) d", n=64) + 0.2 * torch.randn(1024, 8)


def steered(z: torch.Tensor, size: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, perplexity of the weights) at every step of a schedule with prototypes at rest."""
    codebook = started(z, size, temperature=EntropyTemperature(), schedule_steps=steps)
    temperatures, perplexities = [], []
    for _ in range(steps):
        temperatures.append(codebook.temperature.clone())
        perplexities.append(codebook.assign(z).entropy.detach().exp())
    return torch.stack(temperatures), torch.stack(perplexities)


@pytest.mark.parametrize(("size", "steps"), [(64, 500), (2, 200)])
def test_steering_follows_its_target_at_every_scale(mixture, size, steps):
    progress = torch.arange(steps) / steps
    warm = 4 * (1.3 / 4) ** (progress / 0.9)
    target = torch.where(progress < 0.9, warm, 1.3 * (1.02 / 1.3) ** ((progress - 0.9) / 0.1))
    target = target.clamp_max(math.sqrt(size))
    reference, perplexities = steered(mixture, size, steps)
    assert_close(perplexities, target, rtol=0.05, atol=0)
    for scale in (1e-3, 1e3):
        temperatures, perplexities = steered(scale * mixture, size, steps)
        assert_close(perplexities, target, rtol=0.05, atol=0)
        assert_close(temperatures / scale**2, reference, rtol=1e-2, atol=0)


def test_steering_one_code_stays_finite(mixture):
    temperatures, perplexities = steered(mixture, 1, 50)
    assert (temperatures > 0).all()
    assert temperatures.isfinite().all()
    assert torch.equal(perplexities, torch.ones(50))


def test_training_reaches_k_means_with_every_code_used_and_distinct(mixture):
    steps, size = 600, 32
    codebook = started(
        mixture,
        size,
        temperature=EntropyTemperature(),
        schedule_steps=steps,
        usage_weight=0.05,
    )
    optimizer = torch.optim.Adam(codebook.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        codebook(mixture).loss.backward()
        optimizer.step()
        schedule.step()
    assignment = codebook.eval().assign(mixture)
    error = (mixture - assignment.quantized).square().sum(1).mean().item()
    best = KMeans(size, n_init=5, random_state=0).fit(mixture.numpy()).inertia_ / len(mixture)
    assert (assignment.counts > 0).all()
    distances = torch.cdist(codebook.prototypes.detach(), codebook.prototypes.detach())
    assert distances.fill_diagonal_(1.0).min() > 0.01
    assert error < 1.05 * best


def with_a_far_code(**options) -> tuple[DDCLCodebook, torch.Tensor]:
    """The second of three codes is out of reach of all tokens; and the tokens."""
    z = tokens(60, 1)
    codebook = started(z, 3, temperature=FixedTemperature(value=0.01), **options)
    with torch.no_grad():
        codebook.prototypes[1] = 1000.0
    return codebook, z


def passes_until_revived(codebook: DDCLCodebook, z: torch.Tensor, mask=None) -> int:
    """Training passes up to the first that revives, which must revive one code alone."""
    for number in range(1, 400):
        before = codebook.prototypes.detach().clone()
        revived = codebook.assign(z, mask).revived.item()
        if revived:
            assert revived == 1
            assert torch.equal(codebook.prototypes[[0, 2]], before[[0, 2]])
            return number
        assert torch.equal(codebook.prototypes, before)
    return 0


def test_a_dead_code_becomes_a_token_when_its_moving_share_is_a_tenth_of_the_mean():
    codebook, z = with_a_far_code()
    # .99^n falls below .1 at n = 230
    assert passes_until_revived(codebook, z) == 230
    assert torch.isin(codebook.prototypes[1], z).all()
    assert (codebook.assign(z).counts > 0).all()
    assert codebook.eval().assign(z).revived == 0


def test_a_dead_code_stays_where_it_is_when_revival_is_off():
    codebook, z = with_a_far_code(dead_below=0.0)
    assert passes_until_revived(codebook, z) == 0
    assert codebook.prototypes[1] == 1000


def test_padding_and_broken_tokens_never_become_codes():
    codebook, z = with_a_far_code(dead_below=0.9)
    mask = torch.arange(60) % 2 == 0
    z = z.masked_fill(~mask[:, None], 7e5)
    z[:40:2] = torch.nan
    for _ in range(50):
        codebook.assign(z, mask)
    assert torch.isin(codebook.prototypes[1], z[40::2]).all()


@pytest.mark.parametrize(
    "z", [torch.ones(64, 1), torch.tensor([[0.1], [0.2], [0.3]])], ids=["constant", "three tokens"]
)
def test_more_dead_codes_than_distinct_tokens_share_the_tokens(z):
    # C05: the refill of a codebook whose codes are all out of reach but one
    policy = FixedTemperature(value=0.01)
    codebook = started(torch.linspace(-1, 1, 60)[:, None], 8, temperature=policy, dead_below=0.9)
    with torch.no_grad():
        codebook.prototypes[1:] = 1000 + torch.arange(7.0)[:, None]
    codebook.share[1:] = 0.0
    assert codebook.assign(z).revived == 7
    assert codebook.prototypes.shape == (8, 1)
    assert torch.isin(codebook.prototypes[1:], z).all()
    # Every token is taken before one is taken twice.
    assert len(codebook.prototypes[1:].unique()) == len(z.unique())
    for _ in range(5):
        assignment = codebook.assign(z)
        assert assignment.loss.isfinite()
        assert all(value.isfinite().all() for value in codebook.state_dict().values())


def test_a_batch_without_a_real_token_revives_none_and_keeps_the_shares():
    codebook, z = with_a_far_code(dead_below=0.9)
    codebook.share.fill_(0.01)
    nothing = torch.zeros(60, dtype=torch.bool)
    assert codebook.assign(z, nothing).revived == 0
    assert codebook.assign(z[:0]).revived == 0
    assert (codebook.share == 0.01).all()


def test_gradients_of_two_passes_are_right_though_a_code_was_revived_between_them():
    codebook, z = with_a_far_code(dead_below=0.9)
    codebook.share.fill_(0.01)
    before = codebook.prototypes.detach().clone()
    first = codebook.assign(z)
    assert first.revived > 0
    between = codebook.prototypes.detach().clone()
    second = codebook.assign(z)
    (first.loss + second.loss).backward()
    fresh, _ = with_a_far_code(dead_below=0.0)
    expected = torch.zeros_like(before)
    for prototypes in (before, between):
        with torch.no_grad():
            fresh.prototypes.copy_(prototypes)
        expected += torch.autograd.grad(fresh.assign(z).loss, fresh.prototypes)[0]
    assert_close(codebook.prototypes.grad, expected)


def test_the_length_of_the_schedule_is_part_of_the_state():
    z = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    codebook = DDCLCodebook(dim=4, codebook_size=8, hard_forward_after=0.5)
    codebook.schedule_steps = 20
    for _ in range(20):
        codebook(z)
    other = DDCLCodebook(dim=4, codebook_size=8, hard_forward_after=0.5)
    other.load_state_dict(codebook.state_dict())
    assert (other.schedule_steps, other.progress) == (20, 1)
    for _ in range(10):
        for one, two in zip(codebook(z), other(z), strict=True):
            assert torch.equal(one, two)
    assert torch.equal(codebook.temperature, other.temperature)
    for steps in (0, -1):
        with pytest.raises(ValueError, match=f"schedule_steps must be at least 1, got {steps}"):
            codebook.schedule_steps = steps
    assert codebook.schedule_steps == 20
