"""How a prior is trained: recipe, schedule, one step, and the bits that codes take.

The loop, the log and the files are in the program, `softvq.prior.__main__`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softvq.prior.codes import CodeSet
from softvq.prior.transformer import CodePrior, Grids
from softvq.training import NonFiniteLoss, WarmupRecipe

_LARGEST_NORM = 1.0
_EVALUATED_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class PriorTrainConfig(WarmupRecipe):
    """The recipe: AdamW, a linear warm-up and a cosine to zero."""

    epochs: int = 20
    """Passes over the training codes."""
    batch_size: int = 64
    """Images in a step."""
    lr: float = 5e-4
    """Learning rate after the warm-up."""
    warmup: float = 0.05
    """Fraction of the training, in [0, 1), in which the learning rate rises from 0."""
    weight_decay: float = 0.05
    """Decay of matrices; biases, norms and embeddings have none."""
    label_dropout: float = 0.1
    """Share of the images, in [0, 1], shown without their class, so that samples of no class can
    be drawn as well."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_dropout <= 1:
            raise ValueError(f"label_dropout must lie in [0, 1], got {self.label_dropout}")


def build_optimizer(prior: CodePrior, config: PriorTrainConfig) -> torch.optim.AdamW:
    """AdamW with decay on the matrices of the blocks and the head."""
    decayed = [p for name, p in prior.named_parameters() if _is_matrix(name, p)]
    rest = [p for name, p in prior.named_parameters() if not _is_matrix(name, p)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95))


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and name not in ("embedding.weight", "position")


def train_step(
    prior: CodePrior,
    optimizer: torch.optim.Optimizer,
    indices: Grids,
    labels: Int[Tensor, "b"],
    config: PriorTrainConfig,
) -> Float[Tensor, ""]:
    """One update by the mean -log p of a code, which is returned, in nats; labels of -1 are none.

    Raises NonFiniteLoss before anything is updated by a loss that is not finite.
    """
    dropped = (torch.rand(labels.shape) < config.label_dropout).to(labels.device)
    nats = prior.negative_log_likelihood(indices, labels.masked_fill(dropped, -1))
    loss = nats.sum(1).mean() / sum(prior.config.lengths)
    if not loss.isfinite():
        raise NonFiniteLoss(f"the loss is {loss.item()}")
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(prior.parameters(), _LARGEST_NORM)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def bits_per_code(prior: CodePrior, codes: CodeSet) -> tuple[float, ...]:
    """Mean -log2 p of a code of each level, given the class of its image where it has one."""
    prior.eval()
    device = prior.position.device
    total = torch.zeros(len(prior.config.lengths), dtype=torch.float64)
    for indices, labels in batches(codes, torch.arange(len(codes)), _EVALUATED_AT_ONCE):
        grids = tuple(grid.to(device) for grid in indices)
        nats = prior.negative_log_likelihood(grids, labels.to(device))
        total += nats.double().sum(0).cpu()
    bits = (total / len(codes) / math.log(2)).tolist()
    return tuple(value / length for value, length in zip(bits, prior.config.lengths, strict=True))


def batches(
    codes: CodeSet, order: Int[Tensor, "n"], batch_size: int
) -> Iterator[tuple[Grids, Int[Tensor, "b"]]]:
    """(indices, labels) of `order[0:b]`, `order[b:2b]`, ...; the last may be smaller."""
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        yield tuple(grid[rows] for grid in codes.indices), codes.labels[rows]
