"""The mathematics of Deep Dual Competitive Learning (arXiv 2604.03850) as pure tensor functions.

Tokens z_n are softly assigned to prototypes p_k by q_nk = softmax_k(-|z_n - p_k|² / T) and leave as
the soft centroid mu_n = sum_k q_nk p_k; modules, configuration and temperature rules are elsewhere.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from einops import einsum, pack, rearrange, unpack
from jaxtyping import Bool, Float, Int
from torch import Tensor

Gradient = Literal["detached", "full"]

# The row-wise argmax looks at groups of this many codes: a vectorised maximum inside each group,
# then an ordinary argmax over the groups and inside the best one.
_GROUP = 64


class SoftAssignment(NamedTuple):
    """Soft assignment of tokens to prototypes; differentiable unless said otherwise."""

    mu: Float[Tensor, "*n d"]
    """Soft centroids sum_k q_nk p_k; zeros where masked."""
    reconstruction: Float[Tensor, "*n"]
    """L_OLS_n = |z_n - mu_n|², through q."""
    variance: Float[Tensor, "*n"]
    """V_n = sum_k q_nk |p_k - mu_n|² >= 0, through q."""
    free_energy: Float[Tensor, "*n"]
    """F_n = -T log sum_k exp(-|z_n - p_k|² / T), that is -T times the log-partition. The
    log-partition itself overflows at low temperatures, F never does."""
    entropy: Float[Tensor, "*n"]
    """Entropy of q_n in nats, in [0, log k]; carries no gradient."""
    usage: Float[Tensor, "k"]
    """sum_n q_nk over real tokens."""
    indices: Int[Tensor, "*n"]
    """Most probable code; -1 where masked."""


class Split(NamedTuple):
    """The exact split L_q = L_OLS + V of the competitive loss, one value a token."""

    loss: Float[Tensor, "*n"]
    """L_q = sum_k q_nk |z_n - p_k|²."""
    reconstruction: Float[Tensor, "*n"]
    """L_OLS = |z_n - mu_n|²."""
    variance: Float[Tensor, "*n"]
    """V = sum_k q_nk |p_k - mu_n|²."""


class Separation(NamedTuple):
    """Distances between pairs of prototypes, in the prototypes' units; both are 0 for k = 1."""

    minimum: Float[Tensor, ""]
    """S_min, the smallest pair distance: 0 as soon as two prototypes coincide."""
    mean: Float[Tensor, ""]
    """S_mean, the mean pair distance: 0 only when all coincide."""


def check_gradient(gradient: str) -> None:
    """Raises ValueError when `gradient` is not one of the two ways to differentiate L_q."""
    if gradient not in get_args(Gradient):
        raise ValueError(f"gradient must be one of {get_args(Gradient)}, got {gradient!r}")


def soft_assignment(
    z: Float[Tensor, "*n d"],
    prototypes: Float[Tensor, "k d"],
    temperature: float | Float[Tensor, ""],
    mask: Bool[Tensor, "*n"] | None = None,
    commitment_weight: float = 1.0,
) -> SoftAssignment:
    """Boltzmann assignment of every token, with gradients for z, prototypes and temperature.

    Streams over blocks of tokens, forward and backward, and never holds an n x k matrix. Float16
    and bfloat16 are computed in float32; float64 stays. `temperature` is in units of squared
    distance. Below about 1e-25 (float32) of the largest squared distance between prototypes the
    result no longer changes: the nearest code has weight 1, exact ties share it equally. `mask` is
    True at real tokens; the others may hold anything, NaN included. `commitment_weight` multiplies
    what the gradient of F gives to z, and nothing else. A temperature that is learned by F alone
    rises without bound, since dF/dT = -entropy.

    Raises ValueError for a temperature that is not positive and finite (a CUDA tensor is not
    looked at, to spare a synchronisation) and for widths of z and prototypes that differ.
    """
    z, prototypes = _same_space(z, prototypes)
    t = _checked_temperature(temperature, z)
    if mask is None:
        weights = z.new_ones(z.shape[:-1])
    else:
        z = torch.where(rearrange(mask, "... -> ... 1"), z, 0)
        weights = mask.to(z.dtype)
    flat, shape = pack([z], "* d")
    flat_weights, _ = pack([weights], "*")
    with torch.autocast(z.device.type, enabled=False):
        mu, reconstruction, variance, free_energy, entropy, usage, indices = (
            torch.ops.softvq.soft_assignment(flat, prototypes, t, flat_weights, commitment_weight)
        )
    (mu,) = unpack(mu, shape, "* d")
    reconstruction, variance, free_energy, entropy, indices = (
        unpack(x, shape, "*")[0] for x in (reconstruction, variance, free_energy, entropy, indices)
    )
    if mask is not None:
        mu = torch.where(rearrange(mask, "... -> ... 1"), mu, 0)
        reconstruction, variance, free_energy, entropy = (
            torch.where(mask, x, 0) for x in (reconstruction, variance, free_energy, entropy)
        )
        indices = torch.where(mask, indices, -1)
    return SoftAssignment(mu, reconstruction, variance, free_energy, entropy, usage, indices)


def competitive_loss(soft: SoftAssignment, gradient: Gradient = "detached") -> Split:
    """The competitive loss of each token with its exact split L_q = L_OLS + V >= 0.

    `gradient="detached"` keeps q fixed, so that grad L_q = grad F (soft k-means; the prototypes
    receive 2 q_nk (p_k - z_n), z receives 2 (z - mu)). `"full"` also differentiates through q. The
    values are the same, and `reconstruction` and `variance` are differentiable through q in both.
    """
    check_gradient(gradient)
    loss = soft.reconstruction + soft.variance
    if gradient == "detached":
        loss = soft.free_energy + (loss - soft.free_energy).detach()
    return Split(loss, soft.reconstruction, soft.variance)


def nearest(z: Float[Tensor, "*n d"], prototypes: Float[Tensor, "k d"]) -> Int[Tensor, "*n"]:
    """Index of the nearest prototype of every token (the lowest at a tie), without softmax."""
    z, prototypes = _same_space(z.detach(), prototypes.detach())
    flat, shape = pack([z], "* d")
    with torch.autocast(z.device.type, enabled=False):
        indices = torch.ops.softvq.nearest(flat, prototypes)
    return unpack(indices, shape, "*")[0]


def critical_temperature(
    z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
) -> Float[Tensor, ""]:
    """Tc = 2 lambda_max(Cov z), where all prototypes merge if T is above (detached; 2 Tc: full).

    Zero for fewer than one token. Carries no gradient.
    """
    return 2 * _spectrum(covariance(z, mask))[-1]


def covariance(
    z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
) -> Float[Tensor, "d d"]:
    """Cov(z) over real tokens, with division by their number; zeros when there are none."""
    x = z.detach()
    x, _ = pack([x.to(torch.promote_types(x.dtype, torch.float32))], "* d")
    if mask is None:
        real = x.new_ones(len(x), 1)
    else:
        real = rearrange(mask, "... -> (...) 1")
        x, real = torch.where(real, x, 0), real.to(x.dtype)
    count = real.sum().clamp_min(1)
    x = (x - x.sum(0) / count) * real
    with torch.autocast(x.device.type, enabled=False):
        return einsum(x, x, "n i, n j -> i j") / count


def effective_rank(z: Float[Tensor, "*n d"]) -> Float[Tensor, ""]:
    """exp of the entropy of the normalised eigenvalues of Cov(z): 1 to d, or 0 if constant."""
    eigenvalues = _spectrum(covariance(z)).clamp_min(0)
    share = eigenvalues / eigenvalues.sum()
    rank = torch.exp(-torch.special.xlogy(share, share).sum())
    return torch.where(eigenvalues.sum() > 0, rank, 0)


def separation(prototypes: Float[Tensor, "k d"]) -> Separation:
    """Smallest and mean distance over all pairs of prototypes; O(k² d) time, O(k) memory."""
    p = prototypes.detach().to(torch.promote_types(prototypes.dtype, torch.float32))
    k = len(p)
    if k == 1:
        return Separation(p.new_zeros(()), p.new_zeros(()))
    minimum, total = p.new_full((), torch.inf), p.new_zeros((), dtype=torch.float64)
    for rows, distances in _pair_distances(p):
        total += distances.sum(dtype=torch.float64)
        distances[torch.arange(len(distances)), rows] = torch.inf
        minimum = torch.minimum(minimum, distances.min())
    return Separation(minimum, (total / (k * (k - 1))).to(p.dtype))


def distinct_codes(prototypes: Float[Tensor, "k d"], tolerance: float | Float[Tensor, ""]) -> int:
    """Number of single-link groups of prototypes whose links are at most `tolerance` apart."""
    p = prototypes.detach().to(torch.promote_types(prototypes.dtype, torch.float32))
    k = len(p)
    labels = torch.arange(k, device=p.device)
    while True:
        linked = labels.clone()
        for rows, distances in _pair_distances(p):
            linked[rows] = torch.where(distances <= tolerance, labels, k).amin(1)
        linked = linked[linked]
        if torch.equal(linked, labels):
            return len(labels.unique())
        labels = linked


def _pair_distances(p: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of (row indices, distances of those rows to all prototypes), free of cancellation."""
    for rows in torch.arange(len(p), device=p.device).split(max(1, 2**22 // len(p))):
        yield rows, torch.cdist(p[rows], p, compute_mode="donot_use_mm_for_euclid_dist")


def _spectrum(cov: Tensor) -> Tensor:
    """Eigenvalues in rising order, scaled before the solver so that extreme ones survive it."""
    scale = cov.diagonal().sum().clamp_min(torch.finfo(cov.dtype).tiny)
    return torch.linalg.eigvalsh(cov / scale) * scale


def _same_space(z: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
    if z.shape[-1] != prototypes.shape[-1]:
        raise ValueError(
            f"z has width {z.shape[-1]} but the prototypes have width {prototypes.shape[-1]}"
        )
    dtype = torch.promote_types(torch.promote_types(z.dtype, prototypes.dtype), torch.float32)
    return z.to(dtype), prototypes.to(dtype)


def _checked_temperature(temperature: float | Tensor, z: Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        t = temperature.to(z)
        if t.is_cuda or torch.compiler.is_compiling():
            return t
        value = temperature.item()
    else:
        value = temperature
        t = z.new_tensor(value)
    if not 0 < value < float("inf"):
        raise ValueError(f"temperature must be positive and finite, got {value}")
    return t


def _block_rows(n: int, k: int, device: torch.device) -> int:
    """Tokens in one block: two buffers of k columns should fit a CPU's cache, or fill a GPU."""
    if device.type == "cpu":
        return max(1, min(n, 1024, max(64, 2**20 // k)))
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
    # The middle of each channel, which one prototype far away does not move as it would the mean.
    centre = p.sort(0).values[k // 2]
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


def _blocks(n: int, rows: int) -> Iterator[slice]:
    return (slice(a, min(a + rows, n)) for a in range(0, n, rows))


@torch.library.custom_op("softvq::soft_assignment", mutates_args=())
def _soft_assignment(
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
        torch.softmax(s, 1, out=q)
        torch.mm(q, moments[:d].T, out=m)
        usage.addmv_(q.T, weights[block])
        maximum, index = _argmax(s, arange, k)
        # log sum_k exp of the differences to the maximum, which is in [0, log k]
        excess = -q.gather(1, index[:, None])[:, 0].log()
        entropy[block] = excess + maximum - s.mul_(q).sum(1)
        # From the vectors themselves: the products above lose what z and its code have in common.
        distance = (x[:, :d] - codes[index]).square_().sum(1)
        free_energy[block] = distance - temperature * excess
        reconstruction[block] = (x[:, :d] - m).square_().sum(1)
        variance[block] = torch.mv(q, moments[d]) - m.square().sum(1)
        torch.add(m, centre, out=mu[block])
        indices[block] = index
    variance.clamp_min_(0)
    entropy.clamp_min_(0)
    return (
        mu,
        reconstruction,
        variance,
        free_energy,
        entropy,
        usage[:k].clone(),
        indices,
    )


@_soft_assignment.register_fake
def _(z, p, temperature, weights, commitment_weight):
    n, k = z.shape[0], p.shape[0]  # len() would pin n to the traced batch
    indices = torch.empty(n, dtype=torch.int64, device=z.device)
    scalars = (z.new_empty(n) for _ in range(4))
    return torch.empty_like(z), *scalars, z.new_empty(k), indices


@torch.library.custom_op("softvq::soft_assignment_backward", mutates_args=())
def _soft_assignment_backward(
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

    With s_k = -|z - p_k|² / T and a_k = dL/dq_k, the softmax gives r_k = dL/ds_k as
    q_k (a_k - sum q a), which sums to 0 over k. F is kept out of r: its gradient needs no softmax
    derivative.
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
        # L_OLS = |z - mu|² and V = sum_k q_k |p_k|² - |mu|² reach q through mu as well.
        torch.addcmul(grad_mu[block], g_r, e, value=-2, out=g[:, :d])
        g[:, :d].addcmul_(g_v, m, value=-2)
        g[:, d : d + 1] = g_v
        g[:, d + 1] = weights[block]
        torch.mm(x, logits, out=s)
        torch.softmax(s, 1, out=q)
        # r sums to 0, so s may be shifted: near its maximum the product with r does not cancel.
        shifted = s - s.amax(1, keepdim=True) if needs_temperature else s
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


@_soft_assignment_backward.register_fake
def _(z, p, temperature, *others):
    return torch.empty_like(z), torch.empty_like(p), torch.empty_like(temperature)


def _save(ctx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.commitment_weight = inputs
    mu, _, _, _, entropy, _, indices = output
    ctx.save_for_backward(*tensors, mu, entropy)
    ctx.mark_non_differentiable(entropy, indices)


def _backward(ctx, grad_mu, grad_l_ols, grad_variance, grad_free_energy, _, grad_usage, __):
    needs_temperature = ctx.needs_input_grad[2]
    grads = torch.ops.softvq.soft_assignment_backward(
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


_soft_assignment.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("softvq::nearest", mutates_args=())
def _nearest(z: Tensor, p: Tensor) -> Tensor:
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


@_nearest.register_fake
def _(z: Tensor, p: Tensor) -> Tensor:
    return torch.empty(z.shape[0], dtype=torch.int64, device=z.device)
