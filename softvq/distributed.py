"""What the processes of one training compute together; in a single process each is the identity.

Every function is a collective: all processes call it, equally often and in the same order. Which
values need it is for the callers to know.
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch import distributed as dist


def process_count() -> int:
    """Number of processes that train together, 1 where torch.distributed is not initialised."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return dist.get_rank() if process_count() > 1 else 0


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _Total.apply(gradients[0])


def total(x: Shaped[Tensor, "*n"]) -> Shaped[Tensor, "*n"]:
    """Sum over the processes, the same to the last bit in each.

    Its gradient is the sum of their gradients: averaged over the processes, as
    DistributedDataParallel does, a loss that all of them compute from a total counts once.
    """
    return x if process_count() == 1 else _Total.apply(x)


def from_first(x: Shaped[Tensor, "*n"]) -> Shaped[Tensor, "*n"]:
    """The value in process 0: random draws are made there."""
    if process_count() > 1:
        x = x.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(x, 0)
    return x


def joined(rows: Shaped[Tensor, "n *d"]) -> Shaped[Tensor, "m *d"]:
    """The rows of all processes, which may have different numbers of them, in their order."""
    if process_count() == 1:
        return rows
    lengths = _lengths(rows)
    # Collectives know neither ragged parts nor, everywhere, booleans.
    whole = rows.to(torch.uint8) if rows.dtype == torch.bool else rows
    padded = whole.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = whole
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    cut = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    return torch.cat(cut).to(rows.dtype)


def row_count(rows: Shaped[Tensor, "n *d"]) -> int:
    """Number of rows in all processes."""
    return len(rows) if process_count() == 1 else sum(_lengths(rows))


def rows_of_joined(rows: Float[Tensor, "n d"], picked: Int[Tensor, "k"]) -> Float[Tensor, "k d"]:
    """`joined(rows)[picked]`, without sending the other rows."""
    if process_count() == 1:
        return rows[picked]
    lengths = _lengths(rows)
    position = picked - sum(lengths[: rank()])
    own = (position >= 0) & (position < len(rows))
    found = rows.new_zeros(len(picked), rows.shape[1])
    found[own] = rows[position[own]]
    return total(found)


def joined_mean(values: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"] | None) -> Float[Tensor, ""]:
    """This process's part of the mean over all real tokens, 0 when there are none.

    The parts are such that their mean over the processes is that of the joined batch, however
    many real tokens each has.
    """
    if mask is None:
        amount, count = values.sum(), values.new_tensor(float(values.numel()))
    else:
        amount, count = torch.where(mask, values, 0).sum(), mask.sum()
    return amount * process_count() / total(count).clamp_min(1)


def joined_covariance(
    covariance: Float[Tensor, "d d"], mean: Float[Tensor, "d"], count: Shaped[Tensor, ""]
) -> Float[Tensor, "d d"]:
    """The covariance of all tokens from that of `count` of them around their `mean`."""
    if process_count() == 1:
        return covariance
    everywhere = total(count).clamp_min(1)
    deviation = mean - total(mean * count) / everywhere
    between = rearrange(deviation, "d -> d 1") * deviation
    return total((covariance + between) * count) / everywhere


def any_process(*flags: bool) -> list[bool]:
    """Of each flag, whether it is set in any process."""
    if process_count() == 1:
        return list(flags)
    return [bool(count) for count in total(torch.tensor(flags, dtype=torch.int64))]


def share(items: Shaped[Tensor, "n *d"]) -> Shaped[Tensor, "m *d"]:
    """The part of `items`, which all processes hold, that falls to this one; at most 1 apart."""
    return items.tensor_split(process_count())[rank()]


def _lengths(rows: Tensor) -> list[int]:
    own = torch.tensor(len(rows), device=rows.device)
    lengths = [torch.empty_like(own) for _ in range(process_count())]
    dist.all_gather(lengths, own)
    return [int(length) for length in lengths]
