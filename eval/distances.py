"""Fréchet and kernel distance between two sets of features, computed by torchmetrics.

The networks that make features of images are in `eval.feature_networks`.
"""

import warnings

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance


class _AlreadyFeatures(nn.Module):
    """Hands torchmetrics, in place of images, features that both of its metrics share."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_features = dim

    def forward(self, given: Tensor) -> Tensor:
        return given


def frechet_distance(real: Float[Tensor, "n d"], other: Float[Tensor, "m d"]) -> float:
    """|mean - mean'|² + tr(S + S' - 2 (S S')^1/2) of two sets of features (Heusel et al. 2017)."""
    metric = FrechetInceptionDistance(_AlreadyFeatures(real.shape[1]))
    metric.update(real, real=True)
    metric.update(other, real=False)
    return metric.compute().item()


def kernel_distance(
    real: Float[Tensor, "n d"], other: Float[Tensor, "m d"], subsets: int, subset_size: int
) -> float:
    """Unbiased squared MMD of the kernel (x.y / d + 1)³ (Binkowski et al. 2018), mean over subsets.

    The subsets are the same in every call. Raises ValueError for sets smaller than a subset.
    """
    if subset_size > min(len(real), len(other)):
        raise ValueError(
            f"kid_subset_size must be at most the number of images {min(len(real), len(other))}, "
            f"got {subset_size}"
        )
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", UserWarning)  # that it keeps the features, which is known
        torch.manual_seed(0)
        metric = KernelInceptionDistance(
            _AlreadyFeatures(real.shape[1]), subsets=subsets, subset_size=subset_size
        )
        metric.update(real, real=True)
        metric.update(other, real=False)
        return metric.compute()[0].item()
