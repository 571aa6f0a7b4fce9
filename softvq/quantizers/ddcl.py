"""The DDCL codebook: soft assignment with a temperature policy, and the gradients of both.

The formulas are in `softvq.ddcl`, the policies in `softvq.temperature`; here they become a module.
"""

import warnings
from dataclasses import dataclass, field

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softvq import ddcl, distributed
from softvq.quantizers.base import (
    Assignment,
    Codebook,
    CodebookConfig,
    count_codes,
    masked_mean,
    moments,
    replace_value,
)
from softvq.quantizers.initialization import (
    Start,
    check_start,
    kmeans_plus_plus,
    real_tokens,
    tokens_in_place_of,
    uniform_prototypes,
)
from softvq.temperature import EntropyTemperature, TemperaturePolicy

# Weight of the past in the running averages, and forward passes between two looks at T / Tc.
_DECAY = 0.99
_LOOK_EVERY = 100


@dataclass(frozen=True, kw_only=True)
class DDCLConfig(CodebookConfig):
    """Options of `DDCLCodebook`."""

    temperature: TemperaturePolicy = field(default_factory=EntropyTemperature)
    """How the temperature moves over the schedule."""
    gradient: ddcl.Gradient = "detached"
    """How L_q is differentiated: with the weights fixed (soft k-means), or through them (full;
    twice the work)."""
    commitment_weight: float = 0.25
    """The encoder's share of L_q / dim; the prototypes' share is 1."""
    usage_weight: float = 0.1
    """Weight of KL(mean weights || uniform)."""
    straight_through_weight: float = 1.0
    """Share of the decoder's gradient that reaches z as it is, beside the whole of it that comes
    through the soft centroid; where the decoder sees the code alone. 0 is the paper's DDCL, which
    cannot move z out of the span of the codes around it."""
    hard_forward_after: float = 0.0
    """Fraction of the schedule after which the decoder sees the most probable code in place of
    the soft centroid: 0 is always, 1 never."""
    dead_below: float = 0.1
    """A code whose moving share of the tokens falls below this part of 1 / codebook_size is
    replaced by a token of the batch; 0 revives none."""
    init: Start = "data"
    """Start from k-means++ seeds of the first tokens, or from U(-1/k, 1/k)."""
    schedule_steps: int = 10_000
    """Training forward passes that temperature and hard forward are scheduled over; the module's
    attribute of that name changes it, and is part of its state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ddcl.check_gradient(self.gradient)
        check_start(self.init)
        if self.schedule_steps < 1:
            raise ValueError(f"schedule_steps must be at least 1, got {self.schedule_steps}")
        for name in ("commitment_weight", "usage_weight", "straight_through_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not 0 <= self.dead_below < 1:
            raise ValueError(f"dead_below must lie in [0, 1), got {self.dead_below}")
        if not 0 <= self.hard_forward_after <= 1:
            raise ValueError(
                f"hard_forward_after must lie in [0, 1], got {self.hard_forward_after}"
            )


class DDCLCodebook(Codebook):
    """Soft vector quantization by DDCL: `DDCLCodebook(dim=256, codebook_size=512)`.

    The prototypes are a parameter; give them a learning rate 10 to 100 times that of the encoder
    (eps = 0.1 to 0.01). The temperature and the hard forward follow a schedule of
    `schedule_steps` forward passes in training mode, which may be set on the module. Warns once
    when the temperature is so high that the prototypes merge.
    """

    config_class = DDCLConfig
    config: DDCLConfig
    temperature: Tensor
    critical: Tensor
    step: Tensor
    length: Tensor
    covariance: Tensor
    direction: Tensor
    share: Tensor

    def __init__(self, **options) -> None:
        super().__init__(**options)
        k, d = self.config.codebook_size, self.config.dim
        self.prototypes = nn.Parameter(uniform_prototypes(k, d))
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("critical", torch.zeros(()))
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("covariance", torch.zeros(d, d))
        self.register_buffer("direction", torch.full((d,), d**-0.5))
        self.register_buffer("share", torch.full((k,), 1 / k))
        self.register_buffer("length", torch.tensor(self.config.schedule_steps))
        self._calls = 0
        self._warned = False

    def assign(
        self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
    ) -> Assignment:
        """Soft assignment with its losses; in training mode also one step of the schedule."""
        dtype, z = z.dtype, self._checked(z, mask)
        self.initialize_once(z, mask)
        # Copies that autograd may keep while the schedule moves T and a dead code is replaced.
        temperature, prototypes = self.temperature.clone(), self.prototypes.clone()
        soft = ddcl.soft_assignment(z, prototypes, temperature, mask, self.config.commitment_weight)
        assignment = Assignment(
            quantized=self._decoder_input(z, soft).to(dtype),
            soft=soft.mu.to(dtype),
            indices=soft.indices,
            loss=self._loss(z, prototypes, soft, temperature, mask),
            reconstruction=masked_mean(soft.reconstruction, mask),
            variance=masked_mean(soft.variance, mask),
            entropy=masked_mean(soft.entropy, mask),
            **moments(z, mask),
            usage=soft.usage,
            counts=count_codes(soft.indices, self.codebook_size),
            revived=soft.indices.new_zeros(()),
        )
        if self.updates:
            self._advance(z, mask, assignment)
            return assignment._replace(revived=self._revive(z, assignment))
        return assignment

    def weights(
        self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None
    ) -> Float[Tensor, "*n k"]:
        """The weights of every token at the present temperature, differentiable; 0 where masked.

        This is the one place that holds them all, n x k; `assign` never does.
        """
        z = self._checked(z, mask)
        q = ddcl.assignment_weights(z, self.prototypes, self.temperature.clone())
        return q if mask is None else torch.where(rearrange(mask, "... -> ... 1"), q, 0)

    def _decoder_input(self, z: Tensor, soft: ddcl.SoftAssignment) -> Tensor:
        """The code, with gradients of mu and a share of z's; in training, before its time, mu."""
        after = self.config.hard_forward_after
        if self.training and after == 1:
            return soft.mu
        source = soft.mu
        if self.config.straight_through_weight:
            source = source + self.config.straight_through_weight * z
        hard = replace_value(source, self.indices_to_codes(soft.indices))
        if not self.training or after == 0:
            return hard
        return torch.where(self.progress >= after, hard, soft.mu)

    @property
    def progress(self) -> Float[Tensor, ""]:
        """Fraction of the schedule that is done, in [0, 1]."""
        return (self.step / self.length).clamp_max(1)

    @property
    def schedule_steps(self) -> int:
        """Training forward passes that the schedule is long. Setting it raises ValueError for 0."""
        return int(self.length)

    @schedule_steps.setter
    def schedule_steps(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"schedule_steps must be at least 1, got {steps}")
        self.length.fill_(steps)

    @torch.no_grad()
    def initialize(self, z: Float[Tensor, "*n d"], mask: Bool[Tensor, "*n"] | None = None) -> None:
        """Places the prototypes by k-means++ seeds, or leaves them as built if `init` is uniform.

        The temperature starts where its policy says.

        Raises ValueError when z holds no real token or a value that is not finite.
        """
        tokens = real_tokens(self._checked(z, mask), mask)
        if self.config.init == "data":
            seeds = kmeans_plus_plus(tokens, self.codebook_size)
            self.prototypes.copy_(distributed.from_first(seeds))
        self.covariance.copy_(ddcl.covariance(tokens))
        self.direction.copy_(torch.linalg.eigh(self.covariance).eigenvectors[:, -1])
        self.critical.copy_(2 * torch.linalg.vector_norm(self._image()))
        sample = tokens[: 2**13]
        self.temperature.copy_(self.config.temperature.initial(sample, self.prototypes))
        self.share.fill_(1 / self.codebook_size)
        self._mark_initialized()

    def _loss(
        self,
        z: Tensor,
        prototypes: Tensor,
        soft: ddcl.SoftAssignment,
        temperature: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        config, competing = self.config, soft
        if config.gradient == "full":
            # Another soft assignment, or the gradient of the decoder would get this share as well.
            shared = z.detach() + config.commitment_weight * (z - z.detach())
            competing = ddcl.soft_assignment(shared, prototypes, temperature, mask)
        competitive = ddcl.competitive_loss(competing, config.gradient).loss
        loss = self._mean(competitive, mask) / self.dim
        usage = distributed.total(soft.usage) if self._trains else soft.usage
        return loss + config.usage_weight * ddcl.divergence_from_uniform(usage)

    @torch.no_grad()
    def _advance(self, z: Tensor, mask: Tensor | None, assignment: Assignment) -> None:
        """One step of the schedule: the running covariance, Tc by a power iteration, then T."""
        self.step += 1
        count = assignment.counts.sum()
        everywhere = distributed.total(count)
        covariance = distributed.joined_covariance(ddcl.covariance(z, mask), assignment.mean, count)
        covariance = covariance.to(self.covariance)
        entropy = distributed.total(assignment.entropy * count) / everywhere.clamp_min(1)
        # Without a real token the batch says nothing about covariance and entropy, and with one
        # that is not finite it would destroy them; that token shows in the loss already.
        sound = (everywhere > 0) & covariance.isfinite().all() & entropy.isfinite()
        moved = self.covariance.lerp(covariance, 1 - _DECAY)
        self.covariance.copy_(torch.where(sound, moved, self.covariance))
        image = self._image()
        length = torch.linalg.vector_norm(image)
        self.direction.copy_(torch.where(length > 0, image / length, self.direction))
        self.critical.copy_(2 * length)
        temperature = self.config.temperature.next(
            self.temperature,
            self.progress,
            entropy,
            self.critical,
            self.codebook_size,
        )
        self.temperature.copy_(torch.where(sound, temperature, self.temperature))
        if not torch.compiler.is_compiling():
            self._look_at_temperature()

    @torch.no_grad()
    def _revive(self, z: Tensor, assignment: Assignment) -> Tensor:
        """Moves the dead codes to tokens and returns how many those were.

        Far from all tokens a code has no weight, and so no gradient that could bring it back.
        """
        if self.config.dead_below == 0:
            return assignment.revived
        counts = distributed.total(assignment.counts).to(self.share)
        total = counts.sum()
        moved = self.share.lerp(counts / total.clamp_min(1), 1 - _DECAY)
        self.share.copy_(torch.where(total > 0, moved, self.share))
        just_alive = self.config.dead_below / self.codebook_size
        tokens = rearrange(z, "... d -> (...) d")
        real = rearrange(assignment.indices >= 0, "... -> (...)") & tokens.isfinite().all(1)
        dead = (self.share < just_alive) & (distributed.total(real.sum()) > 0)
        if distributed.row_count(tokens):
            picked = tokens_in_place_of(dead, tokens, real)
            rows = rearrange(dead, "k -> k 1")
            self.prototypes.copy_(torch.where(rows, picked, self.prototypes))
            self.share.masked_fill_(dead, just_alive)
        return dead.sum()

    def _image(self) -> Tensor:
        """Cov(z) v for the direction v, in full precision under autocast as well."""
        with torch.autocast(self.covariance.device.type, enabled=False):
            return einsum(self.covariance, self.direction, "i j, j -> i")

    def _look_at_temperature(self) -> None:
        self._calls += 1
        if self._warned or self._calls % _LOOK_EVERY != 1:
            return
        threshold = self.critical * (1 if self.config.gradient == "detached" else 2)
        if self.temperature > threshold > 0:
            self._warned = True
            warnings.warn(
                f"temperature {self.temperature.item():.3g} is above {threshold.item():.3g}, the "
                f"threshold over which all prototypes merge for gradient={self.config.gradient!r}; "
                "lower it, or use the entropy-steered policy",
                stacklevel=2,
            )
