"""Temperature policies of the DDCL codebook: fixed, annealed in units of Tc, steered by entropy.

Each is a small config with two pure rules, `initial` and `next`; the state they read (temperature,
progress, critical temperature) is kept by `softvq.quantizers.ddcl`.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from softvq.ddcl import critical_temperature, soft_assignment

Scalar = Float[Tensor, ""]

# Above Tc every prototype falls into the mean (detached gradient); far below it, weights are hard.
_HOTTEST = 0.9
_COLDEST = 1e-6
# Of log(T / Tc) from 0: the numbers of float32 end a little further on.
_FARTHEST = 80
# One step moves log T by at most this much: a single odd batch must not undo the schedule.
_LARGEST_STEP = 0.2


@dataclass(frozen=True, kw_only=True)
class FixedTemperature:
    """The same T from first to last, in units of squared distance: the paper's choice."""

    value: float = 1.0
    """Temperature, positive; held to 1e-34..3e34 in float32, beyond which nothing changes."""

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf:
            raise ValueError(f"value must be positive and finite, got {self.value}")

    def initial(self, z: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"]) -> Scalar:
        return _representable(self.value, prototypes)

    def next(
        self, temperature: Scalar, progress: Scalar, entropy: Scalar, critical: Scalar, k: int
    ) -> Scalar:
        return _representable(self.value, temperature)


@dataclass(frozen=True, kw_only=True)
class AnnealedTemperature:
    """T falls geometrically from `start` to `end`, in units of Tc = 2 lambda_max(Cov z)."""

    start: float = 0.5
    """T / Tc at the beginning; from 1 upwards (2 with the full gradient) prototypes merge."""
    end: float = 0.01
    """T / Tc at the end of the cooling."""
    cooling: float = 0.7
    """Fraction of the schedule, in (0, 1], that the cooling takes; T / Tc is constant after it."""

    def __post_init__(self) -> None:
        if not 0 < self.end <= self.start < math.inf:
            raise ValueError(f"start and end need 0 < end <= start, got {self.start}, {self.end}")
        if not 0 < self.cooling <= 1:
            raise ValueError(f"cooling must lie in (0, 1], got {self.cooling}")

    def initial(self, z: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"]) -> Scalar:
        critical = critical_temperature(z).to(prototypes)
        return self._cooled(critical, torch.zeros_like(critical))

    def next(
        self, temperature: Scalar, progress: Scalar, entropy: Scalar, critical: Scalar, k: int
    ) -> Scalar:
        return self._cooled(critical, (progress / self.cooling).clamp_max(1))

    def _cooled(self, critical: Scalar, done: Scalar) -> Scalar:
        """T when that share of the cooling is done."""
        ratio = math.log(self.start) + done * (math.log(self.end) - math.log(self.start))
        return _positive(critical * ratio.clamp(-_FARTHEST, _FARTHEST).exp())


@dataclass(frozen=True, kw_only=True)
class EntropyTemperature:
    """T is steered so that exp(mean entropy of q) follows a schedule; scale-free.

    It falls geometrically from `start` to `warm`, and in the rest of the schedule, after
    `hardening`, to `end`: a cold codebook passes no gradient on but for tokens between two codes,
    so it is made hard only when the training is nearly over. The perplexity asked for is never
    above sqrt(k), and T stays below 0.9 Tc.
    """

    start: float = 4.0
    """Perplexity of a token's weights at the beginning, at least 1."""
    warm: float = 1.3
    """Perplexity of a token's weights when the hardening begins."""
    end: float = 1.02
    """Perplexity of a token's weights at the end; it must be above 1, which would be hard."""
    hardening: float = 0.9
    """Fraction of the schedule, in (0, 1), after which the weights become hard."""
    gain: float = 0.25
    """Share of the relative error in entropy by which log T moves in one step, in (0, 1]."""

    def __post_init__(self) -> None:
        if not 1 < self.end <= self.warm <= self.start < math.inf:
            raise ValueError(
                "start, warm and end need 1 < end <= warm <= start, "
                f"got {self.start}, {self.warm}, {self.end}"
            )
        if not 0 < self.hardening < 1:
            raise ValueError(f"hardening must lie in (0, 1), got {self.hardening}")
        if not 0 < self.gain <= 1:
            raise ValueError(f"gain must lie in (0, 1], got {self.gain}")

    def initial(self, z: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"]) -> Scalar:
        """Solves for the temperature of the first target by bisection of log T."""
        critical = critical_temperature(z).to(prototypes)
        target = self._target(torch.zeros_like(critical), len(prototypes))
        low, high = (_positive(critical * bound).log() for bound in (_COLDEST, _HOTTEST))
        for _ in range(30):
            middle = (low + high) / 2
            entropy = soft_assignment(z, prototypes, middle.exp()).entropy.mean()
            low = torch.where(entropy < target, middle, low)
            high = torch.where(entropy < target, high, middle)
        return high.exp()

    def next(
        self, temperature: Scalar, progress: Scalar, entropy: Scalar, critical: Scalar, k: int
    ) -> Scalar:
        tiny = torch.finfo(temperature.dtype).tiny
        error = torch.log(self._target(progress, k) / entropy.clamp_min(tiny))
        step = (self.gain * error).clamp(-_LARGEST_STEP, _LARGEST_STEP)
        coldest, hottest = _positive(critical * _COLDEST), _positive(critical * _HOTTEST)
        return (temperature * step.exp()).clamp(coldest, hottest)

    def _target(self, progress: Scalar, k: int) -> Scalar:
        """The entropy asked for, in nats."""
        cooled = (progress / self.hardening).clamp_max(1)
        hardened = ((progress - self.hardening) / (1 - self.hardening)).clamp_min(0)
        log_perplexity = (
            math.log(self.start)
            + cooled * math.log(self.warm / self.start)
            + hardened * math.log(self.end / self.warm)
        )
        return log_perplexity.clamp_max(math.log(k) / 2)


def _positive(temperature: Scalar) -> Scalar:
    """Tokens that are all equal have Tc = 0, and no temperature matters to them."""
    info = torch.finfo(temperature.dtype)
    return temperature.clamp(1e4 * info.tiny, 1e-4 * info.max)


def _representable(value: float, like: Tensor) -> Scalar:
    """A Python number may be smaller or larger than any that the dtype holds."""
    return _positive(like.new_tensor(value))


TemperaturePolicy = EntropyTemperature | AnnealedTemperature | FixedTemperature
