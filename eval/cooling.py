"""Soft k-means with restarts: prototypes cooled on features that do not move, without labels.

Its step is where the detached gradient of L_q vanishes for fixed weights; what is clustered is in
the experiments, the soft assignment in `softvq.ddcl`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from eval.experiment import SplitCheck
from softvq.ddcl import assignment_weights, critical_temperature, nearest
from softvq.quantizers import DDCLCodebook, codebooks
from softvq.quantizers.initialization import kmeans_plus_plus
from softvq.readout import DDCLReadout

# Rows whose weights are held at once
_BLOCK = 4096
# Rows on which the split L_q = L_OLS + V is looked at in every step
_CHECKED = 32


@dataclass(frozen=True, kw_only=True)
class Cooling:
    """Options of `soft_kmeans`."""

    hottest: float = 0.5
    """T / Tc at the first step; it falls geometrically. From 1 upwards all prototypes merge."""
    coldest: float = 0.001
    """T / Tc at the last step, in (0, hottest]."""
    steps: int = 60
    """Steps of a start, each over all rows."""
    restarts: int = 10
    """Starts, of which the one with the lowest k-means loss is kept; k-means has as many."""

    def __post_init__(self) -> None:
        if not 0 < self.coldest <= self.hottest < float("inf"):
            raise ValueError(
                f"hottest and coldest need 0 < coldest <= hottest, got {self.hottest}, "
                f"{self.coldest}"
            )
        for name in ("steps", "restarts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Cooled(NamedTuple):
    """What `soft_kmeans` gives."""

    prototypes: Float[Tensor, "k d"]
    temperature: float
    """The last one, in units of squared distance."""
    losses: tuple[float, ...]
    """Mean squared distance to the nearest prototype at the end of every start."""

    @property
    def loss(self) -> float:
        """That of the start that was kept."""
        return min(self.losses)


def soft_kmeans(
    z: Float[Tensor, "n d"],
    codebook_size: int,
    cooling: Cooling,
    seed: int,
    check: SplitCheck,
    critical: float | None = None,
) -> Cooled:
    """The best of several cooled starts from k-means++ seeds, by the k-means loss on z itself.

    `critical` is the temperature that the schedule is in units of; by default that of z. The split
    of L_q is looked at in every step. z is finite; memory is linear in n.
    """
    unit = critical_temperature(z).item() if critical is None else critical
    found: list[tuple[float, Tensor, float]] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # which k-means++ draws from
        for _ in tqdm(range(cooling.restarts), "soft k-means", leave=False):
            p, temperature = kmeans_plus_plus(z, codebook_size), unit
            for temperature in temperatures(cooling, unit):
                p = soft_kmeans_step(z, p, temperature)
                check.add(z[:_CHECKED], p, temperature)
            loss = (z - p[nearest(z, p)]).square().sum(1).mean().item()
            found.append((loss, p, temperature))
    _, prototypes, temperature = min(found, key=lambda start: start[0])
    return Cooled(prototypes, temperature, tuple(loss for loss, _, _ in found))


def temperatures(cooling: Cooling, critical: float) -> Iterator[float]:
    """The temperature of every step, in units of squared distance."""
    # Features without spread have Tc = 0, and any positive temperature is as good.
    unit = max(critical, torch.finfo(torch.float32).tiny ** 0.5)
    for step in range(cooling.steps):
        done = step / max(cooling.steps - 1, 1)
        yield unit * cooling.hottest * (cooling.coldest / cooling.hottest) ** done


@torch.no_grad()
def soft_kmeans_step(
    z: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"], temperature: float
) -> Float[Tensor, "k d"]:
    """p_k <- sum_n q_nk z_n / sum_n q_nk, block by block.

    With the weights fixed, grad L_q for p_k is 2 sum_n q_nk (p_k - z_n), which is zero there. A
    prototype out of every row's reach stays where it is.
    """
    sums, usage = torch.zeros_like(prototypes), prototypes.new_zeros(len(prototypes))
    for block in z.split(_BLOCK):
        q = assignment_weights(block, prototypes, temperature)
        sums.addmm_(q.T, block)
        usage += q.sum(0)
    usage = rearrange(usage, "k -> k 1")
    reached = usage > torch.finfo(usage.dtype).eps
    return torch.where(reached, sums / torch.where(reached, usage, 1), prototypes)


@torch.no_grad()
def fit_readout(
    layer: DDCLReadout,
    z: Float[Tensor, "n d"],
    cooling: Cooling,
    seed: int,
    check: SplitCheck,
    critical: float | None = None,
) -> float:
    """Gives every head of the readout the prototypes and the last temperature of `soft_kmeans` on
    its part of the tokens z, and leaves the readout in eval mode; returns the heads' mean loss."""
    banks = [bank for bank in codebooks(layer) if isinstance(bank, DDCLCodebook)]
    losses = []
    for bank, part in zip(banks, z.split(banks[0].dim, -1), strict=True):
        cooled = soft_kmeans(part.contiguous(), bank.codebook_size, cooling, seed, check, critical)
        bank.initialize(part)
        bank.prototypes.copy_(cooled.prototypes)
        bank.temperature.fill_(cooled.temperature)
        losses.append(cooled.loss)
    layer.eval()
    return sum(losses) / len(losses)
