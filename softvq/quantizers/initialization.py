"""Prototypes from tokens: k-means++ seeds, Lloyd's steps, and tokens in the place of dead codes.

When a codebook starts and when a code is dead, the quantizers decide.
"""

from typing import Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from softvq import distributed
from softvq.ddcl import nearest

Start = Literal["data", "uniform"]

# Beyond this many codes, k-means++ draws several seeds before it looks at the distances again.
_SEQUENTIAL_SEEDS = 512
# torch.multinomial takes fewer than 2^24 categories, and more tokens add nothing to the seeds.
_MOST_TOKENS = 2**20


def check_start(start: str) -> None:
    """Raises ValueError for anything but the two ways to start."""
    if start not in get_args(Start):
        raise ValueError(f"init must be one of {get_args(Start)}, got {start!r}")


def uniform_prototypes(k: int, d: int) -> Float[Tensor, "{k} {d}"]:
    """U(-1/k, 1/k), the start of van den Oord et al. 2017."""
    return torch.empty(k, d).uniform_(-1 / k, 1 / k)


def real_tokens(z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None) -> Float[Tensor, "m d"]:
    """The unmasked tokens of all processes as rows, in random order, the same in each.

    Raises ValueError if there are none or one is not finite.
    """
    tokens = rearrange(z.detach(), "... d -> (...) d")
    if mask is not None:
        tokens = tokens[rearrange(mask, "... -> (...)")]
    tokens = distributed.joined(tokens)
    if len(tokens) == 0:
        raise ValueError("a codebook cannot be initialised from 0 tokens")
    broken = int((~tokens.isfinite()).any(1).sum())
    if broken:
        raise ValueError(
            f"a codebook cannot be initialised from tokens that are not finite: "
            f"{broken} of {len(tokens)} are not"
        )
    order = torch.randperm(len(tokens), device=tokens.device)[:_MOST_TOKENS]
    return tokens[distributed.from_first(order)]


def kmeans_plus_plus(tokens: Float[Tensor, "n d"], k: int) -> Float[Tensor, "k d"]:
    """k seeds drawn from the tokens with probability proportional to squared distance.

    (Arthur and Vassilvitskii 2007.) Where fewer than k distinct tokens exist, the rest are tokens
    drawn again, and every such repetition is moved by a hundredth of the data's standard
    deviation (of its magnitude when all are equal), so that no two prototypes coincide. Above
    512 codes the seeds are drawn k / 512 at a time.
    """
    seeds = tokens[torch.randint(len(tokens), (1,), device=tokens.device)]
    distances = (tokens - seeds).square().sum(1)
    at_once = -(-k // _SEQUENTIAL_SEEDS)
    while len(seeds) < k:
        chances = distances / distances.max().clamp_min(torch.finfo(distances.dtype).tiny)
        count = min(at_once, k - len(seeds), int((chances > 0).sum()))
        if count == 0:
            break
        chosen = tokens[torch.multinomial(chances, count)]
        seeds = torch.cat([seeds, chosen])
        to_chosen = tokens - chosen if count == 1 else tokens - chosen[nearest(tokens, chosen)]
        distances = torch.minimum(distances, to_chosen.square().sum(1))
    if len(seeds) < k:
        again = torch.randint(len(tokens), (k - len(seeds),), device=tokens.device)
        scale = tokens.std(0, correction=0).mean()
        magnitude = tokens.abs().mean().clamp_min(1e-3)
        # A move of less than a few roundings would be lost when it is added to a token.
        least = 1e3 * torch.finfo(tokens.dtype).eps * magnitude
        scale = torch.where(scale > 0, torch.maximum(scale, least), magnitude)
        noise = torch.randn(len(again), tokens.shape[1], device=tokens.device, dtype=tokens.dtype)
        seeds = torch.cat([seeds, tokens[again] + 0.01 * scale * noise])
    return seeds


def lloyd(
    tokens: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"], iterations: int
) -> Float[Tensor, "k d"]:
    """Steps of k-means; a prototype without tokens stays where it is."""
    for _ in range(iterations):
        indices = nearest(tokens, prototypes)
        counts = tokens.new_zeros(len(prototypes)).index_add_(
            0, indices, tokens.new_ones(len(tokens))
        )
        sums = torch.zeros_like(prototypes).index_add_(0, indices, tokens)
        means = sums / rearrange(counts.clamp_min(1), "k -> k 1")
        prototypes = torch.where(rearrange(counts, "k -> k 1") > 0, means, prototypes)
    return prototypes


def tokens_in_place_of(
    dead: Bool[Tensor, "k"], tokens: Float[Tensor, "n d"], real: Bool[Tensor, "n"]
) -> Float[Tensor, "k d"]:
    """A random real token, of any process, for every dead code, different ones as far as they go.

    The other rows are arbitrary tokens; no shape depends on how many codes are dead. There must be
    a token, if only in another process.
    """
    real = distributed.joined(real)
    # Real tokens in random order come first; more dead codes than tokens take some twice.
    order = torch.rand(len(real), device=tokens.device).masked_fill(~real, 2).argsort()
    picked = distributed.from_first(order[(dead.cumsum(0) - 1) % real.sum().clamp_min(1)])
    return distributed.rows_of_joined(tokens, picked)
