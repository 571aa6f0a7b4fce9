"""The hard baseline of 2017: the term that beta weighs (C03), the straight-through gradient.

Where vector-quantize-pytorch defines the same thing, both agree.
"""

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.testing import assert_close
from vector_quantize_pytorch import VectorQuantize

from softvq.quantizers import StraightThroughVQ


def holding(codes: torch.Tensor, **options) -> StraightThroughVQ:
    """In training mode, with these codes."""
    k, d = codes.shape
    codebook = StraightThroughVQ(dim=d, codebook_size=k, **options).to(codes.dtype)
    codebook.initialize(codes)
    with torch.no_grad():
        codebook.prototypes.copy_(codes)
    return codebook


def gradients(codebook: StraightThroughVQ, z: torch.Tensor):
    """(loss, dL/dz, dL/dP) of the codebook's own loss."""
    z = z.clone().requires_grad_()
    loss = codebook(z).loss
    loss.backward()
    return loss.detach(), z.grad, codebook.prototypes.grad


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """(z, codes) in float64."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (40, 7))


@pytest.mark.parametrize(("beta", "loss", "slope"), [(0.25, 1.25, 0.5), (0.5, 1.5, 1.0)])
def test_beta_weighs_the_commitment_term(beta, loss, slope):
    codebook = holding(torch.tensor([[0.0]]), commitment_weight=beta)
    values = gradients(codebook, torch.tensor([[1.0]]))
    assert [value.item() for value in values] == pytest.approx([loss, slope, -2.0])


@pytest.mark.parametrize("beta", [0.0, 0.25, 3.0])
def test_loss_and_gradients_are_equation_3(pair, beta):
    z, codes = pair
    got = gradients(holding(codes, commitment_weight=beta), z)
    z, codes = z.requires_grad_(), codes.requires_grad_()
    chosen = codes[torch.cdist(z, codes).argmin(1)]
    loss = mse_loss(chosen, z.detach()) + beta * mse_loss(z, chosen.detach())
    assert_close(got, (loss, *torch.autograd.grad(loss, (z, codes))))


def test_the_gradient_of_quantized_goes_to_z_unchanged_and_not_to_the_codes(pair):
    z, codes = pair
    codebook = holding(codes)
    weights = torch.rand_like(z)
    quantized = codebook(z.requires_grad_()).quantized
    (quantized * weights).sum().backward()
    assert torch.equal(z.grad, weights)
    assert codebook.prototypes.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_straight_through_arithmetic_does_not_round_the_code(dtype):
    codebook = holding(torch.tensor([[0.1]]))
    z = torch.tensor([[1000.123]], dtype=dtype, requires_grad=True)
    assert torch.equal(codebook(z).quantized, torch.tensor([[0.1]], dtype=dtype))


def test_uniform_start_is_that_of_the_paper():
    codebook = StraightThroughVQ(dim=64, codebook_size=32)
    for initialize in (False, True):
        if initialize:
            codebook.initialize(100 + torch.randn(64, 64))
        assert codebook.prototypes.abs().max() <= 1 / 32
        assert_close(codebook.prototypes.std(), torch.tensor(1 / 32 / 3**0.5), rtol=0.05, atol=0)


def test_it_agrees_with_the_gradient_codebook_of_vector_quantize_pytorch(pair):
    z, codes = (x.float() for x in pair)
    peer = VectorQuantize(
        dim=5,
        codebook_size=7,
        learnable_codebook=True,
        ema_update=False,
        rotation_trick=False,
        commitment_weight=1.0,
    )
    with torch.no_grad():
        peer.codebook = codes
    z_peer = z.clone().requires_grad_()
    quantized, indices, loss = peer(z_peer[None])
    loss.backward()
    # The peer sends one loss to both sides; here the side of z has weight beta.
    beta = 0.3
    codebook = holding(codes, commitment_weight=beta)
    out = codebook(z)
    assert torch.equal(out.indices, indices[0])
    assert_close(out.quantized, quantized[0])
    ours, grad_z, grad_codes = gradients(codebook, z)
    assert_close(ours, (1 + beta) * loss.detach())
    assert_close(grad_z, beta * z_peer.grad)
    assert_close(grad_codes, peer._codebook.embed.grad[0])


def test_codes_set_by_hand_stay_where_the_start_is_uniform():
    codebook = StraightThroughVQ(dim=2, codebook_size=4)
    codes = torch.arange(8.0).reshape(4, 2)
    with torch.no_grad():
        codebook.prototypes.copy_(codes)
    codebook(torch.randn(10, 2))
    assert torch.equal(codebook.prototypes, codes)
