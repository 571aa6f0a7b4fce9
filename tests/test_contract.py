"""What every quantizer of the registry promises, and the bounds of all options.

What is particular to one method is tested in the file that bears its name.
"""

import copy
import dataclasses
import inspect
import io
import json
import math
import re
import subprocess
import sys

import pytest
import torch
from einops import rearrange
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

from softvq import checkpoint
from softvq.autoencoder import VQVAE, VQVAEConfig
from softvq.hierarchical import HierarchicalVQVAEConfig
from softvq.quantizers import (
    EMAVQ,
    REGISTRY,
    Codebook,
    CodebookConfig,
    DDCLCodebook,
    DDCLConfig,
    EMAConfig,
    StraightThroughConfig,
    StraightThroughVQ,
    build,
    register,
)
from softvq.temperature import AnnealedTemperature, EntropyTemperature, FixedTemperature

DIM, SIZE = 4, 8
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
MODES = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
# C06: the one 2 x 2 map whose true indices tell a mixed-up axis from a right one
GRID = torch.tensor([[1, 2], [3, 0]])


# What softvq brings: a test file that registers another changes nothing here.
METHODS = {
    name: method for name, method in REGISTRY.items() if method.__module__.startswith("softvq.")
}


@pytest.fixture(params=METHODS.values(), ids=METHODS)
def method(request) -> type[Codebook]:
    return request.param


def tokens(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def started(
    method: type[Codebook], dim: int = DIM, size: int = SIZE, scale: float = 1.0
) -> Codebook:
    torch.manual_seed(0)
    codebook = method(dim=dim, codebook_size=size)
    codebook.initialize(scale * tokens(256, dim, seed=0))
    return codebook


def holding(method: type[Codebook], codes: torch.Tensor) -> Codebook:
    codebook = started(method, dim=codes.shape[1], size=len(codes))
    with torch.no_grad():
        codebook.prototypes.copy_(codes)
    return codebook


def state(codebook: Codebook) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in codebook.state_dict().items()}


def trained(codebook: Codebook, z: torch.Tensor, mask: torch.Tensor | None = None):
    """One training pass: the assignment, the gradients of z and prototypes, the new state."""
    z = z.clone().requires_grad_()
    assignment = codebook.train().assign(z, mask)
    weights = torch.linspace(-1, 1, codebook.dim, dtype=z.dtype)
    (
        assignment.loss + (assignment.quantized.sum(tuple(range(z.ndim - 1))) * weights).sum()
    ).backward()
    return assignment, z.grad, codebook.prototypes.grad, state(codebook)


def layouts() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The map of C06 as tokens of one-hot codes, in every layout: (z, true indices)."""
    grid = rearrange(GRID, "h w -> 1 h w")
    z = torch.eye(4)[grid]
    channels_first = rearrange(z, "b h w d -> b d h w").contiguous()
    return {
        "channels last": (z, grid),
        "channels first": (rearrange(channels_first, "b d h w -> b h w d"), grid),
        "channels last memory": (
            rearrange(channels_first.to(memory_format=torch.channels_last), "b d h w -> b h w d"),
            grid,
        ),
        "transposed": (z.transpose(1, 2).contiguous().transpose(1, 2), grid),
        "sequence": (rearrange(z, "b h w d -> b (h w) d"), rearrange(grid, "b h w -> b (h w)")),
        "video": (rearrange(z, "b h w d -> b 1 h w d"), rearrange(grid, "b h w -> b 1 h w")),
        "set": (rearrange(z, "b h w d -> (b h w) d"), rearrange(grid, "b h w -> (b h w)")),
        "one token": (z[0, 0, 1], grid[0, 0, 1]),
    }


@MODES
@pytest.mark.parametrize("layout", layouts())
def test_every_layout_gives_the_same_codes_and_gradients(method, layout, training):
    z, indices = layouts()[layout]
    z = z.requires_grad_()
    out = holding(method, torch.eye(4)).train(training)(z)
    assert torch.equal(out.indices, indices)
    assert torch.equal(out.quantized, z)
    ramp = 1 + rearrange(indices, "... -> ... 1") + torch.linspace(-1, 1, 4)
    (gradient,) = torch.autograd.grad((out.quantized * ramp).sum(), z)
    # What comes back to a token depends on its code alone, wherever it lies.
    flat = holding(method, torch.eye(4)).train(training)
    x = torch.eye(4).requires_grad_()
    ramp = 1 + torch.arange(4.0)[:, None] + torch.linspace(-1, 1, 4)
    (expected,) = torch.autograd.grad((flat(x).quantized * ramp).sum(), x)
    assert_close(gradient, expected[indices])


def test_a_batch_of_two_equals_two_singles(method):
    codebook = started(method).eval()
    z = tokens(2, 3, 5, DIM)
    both, singles = codebook(z), [codebook(x) for x in z]
    assert_close(both.quantized, torch.stack([x.quantized for x in singles]))
    assert torch.equal(both.indices, torch.stack([x.indices for x in singles]))


@MODES
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_quantized_is_the_code_in_the_dtype_and_shape_of_z(method, dtype, training):
    codebook = started(method).train(training)
    codes = codebook.prototypes.detach().clone()
    z = tokens(2, 3, DIM, dtype=dtype)
    out = codebook.assign(z)
    assert out.quantized.dtype == out.soft.dtype == dtype
    assert torch.equal(out.quantized, codes[out.indices].to(dtype))
    assert out.loss.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(out.spread, z.to(out.loss.dtype).reshape(-1, DIM).var(0, correction=0).sum())


@MODES
def test_forward_gives_three_fields_of_assign(method, training):
    codebook = started(method).train(training)
    z = tokens(16, DIM)
    assignment, out = copy.deepcopy(codebook).assign(z), codebook(z)
    for name, value in out._asdict().items():
        assert torch.equal(value, getattr(assignment, name)), name
    assert out.loss.shape == ()


@HALVES
def test_indices_lead_back_to_the_codes_bit_for_bit(method, dtype):
    codebook = holding(method, torch.tensor([[0.1], [7.3]])).eval()
    # C04: straight-through arithmetic in float32 makes 0.09998 of the code 0.1
    for z in (torch.tensor([[1000.123], [-1000.123]]), torch.tensor([[1000.0]], dtype=dtype)):
        out = codebook(z)
        assert torch.equal(codebook.indices_to_codes(out.indices).to(z.dtype), out.quantized)
    codebook = started(method).eval()
    out = codebook(100 * tokens(500, DIM))
    assert torch.equal(codebook.indices_to_codes(out.indices), out.quantized)


@MODES
def test_passes_without_gradient_or_in_eval_mode_change_no_state(method, training):
    for codebook in (started(method), method(dim=DIM, codebook_size=SIZE)):
        before = state(codebook.train(training))
        with torch.set_grad_enabled(not training):
            for seed in range(3):
                codebook(tokens(64, DIM, seed=seed))
        assert_close(state(codebook), before, rtol=0, atol=0)


def test_indices_are_the_nearest_codes(method):
    codebook = started(method).eval()
    z = tokens(3, 100, DIM)
    distances = (rearrange(z, "b n d -> b n 1 d") - codebook.prototypes).double().square().sum(-1)
    assert torch.equal(codebook.nearest(z), distances.argmin(-1))
    assert torch.equal(codebook(z).indices, distances.argmin(-1))


@pytest.mark.parametrize("padding", [math.nan, math.inf, -1e30])
def test_padding_changes_nothing(method, padding):
    z = tokens(3, 5, DIM, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3]])
    codebook = started(method).double()
    alone, grad, grad_prototypes, after = trained(copy.deepcopy(codebook), z[mask])
    z[~mask] = padding
    padded, grad_padded, grad_prototypes_padded, after_padded = trained(codebook, z, mask)
    for name, value in alone._asdict().items():
        got = getattr(padded, name)
        assert_close(got[mask] if name in ("quantized", "soft", "indices") else got, value)
    assert (padded.indices[~mask] == -1).all()
    assert (padded.quantized[~mask] == 0).all()
    assert_close(grad_padded[mask], grad)
    assert (grad_padded[~mask] == 0).all()
    assert_close(grad_prototypes_padded, grad_prototypes)
    assert_close(after_padded, after)


@MODES
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"]
)
def test_a_row_that_is_all_padding_is_zero_and_harms_no_other(method, dtype, training):
    z = tokens(2, 5, DIM, dtype=dtype)
    z[1] = math.nan
    z.requires_grad_()
    mask = torch.tensor([[True] * 5, [False] * 5])
    codebook = started(method).train(training)
    codes = codebook.prototypes.detach().clone()
    alone = copy.deepcopy(codebook).assign(z[:1])
    out = codebook.assign(z, mask)
    (out.loss + out.quantized[0].float().square().sum()).backward()
    assert torch.equal(out.quantized[0], alone.quantized[0])
    assert torch.equal(out.quantized[0], codes[out.indices[0]].to(dtype))
    assert torch.equal(out.quantized[1], torch.zeros(5, DIM, dtype=dtype))
    assert torch.equal(out.soft[1], torch.zeros(5, DIM, dtype=dtype))
    assert (out.indices[1] == -1).all()
    assert_close(out.loss, alone.loss, rtol=1e-6, atol=1e-6)
    assert_close(out.usage, alone.usage, rtol=1e-6, atol=1e-6)
    assert z.grad[0].isfinite().all()
    assert torch.equal(z.grad[1], torch.zeros(5, DIM, dtype=dtype))
    for value in (*codebook.state_dict().values(), *(p.grad for p in codebook.parameters())):
        assert value.isfinite().all()


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (torch.ones(5, dtype=torch.bool), "torch.bool of shape (5,)"),
        (torch.ones(2, 1, dtype=torch.bool), "torch.bool of shape (2, 1)"),
        (torch.ones(5, 2, dtype=torch.bool), "torch.bool of shape (5, 2)"),
        (torch.ones(2, 5, dtype=torch.int64), "torch.int64 of shape (2, 5)"),
        (torch.ones(2, 5), "torch.float32 of shape (2, 5)"),
    ],
    ids=["one row", "one column", "transposed", "integers", "floats"],
)
def test_a_mask_that_does_not_fit_is_refused(method, mask, got):
    z, codebook = tokens(2, 5, DIM), started(method)
    # The functions as users call them, without the suite's check of annotations
    for call in (method.assign, method.initialize):
        with pytest.raises(
            ValueError, match=re.escape("mask must be boolean of shape (2, 5)")
        ) as e:
            inspect.unwrap(call)(codebook, z, mask)
        assert got in str(e.value)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_token_that_is_not_finite_harms_its_own_step_alone(method, broken):
    codebook = started(method)
    z = tokens(64, DIM)
    poisoned = z.clone()
    poisoned[7, 1] = broken
    expected = codebook.nearest(z)
    assignment = codebook.train().assign(poisoned)
    assert not assignment.loss.isfinite()
    others = torch.arange(64) != 7
    assert torch.equal(assignment.indices[others], expected[others])
    assert all(value.isfinite().all() for value in state(codebook).values())
    assert codebook.assign(z).loss.isfinite()


def test_the_start_reads_real_tokens_only(method):
    z, mask = tokens(32, DIM), torch.arange(32) % 3 == 0
    codebooks = []
    for arguments in ((z[mask],), (z.masked_fill(~mask[:, None], math.nan), mask)):
        torch.manual_seed(3)
        codebooks.append(method(dim=DIM, codebook_size=SIZE))
        codebooks[-1].initialize(*arguments)
    assert_close(state(codebooks[0]), state(codebooks[1]))


def test_the_opposite_mask_gives_another_result(method):
    codebook = started(method).eval()
    z, mask = tokens(8, DIM), torch.arange(8) < 3
    assert torch.equal(codebook(z, mask).indices >= 0, mask)
    assert not torch.isclose(codebook(z, mask).loss, codebook(z, ~mask).loss)


@pytest.mark.parametrize("shape", [(2, 5), (0,), (2, 0, 3)], ids=str)
def test_a_batch_without_tokens_has_no_loss_and_moves_nothing(method, shape):
    codebook = started(method)
    trained(codebook, tokens(64, DIM))
    codebook.zero_grad()
    before = state(codebook)
    z = torch.full((*shape, DIM), math.nan)
    out, grad, grad_prototypes, after = trained(codebook, z, torch.zeros(shape, dtype=torch.bool))
    assert torch.equal(out.quantized, torch.zeros_like(z))
    assert torch.equal(out.indices, torch.full(shape, -1))
    assert out.counts.sum() == out.usage.sum() == 0
    assert out.loss == out.reconstruction == out.variance == out.entropy == out.spread == 0
    assert torch.equal(grad, torch.zeros_like(z))
    assert grad_prototypes is None or not grad_prototypes.any()
    # The schedule counts passes, and the power iteration goes on with the covariance that it has.
    moving = {"step", "critical", "direction"}
    kept = before.keys() - moving
    assert all(torch.equal(after[name], before[name]) for name in kept)


def test_no_mask_is_needed_for_zero_tokens(method):
    codebook = started(method)
    out, _, _, after = trained(codebook, torch.zeros(0, DIM))
    assert out.loss == 0
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.parametrize(("dim", "size"), [(1, 1), (1, 8), (4, 1)], ids=str)
def test_one_code_and_one_dimension_work(method, dim, size):
    codebook = started(method, dim, size)
    codes = codebook.prototypes.detach().clone()
    z = tokens(32, dim)
    out, grad, _, after = trained(codebook, z)
    assert torch.equal(out.quantized, codes[out.indices])
    assert_close(out.reconstruction, (z - out.soft).square().sum(-1).mean())
    assert torch.equal(out.counts, torch.bincount(out.indices, minlength=size))
    assert grad.isfinite().all()
    assert all(value.isfinite().all() for value in after.values())


def test_usage_and_counts_sum_to_the_number_of_real_tokens(method):
    z, mask = tokens(50, DIM), torch.arange(50) < 37
    out = started(method).assign(z, mask)
    assert torch.equal(out.counts, torch.bincount(out.indices[mask], minlength=SIZE))
    assert out.counts.sum() == 37
    assert_close(out.usage.sum(), torch.tensor(37.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_tokens_that_are_no_floats_are_refused(method, dtype):
    unchecked = inspect.unwrap(method.assign)
    with pytest.raises(ValueError, match=f"z must be of a floating dtype, got {dtype}"):
        unchecked(method(dim=DIM, codebook_size=SIZE), torch.ones(5, DIM, dtype=dtype))


def test_another_width_is_refused(method):
    codebook = started(method)
    for call in (codebook, codebook.assign, codebook.nearest, codebook.initialize):
        with pytest.raises(ValueError, match=r"width 4, got shape \(2, 4, 3\)"):
            call(tokens(2, 4, 3))


@pytest.mark.parametrize("outside", [-2, SIZE])
def test_indices_outside_the_codebook_are_refused(method, outside):
    with pytest.raises(ValueError, match=rf"\[0, {SIZE}\).* got .*{outside}"):
        started(method).indices_to_codes(torch.tensor([0, outside]))


@pytest.mark.parametrize("shape", [(256,), (2, 5), (3, 2, 2)])
def test_indices_of_every_integer_dtype_are_the_same_codes(method, shape):
    codebook = holding(method, tokens(300, 3))
    indices = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    codes = codebook.prototypes[indices]
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32):
        assert torch.equal(codebook.indices_to_codes(indices.to(dtype)), codes)
    small = indices % 128
    assert torch.equal(
        codebook.indices_to_codes(small.to(torch.int8)), codebook.indices_to_codes(small)
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_indices_that_are_no_integers_are_refused(method, dtype):
    unchecked = inspect.unwrap(method.indices_to_codes)
    with pytest.raises(ValueError, match=f"indices must be integers, got {dtype}"):
        unchecked(started(method), torch.ones(3, dtype=dtype))


def test_the_index_of_padding_is_a_code_of_zeros(method):
    codebook = started(method)
    codes = codebook.indices_to_codes(torch.tensor([[-1, 3]]))
    assert_close(codes, torch.stack([torch.zeros(DIM), codebook.prototypes[3]])[None])


@HALVES
def test_casting_to_half_keeps_codes_and_statistics_in_float32(method, dtype):
    codebook, reference = started(method), started(method)
    codebook = codebook.half() if dtype == torch.float16 else codebook.to(dtype)
    assert_close(state(codebook), state(reference), rtol=0, atol=0)
    z = tokens(64, DIM, dtype=dtype)
    got, expected = trained(codebook, z), trained(reference, z.float())
    assert_close(got[0].quantized, expected[0].quantized.to(dtype))
    assert_close(got[0].loss, expected[0].loss)
    assert_close(got[3], expected[3])


def test_casting_to_double_computes_in_double(method):
    codebook = started(method).double()
    assert all(x.dtype != torch.float32 for x in codebook.state_dict().values())
    assert codebook.assign(tokens(4, DIM, dtype=torch.float64)).loss.dtype == torch.float64
    assert all(x.dtype != torch.float64 for x in codebook.float().state_dict().values())


@pytest.mark.parametrize("how", ["cast", "autocast", "float16 tokens", "bfloat16 tokens"])
def test_codes_far_from_zero_survive_half_precision(method, how):
    # C01: |z|² = 102400 overflows float16
    codebook = holding(method, torch.tensor([41.0, 40.0])[:, None].expand(2, 64))
    z = torch.full((1, 64), 40.0)
    if how == "cast":
        codebook, z = codebook.half(), z.half()
    if how.endswith("tokens"):
        z = z.to(getattr(torch, how.split()[0]))
    with torch.autocast("cpu", torch.float16, enabled=how == "autocast"):
        out, grad, grad_prototypes, after = trained(codebook, z)
    assert out.indices.tolist() == [1]
    assert torch.equal(out.quantized, z)
    assert_close(out.reconstruction + out.variance, torch.tensor(0.0))
    # DDCL's loss has the divergence from even use as well; one token cannot use two codes.
    even = 0.1 * math.log(2) if method is DDCLCodebook else 0.0
    assert_close(out.loss, torch.tensor(even), rtol=1e-4, atol=1e-6)
    assert grad.isfinite().all()
    assert grad_prototypes is None or grad_prototypes.isfinite().all()
    assert all(value.isfinite().all() for value in after.values())


@MODES
def test_more_tokens_of_one_code_than_half_precision_counts(method, training):
    codebook = holding(method, torch.tensor([[1.0] * 4, [50.0] * 4])).half().train(training)
    out = codebook.assign(torch.ones(70_000, 4, dtype=torch.float16))
    assert out.counts.tolist() == [70_000, 0]
    assert_close(out.usage, torch.tensor([70_000.0, 0.0]))
    assert out.usage.dtype == out.loss.dtype == torch.float32
    assert_close(out.reconstruction + out.variance, torch.tensor(0.0))
    assert out.loss.isfinite()
    assert all(value.dtype != torch.float16 for value in codebook.state_dict().values())
    assert all(value.isfinite().all() for value in codebook.state_dict().values())


@pytest.mark.parametrize(("beta", "slope"), [(0.25, 0.5), (0.5, 1.0), (0.0, 0.0)])
def test_the_commitment_weight_moves_z_towards_the_code_and_nothing_else(method, beta, slope):
    # C03: the loss of a swapped weight is the same, only its gradients are not.
    codebook = method(dim=1, codebook_size=1, commitment_weight=beta)
    codebook.initialize(torch.zeros(4, 1))
    with torch.no_grad():
        codebook.prototypes.zero_()
    z = torch.tensor([[1.0]], requires_grad=True)
    loss = codebook(z).loss
    loss.backward()
    # In value DDCL's two shares are one L_q; EMA has no codebook term, its code moves by averages.
    shares = {DDCLCodebook: 1.0, StraightThroughVQ: 1 + beta, EMAVQ: beta}
    assert loss.item() == pytest.approx(shares[method])
    assert z.grad.item() == pytest.approx(slope)
    if method is EMAVQ:
        assert not codebook.prototypes.requires_grad
    else:
        assert codebook.prototypes.grad.item() == pytest.approx(-2.0)


def test_codes_and_indices_are_those_of_before_the_pass_though_it_moves_and_revives_codes(method):
    # C04: searched, updated, and only then looked up, they are no longer those of the search.
    options = {EMAVQ: dict(decay=0.0, dead_below=0.9), DDCLCodebook: dict(dead_below=0.98)}
    torch.manual_seed(0)
    codebook = method(dim=DIM, codebook_size=SIZE, **options.get(method, {}))
    codebook.initialize(tokens(256, DIM, seed=0))
    moved = revived = 0
    for seed in range(8):
        before = codebook.prototypes.detach().clone()
        z = tokens(9, DIM, seed=seed)
        out = codebook.assign(z)
        assert torch.equal(out.quantized, before[out.indices])
        error = (z - out.soft).square().sum(1).mean()
        assert_close(out.reconstruction, error)
        moved += not torch.equal(codebook.prototypes, before)
        revived += out.revived.item()
    assert (moved > 0) == (revived > 0) == (method in options)


@HALVES
def test_autocast_changes_nothing(method, dtype):
    codebook = started(method, scale=1e3)
    other = copy.deepcopy(codebook)
    for seed in range(2):
        z = 1e3 * tokens(64, DIM, seed=seed)
        expected = trained(codebook, z)
        with torch.autocast("cpu", dtype):
            got = trained(other, z)
        for name, value in expected[0]._asdict().items():
            assert_close(getattr(got[0], name), value)
        assert_close(got[1:], expected[1:])


def test_a_frozen_codebook_stays_while_z_still_learns(method):
    codebook, z = started(method), tokens(64, DIM)
    _, expected, _, _ = trained(copy.deepcopy(codebook), z)
    before = state(codebook.freeze())
    out, grad, grad_prototypes, after = trained(codebook, z)
    assert_close(after, before, rtol=0, atol=0)
    assert grad_prototypes is None
    assert_close(grad, expected)
    assert torch.equal(out.quantized, codebook.indices_to_codes(out.indices))


def test_loading_gives_equal_outputs_and_no_second_start(method):
    codebook = started(method)
    trained(codebook, tokens(64, DIM))
    file = io.BytesIO()
    torch.save(codebook.state_dict(), file)
    file.seek(0)
    torch.manual_seed(5)
    loaded = method(dim=DIM, codebook_size=SIZE)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert_close(state(loaded), state(codebook), rtol=0, atol=0)
    z = tokens(64, DIM, seed=9)
    codebook.zero_grad()
    expected, got = trained(codebook, z), trained(loaded, z)
    assert_close(got[0]._asdict(), expected[0]._asdict(), rtol=0, atol=0)
    assert_close(got[1:], expected[1:], rtol=0, atol=0)


@pytest.mark.parametrize("way", ["averaged", "assigned", "replaced"])
def test_weights_that_come_in_another_way_are_not_started_again(method, way):
    z = tokens(64, DIM)
    source = started(method, scale=3)
    if way == "averaged":  # a copy that torch made before the start, and fills itself
        averaged = AveragedModel(method(dim=DIM, codebook_size=SIZE))
        averaged.update_parameters(source)
        codebook = averaged.module
    elif way == "assigned":
        with torch.device("meta"):
            codebook = method(dim=DIM, codebook_size=SIZE)
        codebook.load_state_dict(source.state_dict(), assign=True)
    else:  # as transformers' from_pretrained puts tensors in the place of the module's own
        codebook = method(dim=DIM, codebook_size=SIZE)
        for name, value in source.state_dict().items():
            if name in codebook._parameters:
                codebook._parameters[name] = torch.nn.Parameter(value.clone())
            else:
                codebook._buffers[name] = value.clone()
    before = source.prototypes.clone()
    codebook.train()(z)
    # The moving averages of EMA move a code by a little; a new start would by more than 1.
    assert (codebook.prototypes - before).abs().max() < 0.5


@pytest.mark.parametrize("average", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}])
def test_an_average_of_models_holds_the_mean_of_their_codes(method, average):
    codebook = started(method)
    averaged = AveragedModel(codebook, use_buffers=True, **average)
    first = codebook.prototypes.clone()
    averaged.update_parameters(codebook)
    with torch.no_grad():
        codebook.prototypes.add_(2)
    averaged.update_parameters(codebook)
    assert_close(averaged.module.prototypes, first + 1)
    assert averaged.module.initialized
    assert averaged.eval()(first + 1).indices.tolist() == list(range(SIZE))


def test_the_first_training_pass_starts_the_codebook_and_no_later_one_does(method):
    torch.manual_seed(0)
    codebook = method(dim=DIM, codebook_size=SIZE)
    codebook.eval()(tokens(64, DIM))
    assert not codebook.initialized
    codebook.train()(tokens(64, DIM))
    assert codebook.initialized
    codebook(100 + tokens(64, DIM))
    assert (codebook.prototypes < 50).all(1).any()


def test_the_same_seed_gives_the_same_codes(method):
    first, second = started(method), started(method)
    assert_close(state(first), state(second), rtol=0, atol=0)


def test_a_deep_copy_is_independent(method):
    codebook = started(method)
    twin, before = copy.deepcopy(codebook), state(codebook)
    assert torch.equal(
        twin.eval()(tokens(9, DIM)).quantized, codebook.eval()(tokens(9, DIM)).quantized
    )
    with torch.no_grad():
        twin.prototypes.zero_()
    trained(twin, tokens(64, DIM))
    assert_close(state(codebook), before, rtol=0, atol=0)


def test_a_config_builds_its_quantizer(method):
    config = method.config_class(dim=3, codebook_size=5)
    codebook = build(config)
    assert type(codebook) is method
    assert codebook.config == config
    assert (codebook.dim, codebook.codebook_size) == codebook.prototypes.shape[::-1] == (3, 5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(EMAConfig):
    """Options of a method that a user brings."""

    steps: tuple[int, ...] = (3, 4)


class OwnVQ(EMAVQ):
    """A method that a user brings."""

    config_class = OwnConfig


@pytest.fixture
def registry():
    """The registry, to be changed in one test alone."""
    before = dict(REGISTRY)
    yield REGISTRY
    REGISTRY.clear()
    REGISTRY.update(before)


def test_a_registered_method_is_built_saved_and_loaded(registry, tmp_path):
    config = VQVAEConfig(quantizer=OwnConfig(dim=DIM, codebook_size=SIZE, steps=(5, 6, 7)))
    with pytest.raises(ValueError, match=r"from a OwnConfig; known are DDCLConfig, .*EMAConfig"):
        VQVAE(config)
    register("own", OwnVQ)
    assert registry["own"] is OwnVQ
    model = VQVAE(config)
    assert type(model.quantizer) is OwnVQ
    checkpoint.save_model(tmp_path, model)
    assert checkpoint.load(tmp_path).config == config
    assert type(checkpoint.load(tmp_path).quantizer) is OwnVQ
    checkpoint.save_model(tmp_path, model)  # the same configuration, read from the file
    del registry["own"]
    with pytest.raises(ValueError, match=r"unknown configuration 'OwnConfig'; known are VQVAE"):
        checkpoint.load(tmp_path)


def test_a_method_registered_twice_stays_and_a_name_that_is_taken_is_refused(registry):
    register("own", OwnVQ)
    register("own", OwnVQ)
    assert list(registry)[-1] == "own"
    before = dict(registry)

    class Config(CodebookConfig):
        """A config of another name."""

    class Other(EMAVQ):
        """Another method."""

        config_class = Config

    class Twin(EMAVQ):
        """A method whose config class has the name of another one."""

        config_class = type("OwnConfig", (EMAConfig,), {})

    with pytest.raises(ValueError, match="the name 'ddcl' is taken by DDCLCodebook"):
        register("ddcl", Other)
    with pytest.raises(ValueError, match="a OwnConfig already builds OwnVQ"):
        register("twin", Twin)
    with pytest.raises(ValueError, match="a EMAConfig already builds EMAVQ"):
        register("another", type("Heir", (EMAVQ,), {}))
    assert registry == before


def test_a_class_that_is_defined_anew_takes_its_own_place(registry):
    def cell() -> type[Codebook]:
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class MineConfig(EMAConfig):
            """Options of `Mine`."""

        class Mine(EMAVQ):
            """A method of a notebook."""

            config_class = MineConfig

        register("mine", Mine)
        return Mine

    first, second = cell(), cell()
    assert first is not second
    assert registry["mine"] is second
    assert type(build(second.config_class(dim=2, codebook_size=3))) is second
    with pytest.raises(ValueError, match="a MineConfig already builds Mine"):
        register("another", first)


def test_the_methods_of_softvq_are_all_tested_here():
    assert {DDCLCodebook, StraightThroughVQ, EMAVQ} <= set(METHODS.values())


# In a process of its own, where no import hook wraps the functions to compile.
COMPILED = """
import copy, json, sys
import torch
from softvq.quantizers import REGISTRY

torch.set_num_threads(1)
result = {}
for name, method in REGISTRY.items():
    for training in (True, False):
        torch.manual_seed(0)
        codebook = method(dim=8, codebook_size=32).train(training)
        codebook.initialize(torch.randn(256, 8))
        z, mask = torch.randn(2, 5, 5, 8), torch.rand(2, 5, 5) < 0.8
        runs = []
        for compiled in (True, False):
            module, x = copy.deepcopy(codebook), z.clone().requires_grad_()
            run = torch.compile(module, fullgraph=True, backend=sys.argv[1]) if compiled else module
            out = run(x, mask)
            (out.loss + out.quantized.square().sum()).backward()
            runs.append([*out, x.grad, *module.state_dict().values()])
        torch._dynamo.reset()
        result[f"{name} {training}"] = max(
            (a.double() - b.double()).abs().max().item() for a, b in zip(*runs)
        )
print(json.dumps(result))
"""


def run_compiled(script: str, backend: str) -> dict[str, float]:
    """Largest difference between the compiled and the eager run of each case of `script`."""
    command = [sys.executable, "-c", script, backend]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_compiled_as_one_graph_equals_eager():
    differences = run_compiled(COMPILED, "aot_eager")
    assert len(differences) == 2 * len(METHODS)
    assert max(differences.values()) < 1e-5, differences


NOT_POSITIVE, NOT_A_SIZE = (0.0, -1.0, math.nan, math.inf), (0, -1)
NEGATIVE, NOT_A_SHARE = (-0.1, math.nan, math.inf), (-0.1, 1.0, math.nan)
NETWORK = {
    "channels": NOT_A_SIZE,
    "hidden": (1, 0),
    "residual_blocks": (-1,),
    "residual_hidden": NOT_A_SIZE,
    "downsamplings": NOT_A_SIZE,
}
BAD_VALUES = {
    DDCLConfig: {
        "dim": NOT_A_SIZE,
        "codebook_size": NOT_A_SIZE,
        "schedule_steps": NOT_A_SIZE,
        "gradient": ("both",),
        "init": ("zeros",),
        "commitment_weight": NEGATIVE,
        "usage_weight": NEGATIVE,
        "straight_through_weight": NEGATIVE,
        "dead_below": NOT_A_SHARE,
        "hard_forward_after": (-0.1, 1.1, math.nan),
    },
    StraightThroughConfig: {
        "dim": NOT_A_SIZE,
        "codebook_size": NOT_A_SIZE,
        "commitment_weight": NEGATIVE,
        "init": ("zeros",),
    },
    EMAConfig: {
        "dim": NOT_A_SIZE,
        "codebook_size": NOT_A_SIZE,
        "commitment_weight": NEGATIVE,
        "decay": NOT_A_SHARE,
        "smoothing": NEGATIVE,
        "dead_below": NOT_A_SHARE,
        "kmeans_iterations": (-1,),
    },
    FixedTemperature: {"value": NOT_POSITIVE},
    AnnealedTemperature: {
        "start": (*NOT_POSITIVE, 0.001),
        "end": (*NOT_POSITIVE, 0.6),
        "cooling": (0.0, -0.1, 1.1, math.nan),
    },
    EntropyTemperature: {
        "start": (0.9, math.nan, math.inf),
        "warm": (0.9, 5.0, math.nan),
        "end": (1.0, 0.5, 5.0, math.nan),
        "hardening": (0.0, 1.0, 1.1, math.nan),
        "gain": (0.0, -0.1, 1.1, math.nan),
    },
    HierarchicalVQVAEConfig: NETWORK,
    VQVAEConfig: NETWORK,
}
# Their types say all there is to say.
UNBOUNDED = {"temperature", "quantizer", "top", "bottom", "normalize"}


@pytest.mark.parametrize("config", BAD_VALUES, ids=lambda config: config.__name__)
def test_every_option_is_validated(config):
    fields = {field.name for field in dataclasses.fields(config)}
    assert fields - UNBOUNDED == BAD_VALUES[config].keys()


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        pytest.param(config, name, value, id=f"{config.__name__}.{name}={value}")
        for config, fields in BAD_VALUES.items()
        for name, values in fields.items()
        for value in values
    ],
)
def test_an_option_out_of_range_is_refused_by_name_and_value(config, name, value):
    # Past the constructor, where the checks of the suite would stop a wrong literal first.
    options = config()
    object.__setattr__(options, name, value)
    with pytest.raises(ValueError, match=rf"{name}\b.*{re.escape(str(value))}"):
        options.__post_init__()
