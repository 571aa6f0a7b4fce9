"""Soft assignment in many small problems at once, for experiments over seeds.

The library's core, `softvq.ddcl`, takes one set of prototypes; here each problem has its own, and
the formula is the plain one, which holds an n x k x d tensor for each.
"""

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from softvq.ddcl import Gradient, SoftAssignment, competitive_loss


def ensemble_assignment(
    z: Float[Tensor, "m n d"], prototypes: Float[Tensor, "m k d"], temperature: Float[Tensor, "m"]
) -> SoftAssignment:
    """Soft assignment of the tokens of m problems, differentiable in everything.

    Fields have a leading axis m; `usage` is summed over the problems. Temperatures are in units of
    squared distance and positive.
    """
    difference = rearrange(z, "m n d -> m n 1 d") - rearrange(prototypes, "m k d -> m 1 k d")
    distances = reduce(difference.square(), "m n k d -> m n k", "sum")
    t = rearrange(temperature, "m -> m 1 1")
    logits = -distances / t
    q = logits.softmax(-1)
    mu = einsum(q, prototypes, "m n k, m k d -> m n d")
    reconstruction = (z - mu).square().sum(-1)
    spread = rearrange(prototypes, "m k d -> m 1 k d") - rearrange(mu, "m n d -> m n 1 d")
    variance = (q * reduce(spread.square(), "m n k d -> m n k", "sum")).sum(-1)
    log_partition = logits.logsumexp(-1)
    return SoftAssignment(
        mu=mu,
        reconstruction=reconstruction,
        variance=variance,
        free_energy=-rearrange(temperature, "m -> m 1") * log_partition,
        entropy=(log_partition - (q * logits).sum(-1)).detach(),
        usage=reduce(q, "m n k -> k", "sum"),
        indices=distances.argmin(-1),
    )


def descend(
    z: Float[Tensor, "m n d"],
    prototypes: Float[Tensor, "m k d"],
    temperature: Float[Tensor, "m"],
    gradient: Gradient,
) -> Float[Tensor, "m k d"]:
    """The prototypes after one step down the mean L_q of their problem, of length k / 2.

    With equal usage and the detached gradient that is one step of soft k-means.
    """
    p = prototypes.detach().requires_grad_()
    loss = competitive_loss(ensemble_assignment(z, p, temperature), gradient).loss
    (slope,) = torch.autograd.grad(loss.mean(-1).sum(), p)
    return prototypes - p.shape[1] / 2 * slope
