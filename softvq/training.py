"""How a VQ-VAE is trained: recipe, losses, parameter groups, schedule, one step and its state.
What is logged is in `softvq.evaluation`; loop, files and printing are in the program."""

import math
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from softvq import distributed
from softvq.autoencoder import Autoencoder, LatentNorm, NetworkConfig, VQVAEConfig, VQVAEOutput
from softvq.data import DataConfig, ImageSet, float_batches, to_float
from softvq.evaluation import Sums
from softvq.quantizers import DDCLCodebook, codebooks, param_groups

# Tokens for every code in the buffer that a codebook starts from.
_TOKENS_PER_CODE = 16
# Images whose latents say what the statistics are when a model is evaluated
_SETTLING_IMAGES = 2048


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every training has; the defaults belong to the trainings."""

    epochs: int
    """Passes over the training examples."""
    batch_size: int
    """Examples in a step; the last batch of an epoch may be smaller."""
    lr: float
    """Largest learning rate."""
    seed: int = 0
    """Of weights, order and every random choice in between."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2**32), got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class WarmupRecipe(Recipe):
    """AdamW, a linear warm-up and a cosine to zero."""

    warmup: float
    """Fraction of the training, in [0, 1), in which the learning rate rises from 0."""
    weight_decay: float = 0.05
    """Decay of the parameters that have one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must lie in [0, 1), got {self.warmup}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be 0 or more, got {self.weight_decay}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Recipe):
    """The recipe: Adam, a cosine to zero, and prototypes that learn faster than the encoder."""

    epochs: int = 20
    """Passes over the training images."""
    batch_size: int = 128
    """Images in a step; the last batch of an epoch may be smaller."""
    lr: float = 1e-3
    """Learning rate of encoder and decoder at the start of the cosine."""
    eps: float = 1.0
    """lr / learning rate of the prototypes, in (0, 1]; 0.01 to 0.1 for DDCL."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs the convolutions under autocast; the quantizer is float32 always."""
    channels_last: bool = True
    """Memory layout of the convolutions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.eps <= 1:
            raise ValueError(f"eps must lie in (0, 1], got {self.eps}")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision must be float32 or bfloat16, got {self.precision!r}")


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All that a result depends on."""

    model: NetworkConfig = field(default_factory=VQVAEConfig)
    """Architecture."""
    data: DataConfig = field(default_factory=DataConfig)
    """Images."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Recipe."""


class NonFiniteLoss(ArithmeticError):
    """The loss of a step is NaN or infinite; the weights are those from before the step."""


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Adam:
    """Adam over `param_groups`."""
    return torch.optim.Adam(param_groups(model, config.lr, config.eps))


def set_learning_rate(optimizer: torch.optim.Optimizer, config: TrainConfig, done: float) -> None:
    """A cosine from the full rate at `done` = 0 to zero at 1, the same for both groups."""
    factor = (1 + math.cos(math.pi * done)) / 2
    for group in optimizer.param_groups:
        rate = config.lr / config.eps if group["name"] == "prototypes" else config.lr
        group["lr"] = rate * factor


def set_warmup_learning_rate(
    optimizer: torch.optim.Optimizer, config: WarmupRecipe, done: float
) -> None:
    """Linear to the full rate at `done` = warmup, then a cosine to zero at 1."""
    if done < config.warmup:
        factor = done / config.warmup
    else:
        factor = (1 + math.cos(math.pi * (done - config.warmup) / (1 - config.warmup))) / 2
    for group in optimizer.param_groups:
        group["lr"] = config.lr * factor


def prepare(model: Autoencoder, images: ImageSet, total_steps: int) -> None:
    """Places the prototypes by the latents of the first images, and sets schedules to their length.

    Level by level, the next being encoded given the codes of those before. The images are in an
    order by hash, so the first are a sample.
    """
    model.train()
    for level, codebook in enumerate(codebooks(model)):
        if isinstance(codebook, DDCLCodebook):
            codebook.schedule_steps = total_steps
        if not codebook.initialized:
            latents = _first_latents(model, images, level, codebook.codebook_size)
            codebook.initialize(distributed.share(latents))


@torch.no_grad()
def _first_latents(
    model: Autoencoder, images: ImageSet, level: int, codebook_size: int
) -> Float[Tensor, "n d"]:
    """Tokens of a level, some for each of its codes; running statistics become their plain mean."""
    latents, wanted = [], _TOKENS_PER_CODE * codebook_size
    with _plain_means(model):
        for x in float_batches(images, next(model.parameters()).device):
            own = model.latents(distributed.share(x), level)
            latents.append(distributed.joined(rearrange(own, "b h w d -> (b h w) d")))
            if sum(map(len, latents)) >= wanted:
                break
    return torch.cat(latents)


@torch.no_grad()
def settle(model: Autoencoder, images: ImageSet) -> None:
    """Sets the running statistics of the latents to their plain means over the first images.

    Moving averages lag behind an encoder that learns fast, by enough to cost a decibel in
    evaluation. Leaves the model in training mode; a collective where processes train together.
    """
    model.train()
    if not any(isinstance(module, LatentNorm) for module in model.modules()):
        return
    first = torch.arange(min(len(images), _SETTLING_IMAGES))
    with _plain_means(model):
        for x in float_batches(images, next(model.parameters()).device, first):
            model.latents(distributed.share(x), len(codebooks(model)) - 1)


@contextmanager
def _plain_means(model: Autoencoder) -> Iterator[None]:
    """Lets the running statistics start anew, as plain means of all batches that follow."""
    norms = [module for module in model.modules() if isinstance(module, LatentNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None
        norm.num_batches_tracked.zero_()
    yield
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def epoch_order(items: Sized, seed: int, epoch: int) -> Tensor:
    """The order of the items in one epoch: a function of their number, seed and epoch alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(len(items), generator=generator)


def batches(
    images: ImageSet, order: Int[Tensor, "n"], batch_size: int
) -> Iterator[UInt8[Tensor, "b c h w"]]:
    """The batches of `batch_size` images in that order; of each, the part of this process.

    A part may be empty in the last batch. The number of processes must divide `batch_size`.
    """
    if len(order) == 0:
        return
    parts = [distributed.share(batch) for batch in order.split(batch_size)]
    loaded = images.batches(torch.cat(parts), batch_size // distributed.process_count())
    empty = torch.empty(0, *images.image_shape, dtype=torch.uint8)
    for part in parts:
        yield next(loaded) if len(part) else empty


def pixel_variance(images: ImageSet) -> float:
    """Variance of all channels of the images in [-1, 1]: the scale of the reconstruction loss."""
    sums = Sums()
    for x in float_batches(images, torch.device("cpu")):
        x = x.double()
        sums.add(count=float(x.numel()), first=x.sum(), second=x.square().sum())
    variance = sums.mean("second", "count") - sums.mean("first", "count") ** 2
    # Images of one colour cannot set a scale.
    return variance if variance > 1e-6 else 1.0


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pixels: UInt8[Tensor, "b c h w"],
    variance: float,
    config: TrainConfig,
) -> tuple[VQVAEOutput, Tensor]:
    """One update by mse / variance + the quantizers' losses; returns the output and the mse.

    Of several processes, each gives its part of the batch to a DistributedDataParallel, and gets
    the output and the mse of that part. Raises NonFiniteLoss before anything is updated by a loss
    that is not finite.
    """
    device = next(model.parameters()).device
    x = to_float(pixels.to(device, non_blocking=True))
    if config.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
        output = model(x)
    squared_error = (output.reconstruction.float() - x).square()
    loss = distributed.joined_mean(squared_error, None) / variance + output.loss
    joined_loss = distributed.total(loss.detach()) / distributed.process_count()
    if not joined_loss.isfinite():
        raise NonFiniteLoss(f"the loss is {joined_loss.item()}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return output, squared_error.detach().sum() / max(squared_error.numel(), 1)


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, sums: Sums
) -> dict[str, Tensor]:
    """All that the next step depends on, as named tensors: a run continues bit for bit from it."""
    state = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer/{name}/{key}"] = value
    state |= {f"sums/{name}": value for name, value in sums.tensors.items()}
    state["random/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["random/cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> Sums:
    """Puts `training_state` back and returns its sums. Raises ValueError if it does not fit."""
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    for name, value in state.items():
        part, _, rest = name.partition("/")
        if part not in parts:
            raise ValueError(f"the training state does not fit: {name} is unknown")
        parts[part][rest] = value
    if "cpu" not in parts["random"]:
        raise ValueError("the training state does not fit: random/cpu is missing")
    try:
        model.load_state_dict(parts["model"])
        torch.set_rng_state(parts["random"]["cpu"])
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"the training state does not fit the model: {reason}") from None
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = _moments(parts["optimizer"], name, parameter)
    if torch.cuda.is_available() and "cuda" in parts["random"]:
        torch.cuda.set_rng_state(parts["random"]["cuda"])
    sums = Sums()
    sums.tensors = parts["sums"]
    return sums


_PARTS = ("model", "optimizer", "sums", "random")


def _moments(state: dict[str, Tensor], name: str, parameter: Tensor) -> dict[str, Tensor]:
    """Adam's values for one parameter: all three, or none before the first step."""
    shapes = {"step": (), "exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}
    moments = {key: state[f"{name}/{key}"] for key in shapes if f"{name}/{key}" in state}
    if moments and {key: value.shape for key, value in moments.items()} != shapes:
        raise ValueError(f"the training state does not fit the optimizer's values of {name}")
    # Adam counts its steps on the CPU; the moments live beside their parameter.
    return {
        key: value if key == "step" else value.to(parameter.device)
        for key, value in moments.items()
    }
