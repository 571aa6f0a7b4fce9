"""A decoder-only transformer over the codes of a tokenizer, in raster order, coarsest level first.

How codes are drawn from it is in `softvq.prior.sampling`, how they are got from images in
`softvq.prior.codes`.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

Grids = tuple[Int[Tensor, "b _ _"], ...]


@dataclass(frozen=True, kw_only=True)
class CodePriorConfig:
    """Options of `CodePrior`."""

    codebook_sizes: tuple[int, ...] = (512,)
    """Number of codes of each level, coarsest first."""
    grids: tuple[tuple[int, int], ...] = ((8, 8),)
    """Height and width of each level's grid of codes."""
    classes: tuple[str, ...] = ()
    """Names of the classes that samples can be asked for."""
    width: int = 256
    """Width of the residual stream."""
    depth: int = 6
    """Number of blocks."""
    heads: int = 8
    """Attention heads, which divide the width."""
    dropout: float = 0.1
    """Share of values dropped after attention, MLP and embedding in training, in [0, 1)."""

    def __post_init__(self) -> None:
        if not self.codebook_sizes or min(self.codebook_sizes) < 1:
            raise ValueError(f"codebook_sizes must each be at least 1, got {self.codebook_sizes}")
        if len(self.grids) != len(self.codebook_sizes):
            raise ValueError(
                f"grids must be one for each of {len(self.codebook_sizes)} levels, got {self.grids}"
            )
        if any(len(grid) != 2 or min(grid) < 1 for grid in self.grids):
            raise ValueError(f"grids must be pairs of at least 1, got {self.grids}")
        if len(set(self.classes)) < len(self.classes):
            raise ValueError(f"classes must differ, got {self.classes}")
        for name in ("width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width {self.width}, got {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Codes of each level."""
        return tuple(height * width for height, width in self.grids)


@dataclass
class Cache:
    """Keys and values (depth, b, heads, length, width / heads) of the positions done so far."""

    keys: Tensor
    values: Tensor
    done: int = 0
    """Positions that are filled."""


class CodePrior(nn.Module):
    """p(codes | class) as a product over positions: raster order, the coarsest level first.

    The first position is told the class, or that there is none, by a begin token outside the range
    of the codes; each level has its own rows of the embedding and of the output.
    """

    def __init__(self, config: CodePriorConfig) -> None:
        super().__init__()
        self.config = config
        self.offsets = tuple(accumulate(config.codebook_sizes, initial=0))
        self.embedding = nn.Embedding(self.offsets[-1] + len(config.classes) + 1, config.width)
        self.position = nn.Parameter(torch.empty(sum(config.lengths), config.width))
        self.drop = nn.Dropout(config.dropout)
        blocks = [_Block(config) for _ in range(config.depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, self.offsets[-1], bias=False)
        self.apply(_initialize)
        nn.init.normal_(self.position, std=0.02)
        for block in blocks:
            # The residual stream keeps its scale whatever the depth (Radford et al. 2019).
            for layer in (block.attend_out, block.mlp_out):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.depth))

    def forward(
        self, indices: Grids, labels: Int[Tensor, "b"] | None = None
    ) -> tuple[Float[Tensor, "b _ _ _"], ...]:
        """Logits (b, h, w, k) of every code given all codes before it, for each level.

        Raises ValueError for grids, codes or labels that the prior was not made for.
        """
        tokens = self.flatten(indices)
        begin = self.begin(len(tokens), labels)
        hidden = self._through(torch.cat([begin, tokens[:, :-1]], 1), None)
        logits = []
        for level, (part, grid) in enumerate(
            zip(hidden.split(self.config.lengths, 1), self.config.grids, strict=True)
        ):
            out = F.linear(part, self._rows(level))
            logits.append(rearrange(out, "b (h w) k -> b h w k", h=grid[0]))
        return tuple(logits)

    def negative_log_likelihood(
        self, indices: Grids, labels: Int[Tensor, "b"] | None = None
    ) -> Float[Tensor, "b levels"]:
        """-log p of the codes of each image and level, in nats, the sum over a level's codes."""
        parts = []
        for logits, grid in zip(self(indices, labels), indices, strict=True):
            loss = F.cross_entropy(
                rearrange(logits.float(), "b h w k -> b k h w"), grid, reduction="none"
            )
            parts.append(loss.sum((1, 2)))
        return torch.stack(parts, 1)

    def begin(self, count: int, labels: Int[Tensor, "b"] | None) -> Int[Tensor, "{count} 1"]:
        """The begin tokens of `count` images; a label of -1, or no labels, asks for no class.

        Raises ValueError for labels that cannot be.
        """
        classes, device = len(self.config.classes), self.position.device
        if labels is None:
            labels = torch.full((count,), -1, device=device)
        if len(labels) != count:
            raise ValueError(f"labels must be one for each of {count} images, got {len(labels)}")
        if count and not -1 <= labels.min() <= labels.max() < classes:
            raise ValueError(
                f"labels must lie in [0, {classes}), the prior's classes, or be -1 for none; "
                f"got {labels.min().item()} to {labels.max().item()}"
            )
        rows = torch.where(labels < 0, classes, labels).to(device)
        return rearrange(rows + self.offsets[-1], "b -> b 1")

    def flatten(self, indices: Grids) -> Int[Tensor, "b n"]:
        """Tokens of all levels in the order of the sequence, each level in its own range."""
        given = tuple(tuple(grid.shape[1:]) for grid in indices)
        if given != self.config.grids:
            raise ValueError(f"the prior is of grids {self.config.grids}, got {given}")
        for grid, size in zip(indices, self.config.codebook_sizes, strict=True):
            if grid.numel() and not 0 <= grid.min() <= grid.max() < size:
                raise ValueError(
                    f"codes must lie in [0, {size}), got {grid.min().item()} to {grid.max().item()}"
                )
        parts = zip(indices, self.offsets[:-1], strict=True)
        return torch.cat(
            [rearrange(grid + offset, "b h w -> b (h w)") for grid, offset in parts], 1
        )

    def unflatten(self, tokens: Int[Tensor, "b n"]) -> Grids:
        """Inverts `flatten`."""
        parts = tokens.split(self.config.lengths, 1)
        return tuple(
            rearrange(part - offset, "b (h w) -> b h w", h=grid[0])
            for part, offset, grid in zip(parts, self.offsets[:-1], self.config.grids, strict=True)
        )

    def start_cache(self, count: int) -> Cache:
        """An empty cache for `count` images."""
        config, reference = self.config, self.position
        shape = (
            config.depth,
            count,
            config.heads,
            sum(config.lengths),
            config.width // config.heads,
        )
        return Cache(reference.new_empty(shape), reference.new_empty(shape))

    def next_logits(
        self, tokens: Int[Tensor, "b n"], cache: Cache | None = None
    ) -> Float[Tensor, "b k"]:
        """Logits of the code after `tokens`, the begin token being the first of the sequence.

        With a cache, `tokens` are those that it has not seen: all at first, then one at a time.
        Raises ValueError for more.
        """
        if cache is not None and cache.done and tokens.shape[1] != 1:
            raise ValueError(f"a cache that is not empty takes 1 token, got {tokens.shape[1]}")
        done = tokens.shape[1] if cache is None else cache.done + tokens.shape[1]
        level = next(
            level for level, end in enumerate(accumulate(self.config.lengths)) if done <= end
        )
        return F.linear(self._through(tokens, cache)[:, -1], self._rows(level))

    def _rows(self, level: int) -> Tensor:
        return self.head.weight[self.offsets[level] : self.offsets[level + 1]]

    def _through(self, tokens: Int[Tensor, "b n"], cache: Cache | None) -> Float[Tensor, "b n d"]:
        start = 0 if cache is None else cache.done
        x = self.embedding(tokens) + self.position[start : start + tokens.shape[1]]
        x = self.drop(x)
        for number, block in enumerate(self.blocks):
            x = block(x, number, cache)
        if cache is not None:
            cache.done += tokens.shape[1]
        return self.norm(x)


class _Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: CodePriorConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attend_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend_in = nn.Linear(width, 3 * width)
        self.attend_out = nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, number: int, cache: Cache | None) -> Tensor:
        q, k, v = rearrange(
            self.attend_in(self.attend_norm(x)), "b n (p h d) -> p b h n d", p=3, h=self.heads
        )
        causal = True
        if cache is not None:
            end = cache.done + k.shape[2]
            cache.keys[number, :, :, cache.done : end] = k
            cache.values[number, :, :, cache.done : end] = v
            k, v = cache.keys[number, :, :, :end], cache.values[number, :, :, :end]
            # One new position sees all the others; several may come at the start alone.
            causal = cache.done == 0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + self.drop(self.attend_out(rearrange(attended, "b h n d -> b n (h d)")))
        return x + self.drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
