"""DDCL-Attention as a layer on the tokens of a transformer: soft centroids, weights and a summary.

The soft assignment itself is that of `softvq.quantizers.ddcl`, one codebook a head; a stack of
readouts compresses step by step (arXiv 2604.03850).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softvq.ddcl import check_mask
from softvq.quantizers import Assignment, DDCLCodebook, DDCLConfig


@dataclass(frozen=True, kw_only=True)
class DDCLReadoutConfig(DDCLConfig):
    """Options of `DDCLReadout`: those of its codebooks, `dim` being the width of a token and
    `codebook_size` the prototypes of each head."""

    heads: int = 1
    """Equal parts of a token's width, each with prototypes and a temperature of its own."""
    residual: bool = False
    """Whether the layer adds its centroids to the tokens and normalises, as attention blocks do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 1 or self.dim % self.heads:
            raise ValueError(f"heads must divide dim {self.dim}, got {self.heads}")


class ReadoutOutput(NamedTuple):
    """What a readout gives; padding is zero everywhere, and so is a row without a real token."""

    tokens: Float[Tensor, "b n d"]
    """Soft centroid of every token, the heads side by side; with `residual`, added to the token
    and normalised."""
    weights: Float[Tensor, "b n heads k"]
    """Boltzmann weights of every token, which sum to 1 over k."""
    summary: Float[Tensor, "b d"]
    """Mean of `tokens` over the real ones."""
    histogram: Float[Tensor, "b heads k"]
    """Mean of `weights` over the real tokens: the share of a document that each prototype has."""
    loss: Float[Tensor, ""]
    """Mean of the heads' losses."""
    heads: tuple[Assignment, ...]
    """Loss terms, indices and statistics of every head."""


class DDCLReadout(nn.Module):
    """Soft centroids of tokens: `DDCLReadout(dim=768, codebook_size=64, heads=4)`.

    One pass, O(n k d), and in training O(n d²) for the covariance of the tokens. Drops in behind
    any encoder whose output is (b, n, d). The centroids are soft in training and in evaluation,
    whatever `hard_forward_after` says. In training mode the first pass starts the prototypes from
    its tokens, and every pass moves the temperatures.
    """

    def __init__(self, **options) -> None:
        super().__init__()
        self.config = DDCLReadoutConfig(**options)
        config = self.config
        shared = {name: getattr(config, name) for name in DDCLConfig.__dataclass_fields__}
        shared["dim"] = config.dim // config.heads
        self.codebooks = nn.ModuleList(DDCLCodebook(**shared) for _ in range(config.heads))
        self.norm = nn.LayerNorm(config.dim) if config.residual else nn.Identity()

    @classmethod
    def from_config(cls, config: DDCLReadoutConfig) -> "DDCLReadout":
        """The readout that `config` describes."""
        return cls(**{name: getattr(config, name) for name in config.__dataclass_fields__})

    def forward(
        self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None
    ) -> ReadoutOutput:
        """`mask` is True at real tokens; the others may hold anything, NaN included.

        Raises ValueError for tokens that are not b n d or of another width, and for a mask of
        another shape or dtype.
        """
        if x.ndim != 3 or x.shape[-1] != self.config.dim:
            raise ValueError(
                f"tokens must be b n d and have width {self.config.dim}, got shape {tuple(x.shape)}"
            )
        check_mask(x, mask)
        if mask is None:
            mask = x.new_ones(x.shape[:2], dtype=torch.bool)
        real = rearrange(mask, "b n -> b n 1")
        x = torch.where(real, x, 0)
        parts = rearrange(x, "b n (h d) -> h b n d", h=self.config.heads)
        weights, heads = [], []
        for codebook, part in zip(self.codebooks, parts, strict=True):
            assert isinstance(codebook, DDCLCodebook)  # which ModuleList does not know
            codebook.initialize_once(part, mask)
            weights.append(codebook.weights(part, mask))
            heads.append(codebook.assign(part, mask))
        tokens = rearrange([head.soft for head in heads], "h b n d -> b n (h d)")
        if self.config.residual:
            tokens = torch.where(real, self.norm(x + tokens), 0)
        stacked = rearrange(weights, "h b n k -> b n h k")
        count = reduce(mask, "b n -> b 1", "sum").clamp_min(1)
        # A sum may not fit into half precision where the mean does.
        wide = torch.promote_types(tokens.dtype, torch.float32)
        return ReadoutOutput(
            tokens=tokens,
            weights=stacked,
            summary=(tokens.sum(1, dtype=wide) / count).to(tokens.dtype),
            histogram=stacked.sum(1) / rearrange(count, "b 1 -> b 1 1"),
            loss=torch.stack([head.loss for head in heads]).mean(),
            heads=tuple(heads),
        )


class DDCLHierarchy(nn.Module):
    """Readouts one after another, each on the centroids of the one before: tokens, K1, K2, ...

    Every level has a temperature of its own, measured on its own input. One temperature for all
    kills the levels above the first: centroids lie closer together than tokens.
    """

    def __init__(self, levels: tuple[DDCLReadoutConfig, ...]) -> None:
        super().__init__()
        widths = {level.dim for level in levels}
        if len(widths) != 1:
            raise ValueError(f"levels must be given and share one width, got {sorted(widths)}")
        self.levels = nn.ModuleList(DDCLReadout.from_config(level) for level in levels)

    def forward(
        self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None
    ) -> tuple[ReadoutOutput, ...]:
        """The output of every level, the first being that on `x`."""
        outputs = []
        for level in self.levels:
            outputs.append(level(x, mask))
            x = outputs[-1].tokens
        return tuple(outputs)
