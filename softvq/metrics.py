"""Codebook usage and reconstruction quality, exact over a whole split, any batching and any ranks.

Separation and temperature belong to the quantizers, the logged names to the training program.
"""

import math
import warnings
from pathlib import Path

import lpips
import torch
from einops import rearrange, reduce, repeat
from jaxtyping import Float, Int
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.image import structural_similarity_index_measure

_WINDOW = 11  # side of SSIM's Gaussian window, in pixels
ALEXNET_SIDE = 31  # the smallest image whose last pooling still has a full 3 x 3 window


class _SplitSums(Metric):
    full_state_update = False

    @property
    def update_called(self) -> bool:
        """Always: torchmetrics would warn on a rank whose share of the split is empty."""
        return True


class CodebookUsage(_SplitSums):
    """How evenly a split uses the codes, from summed counts and never from per-batch figures.

    `compute()` returns scalar tensors:
    `utilisation` (0 to 1; share of codes that are the most probable code of at least one token),
    `perplexity` (1 to k; exp of the entropy of the argmax histogram),
    `perplexity_soft` (1 to k; exp of the entropy of the mean assignment weights, k at collapse),
    `bits_per_code` (0 to log2 k; entropy of the argmax histogram) and `tokens` (their number).
    It raises ValueError when no token was seen, and when `usage` does not sum to the number of
    tokens: means over a batch would make the result depend on the batch size.
    """

    counts: Tensor
    usage: Tensor

    def __init__(self, codebook_size: int, sync_on_compute: bool = True) -> None:
        """`sync_on_compute` is for counts that are not those of all processes already."""
        super().__init__(sync_on_compute=sync_on_compute)
        self.codebook_size = codebook_size
        self.add_state("counts", torch.zeros(codebook_size, dtype=torch.int64), "sum")
        self.add_state("usage", torch.zeros(codebook_size, dtype=torch.float64), "sum")

    def update(
        self, counts: Int[Tensor, " k"] | Float[Tensor, " k"], usage: Float[Tensor, " k"]
    ) -> None:
        """Add one batch: argmax counts and summed assignment weights, over its real tokens."""
        if len(counts) != self.codebook_size:
            raise ValueError(f"expected {self.codebook_size} codes, got counts of {len(counts)}")
        self.counts += counts.to(torch.int64)
        self.usage += usage

    def compute(self) -> dict[str, Tensor]:
        """The figures of the class docstring, over everything seen since the last reset.

        Raises ArithmeticError where weights were nan.
        """
        tokens = self.counts.sum()
        if tokens == 0:
            raise ValueError("no tokens seen: the split is empty or wholly masked")
        total = self.usage.sum()
        if total.isnan():
            raise ArithmeticError("the usage is nan: the model has latents that are not finite")
        if not (total - tokens).abs() <= 1e-2 * tokens:
            raise ValueError(
                f"usage sums to {total:.6g} over {tokens} tokens: give sums, not means"
            )
        entropy = torch.special.entr(self.counts / tokens.double()).sum()
        return {
            "utilisation": (self.counts > 0).double().mean(),
            "perplexity": entropy.exp(),
            "perplexity_soft": torch.special.entr(self.usage / total).sum().exp(),
            "bits_per_code": entropy / math.log(2),
            "tokens": tokens,
        }


def load_perceptual(weights: str = "") -> lpips.LPIPS | str:
    """LPIPS 0.1 with AlexNet, for any number of `Reconstruction`s, or the reason why there is none.

    `weights` names a file of torchvision's ImageNet AlexNet, with or without its classifier; the
    default is the copy in torchvision's cache, if there is one, and nothing is ever downloaded. The
    linear heads come with the `lpips` package. Raises ValueError for a named file that is missing,
    or whose contents are not that network's; nothing in a file is ever executed.
    Source: Zhang et al. 2018, "The Unreasonable Effectiveness of Deep Features".
    """
    path = Path(weights or Path(torch.hub.get_dir(), "checkpoints", "alexnet-owt-7be5be79.pth"))
    if not path.is_file():
        if weights:
            raise ValueError(f"LPIPS weights {path}: no such file")
        return f"no AlexNet weights were named, and there is no {path}"
    # the constructor passes arguments that torchvision deprecates, and draws random weights
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", UserWarning)
        network = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)
    _fill_backbone(network, path)
    return network.requires_grad_(False)


def _fill_backbone(network: lpips.LPIPS, path: Path) -> None:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # the parser of a foreign file may raise anything
        raise ValueError(f"LPIPS weights {path}: not a file of plain tensors") from None
    if not isinstance(state, dict):
        raise ValueError(f"LPIPS weights {path}: holds a {type(state).__name__}, no state dict")
    # lpips calls torchvision's features.3.weight slice2.3.weight
    wanted = {f"features.{n.split('.', 1)[1]}": p for n, p in network.net.named_parameters()}
    for key in state:
        if key not in wanted and not str(key).startswith("classifier."):
            raise ValueError(f"LPIPS weights {path}: unexpected entry {key!r}")
    for key, parameter in wanted.items():
        if getattr(state.get(key), "shape", None) != parameter.shape:
            shape = tuple(parameter.shape)
            raise ValueError(f"LPIPS weights {path}: no entry {key!r} of shape {shape}")
        parameter.data.copy_(state[key])


class Reconstruction(_SplitSums):
    """How close reconstructions are to their images, both `b c h w` in [-1, 1]; nothing is clipped.

    `compute()` returns scalar tensors:
    `mse` (mean squared error over every pixel and channel of the split),
    `psnr` (dB, for the range of 2; from that mean, so it is not a mean over images; inf if exact),
    `nmse` (squared error / squared deviation from the split's mean colour: 1 is no better than it),
    `ssim` (at most 1; mean over images; Wang et al. 2004, eq. 13; 11 x 11 window, edges mirrored),
    `lpips` (0 is equal; mean over images at native size. The network was fitted on 64 x 64
    patches: published values for smaller images are often of enlarged ones, and differ).
    It raises ValueError when no image was seen.
    A value that cannot be had is left out, and `absent` then maps its name to the reason: no `ssim`
    for images under 11 x 11, no `lpips` under 31 x 31 or without weights, no `nmse` for a single
    colour. Sums are float64; SSIM's windows too, save for float32 on a CPU; LPIPS is float32.
    """

    squared_error: Tensor
    colour: Tensor
    colour_squared: Tensor
    ssim_sum: Tensor
    lpips_sum: Tensor
    pixels: Tensor
    images: Tensor
    ssim_images: Tensor
    lpips_images: Tensor

    def __init__(
        self,
        perceptual: lpips.LPIPS | str = "not asked for",
        channels: int = 3,
        with_ssim: bool = True,
    ) -> None:
        """`perceptual` comes from `load_perceptual`, `channels` is the number in the images.

        SSIM costs more than a small autoencoder does; `with_ssim=False` leaves it out.
        """
        super().__init__()
        if channels not in (1, 3):
            perceptual = f"LPIPS takes 1 or 3 channels, not {channels}"
        self.channels = channels
        self.perceptual = perceptual
        self.with_ssim = with_ssim
        self.absent: dict[str, str] = {}
        for name in ("squared_error", "colour", "colour_squared"):
            self.add_state(name, torch.zeros(channels, dtype=torch.float64), "sum")
        for name in ("ssim_sum", "lpips_sum", "pixels", "images", "ssim_images", "lpips_images"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), "sum")

    def update(
        self, reconstruction: Float[Tensor, "b c h w"], image: Float[Tensor, "b c h w"]
    ) -> None:
        """Add one batch. Raises ValueError for another number of channels or unequal shapes."""
        if reconstruction.shape != image.shape:
            shapes = f"{tuple(reconstruction.shape)} and {tuple(image.shape)}"
            raise ValueError(f"reconstruction and image must have the same shape, got {shapes}")
        b, c, h, w = image.shape
        if c != self.channels:
            raise ValueError(f"expected images of {self.channels} channels, got {c}")
        x, y = image.double(), reconstruction.double()
        self.squared_error += reduce((y - x) ** 2, "b c h w -> c", "sum")
        self.colour += reduce(x, "b c h w -> c", "sum")
        self.colour_squared += reduce(x**2, "b c h w -> c", "sum")
        self.images += b
        self.pixels += b * h * w
        with torch.autocast(image.device.type, enabled=False):
            if self.with_ssim and b and min(h, w) >= _WINDOW:
                self.ssim_sum += _ssim(reconstruction, image).double().sum()
                self.ssim_images += b
            if b and min(h, w) >= ALEXNET_SIDE and not isinstance(self.perceptual, str):
                self.lpips_sum += _lpips(self.perceptual, reconstruction, image).double().sum()
                self.lpips_images += b

    def compute(self) -> dict[str, Tensor]:
        """The figures of the class docstring, over everything seen since the last reset."""
        if self.images == 0:
            raise ValueError("no images seen: the split is empty")
        mse = self.squared_error.sum() / (self.pixels * self.channels)
        deviation = (self.colour_squared - self.colour**2 / self.pixels).sum()
        values = {
            "mse": mse,
            "psnr": 10 * torch.log10(2.0**2 / mse),
            "nmse": self.squared_error.sum() / deviation,
            "ssim": self.ssim_sum / self.images,
            "lpips": self.lpips_sum / self.images,
        }
        small = "some images are smaller than {0} x {0} pixels".format
        missing = self.perceptual if isinstance(self.perceptual, str) else small(ALEXNET_SIDE)
        no_ssim = small(_WINDOW) if self.with_ssim else "not asked for"
        rounding = 1e-12 * self.colour_squared.sum()
        self.absent = {
            **({"nmse": "all pixels have the same colour"} if deviation <= rounding else {}),
            **({"ssim": no_ssim} if self.ssim_images < self.images else {}),
            **({"lpips": missing} if self.lpips_images < self.images else {}),
        }
        return {name: value for name, value in values.items() if name not in self.absent}


def _ssim(reconstruction: Tensor, image: Tensor) -> Tensor:
    # float64 convolutions are 20 times slower on a CPU; elsewhere float32 may mean TF32, which
    # ruins the differences of second moments
    least = torch.float32 if image.device.type == "cpu" else torch.float64
    x, y = (t.to(torch.promote_types(t.dtype, least)) for t in (image, reconstruction))
    values = structural_similarity_index_measure(y, x, reduction="none", data_range=2.0)
    assert isinstance(values, Tensor)
    return values


def _lpips(network: lpips.LPIPS, reconstruction: Tensor, image: Tensor) -> Tensor:
    network.eval()  # its heads hold dropout, which train() on an enclosing module would switch on
    copies = 3 // image.shape[1]
    x, y = (repeat(t.float(), "b c h w -> b (n c) h w", n=copies) for t in (image, reconstruction))
    return rearrange(network(y, x), "b 1 1 1 -> b")
