"""The hard baseline that people really use: codes as moving averages of their tokens, k-means
start, dead codes revived. Codes learned by gradient are in `softvq.quantizers.straight_through`."""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softvq import ddcl, distributed
from softvq.quantizers.base import (
    Assignment,
    Codebook,
    CodebookConfig,
    hard_assignment,
)
from softvq.quantizers.initialization import (
    kmeans_plus_plus,
    lloyd,
    real_tokens,
    tokens_in_place_of,
    uniform_prototypes,
)


@dataclass(frozen=True, kw_only=True)
class EMAConfig(CodebookConfig):
    """Options of `EMAVQ`."""

    commitment_weight: float = 0.25
    """Weight of |z - stopgrad(e)|² / dim."""
    decay: float = 0.99
    """Weight of the past in the moving averages, in [0, 1)."""
    smoothing: float = 1e-5
    """Laplace smoothing added to every count."""
    dead_below: float = 0.1
    """A code whose moving count falls below this share of the mean count is replaced by a token
    of the batch; 0 revives none."""
    kmeans_iterations: int = 10
    """Lloyd's steps after the k-means++ seeds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("commitment_weight", "smoothing", "kmeans_iterations"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("decay", "dead_below"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")


class EMAVQ(Codebook):
    """Hard vector quantization with moving averages (arXiv 1711.00937, appendix A.1).

    The codes returned are those that the indices were chosen from; the update comes after. A
    revived code starts with the count and sum of a code that is just alive, so that it is not
    pulled back to where it died.
    """

    config_class = EMAConfig
    config: EMAConfig
    counts: Tensor
    sums: Tensor

    def __init__(self, **options) -> None:
        super().__init__(**options)
        k, d = self.config.codebook_size, self.config.dim
        codes = uniform_prototypes(k, d)
        self.register_buffer("prototypes", codes)
        self.register_buffer("counts", torch.ones(k))
        self.register_buffer("sums", codes.clone())

    def assign(
        self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
    ) -> Assignment:
        """Nearest codes with commitment loss; in training mode the averages move afterwards."""
        dtype, z = z.dtype, self._checked(z, mask)
        self.initialize_once(z, mask)
        indices = ddcl.nearest(z, self.prototypes)
        # A copy that autograd may keep while the averages below move the codes.
        codes = self.prototypes[indices]
        commitment = self._mean((z - codes).square().mean(-1), mask)
        loss = self.config.commitment_weight * commitment
        assignment = hard_assignment(z, codes, indices, loss, mask, self.codebook_size, dtype)
        if self.updates:
            return assignment._replace(revived=self._update(z, assignment.indices))
        return assignment

    @torch.no_grad()
    def initialize(self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None) -> None:
        """Places the codes by k-means++ and Lloyd's steps, each with the count of a live code.

        Raises ValueError when z holds no real token or a value that is not finite.
        """
        tokens = real_tokens(self._checked(z, mask), mask)
        seeds = distributed.from_first(kmeans_plus_plus(tokens, self.codebook_size))
        self.prototypes.copy_(lloyd(tokens, seeds, self.config.kmeans_iterations))
        self.counts.fill_(1)
        self.sums.copy_(self.prototypes)
        self._mark_initialized()

    @torch.no_grad()
    def _update(self, z: Float[Tensor, "*n d"], indices: Int[Tensor, "*n"]) -> Int[Tensor, ""]:
        """Moves the averages and then the dead codes; returns how many those were."""
        tokens = rearrange(z, "... d -> (...) d").to(self.sums)
        flat = rearrange(indices, "... -> (...)")
        codes = flat.clamp_min(0)
        # A token that is not finite already shows in the loss; here it would destroy its code.
        real = (flat >= 0) & tokens.isfinite().all(1)
        tokens = torch.where(rearrange(real, "n -> n 1"), tokens, 0)
        sums = torch.zeros_like(self.sums).index_add_(0, codes, tokens)
        counts = torch.zeros_like(self.counts).index_add_(0, codes, real.to(self.counts))
        sums, counts = distributed.total(sums), distributed.total(counts)
        found = counts.any()
        step = torch.where(found, 1 - self.config.decay, 0.0).to(self.counts)
        self.counts.lerp_(counts, step)
        self.sums.lerp_(sums, step)
        total = self.counts.sum()
        smoothed = (self.counts + self.config.smoothing) / (
            total + self.codebook_size * self.config.smoothing
        )
        # A count that has decayed to nothing, without smoothing, leaves no mean to move to.
        moved = found & (smoothed * total > torch.finfo(total.dtype).tiny)
        means = self.sums / rearrange(smoothed * total, "k -> k 1")
        self.prototypes.copy_(torch.where(rearrange(moved, "k -> k 1"), means, self.prototypes))
        return self._revive(tokens, real, found)

    def _revive(
        self, tokens: Float[Tensor, "n d"], real: Bool[Tensor, "n"], found: Bool[Tensor, ""]
    ) -> Int[Tensor, ""]:
        if self.config.dead_below == 0 or distributed.row_count(tokens) == 0:
            return torch.zeros((), dtype=torch.int64, device=tokens.device)
        just_alive = self.config.dead_below * self.counts.mean()
        dead = (self.counts < just_alive) & found
        picked = tokens_in_place_of(dead, tokens, real)
        rows = rearrange(dead, "k -> k 1")
        self.prototypes.copy_(torch.where(rows, picked, self.prototypes))
        self.sums.copy_(torch.where(rows, picked * just_alive, self.sums))
        self.counts.copy_(torch.where(dead, just_alive, self.counts))
        return dead.sum()
