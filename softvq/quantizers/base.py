"""What every quantizer returns and can do: `Assignment`, `Quantized`, the `Codebook` base class.

The methods themselves are one file each beside this one; `softvq.quantizers` holds their registry.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor, nn

from softvq import ddcl, distributed


@dataclass(frozen=True, kw_only=True)
class CodebookConfig:
    """Options that every quantizer has."""

    dim: int = 256
    """Width of a code."""
    codebook_size: int = 512
    """Number of codes."""

    def __post_init__(self) -> None:
        for name in ("dim", "codebook_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Quantized(NamedTuple):
    """What `codebook(z)` returns."""

    quantized: Float[Tensor, "*n d"]
    indices: Int[Tensor, "*n"]
    loss: Float[Tensor, ""]


class Assignment(NamedTuple):
    """Everything a quantizer knows about a batch of tokens; means are over real tokens only."""

    quantized: Float[Tensor, "*n d"]
    """What the decoder reads, in the dtype of z; zeros where masked. In eval mode exactly
    `indices_to_codes(indices)`; in training with the gradients of the method."""
    soft: Float[Tensor, "*n d"]
    """Soft centroids; equal to the codes for hard quantizers."""
    indices: Int[Tensor, "*n"]
    """Most probable code; -1 where masked."""
    loss: Float[Tensor, ""]
    """The quantizer's own loss, weighted; of several processes, its mean over them is that of the
    joined batch. Everything else is that of the tokens given."""
    reconstruction: Float[Tensor, ""]
    """Mean |z - soft|² (L_OLS), summed over the width."""
    variance: Float[Tensor, ""]
    """Mean V = sum_k q_k |p_k - soft|²; 0 for hard quantizers."""
    entropy: Float[Tensor, ""]
    """Mean entropy of the weights in nats per token; 0 for hard quantizers."""
    mean: Float[Tensor, "d"]
    """Mean of z; with `spread` it gives the covariance's trace over any number of batches."""
    spread: Float[Tensor, ""]
    """Mean |z - mean|² of the batch, that is tr Cov(z)."""
    usage: Float[Tensor, "k"]
    """Summed weights of each code."""
    counts: Int[Tensor, "k"]
    """Number of tokens whose most probable code it is."""
    revived: Int[Tensor, ""]
    """Number of dead codes that this pass, once all this was found, moved to tokens of its own."""


class Codebook(nn.Module, ABC):
    """A bank of `codebook_size` prototypes of width `dim`; channels last, any leading axes.

    The prototypes and every statistic stay float32 (or become float64) whatever dtype the module
    is cast to: half precision cannot hold counts above 65504 nor distances of wide codes. Built
    from the keywords of its config dataclass, or from a config by `from_config`.

    Where several processes train together (torch.distributed), a training pass is a collective:
    start, statistics, revival and usage are those of the joined batch, and losses are such that
    gradients averaged over the processes, as by DistributedDataParallel, are those of one process.
    """

    config_class: ClassVar[type[CodebookConfig]]
    initialized: Tensor
    prototypes: Tensor
    """The codes (k, d), in the space of z: a parameter, or a buffer if no gradient moves them."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.config = self.config_class(**options)
        # Not bool: averages of models, as torch's AveragedModel takes them, are of numbers.
        self.register_buffer("initialized", torch.zeros((), dtype=torch.uint8))
        # Python's copy of the buffer: a forward pass must not wait for the device to look at it.
        self._initialized = False
        self._frozen = False

    @classmethod
    def from_config(cls, config: Any):
        """The codebook that `config`, an instance of `cls.config_class`, describes."""
        return cls(**{name: getattr(config, name) for name in config.__dataclass_fields__})

    @abstractmethod
    def assign(
        self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
    ) -> Assignment:
        """Quantizes z; `mask` is True at real tokens, and the others may hold anything."""

    @abstractmethod
    def initialize(self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None) -> None:
        """Makes the codebook ready for tokens like z, by the rule of the config.

        Raises ValueError when z holds no real token or a value that is not finite.
        """

    def initialize_once(
        self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
    ) -> None:
        """`initialize`, if this is a training pass and the codebook has not been started yet."""
        if self._initialized or not self.updates:
            return
        # Not every way to load weights tells the module: some put tensors in the place of its own.
        self._initialized = bool(self.initialized)
        if not self._initialized:
            self.initialize(z, mask)

    @property
    def dim(self) -> int:
        """Width of a code."""
        return self.config.dim

    @property
    def codebook_size(self) -> int:
        """Number of codes."""
        return self.config.codebook_size

    def forward(
        self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
    ) -> Quantized:
        """`assign`, cut down to the three values that most code needs."""
        assignment = self.assign(z, mask)
        return Quantized(assignment.quantized, assignment.indices, assignment.loss)

    def indices_to_codes(self, indices: Integer[Tensor, "*n"]) -> Float[Tensor, "*n d"]:
        """The codes of `indices`, zeros for -1, whatever the integer dtype.

        Raises ValueError for others outside [0, k), and for what is no integer.
        """
        if indices.dtype.is_floating_point or indices.dtype == torch.bool:
            raise ValueError(f"indices must be integers, got {indices.dtype}")
        indices = indices.long()
        if not (indices.is_cuda or torch.compiler.is_compiling()) and indices.numel():
            low, high = indices.min().item(), indices.max().item()
            if low < -1 or high >= self.codebook_size:
                raise ValueError(
                    f"indices must lie in [0, {self.codebook_size}), or be -1 for padding; "
                    f"got {low} to {high}"
                )
        codes = self.prototypes[indices.clamp_min(0)]
        return torch.where(rearrange(indices, "... -> ... 1") < 0, 0, codes)

    def nearest(self, z: Float[Tensor, "*n d"]) -> Int[Tensor, "*n"]:
        """Index of the nearest code, without softmax, loss or statistics."""
        return ddcl.nearest(self._checked(z), self.prototypes)

    def freeze(self):
        """Stops gradients and updates of the prototypes for good; `train()` does not undo it."""
        self.requires_grad_(False)
        self._frozen = True
        return self

    @property
    def updates(self) -> bool:
        """Whether a forward pass may change prototypes or statistics now."""
        return self._trains and not self._frozen

    @property
    def _trains(self) -> bool:
        """Whether this is a training pass: then, and only then, processes work together."""
        return self.training and torch.is_grad_enabled()

    def _mean(
        self, values: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"] | None
    ) -> Float[Tensor, ""]:
        """Mean over real tokens; in training this process's part of the mean over those of all."""
        mean = distributed.joined_mean if self._trains else masked_mean
        return mean(values, mask)

    def extra_repr(self) -> str:
        return str(self.config)

    def _checked(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """z with padding replaced by zeros, in the dtype that the codebook computes in."""
        if z.shape[-1] != self.dim:
            raise ValueError(
                f"z must be channels last with width {self.dim}, got shape {tuple(z.shape)}"
            )
        if not z.dtype.is_floating_point:
            raise ValueError(f"z must be of a floating dtype, got {z.dtype}")
        ddcl.check_mask(z, mask)
        if mask is not None:
            z = torch.where(rearrange(mask, "... -> ... 1"), z, 0)
        return z.to(torch.promote_types(z.dtype, self.prototypes.dtype))

    def _mark_initialized(self) -> None:
        self.initialized.fill_(True)
        self._initialized = True

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self._initialized = bool(self.initialized)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        return super()._apply(in_full_precision(fn), recurse)


def in_full_precision(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn`, as a module applies it to its tensors, but for a cast from float32 or more to half."""

    def changed(tensor: Tensor) -> Tensor:
        result = fn(tensor)
        if result.dtype in (torch.float16, torch.bfloat16) and tensor.dtype.itemsize >= 4:
            return tensor.to(result.device)
        return result

    return changed


def hard_assignment(
    z: Float[Tensor, "*n d"],
    codes: Float[Tensor, "*n d"],
    indices: Int[Tensor, "*n"],
    loss: Float[Tensor, ""],
    mask: Bool[Tensor, "*n"] | None,
    codebook_size: int,
    dtype: torch.dtype,
) -> Assignment:
    """The `Assignment` of a method that gives every token one code, by straight-through gradients.

    `z` has zeros where masked, `indices` is valid everywhere, `dtype` is that of the output.
    """
    quantized = replace_value(z, codes)
    if mask is not None:
        padding = rearrange(~mask, "... -> ... 1")
        quantized, codes = (x.masked_fill(padding, 0) for x in (quantized, codes))
        indices = indices.masked_fill(~mask, -1)
    counts = count_codes(indices, codebook_size)
    zero = loss.new_zeros(())
    return Assignment(
        quantized=quantized.to(dtype),
        soft=codes.to(dtype),
        indices=indices,
        loss=loss,
        reconstruction=masked_mean((z - codes).square().sum(-1), mask),
        variance=zero,
        entropy=zero,
        **moments(z, mask),
        usage=counts.to(z.dtype),
        counts=counts,
        revived=counts.new_zeros(()),
    )


class _ReplaceValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def replace_value(
    source: Float[Tensor, "*n d"], value: Float[Tensor, "*n d"]
) -> Float[Tensor, "*n d"]:
    """`value` to the last bit, with its gradient going to `source` alone.

    The usual source + stopgrad(value - source) rounds.
    """
    return _ReplaceValue.apply(source, value)


def count_codes(indices: Int[Tensor, "*n"], codebook_size: int) -> Int[Tensor, "k"]:
    """How often each code occurs; -1 is not counted."""
    flat = rearrange(indices, "... -> (...)")
    counts = flat.new_zeros(codebook_size)
    return counts.index_add_(0, flat.clamp_min(0), (flat >= 0).to(counts.dtype))


def masked_mean(values: Float[Tensor, "*n"], mask: Bool[Tensor, "*n"] | None) -> Float[Tensor, ""]:
    """Mean over real tokens, 0 when there are none."""
    if mask is None:
        return values.sum() / max(values.numel(), 1)
    return torch.where(mask, values, 0).sum() / mask.sum().clamp_min(1)


def moments(z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None) -> dict[str, Tensor]:
    """`mean` and `spread` of the real tokens, without gradient."""
    flat = rearrange(z.detach(), "... d -> (...) d")
    if mask is None:
        count = max(flat.shape[0], 1)  # len() would pin an exported batch
        mean = flat.sum(0) / count
        deviations = flat - mean
    else:
        real = rearrange(mask, "... -> (...) 1")
        count = real.sum().clamp_min(1)
        mean = torch.where(real, flat, 0).sum(0) / count
        deviations = torch.where(real, flat - mean, 0)
    return {"mean": mean, "spread": torch.linalg.vector_norm(deviations).square() / count}
