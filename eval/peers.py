"""The quantizers of vector-quantize-pytorch as codebooks of softvq, and named models with them.

`python -m eval.compare cifar10-ddcl cifar10-vqtorch` trains one beside our own: search, codes, loss
and gradients are the peer's; network, recipe and evaluation are those of softvq.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from vector_quantize_pytorch import FSQ, SimVQ, VectorQuantize

from softvq import VQVAEConfig
from softvq.data import DataConfig
from softvq.quantizers import Assignment, Codebook, CodebookConfig, register
from softvq.quantizers.base import hard_assignment, replace_value
from softvq.quantizers.initialization import real_tokens, uniform_prototypes
from softvq.training import Experiment

Found = tuple[Float[Tensor, "1 n d"], Int[Tensor, "1 n"], Float[Tensor, ""]]


@dataclass(frozen=True, kw_only=True)
class VectorQuantizeConfig(CodebookConfig):
    """Options of `VectorQuantizeCodebook`, with the values that the package's README shows."""

    decay: float = 0.8
    """Weight of the past in the moving averages, in [0, 1)."""
    commitment_weight: float = 1.0
    """Weight of |z - stopgrad(e)|² / dim."""
    threshold_ema_dead_code: int = 2
    """A code whose moving count of tokens falls below is replaced by a token; 0 revives none."""
    kmeans_iterations: int = 10
    """Lloyd's steps from random tokens, at the start."""
    rotation_trick: bool = False
    """Rotated and scaled gradients (arXiv 2410.06424) in place of straight-through ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_weights(self, "commitment_weight", "threshold_ema_dead_code")
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {self.decay}")
        if self.kmeans_iterations < 1:
            raise ValueError(f"kmeans_iterations must be at least 1, got {self.kmeans_iterations}")


@dataclass(frozen=True, kw_only=True)
class SimVQConfig(CodebookConfig):
    """Options of `SimVQCodebook`, with the defaults of the package."""

    commitment_weight: float = 1.0
    """Weight of the whole loss."""
    input_weight: float = 0.25
    """Weight of |z - stopgrad(e)|² / dim within it; that of |stopgrad(z) - e|² / dim is 1."""
    rotation_trick: bool = True
    """Rotated and scaled gradients (arXiv 2410.06424) in place of straight-through ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_weights(self, "commitment_weight", "input_weight")


@dataclass(frozen=True, kw_only=True)
class FSQConfig(CodebookConfig):
    """Options of `FSQCodebook`."""

    levels: tuple[int, ...] = (8, 8, 8)
    """Values of each scalar, 3 or more; they multiply to `codebook_size`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.levels or min(self.levels) < 3:
            raise ValueError(f"levels must each be at least 3, got {self.levels}")
        if math.prod(self.levels) != self.codebook_size:
            raise ValueError(
                f"levels must multiply to codebook_size {self.codebook_size}, got {self.levels}"
            )


def _check_weights(config: CodebookConfig, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{name} must be 0 or more, got {getattr(config, name)}")


class Peer(Codebook):
    """A quantizer of another package: what it finds, its loss and its gradients, in our fields.

    The values of `quantized` are the codes to the last bit, in training mode too, where the peers
    round. It computes in the dtype of its codes whatever that of z is.
    """

    peer: nn.Module

    def __init__(self, **options) -> None:
        super().__init__(**options)
        with torch.random.fork_rng(devices=[]):
            self.peer = self._build()
        # As many random numbers as our own methods take: a decoder that is built next starts from
        # the same weights for all of them.
        uniform_prototypes(self.codebook_size, self.dim)

    @abstractmethod
    def _build(self) -> nn.Module:
        """The peer that the config describes."""

    @abstractmethod
    def _find(self, tokens: Float[Tensor, "1 n d"], real: Bool[Tensor, "1 n"] | None) -> Found:
        """The peer's output, indices (any number at padding) and loss; `real` is not all False."""

    @property
    @abstractmethod
    def prototypes(self) -> Float[Tensor, "k d"]:
        """The codes as they are now, in the space that the decoder reads."""

    def assign(
        self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
    ) -> Assignment:
        """What the peer finds; in training mode it may move its codes afterwards."""
        dtype, z = z.dtype, self._checked(z, mask)
        self.initialize_once(z, mask)
        # The peer moves its codes in place.
        prototypes = self.prototypes.detach().clone()
        output, indices, loss = self._found(z, mask)
        codes = prototypes[indices].to(z.dtype)
        assignment = hard_assignment(z, codes, indices, loss, mask, self.codebook_size, dtype)
        quantized = replace_value(output, codes)
        if mask is not None:
            quantized = quantized.masked_fill(rearrange(~mask, "... -> ... 1"), 0)
        return assignment._replace(quantized=quantized.to(dtype))

    @torch.no_grad()
    def initialize(self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None) -> None:
        """Leaves the codes as built, where the peer has no start from data.

        Raises ValueError when z holds no real token or a value that is not finite.
        """
        self._start(real_tokens(self._checked(z, mask), mask))
        self._mark_initialized()

    def _start(self, tokens: Float[Tensor, "n d"]) -> None:
        """The peer's own start from data, if it has one."""

    @torch.no_grad()
    def nearest(self, z: Float[Tensor, "*n d"]) -> Int[Tensor, "*n"]:
        """The index that `assign` gives, by the peer's own search."""
        return self._found(self._checked(z), None)[1]

    def _found(
        self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None
    ) -> tuple[Float[Tensor, "*n d"], Int[Tensor, "*n"], Float[Tensor, ""]]:
        """`_find` for any leading axes, for no token at all, and in the precision of the codes."""
        if z.numel() == 0 or (mask is not None and not mask.any()):
            return z, z.new_zeros(z.shape[:-1], dtype=torch.int64), z.new_zeros(())
        tokens = rearrange(z, "... d -> 1 (...) d").to(self.prototypes.dtype)
        real = None if mask is None else rearrange(mask, "... -> 1 (...)")
        with torch.autocast(z.device.type, enabled=False):
            output, indices, loss = self._find(tokens, real)
        indices = indices.clamp_min(0).long().reshape(z.shape[:-1])
        return output.reshape(z.shape).to(z.dtype), indices, loss.to(z.dtype)


class VectorQuantizeCodebook(Peer):
    """`VectorQuantize`: moving averages, k-means start, dead codes revived, and the rotation trick
    of arXiv 2410.06424 if wanted.

    The peer has a loss in training mode alone; in eval mode it is 0, and z gets no gradient.
    """

    config_class = VectorQuantizeConfig
    config: VectorQuantizeConfig
    peer: VectorQuantize

    def _build(self) -> VectorQuantize:
        config = self.config
        return VectorQuantize(
            dim=config.dim,
            codebook_size=config.codebook_size,
            decay=config.decay,
            commitment_weight=config.commitment_weight,
            threshold_ema_dead_code=config.threshold_ema_dead_code,
            # An eval pass would start it as well; `initialize` is the only one that does so here.
            kmeans_init=False,
            kmeans_iters=config.kmeans_iterations,
            rotation_trick=config.rotation_trick,
        )

    @property
    def prototypes(self) -> Float[Tensor, "k d"]:
        """The moving averages, in the space of z."""
        return self.peer.codebook

    def _find(self, tokens: Float[Tensor, "1 n d"], real: Bool[Tensor, "1 n"] | None) -> Found:
        # Left to itself it also learns from a training pass without gradient.
        output, indices, loss = self.peer(tokens, mask=real, freeze_codebook=not self.updates)
        self._release()
        # In eval mode the loss is a buffer of the peer.
        return output, indices, loss.clone()

    def _start(self, tokens: Float[Tensor, "n d"]) -> None:
        """K-means and a first update, as in the peer's first training pass."""
        self.peer._codebook.get_buffer("initted").fill_(False)
        self.peer.train()
        with torch.autocast(tokens.device.type, enabled=False):
            self.peer(rearrange(tokens, "n d -> 1 n d").to(self.prototypes.dtype))
        self.peer.train(self.training)
        self._release()

    def _release(self) -> None:
        """Undoes what a training pass does to the peer: a buffer of it wants a gradient, and a
        copy of the module, once that is cast, fails."""
        self.peer.get_buffer("zero").requires_grad_(False)


class SimVQCodebook(Peer):
    """`SimVQ` (arXiv 2411.02038): a fixed random codebook behind one linear layer that learns."""

    config_class = SimVQConfig
    config: SimVQConfig
    peer: SimVQ

    def _build(self) -> SimVQ:
        return SimVQ(
            dim=self.config.dim,
            codebook_size=self.config.codebook_size,
            rotation_trick=self.config.rotation_trick,
            input_to_quantize_commit_loss_weight=self.config.input_weight,
            commitment_weight=self.config.commitment_weight,
        )

    @property
    def prototypes(self) -> Float[Tensor, "k d"]:
        """The codes behind the linear layer, in the space of z."""
        with torch.autocast(self.initialized.device.type, enabled=False):
            return self.peer.codebook

    def _find(self, tokens: Float[Tensor, "1 n d"], real: Bool[Tensor, "1 n"] | None) -> Found:
        return _of_real(self.peer, tokens, real)


class FSQCodebook(Peer):
    """`FSQ` (arXiv 2309.15505): every scalar of a narrow projection rounded to its levels; no loss.

    Its linear layers take z from `dim` to one scalar for each of the levels, and the codes back:
    codes and z are not in the same space, and the index is not that of the nearest code.
    """

    config_class = FSQConfig
    config: FSQConfig
    peer: FSQ

    def _build(self) -> FSQ:
        return FSQ(levels=self.config.levels, dim=self.config.dim)

    @property
    def prototypes(self) -> Float[Tensor, "k d"]:
        """The grid behind the layer that leads out, in the order of the peer's indices."""
        with torch.autocast(self.initialized.device.type, enabled=False):
            return self.peer.project_out(self.peer.implicit_codebook)

    def _find(self, tokens: Float[Tensor, "1 n d"], real: Bool[Tensor, "1 n"] | None) -> Found:
        return _of_real(lambda x: (*self.peer(x), x.new_zeros(())), tokens, real)


def _of_real(
    find: Callable[[Tensor], Found],
    tokens: Float[Tensor, "1 n d"],
    real: Bool[Tensor, "1 n"] | None,
) -> Found:
    """`find` for a peer that knows no mask: it is shown the real tokens alone."""
    if real is None:
        return find(tokens)
    output, indices, loss = find(rearrange(tokens[real], "m d -> 1 m d"))
    spread = torch.zeros_like(tokens).index_put((real,), rearrange(output, "1 m d -> m d"))
    found = indices.new_zeros(real.shape).index_put((real,), rearrange(indices, "1 m -> m"))
    return spread, found, loss


register("vector_quantize", VectorQuantizeCodebook)
register("simvq", SimVQCodebook)
register("fsq", FSQCodebook)


def _cifar10(quantizer: CodebookConfig) -> Experiment:
    """Data and recipe of cifar10-ema."""
    model = VQVAEConfig(quantizer=quantizer, normalize=False)
    return Experiment(model=model, data=DataConfig(source="cifar10"))


PEERS: dict[str, Experiment] = {
    "cifar10-vqtorch": _cifar10(VectorQuantizeConfig(dim=64, codebook_size=512)),
    "cifar10-vqtorch-rotation": _cifar10(
        VectorQuantizeConfig(dim=64, codebook_size=512, rotation_trick=True)
    ),
    # With the package's rotation trick it collapses here; its paper has straight-through gradients.
    "cifar10-simvq": _cifar10(SimVQConfig(dim=8, codebook_size=512, rotation_trick=False)),
    "cifar10-fsq": _cifar10(FSQConfig(dim=8, codebook_size=512, levels=(8, 8, 8))),
    "cifar10-fsq-k4096": _cifar10(FSQConfig(dim=8, codebook_size=4096, levels=(8, 8, 8, 8))),
}
