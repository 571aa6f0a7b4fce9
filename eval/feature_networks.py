"""The networks whose features Fréchet and kernel distances compare: InceptionV3, with which these
are FID and KID, and AlexNet, with which they are called otherwise. What is compared is in
`eval.quality`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lpips
import torch
import torch.nn.functional as F
from einops import reduce
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from tqdm import tqdm

from softvq.data import to_float
from softvq.metrics import load_perceptual

_AT_ONCE = 64
# The same weights, as torch-fidelity and as pytorch-fid keep them
_CACHED = ("weights-inception-2015-12-05-6726825d.pth", "pt_inception-2015-12-05-6726825d.pth")


@dataclass(frozen=True)
class FeatureNetwork:
    """A network from images to features, and what distances between its features are called."""

    network: nn.Module
    """From uint8 (b, 3, h, w) to float (b, d)."""
    frechet: str
    """Name of the Fréchet distance in reports: `fid` for InceptionV3 alone."""
    kid: str
    """Name of the kernel distance in reports: `kid` for InceptionV3 alone."""
    description: dict[str, Any]
    """Layer, width, side that images are brought to, SHA-256 of the weights in use."""


class AlexNetFeatures(nn.Module):
    """The mean over all positions of AlexNet's last convolution, after its ReLU: 256 values."""

    def __init__(self, perceptual: lpips.LPIPS, resize: int) -> None:
        super().__init__()
        self.scaling_layer, self.net = perceptual.scaling_layer, perceptual.net
        self.resize = resize

    def forward(self, pixels: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b 256"]:
        """Features of images that are first brought to the side `resize`, bilinearly."""
        size = (self.resize, self.resize)
        x = F.interpolate(to_float(pixels), size=size, mode="bilinear", antialias=True)
        return reduce(self.net(self.scaling_layer(x)).relu5, "b d h w -> b d", "mean")


def load_feature_network(inception: str, alexnet: str, resize: int) -> FeatureNetwork:
    """The network whose file is given, or else the one that is cached, InceptionV3 first.

    Nothing is downloaded. Raises ValueError for two files, for one that does not hold the network,
    and if there is none.
    """
    if inception and alexnet:
        raise ValueError("give inception-weights or alexnet-weights, not both")
    folder = Path(torch.hub.get_dir(), "checkpoints")
    cached = [str(folder / name) for name in _CACHED if (folder / name).is_file()]
    if inception or (cached and not alexnet):
        return _inception(inception or cached[0])
    perceptual = load_perceptual(alexnet)
    if isinstance(perceptual, str):
        raise ValueError(f"{perceptual}; give alexnet-weights or inception-weights")
    network = AlexNetFeatures(perceptual, resize).eval()
    description = {
        "network": "torchvision's ImageNet AlexNet, mean of the last convolution after its ReLU",
        "dim": 256,
        "resize": resize,
        "sha256": weights_hash(network),
    }
    return FeatureNetwork(network, "frechet_alexnet", "kid_alexnet", description)


def _inception(path: str) -> FeatureNetwork:
    """The network that FID is defined by, with its own way of resizing."""
    try:
        # torch-fidelity would execute a pickle; what passes here holds tensors alone.
        torch.load(path, map_location="cpu", weights_only=True)
        metric = FrechetInceptionDistance(feature_extractor_weights_path=path, antialias=False)
    except ModuleNotFoundError:
        raise ValueError("InceptionV3 needs torch-fidelity: pip install torch-fidelity") from None
    except FileNotFoundError:
        raise ValueError(f"inception weights {path}: no such file") from None
    except Exception as error:  # the parser of a foreign file may raise anything
        line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ValueError(f"inception weights {path}: not those of FID ({line})") from None
    description = {
        "network": "InceptionV3 of FID, its 2048 pooled values",
        "dim": 2048,
        "resize": 299,
        "sha256": weights_hash(metric.inception),
    }
    return FeatureNetwork(metric.inception, "fid", "kid", description)


def weights_hash(network: nn.Module) -> str:
    """SHA-256 over names and values of everything in the network's state, in their order."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def features(
    network: nn.Module, pixels: UInt8[Tensor, "n 3 h w"], device: torch.device, name: str
) -> Float[Tensor, "n d"]:
    """The features of all images on the CPU, in float64; `name` is shown beside the progress."""
    parts = []
    with tqdm(total=len(pixels), desc=f"features, {name}", unit="images", leave=False) as bar:
        for part in pixels.split(_AT_ONCE):
            parts.append(network(part.to(device)).double().cpu())
            bar.update(len(part))
    return torch.cat(parts)
