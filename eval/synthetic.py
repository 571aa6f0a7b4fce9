"""Synthetic tokens whose statistics are known exactly or by construction.

The experiments that use them are beside this file; orbits are in `eval.orbits`.
"""

import math
from typing import Literal, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

Data = Literal["pair", "gaussian"]


class Clusters(NamedTuple):
    """Tokens and the cluster that each was drawn from."""

    z: Float[Tensor, "n d"]
    labels: Int[Tensor, "n"]


def exact_tokens(data: Data, tokens: int, dim: int, seed: int) -> Float[Tensor, "n d"]:
    """Tokens in float64 with mean 0 and lambda_max(Cov z) = 1 exactly, mirrored about the mean.

    `gaussian` has the spectrum 1, 1/2, 1/2, ... in rotated axes; `pair` is two clusters at -0.9
    and 0.9 of a direction, with a spread of 0.19 along it (variances; 0.81 + 0.19 = 1) and 0.1
    across. Mirroring removes the odd moments, so that separation sets in continuously. Needs an
    even number of tokens, at least 2 (dim + 1).
    """
    generator = torch.Generator().manual_seed(seed)
    half = torch.randn(tokens // 2, dim, generator=generator, dtype=torch.float64)
    if data == "pair":
        # Centred, so that the means of the clusters are where they are said to be
        half = _whitened(half - half.mean(0)) * half.new_tensor([0.19] + [0.1] * (dim - 1)).sqrt()
        half[:, 0] += math.sqrt(0.81)
    else:
        half = _whitened(half) * half.new_tensor([1.0] + [0.5] * (dim - 1)).sqrt()
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    return torch.cat([half, -half]) @ rotation


def _whitened(x: Tensor) -> Tensor:
    """The second moment about 0 becomes the identity, exactly."""
    factor = torch.linalg.cholesky(x.T @ x / len(x))
    return torch.linalg.solve_triangular(factor, x.T, upper=False).T


def simplex_clusters(clusters: int, tokens: int, dim: int, spread: float, seed: int) -> Clusters:
    """Gaussian clusters of that standard deviation at the points 3 e_c, in float64.

    Their number is at most `dim`; each has `tokens` / `clusters` members, rounded down.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.eye(dim, dtype=torch.float64)[:clusters]
    size = tokens // clusters
    noise = torch.randn(clusters, size, dim, generator=generator, dtype=torch.float64)
    z = rearrange(rearrange(centres, "c d -> c 1 d") + spread * noise, "c n d -> (c n) d")
    return Clusters(z, repeat(torch.arange(clusters), "c -> (c n)", n=size))
