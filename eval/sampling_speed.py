"""Codes drawn in a second with the prior's key-value cache and without it, alternating in one run:
`python -m eval.sampling_speed` prints one JSON object.

How codes are drawn is in `softvq.prior.sampling`; clocks and alternation are in `eval.timing`.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eval.report import check_out_file, run_measurement
from eval.timing import alternate, cpu_model
from softvq.checkpoint import CONFIG, decode_config, read_config
from softvq.prior import CodePrior, CodePriorConfig, SamplingConfig, sample
from softvq.program import find_device


@dataclass(frozen=True, kw_only=True)
class SpeedConfig:
    """Which prior draws how many images."""

    prior: str = ""
    """Folder of a prior, whose architecture is taken; by default that of `CodePriorConfig`: 512
    codes on a grid of 8x8, width 256, 6 blocks. Speed does not depend on the weights."""
    num: int = 32
    """Images whose codes are drawn side by side."""
    repeats: int = 3
    """Draws with the cache, and as many without."""
    threads: int = 1
    """CPU threads of torch."""
    device: str = "cpu"
    """Where to compute."""
    out: Path | None = None
    """The JSON object is also written to this file."""

    def __post_init__(self) -> None:
        for name in ("num", "repeats", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.out is not None:
            check_out_file(self.out)


def sampling_speed(config: SpeedConfig) -> dict[str, Any]:
    """The report. Raises ValueError for a prior or device that cannot be used."""
    torch.set_num_threads(config.threads)
    device = find_device(config.device)
    architecture = _architecture(config.prior)
    torch.manual_seed(0)
    prior = CodePrior(architecture).to(device)

    def step(cached: bool) -> None:
        grids = sample(prior, config.num, SamplingConfig(), cached=cached)
        grids[0].cpu()  # waits for the device

    steps = {"cached": partial(step, True), "not_cached": partial(step, False)}
    with tqdm(total=config.repeats, unit="repeat") as bar:
        seconds = alternate(steps, config.repeats, bar)
    codes = config.num * sum(architecture.lengths)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    pairs = zip(seconds["not_cached"], seconds["cached"], strict=True)
    ratios = [slow / fast for slow, fast in pairs]
    return {
        "grids": architecture.grids,
        "codebook_sizes": architecture.codebook_sizes,
        "width": architecture.width,
        "depth": architecture.depth,
        "heads": architecture.heads,
        "images": config.num,
        "repeats": config.repeats,
        "threads": config.threads,
        "device": str(device),
        "cpu": cpu_model(),
        "torch": torch.__version__,
        "codes_per_second": {name: codes / median for name, median in medians.items()},
        "speedup": {
            "ratio": medians["not_cached"] / medians["cached"],
            "lowest": min(ratios),
            "highest": max(ratios),
        },
    }


def _architecture(folder: str) -> CodePriorConfig:
    if not folder:
        return CodePriorConfig()
    content = read_config(folder)
    if "prior" not in content:
        raise ValueError(f"{folder}/{CONFIG} is that of a run of another kind, no prior")
    return decode_config(content["prior"], CodePriorConfig)


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    return run_measurement(SpeedConfig, sampling_speed, arguments, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
