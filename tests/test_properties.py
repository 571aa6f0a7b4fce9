"""Every quantizer on tokens of every kind: shapes, masks, dtypes, scales, offsets, repetitions.

500 examples for each property; named cases are in `test_contract`.
"""

import math

import pytest
import torch
from einops import rearrange
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from softvq.quantizers import EMAVQ, Codebook, DDCLCodebook, StraightThroughVQ

pytestmark = pytest.mark.slow
METHODS = (DDCLCodebook, StraightThroughVQ, EMAVQ)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Of one computation's rounding, in units of the size of what is summed
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 1e-4, torch.float16: 1e-4}
EXAMPLES = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def cases(draw) -> tuple[Codebook, torch.Tensor, torch.Tensor | None]:
    """A codebook started from other tokens of the same kind, tokens, and perhaps a mask."""
    dim, size = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    shape = draw(st.sampled_from([(0,), (1,), (7,), (3, 0), (2, 5), (2, 3, 4)]))
    dtype = draw(st.sampled_from(DTYPES))
    scale = 10.0 ** draw(st.integers(-6, 6))
    if dtype == torch.float16:
        scale = min(scale, 100.0)
    offset = scale * draw(st.sampled_from([0, 0, 1, -30, 300]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["spread", "all equal", "two values", "zero"]))

    def tokens(*shape: int) -> torch.Tensor:
        x = torch.randn(*shape, dim, generator=generator, dtype=torch.float64)
        if kind == "all equal":
            x = torch.ones_like(x)
        elif kind == "two values":
            x = x.sign()
        elif kind == "zero":
            x = torch.zeros_like(x)
        return (offset + scale * x).to(dtype)

    codebook = draw(st.sampled_from(METHODS))(dim=dim, codebook_size=size)
    if dtype == torch.float64:
        codebook.double()
    codebook.initialize(tokens(40))
    if draw(st.booleans()):
        with torch.no_grad():
            codebook.prototypes[: size // 2] = codebook.prototypes[-1]
    z = tokens(*shape)
    mask = torch.rand(shape, generator=generator) < 0.6 if draw(st.booleans()) else None
    return codebook, z, mask


def real(z: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return rearrange(z, "... d -> (...) d") if mask is None else z[mask]


def size_of(codebook: Codebook, z: torch.Tensor) -> float:
    """The largest squared length that a distance is computed from, once the offset is removed."""
    both = torch.cat([codebook.prototypes.detach().double(), real(z, None).double()])
    spread = (both - both[0]).square().sum(1).max().item()
    # What is lost when z itself is rounded to its dtype, squared lengths being known to that only
    return spread + torch.finfo(z.dtype).eps * both.square().sum(1).max().item() + 1e-30


@EXAMPLES
@given(cases())
def test_training_passes_stay_finite_and_count_every_real_token(case):
    codebook, z, mask = case
    z = z.requires_grad_()
    for _ in range(2):
        assignment = codebook.train().assign(z, mask)
        (assignment.loss + assignment.quantized.float().sum()).backward()
    count = len(real(z, mask))
    assert assignment.quantized.shape == z.shape
    assert assignment.quantized.dtype == z.dtype
    assert assignment.indices.shape == z.shape[:-1]
    assert assignment.counts.sum() == count
    assert_close(assignment.usage.sum().item(), float(count), rtol=1e-4, atol=0)
    assert assignment.loss.isfinite()
    assert z.grad.isfinite().all()
    assert all(value.isfinite().all() for value in codebook.state_dict().values())
    if mask is not None:
        assert (assignment.indices[~mask] == -1).all()
        assert (z.grad[~mask] == 0).all()


@EXAMPLES
@given(cases())
def test_codes_are_the_nearest_and_indices_lead_back_to_them(case):
    codebook, z, mask = case
    assignment = codebook.eval().assign(z, mask)
    codes = codebook.indices_to_codes(assignment.indices)
    assert torch.equal(assignment.quantized, codes.to(z.dtype))
    assert torch.equal(codebook.eval().assign(z, mask).indices, assignment.indices)
    tokens = real(z, mask).double()
    if len(tokens) == 0:
        return
    chosen = real(codes, mask).double()
    prototypes = codebook.prototypes.detach().double()
    distances = (rearrange(tokens, "n d -> n 1 d") - prototypes).square().sum(-1)
    excess = (tokens - chosen).square().sum(-1) - distances.amin(1)
    assert excess.max().item() <= TOLERANCE[z.dtype] * size_of(codebook, z)


@EXAMPLES
@given(cases())
def test_the_loss_splits_and_is_that_of_the_definition(case):
    codebook, z, mask = case
    assignment = codebook.eval().assign(z, mask)
    tokens = real(z, mask).double()
    scale = TOLERANCE[z.dtype] * size_of(codebook, z)
    assert assignment.variance >= 0
    if len(tokens) == 0:
        assert assignment.reconstruction == assignment.variance == assignment.loss == 0
        return
    prototypes = codebook.prototypes.detach().double()
    distances = (rearrange(tokens, "n d -> n 1 d") - prototypes).square().sum(-1)
    if isinstance(codebook, DDCLCodebook):
        q = (-distances / codebook.temperature.double()).softmax(1)
        assert_close(
            real(codebook.weights(z, mask), mask).sum(1),
            torch.ones(len(tokens)).to(q),
            rtol=0,
            atol=1e-4,
            check_dtype=False,
        )
        expected = (q * distances).sum(1).mean().item()
        split = (assignment.reconstruction + assignment.variance).item()
    else:
        expected = distances.amin(1).mean().item()
        split = assignment.reconstruction.item()
    if math.isfinite(expected):
        assert abs(split - expected) <= 10 * scale


@EXAMPLES
@given(cases())
def test_padding_and_order_of_the_tokens_do_not_matter(case):
    codebook, z, mask = case
    tokens = real(z, mask)
    alone = codebook.eval().assign(tokens)
    order = torch.randperm(len(tokens))
    shuffled = codebook.assign(tokens[order])
    padded = codebook.assign(z, mask)
    assert torch.equal(shuffled.indices, alone.indices[order])
    flat = rearrange(padded.indices, "... -> (...)")
    assert torch.equal(flat[flat >= 0], alone.indices)
    tolerance = TOLERANCE[z.dtype] * size_of(codebook, z)
    for other in (shuffled, padded):
        assert abs(other.loss.item() - alone.loss.item()) <= tolerance + 1e-5
        assert torch.equal(other.counts, alone.counts)
