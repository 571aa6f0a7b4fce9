"""Time and memory of the DDCL readout, self-attention and Slot Attention against the tokens:
`python -m eval.complexity`.

All contestants alternate in one run, and seconds are those on processors, which other programs
disturb little; how they are timed is in `eval.timing`.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from eval.experiment import SplitCheck
from eval.report import ReportConfig, check_positive, run_experiment
from eval.timing import (
    Step,
    alternate,
    extra_peak,
    has_peak_memory,
    in_fresh_process,
    reset_peak,
)
from softvq.figures import Panel, Series
from softvq.readout import DDCLReadout

NAMES = ("ddcl", "slot_attention", "attention_weights", "attention_math", "attention_fused")
MODES = ("forward", "step")


@dataclass(frozen=True, kw_only=True)
class ComplexityConfig(ReportConfig):
    """Times one sequence of growing length through every contestant."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Drawing of tokens and weights; the repeats of all seeds are pooled for median and range."""
    smallest: int = 128
    """Tokens of the shortest sequence."""
    largest: int = 16384
    """Tokens of the longest sequence at most; lengths double."""
    dim: int = 64
    """Width of a token."""
    codes: int = 32
    """Prototypes of the readout and slots of Slot Attention."""
    repeats: int = 3
    """Every contestant runs once in each repeat of each seed."""
    tail: int = 4
    """Longest lengths that the exponents are fitted to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "smallest", "dim", "codes", "repeats")
        if self.largest < self.smallest:
            raise ValueError(
                f"largest must be at least smallest = {self.smallest}, got {self.largest}"
            )
        if self.tail < 2:
            raise ValueError(f"tail must be at least 2, got {self.tail}")

    @property
    def lengths(self) -> list[int]:
        """Numbers of tokens, each twice the one before."""
        count = int(math.log2(self.largest / self.smallest)) + 1
        return [self.smallest * 2**i for i in range(count)]


class SlotAttention(nn.Module):
    """Slot Attention (Locatello et al. 2020, arXiv 2006.15055) without its noise: the slots start
    from learned vectors. Three iterations of attention over slots, a GRU cell and an MLP."""

    def __init__(self, dim: int, slots: int, iterations: int = 3) -> None:
        super().__init__()
        self.iterations = iterations
        self.slots = nn.Parameter(torch.randn(slots, dim))
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.before, self.inside, self.after = (nn.LayerNorm(dim) for _ in range(3))
        self.cell = nn.GRUCell(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b k d"]:
        """The slots after the last iteration."""
        x = self.before(x)
        keys, values = self.key(x), self.value(x)
        slots = self.slots.expand(len(x), -1, -1)
        for _ in range(self.iterations):
            query = self.query(self.inside(slots))
            logits = einsum(query, keys, "b k d, b n d -> b n k") / x.shape[-1] ** 0.5
            weights = logits.softmax(-1) + 1e-8
            weights = weights / weights.sum(1, keepdim=True)
            update = einsum(weights, values, "b n k, b n d -> b k d")
            flat = (rearrange(t, "b k d -> (b k) d") for t in (update, slots))
            slots = rearrange(self.cell(*flat), "(b k) d -> b k d", b=len(x))
            slots = slots + self.mlp(self.after(slots))
        return slots


class ProjectedAttention(nn.Module):
    """Self-attention of one head by torch's scaled_dot_product_attention, with or without its
    fused kernel, which never holds the n x n weights."""

    def __init__(self, dim: int, backend: SDPBackend) -> None:
        super().__init__()
        self.backend = backend
        self.inputs, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """A mixture of all tokens for each token."""
        query, key, value = rearrange(self.inputs(x), "b n (s h d) -> s b h n d", s=3, h=1)
        with sdpa_kernel(self.backend):
            mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.output(rearrange(mixed, "b h n d -> b n (h d)"))


def layer(name: str, dim: int, codes: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A contestant, as a function from tokens to the tensors that a loss would read."""
    if name == "ddcl":
        readout = DDCLReadout(dim=dim, codebook_size=codes)

        def read(x: Tensor) -> tuple[Tensor, ...]:
            output = readout(x)
            return output.tokens, output.loss

        return read
    if name == "slot_attention":
        slots = SlotAttention(dim, codes)
        return lambda x: (slots(x),)
    if name == "attention_weights":
        attention = nn.MultiheadAttention(dim, 1, batch_first=True)
        # With need_weights, as whoever looks at the weights asks for
        return lambda x: (attention(x, x, x, need_weights=True)[0],)
    fused = SDPBackend.FLASH_ATTENTION if name == "attention_fused" else SDPBackend.MATH
    projected = ProjectedAttention(dim, fused)
    return lambda x: (projected(x),)


def make_step(name: str, mode: str, tokens: int, dim: int, codes: int, seed: int) -> Step:
    """One call: `forward` without gradients, or `step`, forward and backward to the tokens."""
    torch.manual_seed(seed)
    run = layer(name, dim, codes)
    x = torch.randn(1, tokens, dim)
    if mode == "forward":

        @torch.no_grad()
        def forward() -> None:
            run(x)

        return forward
    x.requires_grad_()

    def step() -> None:
        x.grad = None
        outputs = run(x)
        torch.stack([output.square().mean() for output in outputs]).sum().backward()

    return step


def peak_bytes(
    names: Sequence[str], lengths: Sequence[int], dim: int, codes: int, threads: int
) -> dict[str, dict[int, int]]:
    """Peak memory of one step of each beyond what was resident before; needs a fresh process."""
    torch.set_num_threads(threads)
    peaks: dict[str, dict[int, int]] = {}
    for name in names:
        make_step(name, "step", 64, dim, codes, 0)()  # loads the libraries
        peaks[name] = {}
        for tokens in lengths:
            step = make_step(name, "step", tokens, dim, codes, 0)
            reset_peak()
            peaks[name][tokens] = extra_peak(step)
    return peaks


def exponent(lengths: Sequence[int], values: Sequence[float], tail: int) -> float | None:
    """Slope of log value against log length over the last `tail`; None with fewer than two."""
    if min(len(lengths), tail) < 2 or min(values[-tail:]) <= 0:
        return None
    return float(np.polyfit(np.log(lengths[-tail:]), np.log(values[-tail:]), 1)[0])


def times(config: ComplexityConfig, bar: tqdm) -> dict[str, dict[int, dict[str, list[float]]]]:
    """Processor seconds of every repeat, by mode, length and contestant."""
    found: dict[str, dict[int, dict[str, list[float]]]] = {mode: {} for mode in MODES}
    for mode in MODES:
        for tokens in config.lengths:
            pooled: dict[str, list[float]] = {name: [] for name in NAMES}
            for seed in config.seeds:
                steps = {
                    name: make_step(name, mode, tokens, config.dim, config.codes, seed)
                    for name in NAMES
                }
                for name, values in alternate(
                    steps, config.repeats, bar, time.process_time
                ).items():
                    pooled[name] += values
            found[mode][tokens] = pooled
    return found


def memories(config: ComplexityConfig) -> dict[str, dict[int, int]]:
    """Extra peak bytes of a step at every length; empty where the system does not tell."""
    if not has_peak_memory():
        return {}
    shape = (config.dim, config.codes, config.threads)
    return in_fresh_process(peak_bytes, NAMES, config.lengths, *shape)


def check_split(config: ComplexityConfig) -> SplitCheck:
    """The split of the readout's loss at every length and seed."""
    check = SplitCheck()
    for tokens in config.lengths:
        for seed in config.seeds:
            torch.manual_seed(seed)
            readout = DDCLReadout(dim=config.dim, codebook_size=config.codes)
            x = torch.randn(1, tokens, config.dim)
            readout(x)
            codebook: Any = readout.codebooks[0]
            check.add(x, codebook.prototypes, codebook.temperature)
    return check


def complexity(config: ComplexityConfig) -> tuple[dict[str, Any], Sequence[Panel]]:
    """The whole report, ready for JSON, and the panels of its figure."""
    lengths = config.lengths
    with tqdm(total=2 * len(lengths) * len(config.seeds) * config.repeats, unit="repeat") as bar:
        seconds = times(config, bar)
    peaks = memories(config)
    report: dict[str, Any] = {"lengths": lengths, "split": vars(check_split(config))}
    panels = []
    for mode in MODES:
        report[mode], series = {}, {}
        for name in NAMES:
            every = [seconds[mode][tokens][name] for tokens in lengths]
            medians = [statistics.median(values) for values in every]
            report[mode][name] = {
                "exponent": exponent(lengths, medians, config.tail),
                "median_seconds": medians,
                "lowest_seconds": [min(values) for values in every],
                "highest_seconds": [max(values) for values in every],
            }
            series[name] = (lengths, [list(row) for row in zip(*every, strict=True)])
        title = "forward" if mode == "forward" else "forward and backward"
        panels.append(Panel(title, "tokens", "processor seconds", series, True, True))
    report["peak_bytes"] = {
        name: {
            "exponent": exponent([*values], [*values.values()], config.tail),
            "bytes": {str(tokens): peak for tokens, peak in values.items()},
        }
        for name, values in peaks.items()
    }
    if peaks:
        memory: Mapping[str, Series] = {
            name: ([*values], [[max(x, 1) / 2**20 for x in values.values()]])
            for name, values in peaks.items()
        }
        panels.append(Panel("forward and backward", "tokens", "MiB", memory, True, True))
    report["notes"] = NOTES
    return report, panels


NOTES = {
    "ddcl": "softvq.DDCLReadout in training mode: forward includes its schedule and its losses",
    "slot_attention": "3 iterations, as many slots as the readout has prototypes",
    "attention_weights": "nn.MultiheadAttention, one head, need_weights=True: holds n x n weights",
    "attention_math": "scaled_dot_product_attention, math kernel: holds n x n weights",
    "attention_fused": "scaled_dot_product_attention, torch's fused (flash) kernel: the same n^2 "
    "operations, without the n x n memory",
    "seconds": "processor time of all threads",
    "readout": "a readout mixes no tokens: it is no replacement for attention, only cheaper",
}


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""
    return run_experiment("complexity", ComplexityConfig, complexity, arguments, __doc__ or "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
