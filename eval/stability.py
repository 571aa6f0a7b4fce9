"""Does the ratio of learning rates decide collapse? `python -m eval.stability` trains the grid.

A small encoder and its prototypes learn together on clusters, with equal encoder rate x steps for
every ratio eps; the formulas are in `softvq.ddcl`, the score of the clusters in `eval.clustering`.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from eval.clustering import clustering_scores
from eval.experiment import SplitCheck, summarize
from eval.report import ReportConfig, check_positive, run_experiment
from eval.synthetic import Clusters, simplex_clusters
from softvq.ddcl import (
    Gradient,
    competitive_loss,
    covariance,
    critical_temperature,
    distinct_codes,
    nearest,
    separation,
    soft_assignment,
)
from softvq.figures import Panel
from softvq.quantizers.initialization import kmeans_plus_plus

Task = Literal["none", "classes", "reconstruction"]
CLUSTERS, DIM, WIDTH, HIDDEN = 6, 10, 4, 32
# A run is collapsed when the encoder's outputs keep less than this share of their first variance...
OPEN = 0.01
# ... or fewer than half of the prototypes are further apart than this, in sqrt(trace Cov z)
APART = 0.01
STABLE, COLLAPSING = 0.1, 1.0


@dataclass(frozen=True, kw_only=True)
class StabilityConfig(ReportConfig):
    """Trains one model for every eps, commitment, gradient, task and seed."""

    eps: tuple[float, ...] = (0.01, 0.05, 0.1, 0.5, 1.0)
    """Learning rates of the encoder in units of that of the prototypes."""
    commitments: tuple[float, ...] = (0.1, 1.0)
    """Weights of the encoder's share of L_q."""
    tasks: tuple[Task, ...] = get_args(Task)
    """What holds the encoder open: nothing, a linear classifier on the centroids, or a linear
    reconstruction from them."""
    clock: float = 40.0
    """eps x steps of every run, so that every encoder has the same rate x steps."""
    short_steps: int = 40
    """Steps after which all eps are looked at as well: an equal number of steps, not of clock."""
    lr: float = 0.01
    """Adam's rate of prototypes and head; the encoder's is eps times that."""
    temperature: float = 0.3
    """T, fixed, in units of Tc at the start."""
    tokens: int = 240
    """Tokens, all in one batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "eps", "commitments", "clock", "short_steps", "lr", "temperature")
        if not self.tasks:
            raise ValueError("tasks must not be empty")
        if self.tokens < 2 * CLUSTERS:
            raise ValueError(f"tokens must be at least {2 * CLUSTERS}, got {self.tokens}")

    def steps(self, eps: float) -> int:
        """Steps of a run: equal clock, but no less than what the short look needs."""
        return max(round(self.clock / eps), self.short_steps)


class Case(NamedTuple):
    """One point of the grid."""

    task: Task
    gradient: Gradient
    commitment: float
    eps: float
    seed: int


class Joint(nn.Module):
    """An encoder of one hidden layer, the prototypes, and the linear head of a task."""

    def __init__(self, case: Case, config: StabilityConfig, data: Clusters) -> None:
        super().__init__()
        self.case = case
        self.encoder = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        self.head = nn.Linear(WIDTH, CLUSTERS if case.task == "classes" else DIM)
        with torch.no_grad():
            z = self.encoder(data.z)
        self.prototypes = nn.Parameter(kmeans_plus_plus(z, CLUSTERS))
        self.start = covariance(z).trace().item()
        self.temperature = config.temperature * critical_temperature(z).item()
        self.labels = data.labels

    def loss(self, x: Tensor) -> Tensor:
        """The task's loss plus L_q in units of the first variance of z."""
        case, z = self.case, self.encoder(x)
        # Scales the encoder's gradient of L_q and leaves its value
        shared = z.detach() + case.commitment * (z - z.detach())
        soft = soft_assignment(shared, self.prototypes, self.temperature)
        loss = competitive_loss(soft, case.gradient).loss.mean() / self.start
        if case.task == "none":
            return loss
        output = self.head(soft_assignment(z, self.prototypes, self.temperature).mu)
        if case.task == "classes":
            return loss + functional.cross_entropy(output, self.labels)
        return loss + functional.mse_loss(output, x) / x.var()

    @torch.no_grad()
    def measures(self, x: Tensor, check: SplitCheck) -> dict[str, float]:
        """The state of encoder and prototypes; separations in sqrt(trace Cov z) of the start."""
        z, p = self.encoder(x), self.prototypes
        check.add(z, p, self.temperature)
        apart = separation(p)
        trace = covariance(z).trace().item()
        scores = clustering_scores(self.labels.numpy(), nearest(z, p).numpy())
        measures = {
            "separation_min": apart.minimum.item() / math.sqrt(self.start),
            "separation_mean": apart.mean.item() / math.sqrt(self.start),
            "trace": trace / self.start,
            "temperature_ratio": self.temperature / max(critical_temperature(z).item(), 1e-300),
            "distinct_codes": distinct_codes(p, APART * math.sqrt(trace)),
            "accuracy": scores["accuracy"],
        }
        output = self.head(soft_assignment(z, p, self.temperature).mu)
        if self.case.task == "classes":
            measures["task_accuracy"] = (output.argmax(1) == self.labels).double().mean().item()
        elif self.case.task == "reconstruction":
            hard = self.head(p[nearest(z, p)])
            variance = covariance(x).trace().item()
            for name, decoded in (("nmse_soft", output), ("nmse_hard", hard)):
                measures[name] = (decoded - x).square().sum(1).mean().item() / variance
        measures["collapsed"] = float(
            measures["trace"] < OPEN or measures["distinct_codes"] < CLUSTERS / 2
        )
        return measures


def train(case: Case, config: StabilityConfig, check: SplitCheck) -> list[dict[str, float]]:
    """Measures at the start and after 20 equal parts of the run and `short_steps`, in order.

    Raises ArithmeticError when the loss is not finite.
    """
    data = simplex_clusters(CLUSTERS, config.tokens, DIM, 0.8, case.seed)
    data = Clusters(data.z.float(), data.labels)
    torch.manual_seed(case.seed)
    model = Joint(case, config, data)
    slow = {"params": model.encoder.parameters(), "lr": case.eps * config.lr}
    fast = {"params": [model.prototypes, *model.head.parameters()], "lr": config.lr}
    optimizer = torch.optim.Adam([slow, fast], foreach=True)
    steps = config.steps(case.eps)
    looks = {round(steps * i / 20) for i in range(21)}
    looks |= {config.short_steps, round(config.clock / case.eps)}
    records = []
    for step in range(steps + 1):
        if step in looks:
            records.append({"step": step, **model.measures(data.z, check)})
        loss = model.loss(data.z)
        if not math.isfinite(loss.item()):
            raise ArithmeticError(f"the loss is {loss.item()} at step {step} of {case}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return records


def at(records: Sequence[dict[str, float]], step: int) -> dict[str, float]:
    """The record of that step."""
    return next(record for record in records if record["step"] == step)


def judge(entries: Sequence[dict[str, Any]], config: StabilityConfig) -> list[dict[str, Any]]:
    """For each task, gradient and commitment, whether eps decides as the paper says.

    It does when no seed collapses at eps <= 0.1 and every seed does at eps = 1, at an equal clock;
    `at_equal_steps` is the same question with the steps equal. None where the grid has no such eps.
    """
    verdicts = []
    keys = sorted({(e["task"], e["gradient"], e["commitment"]) for e in entries})
    for task, gradient, commitment in keys:
        chosen = [
            e
            for e in entries
            if (e["task"], e["gradient"], e["commitment"]) == (task, gradient, commitment)
        ]
        verdict: dict[str, Any] = {"task": task, "gradient": gradient, "commitment": commitment}
        for horizon, name in (("clock", "claim_holds"), ("steps", "at_equal_steps")):
            shares = {e["eps"]: e[horizon]["collapsed"]["mean"] for e in chosen}
            small = [share for eps, share in shares.items() if eps <= STABLE]
            large = [share for eps, share in shares.items() if eps == COLLAPSING]
            known = small and large
            verdict[name] = not any(small) and min(large) == 1 if known else None
            verdict[f"collapsed_share_{horizon}"] = {str(k): v for k, v in shares.items()}
        shares = verdict["collapsed_share_clock"].values()
        verdict["summary"] = (
            "every eps collapses"
            if min(shares) == 1
            else "no eps collapses"
            if max(shares) == 0
            else "depends on eps or seed"
        )
        verdicts.append(verdict)
    return verdicts


def pictures(histories: dict[Case, list[dict[str, float]]], config: StabilityConfig) -> list[Panel]:
    """Trace of Cov z against the clock without a task, and the end of every task against eps."""
    strongest = max(config.commitments)
    panels = []
    for gradient in get_args(Gradient):
        series = {}
        for eps in config.eps:
            runs = [
                records
                for case, records in histories.items()
                if case[:4] == (config.tasks[0], gradient, strongest, eps)
            ]
            clocks = [max(record["step"], 0.5) * eps for record in runs[0]]
            series[f"eps = {eps:g}"] = (clocks, [[r["trace"] for r in run] for run in runs])
        title = f"task: {config.tasks[0]}, {gradient}, commitment {strongest:g}"
        panels.append(
            Panel(title, "eps x steps", "trace Cov z / start", series, True, True, (config.clock,))
        )
    for key, label in (
        ("trace", "trace Cov z / start"),
        ("temperature_ratio", "T / Tc"),
        ("separation_mean", "S_mean / start scale"),
        ("accuracy", "accuracy"),
    ):
        series = {}
        for task, gradient in itertools.product(config.tasks, get_args(Gradient)):
            rows = [
                [
                    at(
                        histories[Case(task, gradient, strongest, eps, seed)],
                        round(config.clock / eps),
                    )[key]
                    for eps in config.eps
                ]
                for seed in config.seeds
            ]
            series[f"{task}, {gradient}"] = (config.eps, rows)
        log = key != "accuracy"
        panels.append(Panel(f"equal clock: {label}", "eps", label, series, True, log, (STABLE,)))
    return panels


def stability(config: StabilityConfig) -> tuple[dict[str, Any], Sequence[Panel]]:
    """The whole report, ready for JSON, and the panels of its figure."""
    check = SplitCheck()
    grid = list(itertools.product(config.tasks, get_args(Gradient), config.commitments, config.eps))
    histories: dict[Case, list[dict[str, float]]] = {}
    entries = []
    total = sum(config.steps(point[3]) for point in grid) * len(config.seeds)
    with tqdm(total=total, unit="step") as bar:
        for point in grid:
            runs = []
            for seed in config.seeds:
                case = Case(*point, seed)
                histories[case] = train(case, config, check)
                runs.append(histories[case])
                bar.update(config.steps(case.eps))
            task, gradient, commitment, eps = point
            steps = round(config.clock / eps)
            entries.append(
                {"task": task, "gradient": gradient, "commitment": commitment, "eps": eps}
                | {"steps_at_equal_clock": steps}
                | {"clock": summarize([at(run, steps) for run in runs])}
                | {"steps": summarize([at(run, config.short_steps) for run in runs])}
            )
    verdicts = judge(entries, config)
    known = [v["claim_holds"] for v in verdicts if v["claim_holds"] is not None]
    report = {
        "claim": f"eps <= {STABLE} is stable, eps = {COLLAPSING:g} collapses",
        "claim_holds_everywhere": all(known) if known else None,
        "claim_holds_somewhere": any(known) if known else None,
        "verdicts": verdicts,
        "collapsed_means": f"trace Cov z below {OPEN} of the start, or fewer than half of the "
        f"prototypes distinct at {APART} sqrt(trace Cov z)",
        "encoder_rate_x_steps": config.clock * config.lr,
        "short_steps": config.short_steps,
        "split": vars(check),
        "grid": entries,
    }
    return report, pictures(histories, config)


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    return run_experiment("stability", StabilityConfig, stability, arguments, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
