"""Codes drawn from a `CodePrior`, position by position, some of them given.

The transformer and its cache are in `softvq.prior.transformer`; images are decoded from the codes
by the tokenizer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softvq.prior.transformer import CodePrior, Grids


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a code is drawn from its distribution."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most probable code."""
    top_k: int = 0
    """Only the so many most probable codes; 0 is all."""
    top_p: float = 1.0
    """Only the fewest codes whose probabilities add up to this, in (0, 1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


def probabilities(logits: Float[Tensor, "b k"], config: SamplingConfig) -> Float[Tensor, "b k"]:
    """The distribution that `config` makes of the logits: temperature first, then top-k, top-p."""
    if config.temperature == 0:
        return torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1)
    # Subtracting the maximum first keeps a tiny temperature from overflowing, and one that the
    # dtype cannot hold is not to become 0.
    temperature = max(config.temperature, torch.finfo(logits.dtype).tiny)
    logits = (logits - logits.amax(1, keepdim=True)) / temperature
    if 0 < config.top_k < logits.shape[1]:
        least = logits.topk(config.top_k, 1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    p = logits.softmax(1)
    if config.top_p < 1:
        ordered, order = p.sort(dim=1, descending=True, stable=True)
        # A code stays if those before it do not reach top_p yet: the first one always does.
        kept = ordered.cumsum(1) - ordered < config.top_p
        p = p.masked_fill(~torch.zeros_like(kept).scatter(1, order, kept), 0)
        p = p / p.sum(1, keepdim=True)
    return p


@torch.no_grad()
def sample(
    prior: CodePrior,
    count: int,
    config: SamplingConfig,
    labels: Int[Tensor, "b"] | None = None,
    given: Grids | None = None,
    generator: torch.Generator | None = None,
    cached: bool = True,
    progress: Callable[[], object] = lambda: None,
) -> Grids:
    """`count` drawn grids of codes, for each level.

    `given` holds codes that are kept, and -1 where one is to be drawn; what is drawn depends on
    the codes before it alone, those of coarser levels among them. The same generator gives the
    same codes with the cache and without it, up to ties within rounding. `progress` is called
    after every position. Raises ValueError for labels and codes that the prior was not made for.
    """
    with _evaluating(prior):
        tokens = prior.begin(count, labels)
        kept = None if given is None else _kept(prior, given, count)
        cache = prior.start_cache(count) if cached else None
        position = 0
        for level, length in enumerate(prior.config.lengths):
            for _ in range(length):
                logits = prior.next_logits(
                    tokens if cache is None or not cache.done else tokens[:, -1:], cache
                )
                drawn = (
                    torch.multinomial(probabilities(logits.float(), config), 1, generator=generator)
                    + prior.offsets[level]
                )
                if kept is not None:
                    old = kept[:, position : position + 1]
                    drawn = torch.where(old < 0, drawn, old)
                tokens = torch.cat([tokens, drawn], 1)
                position += 1
                progress()
    return prior.unflatten(tokens[:, 1:])


@contextmanager
def _evaluating(prior: CodePrior) -> Iterator[None]:
    training = prior.training
    prior.eval()
    try:
        yield
    finally:
        prior.train(training)


def _kept(prior: CodePrior, given: Grids, count: int) -> Int[Tensor, "b n"]:
    """The given codes as tokens, -1 where one is to be drawn."""
    if any(len(grid) != count for grid in given):
        raise ValueError(f"given must hold {count} grids, got {[len(grid) for grid in given]}")
    device = prior.position.device
    tokens = prior.flatten(tuple(grid.clamp_min(0).to(device) for grid in given))
    open_ = torch.cat([(grid < 0).flatten(1) for grid in given], 1).to(device)
    return tokens.masked_fill(open_, -1)
