"""The mathematics of Deep Dual Competitive Learning (arXiv 2604.03850) as pure tensor functions.

Tokens z_n are softly assigned to prototypes p_k by q_nk = softmax_k(-|z_n - p_k|² / T) and leave as
the soft centroid mu_n = sum_k q_nk p_k; modules, configuration and temperature rules are elsewhere.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softvq import streaming

Gradient = Literal["detached", "full"]


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


def check_mask(z: Tensor, mask: Tensor | None) -> None:
    """Raises ValueError for a mask that does not say of every token of z whether it is real."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != z.shape[:-1]):
        raise ValueError(
            f"mask must be boolean of shape {tuple(z.shape[:-1])}, True at real tokens; "
            f"got {mask.dtype} of shape {tuple(mask.shape)}"
        )


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
    looked at, to spare a synchronisation), for widths of z and prototypes that differ, and for a
    mask of another shape or dtype.
    """
    z, prototypes = _same_space(z, prototypes)
    check_mask(z, mask)
    t = _checked_temperature(temperature, z)
    if mask is None:
        weights = z.new_ones(z.shape[:-1])
    else:
        z = torch.where(rearrange(mask, "... -> ... 1"), z, 0)
        weights = mask.to(z.dtype)
    flat, flat_weights = rearrange(z, "... d -> (...) d"), rearrange(weights, "... -> (...)")
    with torch.autocast(z.device.type, enabled=False):
        mu, reconstruction, variance, free_energy, entropy, usage, indices = (
            streaming.soft_assignment(flat, prototypes, t, flat_weights, commitment_weight)
        )
    mu = mu.reshape(z.shape)
    reconstruction, variance, free_energy, entropy, indices = (
        x.reshape(weights.shape) for x in (reconstruction, variance, free_energy, entropy, indices)
    )
    if mask is not None:
        mu = torch.where(rearrange(mask, "... -> ... 1"), mu, 0)
        reconstruction, variance, free_energy, entropy = (
            torch.where(mask, x, 0) for x in (reconstruction, variance, free_energy, entropy)
        )
        indices = torch.where(mask, indices, -1)
    return SoftAssignment(mu, reconstruction, variance, free_energy, entropy, usage, indices)


def assignment_weights(
    z: Float[Tensor, "*n d"],
    prototypes: Float[Tensor, "k d"],
    temperature: float | Float[Tensor, ""],
) -> Float[Tensor, "*n k"]:
    """The weights q themselves, which `soft_assignment` does not keep; holds an n x k matrix.

    With gradients for z and prototypes. Raises ValueError as `soft_assignment` does.
    """
    z, prototypes = _same_space(z, prototypes)
    t = _checked_temperature(temperature, z)
    with torch.autocast(z.device.type, enabled=False):
        return streaming.assignment_weights(z, prototypes, t)


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


def divergence_from_uniform(usage: Float[Tensor, "k"]) -> Float[Tensor, ""]:
    """KL(mean weights || uniform) in nats, in [0, log k]; 0 when there are no tokens."""
    total = usage.sum()
    # Codes out of reach (weight 0) have an infinite slope, which no finite step can follow.
    share = (usage / total.clamp_min(1)).clamp_min(torch.finfo(usage.dtype).tiny)
    return torch.where(total > 0, (share * (share * len(usage)).log()).sum(), 0)


def nearest(z: Float[Tensor, "*n d"], prototypes: Float[Tensor, "k d"]) -> Int[Tensor, "*n"]:
    """Index of the nearest prototype of every token (the lowest at a tie), without softmax."""
    z, prototypes = _same_space(z.detach(), prototypes.detach())
    flat = rearrange(z, "... d -> (...) d")
    with torch.autocast(z.device.type, enabled=False):
        return streaming.nearest(flat, prototypes).reshape(z.shape[:-1])


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
    x = rearrange(z.detach(), "... d -> (...) d")
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        count = max(x.shape[0], 1)
        x = x - x.sum(0) / count
    else:
        real = rearrange(mask, "... -> (...) 1")
        count = real.sum().clamp_min(1)
        x = torch.where(real, x - torch.where(real, x, 0).sum(0) / count, 0)
    with torch.autocast(x.device.type, enabled=False):
        return x.T @ x / count


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
        lowest = labels.clone()  # of a code and those it is linked with
        for rows, distances in _pair_distances(p):
            neighbours = torch.where(distances <= tolerance, labels, k).amin(1)
            # A code that is not finite is at no distance of itself.
            lowest[rows] = torch.minimum(neighbours, labels[rows])
        # What a code learns goes to the code that its label names too, and so to its whole group:
        # a chain of n links needs about log n rounds.
        linked = lowest.scatter_reduce(0, labels, lowest, "amin")
        while not torch.equal(linked, linked[linked]):
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
