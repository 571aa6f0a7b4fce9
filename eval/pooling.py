"""Slot Attention and attention pooling (PMA), which rebuild a document's tokens from K vectors.

They are trained without labels, as many steps as the DDCL readout in `eval.cooling`.
"""

import math
from itertools import chain, count, islice
from statistics import fmean
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from tqdm import tqdm

from eval.features import TokenFeatures

_ITERATIONS = 3
# Width inside, and learning rate at the start of the cosine
_WIDTH = 64
_RATE = 1e-3
_TINY = 1e-8


class Pooled(NamedTuple):
    """What Slot Attention and PMA make of documents."""

    summary: Float[Tensor, "b d"]
    """Mean of the vectors of a document, in the space of the tokens."""
    loss: Float[Tensor, ""]
    """Mean |token - its reconstruction from the vectors|² / d over real tokens."""


class SlotAttention(nn.Module):
    """K slots that compete for the tokens in three rounds (Locatello et al. 2020).

    The slots start from learned vectors, one each, in place of random draws, so that a document
    has one result. A token is rebuilt from the slots by its own weights.
    """

    def __init__(self, dim: int, slots: int) -> None:
        super().__init__()
        self.norm, self.norm_slots = nn.LayerNorm(dim), nn.LayerNorm(_WIDTH)
        self.start = nn.Parameter(torch.randn(slots, _WIDTH))
        self.query = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.key = nn.Linear(dim, _WIDTH, bias=False)
        self.value = nn.Linear(dim, _WIDTH, bias=False)
        self.update = nn.GRUCell(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH)
        )
        self.decode = nn.Linear(_WIDTH, dim)

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> Pooled:
        """`mask` is True at real tokens; the others may hold anything."""
        x = torch.where(mask[..., None], x, 0)
        inputs = self.norm(x)
        keys, values = self.key(inputs), self.value(inputs)
        slots = self.start.expand(len(x), -1, -1)
        weights = self._weights(slots, keys, mask)
        for _ in range(_ITERATIONS):
            share = weights / (weights.sum(1, keepdim=True) + _TINY)
            read = einsum(share, values, "b n k, b n w -> b k w")
            shape = slots.shape
            slots = self.update(
                rearrange(read, "b k w -> (b k) w"), rearrange(slots, "b k w -> (b k) w")
            ).reshape(shape)
            slots = slots + self.mlp(slots)
            weights = self._weights(slots, keys, mask)
        return _pooled(x, mask, weights, self.decode(slots))

    def _weights(self, slots: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Weights of the slots at every token, which sum to 1 over slots; 0 at padding."""
        scores = einsum(keys, self.query(self.norm_slots(slots)), "b n w, b k w -> b n k")
        return (scores / math.sqrt(_WIDTH)).softmax(-1) * mask[..., None]


class AttentionPooling(nn.Module):
    """K learned seeds that attend to the tokens: PMA of the Set Transformer (Lee et al. 2019).

    A token is rebuilt from the K results by attention of its own to them.
    """

    def __init__(self, dim: int, seeds: int, heads: int = 4) -> None:
        super().__init__()
        self.seeds = nn.Parameter(torch.randn(seeds, _WIDTH))
        self.read = nn.Linear(dim, _WIDTH)
        self.attention = nn.MultiheadAttention(_WIDTH, heads, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))
        self.query, self.decode = nn.Linear(dim, _WIDTH), nn.Linear(_WIDTH, dim)

    def forward(self, x: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"]) -> Pooled:
        """`mask` is True at real tokens; the others may hold anything."""
        x = torch.where(mask[..., None], x, 0)
        inputs, seeds = self.read(x), self.seeds.expand(len(x), -1, -1)
        read, _ = self.attention(seeds, inputs, inputs, ~mask, need_weights=False)
        read = self.norms[0](seeds + read)
        read = self.norms[1](read + self.mlp(read))
        scores = einsum(self.query(x), read, "b n w, b k w -> b n k") / math.sqrt(_WIDTH)
        return _pooled(x, mask, scores.softmax(-1) * mask[..., None], self.decode(read))


def _pooled(x: Tensor, mask: Tensor, weights: Tensor, vectors: Tensor) -> Pooled:
    rebuilt = einsum(weights, vectors, "b n k, b k d -> b n d")
    error = torch.where(mask, (x - rebuilt).square().mean(-1), 0).sum() / mask.sum().clamp_min(1)
    return Pooled(vectors.mean(1), error)


Layer = SlotAttention | AttentionPooling


def train_layer(
    layer: Layer, features: TokenFeatures, steps: int, batch_size: int, seed: int
) -> float:
    """Trains by Adam with a cosine to zero; returns the mean loss of the last tenth.

    Raises ArithmeticError when the loss is no longer finite.
    """
    generator = torch.Generator().manual_seed(seed)
    layer.train()
    optimizer = torch.optim.Adam(layer.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses, name = [], type(layer).__name__
    endless = chain.from_iterable(features.batches(batch_size, generator) for _ in count())
    for x, mask in tqdm(islice(endless, steps), desc=name, total=steps, leave=False):
        loss = layer(x, mask).loss
        if not loss.isfinite():
            raise ArithmeticError(f"the loss of {name} is not finite any more")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    layer.eval()
    return fmean(losses[-max(1, steps // 10) :])
