"""What every autoencoder is, and the flat VQ-VAE: DeepMind's CIFAR-10 encoder and decoder around
any quantizer of the registry.

Here alone images are `b c h w`; quantizers see channels last. Two levels are in
`softvq.hierarchical`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from softvq import distributed
from softvq.quantizers import Assignment, CodebookConfig, DDCLConfig, build, codebooks
from softvq.quantizers.base import in_full_precision

Images = Float[Tensor, "b c h w"]


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The convolutions of an autoencoder, whatever its levels are."""

    channels: int = 3
    """Channels of an image."""
    hidden: int = 128
    """Channels of the convolutions."""
    residual_blocks: int = 2
    """Residual blocks in the encoder, and as many in the decoder."""
    residual_hidden: int = 32
    """Channels inside a residual block."""
    downsamplings: int = 2
    """Halvings of height and width down to the finest codes: 2 turns 32x32 images into 8x8."""
    normalize: bool = True
    """Affine-free batch normalisation of the latents, with running statistics in eval mode."""

    def __post_init__(self) -> None:
        bounds = dict(channels=1, hidden=2, residual_blocks=0, residual_hidden=1, downsamplings=1)
        for name, least in bounds.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")

    @property
    def quantizers(self) -> tuple[CodebookConfig, ...]:
        """The quantizers' options, one per level."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class VQVAEConfig(NetworkConfig):
    """Architecture of `VQVAE`; the width of the latents is that of the quantizer's codes."""

    quantizer: CodebookConfig = field(default_factory=lambda: DDCLConfig(dim=64))
    """The quantizer and its options."""

    @property
    def quantizers(self) -> tuple[CodebookConfig, ...]:
        return (self.quantizer,)


class VQVAEOutput(NamedTuple):
    """What a forward pass gives."""

    reconstruction: Float[Tensor, "b c h w"]
    assignments: tuple[Assignment, ...]
    """One per level."""
    loss: Float[Tensor, ""]
    """Sum of the quantizers' losses; the reconstruction loss is the training's affair."""


class Autoencoder(nn.Module, ABC):
    """Encoder, quantizers, decoder, with levels in a tuple everywhere, coarsest first.

    Images are float in [-1, 1], of any height and width.
    """

    config: NetworkConfig
    _frozen = False

    @property
    @abstractmethod
    def stride(self) -> int:
        """Pixels in height and width that one code of the coarsest level stands for."""

    @abstractmethod
    def latents(self, x: Images, level: int = 0) -> Float[Tensor, "b i j d"]:
        """What the quantizer of a level is given, the levels before it being quantized.

        Edges are repeated up to a multiple of the stride. Raises ValueError for what is no batch
        of images with the right number of channels.
        """

    @abstractmethod
    def encode(self, x: Images) -> tuple[Assignment, ...]:
        """One `Assignment` per level."""

    @abstractmethod
    def decode(self, quantized: tuple[Float[Tensor, "b _ _ _"], ...]) -> Images:
        """Images from the codes of each level; multiples of the stride in height and width."""

    def decode_indices(self, indices: tuple[Integer[Tensor, "b _ _"], ...]) -> Images:
        """Images from the indices of each level; the same, bit for bit, as decoding their codes.

        Raises ValueError for what is no tuple of one grid b h w per level.
        """
        banks = codebooks(self)
        if isinstance(indices, Tensor) or [grid.ndim for grid in indices] != [3] * len(banks):
            given = [indices] if isinstance(indices, Tensor) else indices
            shapes = ", ".join(str(tuple(grid.shape)) for grid in given)
            raise ValueError(f"indices must be a tuple of {len(banks)} grids b h w, got {shapes}")
        levels = zip(banks, indices, strict=True)
        return self.decode(tuple(codebook.indices_to_codes(grid) for codebook, grid in levels))

    def freeze(self):
        """Keeps the model as it is, for good: no gradients for it, and evaluation mode, which
        `train()`, of this or of a module around it, does not undo."""
        self.requires_grad_(False)
        self._frozen = True
        return self.eval()

    def train(self, mode: bool = True):
        """Training mode, or evaluation for `mode=False` and wherever the model is frozen."""
        return super().train(mode and not self._frozen)

    def forward(self, x: Images) -> VQVAEOutput:
        """Encodes, quantizes, decodes and crops to the size of `x`."""
        assignments = self.encode(x)
        reconstruction = self.decode(tuple(level.quantized for level in assignments))
        loss = torch.stack([level.loss for level in assignments]).sum()
        return VQVAEOutput(crop(reconstruction, x), assignments, loss)

    def _padded(self, x: Tensor) -> Float[Tensor, "b c _ _"]:
        if x.ndim != 4 or x.shape[1] != self.config.channels:
            raise ValueError(
                f"images must be b c h w and have {self.config.channels} channels, "
                f"got shape {tuple(x.shape)}"
            )
        bottom, right = (-size % self.stride for size in x.shape[2:])
        return F.pad(x, (0, right, 0, bottom), mode="replicate")


class VQVAE(Autoencoder):
    """One level: DeepMind's encoder and decoder, and a grid of codes between them."""

    config: VQVAEConfig

    def __init__(self, config: VQVAEConfig) -> None:
        super().__init__()
        self.config = config
        width = config.quantizer.dim
        self.encoder = nn.Sequential(*encoder_layers(config), nn.Conv2d(config.hidden, width, 1))
        self.norm = latent_norm(config, width)
        self.quantizer = build(config.quantizer)
        self.decoder = nn.Sequential(*decoder_layers(config, width))

    @property
    def stride(self) -> int:
        return 2**self.config.downsamplings

    def latents(self, x: Images, level: int = 0) -> Float[Tensor, "b i j d"]:
        return rearrange(self.norm(self.encoder(self._padded(x))), "b d h w -> b h w d")

    def encode(self, x: Images) -> tuple[Assignment, ...]:
        """A tuple of one `Assignment`."""
        return (self.quantizer.assign(self.latents(x)),)

    def decode(self, quantized: tuple[Float[Tensor, "b _ _ _"], ...]) -> Images:
        (codes,) = quantized
        weight = next(self.decoder.parameters())
        return self.decoder(rearrange(codes, "b h w d -> b d h w").to(weight.dtype))


class LatentNorm(nn.BatchNorm2d):
    """Affine-free batch normalisation that uses the running statistics for a single position.

    Processes that train together normalise by the statistics of the joined batch. The running
    statistics stay float32 whatever the module is cast to, since half precision cannot hold a
    variance above 65504, and a training pass without gradient leaves them alone, unless `momentum`
    is None and they are being taken anew.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels, affine=False)

    def forward(self, input: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        if self.training and distributed.process_count() > 1:
            return self._of_joined(input)
        if input.numel() <= self.num_features:
            return F.batch_norm(input, self.running_mean, self.running_var, eps=self.eps)
        if self.training and not self._moves:
            return F.batch_norm(input, None, None, training=True, eps=self.eps)
        return super().forward(input)

    @property
    def _moves(self) -> bool:
        """Whether a training pass changes the running statistics."""
        return torch.is_grad_enabled() or self.momentum is None

    def _of_joined(self, input: Tensor) -> Tensor:
        """torch's SyncBatchNorm, which is made for GPUs alone."""
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        x = rearrange(x, "b d h w -> b h w d")
        count = distributed.total(x.new_tensor(float(x[..., 0].numel())))
        if count <= 1:
            return F.batch_norm(input, self.running_mean, self.running_var, eps=self.eps)
        mean = distributed.total(x.sum((0, 1, 2))) / count
        x = x - mean
        variance = distributed.total(x.square().sum((0, 1, 2))) / count
        if self._moves:
            self._move(mean.detach(), (variance * count / (count - 1)).detach())
        normalized = x * torch.rsqrt(variance + self.eps)
        return rearrange(normalized, "b h w d -> b d h w").to(input.dtype)

    def _move(self, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked += 1
        momentum = self.momentum
        if momentum is None:
            momentum = 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean), momentum)
        self.running_var.lerp_(variance.to(self.running_var), momentum)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        return super()._apply(in_full_precision(fn), recurse)


class ResidualBlock(nn.Module):
    """x + conv1x1(relu(conv3x3(relu(x))))."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, hidden, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(hidden, channels, 1),
        )

    def forward(self, x: Float[Tensor, "b d h w"]) -> Float[Tensor, "b d h w"]:
        return x + self.layers(x)


def crop(images: Float[Tensor, "b c _ _"], like: Images) -> Images:
    """The top left of `images`, in the height and width of `like`."""
    return images[:, :, : like.shape[2], : like.shape[3]]


def latent_norm(config: NetworkConfig, width: int) -> nn.Module:
    """The normalisation of latents of that width, or none."""
    return LatentNorm(width) if config.normalize else nn.Identity()


def residual_layers(config: NetworkConfig) -> list[nn.Module]:
    """Residual blocks and the activation that ends them."""
    blocks = (
        ResidualBlock(config.hidden, config.residual_hidden) for _ in range(config.residual_blocks)
    )
    return [*blocks, nn.ReLU()]


def encoder_layers(config: NetworkConfig) -> list[nn.Module]:
    """Strided convolutions of half and full width, a 3x3, residual blocks."""
    widths = [config.channels, config.hidden // 2] + [config.hidden] * (config.downsamplings - 1)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(widths[-1], config.hidden, 3, padding=1), nn.ReLU()]
    return [*layers, *residual_layers(config)]


def decoder_layers(config: NetworkConfig, width: int) -> list[nn.Module]:
    """The encoder's mirror image from codes of that width, with transposed convolutions."""
    widths = [config.hidden] * config.downsamplings + [config.channels]
    if config.downsamplings > 1:
        widths[-2] = config.hidden // 2
    layers: list[nn.Module] = [nn.Conv2d(width, config.hidden, 3, padding=1)]
    layers += residual_layers(config)
    for before, after in pairwise(widths):
        layers += [nn.ConvTranspose2d(before, after, 4, stride=2, padding=1), nn.ReLU()]
    return layers[:-1]
