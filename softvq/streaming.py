"""The streaming kernels behind `softvq.ddcl`: soft assignment, its gradient and the nearest code,
walking over blocks of tokens so that no n x k matrix is ever held.

What they compute is defined in `softvq.ddcl`; as custom operators they are opaque to compilers.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

# The row-wise argmax looks at groups of this many codes: a vectorised maximum inside each group,
# then an ordinary argmax over the groups and inside the best one.
_GROUP = 64


def _block_rows(n: int, k: int, device: torch.device) -> int:
    """Tokens in one block: two buffers of k columns should fit a CPU's cache, or fill a GPU."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return max(1, min(n, 512 * threads, max(64, 2**20 * threads // k)))
    return max(1, min(n, max(64, 2**26 // k)))


class _Operands(NamedTuple):
    """The prototypes as the streaming products read them, padded with unreachable codes."""

    centre: Tensor  # (d): subtracted from z and p, so that an offset costs no precision
    codes: Tensor  # (k, d): p
    moments: Tensor  # (d + 1, k'): p and |p|²
    logits: Tensor  # (d + 1, k'): [z, 1] @ logits = (|z|² - |z - p|²) / T
    temperature: Tensor  # T, raised to the lowest value that still makes a difference


def _operands(p: Tensor, temperature: Tensor) -> _Operands:
    """Laid out (d + 1, k'), the order in which every product is fast."""
    k, d = p.shape
    # The median of some prototypes, which one that is far away does not move as it does a mean.
    centre = p[:: -(-k // 128)].median(0).values
    p = p - centre
    moments = p.new_zeros(d + 1, -(-k // _GROUP) * _GROUP)
    moments[:d, :k] = p.T
    moments[d, :k] = p.square().sum(1)
    info = torch.finfo(p.dtype)
    # Below this temperature every difference that the dtype resolves is already decided, and above
    # it no quotient overflows, for tokens up to 1e13 times as far away as the prototypes (float32).
    coldest = (moments[d].max() * info.tiny ** (2 / 3)).clamp_min(10 * info.tiny)
    t = torch.maximum(temperature, coldest)
    logits = moments * (2 / t)
    logits[d] /= -2
    logits[d, k:] = -(info.max ** (3 / 4))
    return _Operands(centre, p, moments, logits, t)


def _argmax(logits: Tensor, arange: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(maximum, lowest index of it) of every row; several times as fast as Tensor.max on a CPU."""
    groups = rearrange(logits, "b (g s) -> b g s", s=_GROUP)
    maximum, group = groups.amax(2).max(1)
    index = group * _GROUP + groups[arange[: len(group)], group].argmax(1)
    # Only a token that is not finite finds its maximum in the padding.
    return maximum, index.clamp_max_(k - 1)


def _softmax(logits: Tensor, maximum: Tensor, out: Tensor) -> None:
    """Weights of rows with these maxima; leaves in `logits` what is left when they are subtracted.

    A weight that is too small to change any sum would be a denormal number for most codes of a
    cold codebook, and many processors compute with those a hundred times as slowly: none is less
    than a power of the smallest normal number.
    """
    smallest = torch.finfo(logits.dtype).tiny ** 0.8
    logits.sub_(maximum[:, None]).clamp_min_(math.log(smallest))
    torch.softmax(logits, 1, out=out)


def _blocks(n: int, rows: int) -> Iterator[slice]:
    return (slice(a, min(a + rows, n)) for a in range(0, n, rows))


@torch.library.custom_op("softvq::soft_assignment", mutates_args=())
def soft_assignment(
    z: Tensor, p: Tensor, temperature: Tensor, weights: Tensor, commitment_weight: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `SoftAssignment` for z (n, d), p (k, d), T (), usage weights (n)."""
    (n, d), k = z.shape, len(p)
    centre, codes, moments, logits, temperature = _operands(p, temperature)
    rows = _block_rows(n, moments.shape[1], z.device)
    block_z, block_mu = z.new_ones(rows, d + 1), z.new_empty(rows, d)
    block_s, block_q = (z.new_empty(rows, moments.shape[1]) for _ in range(2))
    arange = torch.arange(rows, device=z.device)
    mu = torch.empty_like(z)
    reconstruction, variance, free_energy, entropy = (z.new_empty(n) for _ in range(4))
    indices = torch.empty(n, dtype=torch.int64, device=z.device)
    usage = z.new_zeros(moments.shape[1])
    for block in _blocks(n, rows):
        b = block.stop - block.start
        x, m, s, q = block_z[:b], block_mu[:b], block_s[:b], block_q[:b]
        torch.sub(z[block], centre, out=x[:, :d])
        torch.mm(x, logits, out=s)
        maximum, index = _argmax(s, arange, k)
        _softmax(s, maximum, out=q)
        torch.mm(q, moments[:d].T, out=m)
        usage.addmv_(q.T, weights[block])
        # log sum_k exp of the differences to the maximum, which is in [0, log k]
        excess = -q.gather(1, index[:, None])[:, 0].log()
        entropy[block] = excess - s.mul_(q).sum(1)
        # From the vectors themselves: the products above lose what z and its code have in common.
        distance = (x[:, :d] - codes[index]).square_().sum(1)
        free_energy[block] = distance - temperature * excess
        reconstruction[block] = (x[:, :d] - m).square_().sum(1)
        variance[block] = torch.mv(q, moments[d]) - m.square().sum(1)
        torch.add(m, centre, out=mu[block])
        indices[block] = index
    variance.clamp_min_(0)
    entropy.clamp_min_(0)
    return mu, reconstruction, variance, free_energy, entropy, usage[:k].clone(), indices


@soft_assignment.register_fake
def _(z, p, temperature, weights, commitment_weight):
    n, k = z.shape[0], p.shape[0]  # len() would pin n to the traced batch
    indices = torch.empty(n, dtype=torch.int64, device=z.device)
    scalars = (z.new_empty(n) for _ in range(4))
    return torch.empty_like(z), *scalars, z.new_empty(k), indices


@torch.library.custom_op("softvq::soft_assignment_backward", mutates_args=())
def soft_assignment_backward(
    z: Tensor,
    p: Tensor,
    temperature: Tensor,
    weights: Tensor,
    mu: Tensor,
    entropy: Tensor,
    grad_mu: Tensor,
    grad_reconstruction: Tensor,
    grad_variance: Tensor,
    grad_free_energy: Tensor,
    grad_usage: Tensor,
    commitment_weight: float,
    needs_temperature: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for z, p and T from a second pass over the blocks, with q computed again.

    With s_k = -|z - p_k|² / T and a_k = dL/dq_k, r_k = dL/ds_k = q_k (a_k - sum q a), which sums
    to 0 over k. F is kept out of r: its gradient needs no softmax derivative.
    """
    (n, d), k = z.shape, len(p)
    centre, _, moments, logits, temperature = _operands(p, temperature)
    columns = moments.shape[1]
    readers = moments.new_zeros(d + 2, columns)  # [g_mu, g_V, w] @ readers = a
    readers[: d + 1] = moments
    readers[d + 1, :k] = grad_usage
    rows = _block_rows(n, columns, z.device)
    block_z, block_g = z.new_ones(rows, d + 1), z.new_empty(rows, d + 2)
    block_mu, block_e = (z.new_empty(rows, d) for _ in range(2))
    block_s, block_q = (z.new_empty(rows, columns) for _ in range(2))
    grad_z = torch.empty_like(z)
    by_r, by_q = (z.new_zeros(d + 1, columns) for _ in range(2))
    grad_temperature = z.new_zeros(())
    for block in _blocks(n, rows):
        b = block.stop - block.start
        x, g, m, e, s, q = (
            whole[:b] for whole in (block_z, block_g, block_mu, block_e, block_s, block_q)
        )
        g_r, g_v, g_f = (
            whole[block, None] for whole in (grad_reconstruction, grad_variance, grad_free_energy)
        )
        torch.sub(z[block], centre, out=x[:, :d])
        torch.sub(mu[block], centre, out=m)
        torch.sub(x[:, :d], m, out=e)
        _write_upstream(g, grad_mu[block], g_r, g_v, weights[block], e, m)
        torch.mm(x, logits, out=s)
        _softmax(s, s.amax(1), out=q)
        # r sums to 0, so s may be shifted: near its maximum the product with r does not cancel.
        shifted = s.clone() if needs_temperature else s
        a = torch.mm(g, readers, out=s)  # overwritten by r, row by row
        r = torch.ops.aten._softmax_backward_data.out(a, q, 1, a.dtype, grad_input=a)
        if needs_temperature:
            grad_temperature -= shifted.mul_(r).sum()
        torch.mm(r, moments[:d].T, out=m).mul_(2 / temperature)
        torch.addcmul(m, commitment_weight * g_f + g_r, e, value=2, out=grad_z[block])
        by_r.addmm_(x.T, r)
        # What q_nk multiplies in the gradient for p_k, apart from the terms in p_k itself.
        g[:, :d].addcmul_(g_f, x[:, :d], value=-2)
        g[:, d : d + 1] += g_f
        by_q.addmm_(g[:, : d + 1].T, q)
    by_r[:d].addcmul_(moments[:d], by_r[d], value=-1).mul_(2 / temperature)
    by_q[:d].addcmul_(moments[:d], by_q[d], value=2).add_(by_r[:d])
    grad_temperature = grad_temperature / temperature - (grad_free_energy * entropy).sum()
    return grad_z, by_q[:d, :k].T.contiguous(), grad_temperature


def _write_upstream(
    g: Tensor, g_mu: Tensor, g_r: Tensor, g_v: Tensor, weights: Tensor, error: Tensor, mu: Tensor
) -> None:
    """Fills a block of [dL/dmu, dL/dV, weight], what each q_nk is multiplied with in L."""
    d = mu.shape[1]
    # L_OLS = |z - mu|² and V = sum_k q_k |p_k|² - |mu|² reach q through mu as well.
    torch.addcmul(g_mu, g_r, error, value=-2, out=g[:, :d])
    g[:, :d].addcmul_(g_v, mu, value=-2)
    g[:, d : d + 1] = g_v
    g[:, d + 1] = weights


@soft_assignment_backward.register_fake
def _(z, p, temperature, *others):
    return torch.empty_like(z), torch.empty_like(p), torch.empty_like(temperature)


def _save(ctx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.commitment_weight = inputs
    mu, _, _, _, entropy, _, indices = output
    ctx.save_for_backward(*tensors, mu, entropy)
    ctx.mark_non_differentiable(entropy, indices)


def _backward(ctx, grad_mu, grad_l_ols, grad_variance, grad_free_energy, _, grad_usage, __):
    needs_temperature = ctx.needs_input_grad[2]
    grads = soft_assignment_backward(
        *ctx.saved_tensors,
        grad_mu.contiguous(),
        grad_l_ols,
        grad_variance,
        grad_free_energy,
        grad_usage,
        ctx.commitment_weight,
        needs_temperature,
    )
    return grads[0], grads[1], grads[2] if needs_temperature else None, None, None


soft_assignment.register_autograd(_backward, setup_context=_save)


def assignment_weights(z: Tensor, p: Tensor, temperature: Tensor) -> Tensor:
    """q (..., k) of z (..., d), by operations that autograd knows; no gradient for T."""
    with torch.no_grad():
        operands = _operands(p, temperature)
    x, codes = z - operands.centre, p - operands.centre
    logits = 2 * x @ codes.T - codes.square().sum(1)
    return (logits / operands.temperature).softmax(-1)


@torch.library.custom_op("softvq::nearest", mutates_args=())
def nearest(z: Tensor, p: Tensor) -> Tensor:
    """Indices (n) of the nearest of p (k, d) to each of z (n, d)."""
    n, d = z.shape
    operands = _operands(p, z.new_ones(()))
    columns = operands.logits.shape[1]
    rows = _block_rows(n, columns, z.device)
    block_z, block_s = z.new_ones(rows, d + 1), z.new_empty(rows, columns)
    arange = torch.arange(rows, device=z.device)
    indices = torch.empty(n, dtype=torch.int64, device=z.device)
    for block in _blocks(n, rows):
        x, s = (whole[: block.stop - block.start] for whole in (block_z, block_s))
        torch.sub(z[block], operands.centre, out=x[:, :d])
        _, indices[block] = _argmax(torch.mm(x, operands.logits, out=s), arange, len(p))
    return indices


@nearest.register_fake
def _(z: Tensor, p: Tensor) -> Tensor:
    return torch.empty(z.shape[0], dtype=torch.int64, device=z.device)
