"""Seconds and peak memory of one step, measured so that contestants can be compared.

Which steps are compared, and what follows from it, is in `eval.benchmark` and `eval.complexity`.
"""

import ctypes
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

PAUSE_SECONDS = 0.02

Step = Callable[[], object]
Result = TypeVar("Result")


def seconds_of(step: Step, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that one call takes by that clock, after a pause of `PAUSE_SECONDS`."""
    # faiss brings an OpenMP of its own, whose threads keep a core busy for a while after a call.
    time.sleep(PAUSE_SECONDS)
    start = clock()
    step()
    return clock() - start


def alternate(
    steps: Mapping[str, Step],
    repeats: int,
    bar: tqdm,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every step in every repeat, after one warm-up of each.

    `time.process_time` as clock counts the seconds of all threads on processors, and so nearly
    leaves out what else runs on the machine.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            seconds[name].append(seconds_of(step, clock))
        bar.update()
    return seconds


def has_peak_memory() -> bool:
    """Whether this system tells the peak memory of a process: Linux does."""
    return Path("/proc/self/status").exists()


def reset_peak() -> None:
    """Forgets the peak so far and hands free memory back to the system, for `extra_peak` to follow
    in a process that has measured before. Linux with glibc alone."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def extra_peak(step: Step) -> int:
    """Bytes of peak resident memory of one call beyond what was resident before it.

    The peak never falls by itself, so this needs a process that held no more before, or
    `reset_peak`.
    """
    before = _status_bytes("VmRSS")
    step()
    return _status_bytes("VmHWM") - before


def in_fresh_process(function: Callable[..., Result], *arguments: object) -> Result:
    """What a function of a module returns in a process of its own.

    Raises ValueError when that process dies, as it does when memory runs out.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise ValueError(f"no memory left for {arguments[0]}; give fewer tokens") from None


def cpu_model() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")


def _status_bytes(field: str) -> int:
    """A figure of /proc/self/status; getrusage's peak would include that of the parent process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")
