"""Codes as moving averages: look-up before update (C04), large counts (C01), the peer, revival.

Starts from data are in `test_initialization`, what holds for every quantizer in `test_contract`.
"""

import pytest
import torch
from einops import rearrange
from torch.testing import assert_close
from vector_quantize_pytorch import VectorQuantize

from softvq.quantizers import EMAVQ


def holding(codes: torch.Tensor, **options) -> EMAVQ:
    """In training mode, with these codes at count 1."""
    k, d = codes.shape
    codebook = EMAVQ(dim=d, codebook_size=k, **options)
    codebook.initialize(codes)
    codebook.prototypes.copy_(codes)
    codebook.sums.copy_(codes)
    return codebook


def column(*values: float) -> torch.Tensor:
    return rearrange(torch.tensor(values, dtype=torch.float32), "n -> n 1")


def test_the_codes_returned_are_those_before_the_update():
    codebook = holding(column(0, 10), decay=0.5, smoothing=0.0, dead_below=0.0)
    z = column(1, 9)
    assignment = codebook.assign(z)
    assert torch.equal(assignment.quantized, column(0, 10))
    assert_close(assignment.reconstruction, torch.tensor(1.0))
    assert_close(assignment.loss, torch.tensor(0.25))
    assert_close(codebook.prototypes, column(0.5, 9.5))


def test_a_count_beyond_the_range_of_half_precision_is_exact():
    codebook = holding(
        torch.tensor([[1.0] * 4, [50.0] * 4]), decay=0.0, smoothing=0.0, dead_below=0.0
    ).half()
    assignment = codebook.assign(torch.ones(70_000, 4, dtype=torch.float16))
    assert assignment.counts.tolist() == codebook.counts.tolist() == [70_000, 0]
    assert torch.equal(codebook.prototypes[0], torch.ones(4))
    assert assignment.loss == 0


def test_a_code_without_count_and_smoothing_keeps_its_place():
    codebook = holding(column(0, 10, -10), decay=0.0, smoothing=0.0, dead_below=0.0)
    for _ in range(3):
        codebook(column(1, 9))
    assert codebook.counts.tolist() == [1, 1, 0]
    assert torch.equal(codebook.prototypes, column(1, 9, -10))


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_it_agrees_with_vector_quantize_pytorch_over_many_steps(decay):
    torch.manual_seed(0)
    codes = torch.randn(16, 8)
    codebook = holding(codes, decay=decay, smoothing=1e-3, dead_below=0.0, commitment_weight=0.7)
    peer = VectorQuantize(
        dim=8,
        codebook_size=16,
        decay=decay,
        eps=1e-3,
        threshold_ema_dead_code=0,
        kmeans_init=False,
        rotation_trick=False,
        commitment_weight=0.7,
    )
    peer.codebook = codes
    peer._codebook.embed_avg.copy_(codes[None])
    for _ in range(30):
        z = torch.randn(4, 50, 8) + 0.3
        z_peer = z.clone().requires_grad_()
        quantized, indices, loss = peer(z_peer)
        out = codebook(z.requires_grad_())
        assert torch.equal(out.indices, indices)
        assert_close(out.quantized, quantized, rtol=1e-5, atol=1e-5)
        assert_close(out.loss, loss, rtol=1e-5, atol=1e-5)
        for codes, penalty in ((out.quantized, out.loss), (quantized, loss)):
            (codes.square().sum() + penalty).backward()
        assert_close(z.grad, z_peer.grad)
    assert_close(codebook.prototypes, peer.codebook, rtol=1e-5, atol=1e-5)
    assert_close(codebook.counts, peer._codebook.cluster_size[0], rtol=1e-5, atol=1e-5)
    assert_close(codebook.sums, peer._codebook.embed_avg[0], rtol=1e-5, atol=1e-5)


@pytest.fixture
def near() -> torch.Tensor:
    """30 tokens around each of 0, 10 and 20."""
    torch.manual_seed(0)
    return rearrange(column(0, 10, 20) + torch.rand(3, 30), "k n -> (k n) 1")


@pytest.fixture
def dying() -> EMAVQ:
    """Three codes at the tokens of `near`, two that are about to die far away."""
    return holding(column(0, 10, 20, 1000, -1000), decay=0.5, dead_below=0.3)


def test_a_dead_code_becomes_a_token_with_count_and_sum(dying, near):
    dying(near)
    # Counts 15.5 and 0.5; 0.3 times their mean is just alive.
    alive = 0.3 * (3 * 15.5 + 2 * 0.5) / 5
    assert_close(dying.counts, torch.tensor([15.5] * 3 + [alive] * 2))
    assert torch.isin(dying.prototypes[3:], near).all()
    assert dying.prototypes[3] != dying.prototypes[4]
    assert_close(dying.sums[3:], alive * dying.prototypes[3:])
    assert_close(dying.prototypes[:3], dying.sums[:3] / 15.5, rtol=1e-4, atol=1e-4)


def test_a_revived_code_is_not_pulled_back_and_is_used(dying, near):
    dying(near)
    for _ in range(5):
        assignment = dying.assign(near)
        assert (assignment.counts > 0).all()
        assert ((dying.prototypes >= 0) & (dying.prototypes <= 21)).all()
    assert len(dying.prototypes.unique()) == 5


def test_no_code_is_revived_when_the_option_is_off(near):
    codebook = holding(column(0, 10, 20, 1000), decay=0.5, smoothing=0.0, dead_below=0.0)
    for _ in range(10):
        codebook(near)
    assert_close(codebook.prototypes[3], torch.tensor([1000.0]))


def test_more_dead_codes_than_tokens_share_the_tokens():
    codebook = holding(column(0, *range(1000, 1007)), decay=0.0, dead_below=0.5)
    z = column(0.1, 0.2, 0.3)
    codebook(z)
    assert torch.isin(codebook.prototypes[1:], z).all()
    # Every token is taken before one is taken twice.
    assert len(codebook.prototypes[1:].unique()) == 3


def test_revival_takes_real_tokens_only(dying, near):
    mask = torch.arange(len(near)) % 2 == 0
    z = near.masked_fill(~mask[:, None], 7e5)
    for _ in range(5):
        dying(z, mask)
        assert (dying.prototypes.abs() < 21).all()
    assert (dying.counts > 0).all()


def test_a_constant_batch_refills_with_its_value():
    codebook = holding(column(1, *range(1000, 1007)), decay=0.5, dead_below=0.9)
    for _ in range(5):
        codebook(torch.ones(64, 1))
    assert_close(codebook.prototypes, torch.ones(8, 1), rtol=0, atol=0.1)


def test_a_broken_token_shows_in_the_loss_and_never_becomes_a_code(dying, near):
    near[::3] = torch.nan
    for _ in range(5):
        assert not dying(near).loss.isfinite()
    assert ((dying.prototypes >= 0) & (dying.prototypes <= 21)).all()
    assert dying.counts.isfinite().all()
