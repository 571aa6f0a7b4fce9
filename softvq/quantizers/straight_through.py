"""The hard baseline of van den Oord et al. 2017: nearest code, straight-through gradient, codes
learned by gradient. Moving averages in place of the gradient are in `softvq.quantizers.ema`."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softvq import ddcl, distributed
from softvq.quantizers.base import (
    Assignment,
    Codebook,
    CodebookConfig,
    hard_assignment,
)
from softvq.quantizers.initialization import (
    Start,
    check_start,
    kmeans_plus_plus,
    real_tokens,
    uniform_prototypes,
)


@dataclass(frozen=True, kw_only=True)
class StraightThroughConfig(CodebookConfig):
    """Options of `StraightThroughVQ`."""

    commitment_weight: float = 0.25
    """Weight of |z - stopgrad(e)|² / dim (beta); that of |stopgrad(z) - e|² / dim is 1."""
    init: Start = "uniform"
    """Start from U(-1/k, 1/k) as the original does, or from k-means++ seeds of the first tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_start(self.init)
        if not 0 <= self.commitment_weight < float("inf"):
            raise ValueError(f"commitment_weight must be 0 or more, got {self.commitment_weight}")


class StraightThroughVQ(Codebook):
    """Hard vector quantization with a gradient codebook (arXiv 1711.00937, equation 3)."""

    config_class = StraightThroughConfig
    config: StraightThroughConfig

    def __init__(self, **options) -> None:
        super().__init__(**options)
        k, d = self.config.codebook_size, self.config.dim
        self.prototypes = nn.Parameter(uniform_prototypes(k, d))

    def assign(
        self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
    ) -> Assignment:
        """Nearest codes with codebook and commitment loss."""
        dtype, z = z.dtype, self._checked(z, mask)
        self.initialize_once(z, mask)
        indices = ddcl.nearest(z, self.prototypes)
        codes = self.prototypes[indices]
        codebook_loss = (z.detach() - codes).square().mean(-1)
        commitment = (z - codes.detach()).square().mean(-1)
        loss = self._mean(codebook_loss + self.config.commitment_weight * commitment, mask)
        return hard_assignment(z, codes, indices, loss, mask, self.codebook_size, dtype)

    @torch.no_grad()
    def initialize(self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None) -> None:
        """Places the codes by k-means++ seeds, or leaves them as built where `init` is uniform.

        Raises ValueError when z holds no real token or a value that is not finite.
        """
        tokens = real_tokens(self._checked(z, mask), mask)
        if self.config.init == "data":
            seeds = kmeans_plus_plus(tokens, self.codebook_size)
            self.prototypes.copy_(distributed.from_first(seeds))
        self._mark_initialized()
