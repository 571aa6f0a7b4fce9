"""How a DDCL readout learns from a frozen encoder: soft k-means steps while the temperature falls.

The gradient is that of the readout's own loss; only its preconditioning, and a prior of equal use
in units of the temperature, are added here.
"""

import math
from dataclasses import dataclass
from itertools import chain, count, islice
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from eval.features import TokenFeatures
from softvq.ddcl import divergence_from_uniform
from softvq.quantizers import Assignment, DDCLCodebook, codebooks
from softvq.readout import DDCLReadout

# Tokens for every prototype in the sample that a codebook starts from
_TOKENS_PER_CODE = 256
# A prototype with less than this share of 1 / K moves as one that has it
_LEAST_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Cooling:
    """Options of `train_readout`."""

    steps: int
    """Steps in all."""
    batch_size: int
    """Documents in a step."""
    rate: float = 0.5
    """Part of the way to the exact soft k-means step at the start of a cosine, in (0, 1]."""
    equal_use: float = 3.0
    """Weight of T KL(mean weights || uniform) beside the free energy; 0 is plain soft k-means."""
    noise: float = 0.01
    """Standard deviation, in units of that of a feature, of the noise that lets prototypes that lie
    together part as the temperature falls; none in the last 30 % of the steps."""


def train_readout(
    layer: DDCLReadout, features: TokenFeatures, cooling: Cooling, seed: int
) -> float:
    """Trains the prototypes on documents without labels; returns the mean loss of the last tenth.

    They start from k-means++ seeds of a sample of tokens, and their temperature is scheduled over
    all steps. With the weights fixed, the gradient of F for a prototype is 2 sum_n q_nk (p_k - z_n)
    / N: divided by 2 sum_n q_nk / N it leads to the weighted mean of its tokens, the exact step of
    soft k-means. Raises ArithmeticError when the loss is no longer finite.
    """
    generator = torch.Generator().manual_seed(seed)
    banks = [bank for bank in codebooks(layer) if isinstance(bank, DDCLCodebook)]
    _start(banks, features, cooling.steps, generator, seed)
    layer.train()
    losses = []
    endless = chain.from_iterable(features.batches(cooling.batch_size, generator) for _ in count())
    batches = islice(endless, cooling.steps)
    for step, (x, mask) in enumerate(tqdm(batches, "DDCL", cooling.steps, leave=False)):
        temperatures = [bank.temperature.clone() for bank in banks]
        output = layer(x, mask)
        priors = [
            temperature / bank.dim * divergence_from_uniform(head.usage)
            for temperature, bank, head in zip(temperatures, banks, output.heads, strict=True)
        ]
        loss = output.loss + cooling.equal_use * torch.stack(priors).mean()
        if not loss.isfinite():
            raise ArithmeticError("the loss of the readout is not finite any more")
        gradients = torch.autograd.grad(loss, [bank.prototypes for bank in banks])
        done = step / cooling.steps
        rate = cooling.rate * (1 + math.cos(math.pi * done)) / 2
        noise = cooling.noise if done < 0.7 else 0.0
        for bank, head, gradient in zip(banks, output.heads, gradients, strict=True):
            _move(bank, head, len(banks) * gradient, rate, noise, generator)
        losses.append(loss.item())
    layer.eval()
    return fmean(losses[-max(1, cooling.steps // 10) :])


@torch.no_grad()
def _move(
    bank: DDCLCodebook,
    head: Assignment,
    gradient: Float[Tensor, "k d"],
    rate: float,
    noise: float,
    generator: torch.Generator,
) -> None:
    """One step; the loss of a bank is F / dim, a mean over tokens."""
    share = (head.usage / head.usage.sum()).clamp_min(_LEAST_SHARE / bank.codebook_size)
    scale = (bank.covariance.trace() / bank.dim).sqrt()
    jitter = torch.randn(gradient.shape, generator=generator)
    bank.prototypes -= rate * bank.dim * gradient / (2 * share[:, None])
    bank.prototypes += noise * scale * jitter


def _start(
    banks: list[DDCLCodebook],
    features: TokenFeatures,
    steps: int,
    generator: torch.Generator,
    seed: int,
) -> None:
    wanted = _TOKENS_PER_CODE * banks[0].codebook_size
    share = math.ceil(wanted * len(features) / features.tokens)
    x, mask = features.padded(torch.randperm(len(features), generator=generator)[:share])
    torch.manual_seed(seed)  # which k-means++ draws from
    for bank, part in zip(banks, x.split(banks[0].dim, -1), strict=True):
        bank.schedule_steps = steps
        bank.initialize(part, mask)
