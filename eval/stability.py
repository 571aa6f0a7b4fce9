"""Does the ratio of learning rates decide collapse? `python -m eval.stability` trains the grid.

A small encoder and its prototypes learn together on clusters, with equal encoder rate x steps for
every ratio eps; the model is in `eval.joint`, the formulas in `softvq.ddcl`.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from tqdm import tqdm

from eval.experiment import SplitCheck, summarize
from eval.joint import APART, CLUSTERS, OPEN, Case, Joint, Member, Task
from eval.report import ReportConfig, check_each_once, check_positive, map_cases, run_experiment
from softvq.ddcl import Gradient
from softvq.figures import Panel

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
        check_each_once(self, "eps", "commitments", "tasks")
        if self.tokens < 2 * CLUSTERS:
            raise ValueError(f"tokens must be at least {2 * CLUSTERS}, got {self.tokens}")

    def steps(self, eps: float) -> int:
        """Steps of a run: equal clock, but no less than what the short look needs."""
        return max(self.equal_clock(eps), self.short_steps)

    def equal_clock(self, eps: float) -> int:
        """Steps at which the encoder's rate x steps is the same for all eps."""
        return max(round(self.clock / eps), 1)


Records = list[dict[str, float]]


def train(config: StabilityConfig, case: Case) -> tuple[dict[Member, Records], SplitCheck]:
    """Measures of every member at the start, after 10 equal parts of the run and `short_steps`.

    Raises ArithmeticError when a loss is not finite.
    """
    members = [Member(c, s) for c in config.commitments for s in config.seeds]
    model = Joint(case, members, config.tokens, config.temperature)
    slow = {"params": [model.first, model.second], "lr": case.eps * config.lr}
    fast = {"params": [model.prototypes, model.head], "lr": config.lr}
    # Adam's steps are elementwise, so that members trained at once stay what they are alone
    optimizer = torch.optim.Adam([slow, fast], foreach=True)
    steps = config.steps(case.eps)
    looks = {round(steps * i / 10) for i in range(11)}
    looks |= {config.short_steps, config.equal_clock(case.eps)}
    records: dict[Member, Records] = {member: [] for member in members}
    check = SplitCheck()
    for step in range(steps + 1):
        if step in looks:
            for member, state in zip(members, model.measures(check), strict=True):
                records[member].append({"step": step, **state})
        loss = model.losses().sum()
        if not math.isfinite(loss.item()):
            raise ArithmeticError(f"a loss is {loss.item()} at step {step} of {case}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return records, check


def at(records: Sequence[dict[str, float]], step: int) -> dict[str, float]:
    """The record of that step."""
    return next(record for record in records if record["step"] == step)


def judge(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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


History = dict[tuple[Case, Member], Records]


def pictures(histories: History, config: StabilityConfig) -> list[Panel]:
    """Trace of Cov z against the clock for the first task, and the end of all tasks against eps."""
    commitment, first = max(config.commitments), config.tasks[0]

    def runs(task: Task, gradient: Gradient, eps: float) -> list[Records]:
        case = Case(task, gradient, eps)
        return [histories[case, Member(commitment, seed)] for seed in config.seeds]

    panels = []
    for gradient in get_args(Gradient):
        series = {}
        for eps in config.eps:
            chosen = runs(first, gradient, eps)
            clocks = [max(record["step"], 0.5) * eps for record in chosen[0]]
            series[f"eps = {eps:g}"] = (clocks, [[r["trace"] for r in run] for run in chosen])
        title = f"task: {first}, {gradient}, commitment {commitment:g}"
        panels.append(Panel(title, "eps x steps", "trace Cov z / start", series, True, True))
    ends = {
        "trace": "trace Cov z / start",
        "separation_mean": "S_mean / sqrt(trace Cov z at start)",
        "temperature_ratio": "T / Tc",
        "accuracy": "accuracy of the codes",
    }
    for key, label in ends.items():
        series = {}
        for task, gradient in itertools.product(config.tasks, get_args(Gradient)):
            columns = [
                [at(run, config.equal_clock(eps))[key] for run in runs(task, gradient, eps)]
                for eps in config.eps
            ]
            rows = [list(row) for row in zip(*columns, strict=True)]
            series[f"{task}, {gradient}"] = (config.eps, rows)
        panels.append(Panel("at equal clock", "eps", label, series, True, key != "accuracy"))
    return panels


def stability(config: StabilityConfig) -> tuple[dict[str, Any], Sequence[Panel]]:
    """The whole report, ready for JSON, and the panels of its figure."""
    check = SplitCheck()
    cases = [
        Case(*point) for point in itertools.product(config.tasks, get_args(Gradient), config.eps)
    ]
    histories: History = {}
    entries = []
    # The longest first, so that processes end together
    cases.sort(key=lambda case: case.eps)
    with tqdm(total=len(cases), unit="case") as bar:
        runs = map_cases(partial(train, config), cases, config, bar)
    for case, (trained, part) in zip(cases, runs, strict=True):
        check.merge([part])
        histories |= {(case, member): records for member, records in trained.items()}
        steps = config.equal_clock(case.eps)
        for commitment in config.commitments:
            chosen = [trained[Member(commitment, seed)] for seed in config.seeds]
            entries.append(
                {**case._asdict(), "commitment": commitment, "steps_at_equal_clock": steps}
                | {"clock": summarize([at(run, steps) for run in chosen])}
                | {"steps": summarize([at(run, config.short_steps) for run in chosen])}
            )
    verdicts = judge(entries)
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
