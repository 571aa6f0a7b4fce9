"""A small encoder and its prototypes that learn together on clusters, several seeds at once.

The grid of ratios of learning rates over it is `eval.stability`; the formulas are in `softvq.ddcl`.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from eval.clustering import clustering_scores
from eval.ensemble import ensemble_assignment
from eval.experiment import SplitCheck
from eval.synthetic import simplex_clusters
from softvq.ddcl import (
    Gradient,
    competitive_loss,
    covariance,
    critical_temperature,
    distinct_codes,
    separation,
)
from softvq.quantizers.initialization import kmeans_plus_plus

Task = Literal["none", "classes", "reconstruction"]
CLUSTERS, DIM, WIDTH, HIDDEN = 6, 10, 4, 32
# A run is collapsed when the encoder's outputs keep less than this share of their first variance...
OPEN = 0.01
# ... or fewer than half of the prototypes are further apart than this, in sqrt(trace Cov z)
APART = 0.01


class Member(NamedTuple):
    """What is trained at once for one point of the grid."""

    commitment: float
    seed: int


class Case(NamedTuple):
    """One point of the grid; its commitments and seeds are trained at once."""

    task: Task
    gradient: Gradient
    eps: float


class Joint(nn.Module):
    """Encoders of one hidden layer, their prototypes and linear heads: one of each a member.

    A member is a commitment and a seed; what belongs to one never touches another. `tokens` are in
    one batch of each, and `temperature` is fixed, in units of Tc at the start.
    """

    first: Tensor
    second: Tensor
    head: Tensor

    def __init__(
        self, case: Case, members: Sequence[Member], tokens: int, temperature: float
    ) -> None:
        super().__init__()
        self.case, self.members = case, members
        data = [simplex_clusters(CLUSTERS, tokens, DIM, 0.8, m.seed) for m in members]
        self.x = torch.stack([clusters.z.float() for clusters in data])
        self.labels = data[0].labels
        self.commitments = torch.tensor([m.commitment for m in members])
        outputs = CLUSTERS if case.task == "classes" else DIM
        sizes = {"first": (DIM, HIDDEN), "second": (HIDDEN, WIDTH), "head": (WIDTH, outputs)}
        for name, (inputs, width) in sizes.items():
            layers = [_layer(inputs, width, m.seed) for m in members]
            self.register_parameter(name, nn.Parameter(torch.stack(layers)))
        with torch.no_grad():
            z = self.encode()
        starts = [_seeds_of(own, m.seed) for own, m in zip(z, members, strict=True)]
        self.prototypes = nn.Parameter(torch.stack(starts))
        self.start = torch.stack([covariance(own).trace() for own in z])
        critical = torch.stack([critical_temperature(own) for own in z])
        self.temperature = temperature * critical

    def encode(self) -> Float[Tensor, "m n d"]:
        """The tokens of every member."""
        return _affine(_affine(self.x, self.first).tanh(), self.second)

    def decode(self, codes: Float[Tensor, "m n d"]) -> Float[Tensor, "m n o"]:
        """Logits of the classes, or the reconstruction."""
        return _affine(codes, self.head)

    def losses(self) -> Float[Tensor, "m"]:
        """Of every member, the task's loss plus L_q in units of the first variance of z."""
        case, z = self.case, self.encode()
        # Scales the encoder's gradient of L_q and leaves its value
        shared = z.detach() + rearrange(self.commitments, "m -> m 1 1") * (z - z.detach())
        soft = ensemble_assignment(shared, self.prototypes, self.temperature)
        loss = competitive_loss(soft, case.gradient).loss.mean(-1) / self.start
        if case.task == "none":
            return loss
        output = self.decode(ensemble_assignment(z, self.prototypes, self.temperature).mu)
        if case.task == "classes":
            labels = repeat(self.labels, "n -> m n", m=len(output))
            scores = rearrange(output, "m n o -> m o n")
            return loss + functional.cross_entropy(scores, labels, reduction="none").mean(-1)
        return loss + (output - self.x).square().mean((1, 2)) / self.x.var((1, 2))

    @torch.no_grad()
    def measures(self, check: SplitCheck) -> list[dict[str, float]]:
        """The state of every member; separations in sqrt(trace Cov z) of the start."""
        everything = self.encode()
        soft = ensemble_assignment(everything, self.prototypes, self.temperature)
        output = self.decode(soft.mu)
        codes = torch.stack([p[i] for p, i in zip(self.prototypes, soft.indices, strict=True)])
        hard = self.decode(codes)
        found = []
        for i, (z, p, temperature) in enumerate(
            zip(everything, self.prototypes, self.temperature, strict=True)
        ):
            check.add(z, p, temperature)
            own = _state(z, p, temperature, self.start[i])
            scores = clustering_scores(self.labels.numpy(), soft.indices[i].numpy())
            own["accuracy"] = scores["accuracy"]
            if self.case.task == "classes":
                right = output[i].argmax(1) == self.labels
                own["task_accuracy"] = right.double().mean().item()
            elif self.case.task == "reconstruction":
                variance = covariance(self.x[i]).trace()
                for name, decoded in (("nmse_soft", output[i]), ("nmse_hard", hard[i])):
                    error = (decoded - self.x[i]).square().sum(1).mean()
                    own[name] = (error / variance).item()
            found.append(own)
        return found


def _state(z: Tensor, p: Tensor, temperature: Tensor, start: Tensor) -> dict[str, float]:
    """Collapse of encoder and prototypes, without what depends on labels."""
    apart, trace, unit = separation(p), covariance(z).trace(), start.sqrt()
    ratio = temperature / critical_temperature(z).clamp_min(torch.finfo(z.dtype).tiny)
    distinct = distinct_codes(p, APART * trace.sqrt())
    return {
        "separation_min": (apart.minimum / unit).item(),
        "separation_mean": (apart.mean / unit).item(),
        "trace": (trace / start).item(),
        "temperature_ratio": ratio.item(),
        "distinct_codes": distinct,
        "collapsed": float(bool(trace < OPEN * start) or distinct < CLUSTERS / 2),
    }


def _layer(inputs: int, width: int, seed: int) -> Float[Tensor, "i o"]:
    """Weights and, as the last row, biases, uniform as in `torch.nn.Linear`."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(inputs + 1, width, generator=generator) - 1) / inputs**0.5


def _affine(x: Tensor, layer: Tensor) -> Tensor:
    return torch.baddbmm(layer[:, -1:], x, layer[:, :-1])


def _seeds_of(z: Tensor, seed: int) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kmeans_plus_plus(z, CLUSTERS)
