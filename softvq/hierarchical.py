"""The two-level VQ-VAE: a coarse grid of codes, and a fine one encoded given the coarse one.

The arrangement is that of VQ-VAE-2 (arXiv 1906.00446, section 3.1); layers and contract are those
of `softvq.autoencoder`.
"""

from dataclasses import dataclass, field

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from softvq.autoencoder import (
    VQVAE,
    Autoencoder,
    Images,
    NetworkConfig,
    VQVAEConfig,
    decoder_layers,
    encoder_layers,
    latent_norm,
    residual_layers,
)
from softvq.quantizers import Assignment, CodebookConfig, DDCLConfig, build


@dataclass(frozen=True, kw_only=True)
class HierarchicalVQVAEConfig(NetworkConfig):
    """Architecture of `HierarchicalVQVAE`; each level has a quantizer of its own."""

    top: CodebookConfig = field(default_factory=lambda: DDCLConfig(dim=64))
    """The quantizer of the coarse grid and its options."""
    bottom: CodebookConfig = field(default_factory=lambda: DDCLConfig(dim=64))
    """The quantizer of the fine grid and its options."""

    @property
    def quantizers(self) -> tuple[CodebookConfig, ...]:
        return (self.top, self.bottom)


class HierarchicalVQVAE(Autoencoder):
    """Two levels, (top, bottom): 4x4 and 8x8 codes for images of 32x32 and two downsamplings.

    The bottom latents are made from the encoder's features beside the decoded top, and the decoder
    reads both codes, the top's brought to the size of the bottom's.
    """

    config: HierarchicalVQVAEConfig

    def __init__(self, config: HierarchicalVQVAEConfig) -> None:
        super().__init__()
        self.config = config
        hidden, top, bottom = config.hidden, config.top.dim, config.bottom.dim
        self.bottom_features = nn.Sequential(*encoder_layers(config))
        self.top_encoder = nn.Sequential(
            nn.Conv2d(hidden, hidden, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, padding=1),
            nn.ReLU(),
            *residual_layers(config),
            nn.Conv2d(hidden, top, 1),
        )
        self.top_norm = latent_norm(config, top)
        self.top_quantizer = build(config.top)
        self.top_decoder = nn.Sequential(
            nn.Conv2d(top, hidden, 3, padding=1),
            *residual_layers(config),
            nn.ConvTranspose2d(hidden, hidden, 4, stride=2, padding=1),
            nn.ReLU(),
        )
        self.bottom_encoder = nn.Conv2d(2 * hidden, bottom, 1)
        self.bottom_norm = latent_norm(config, bottom)
        self.bottom_quantizer = build(config.bottom)
        self.upsample = nn.ConvTranspose2d(top, top, 4, stride=2, padding=1)
        self.decoder = nn.Sequential(*decoder_layers(config, top + bottom))

    @property
    def stride(self) -> int:
        return 2 ** (self.config.downsamplings + 1)

    def latents(self, x: Images, level: int = 0) -> Float[Tensor, "b i j d"]:
        features = self.bottom_features(self._padded(x))
        z = self._top_latents(features)
        if level == 0:
            return z
        return self._bottom_latents(features, self.top_quantizer.assign(z).quantized)

    def encode(self, x: Images) -> tuple[Assignment, ...]:
        """The `Assignment` of the top and that of the bottom."""
        features = self.bottom_features(self._padded(x))
        top = self.top_quantizer.assign(self._top_latents(features))
        bottom = self.bottom_quantizer.assign(self._bottom_latents(features, top.quantized))
        return top, bottom

    def decode(self, quantized: tuple[Float[Tensor, "b _ _ _"], ...]) -> Images:
        top, bottom = (self._channels_first(codes) for codes in quantized)
        return self.decoder(torch.cat([self.upsample(top), bottom], 1))

    def _top_latents(self, features: Tensor) -> Tensor:
        return rearrange(self.top_norm(self.top_encoder(features)), "b d h w -> b h w d")

    def _bottom_latents(self, features: Tensor, top: Tensor) -> Tensor:
        decoded = self.top_decoder(self._channels_first(top))
        z = self.bottom_encoder(torch.cat([features, decoded], 1))
        return rearrange(self.bottom_norm(z), "b d h w -> b h w d")

    def _channels_first(self, codes: Tensor) -> Tensor:
        weight = self.upsample.weight
        return rearrange(codes, "b h w d -> b d h w").to(weight.dtype)


def build_autoencoder(config: NetworkConfig) -> Autoencoder:
    """The autoencoder that `config` describes, flat or of two levels.

    Raises ValueError for an architecture that is not known.
    """
    if isinstance(config, VQVAEConfig):
        return VQVAE(config)
    if isinstance(config, HierarchicalVQVAEConfig):
        return HierarchicalVQVAE(config)
    raise ValueError(f"no autoencoder is built from a {type(config).__name__}")
