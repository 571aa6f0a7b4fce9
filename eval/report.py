"""The frame of an experiment's program: its shared flags, its report, and the files of a report.

What is measured is in the experiments beside this file; how several seeds become one number, in
`eval.experiment`.
"""

import platform
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import tyro
from tqdm import tqdm

from eval.timing import cpu_model
from softvq import figures
from softvq.checkpoint import write_json
from softvq.program import parse_flags, run_program


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Flags that every experiment has."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """One repetition for each; figures are mean and sample standard deviation over them."""
    threads: int = 1
    """CPU threads of torch, in every process."""
    processes: int = 1
    """Processes that share the cases, where an experiment has many; results do not depend on it."""
    out: Path | None = None
    """Folder for the JSON object and the figure; made if it does not exist."""

    def __post_init__(self) -> None:
        check_each_once(self, "seeds")
        if not all(0 <= seed < 2**32 for seed in self.seeds):
            raise ValueError(f"seeds must lie in [0, 2**32), got {self.seeds}")
        for name in ("threads", "processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def check_out_file(path: Path, name: str = "out") -> None:
    """Raises ValueError for a file that cannot be written, before the work and not after."""
    if not path.parent.is_dir():
        raise ValueError(f"{name} must be in an existing folder, got {path}")
    if path.is_dir():
        raise ValueError(f"{name} must be a file, got the folder {path}")


class MeasurementConfig(Protocol):
    """Flags of a program whose report may go to a file."""

    @property
    def out(self) -> Path | None:
        """The file."""
        ...


Case = TypeVar("Case")
Result = TypeVar("Result")
Config = TypeVar("Config", bound=ReportConfig)
Measured = TypeVar("Measured", bound=MeasurementConfig)
Experiment = Callable[[Config], tuple[dict[str, Any], Sequence[figures.Panel]]]


def check_each_once(config: object, *names: str) -> None:
    """Raises ValueError for the first named option that is empty or has an entry twice."""
    for name in names:
        values = getattr(config, name)
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must be given, each once, got {values}")


def check_positive(config: ReportConfig, *names: str) -> None:
    """Raises ValueError for the first named option, or entry of one, that is not above 0."""
    for name in names:
        value = getattr(config, name)
        for entry in value if isinstance(value, tuple) else (value,):
            if not 0 < entry < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {entry}")
        if value == ():
            raise ValueError(f"{name} must not be empty")


def map_cases(
    function: Callable[[Case], Result], cases: Sequence[Case], config: ReportConfig, bar: tqdm
) -> list[Result]:
    """Results in the order of the cases, computed in `config.processes` processes.

    With more than one, `function` and cases must be of a module, not of a function.
    """
    results = []
    with ExitStack() as stack:
        if config.processes == 1:
            found = map(function, cases)
        else:
            pool = ProcessPoolExecutor(
                config.processes,
                mp_context=get_context("spawn"),
                initializer=torch.set_num_threads,
                initargs=(config.threads,),
            )
            found = stack.enter_context(pool).map(function, cases)
        for result in found:
            results.append(result)
            bar.update()
    return results


def run_experiment(
    name: str,
    config_class: type[Config],
    experiment: Experiment[Config],
    arguments: Sequence[str],
    description: str,
) -> int:
    """Reads flags, runs the experiment, prints its report and returns the exit status.

    With `--out` it also writes `NAME.json` and `NAME.png` there.
    """

    def action() -> dict[str, Any]:
        config = parse_flags(
            lambda: tyro.cli(config_class, args=arguments, description=description)
        )
        if config.out is not None:
            try:  # before hours of work, not after
                config.out.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"out must be a folder, got {config.out} ({error})") from None
        torch.set_num_threads(config.threads)
        start = time.perf_counter()
        report, panels = experiment(config)
        report = {
            "command": shlex.join(["python", "-m", f"eval.{name}", *arguments]),
            "seeds": list(config.seeds),
            "seconds": time.perf_counter() - start,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpu": cpu_model(),
            **report,
        }
        if config.out is not None:
            figures.panels(panels, config.out / f"{name}.png")
            write_json(config.out / f"{name}.json", report)
            print(f"written: {config.out / name}.json and .png", file=sys.stderr)
        return report

    return run_program(action)


def run_measurement(
    config_class: type[Measured],
    measure: Callable[[Measured], dict[str, Any]],
    arguments: Sequence[str],
    description: str,
) -> int:
    """Reads flags, measures, prints the report and returns the exit status.

    The report is also written to the file `config.out`, if there is one.
    """

    def action() -> dict[str, Any]:
        config = parse_flags(
            lambda: tyro.cli(config_class, args=arguments, description=description)
        )
        report = measure(config)
        if config.out is not None:
            write_json(config.out, report)
        return report

    return run_program(action)
