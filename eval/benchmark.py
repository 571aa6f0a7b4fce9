"""Speed and memory of the streaming core beside its peers, and what a quantizer adds to a training
step, all measured alternately in one run.

The core is in `softvq.ddcl`; the peers are plain autograd, vector-quantize-pytorch and faiss.
"""

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import tyro
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from eval.report import check_out_file
from eval.timing import (
    PAUSE_SECONDS,
    Step,
    alternate,
    cpu_model,
    extra_peak,
    has_peak_memory,
    in_fresh_process,
)
from softvq.autoencoder import VQVAE, VQVAEConfig
from softvq.checkpoint import write_json
from softvq.data import ImageArray
from softvq.ddcl import SoftAssignment, competitive_loss, nearest, soft_assignment
from softvq.program import parse_flags, run_program
from softvq.quantizers import Assignment, DDCLConfig, EMAConfig
from softvq.training import TrainConfig, build_optimizer, train_step

# (codes, dim): matrix products dominate the first two, the exponential and memory the third.
SHAPES = ((512, 64), (4096, 64), (16384, 8))
MEMORY_SHAPE = (65536, 8)
GEMM_SIDE = 2048
TOKENS_PER_IMAGE = 64


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """Measures softvq.ddcl against its peers and prints one JSON object."""

    threads: int = 1
    """CPU threads of torch and faiss."""
    repeats: int = 11
    """Every contestant runs once in each repeat."""
    tokens: int = 8192
    """Tokens in one call."""
    out: Path | None = None
    """The JSON object is also written to this file."""

    def __post_init__(self) -> None:
        for name in ("threads", "repeats", "tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.out is not None:
            check_out_file(self.out)


class Problem(NamedTuple):
    """Tokens, prototypes and what a training step asks of them."""

    z: Float[Tensor, "n d"]
    prototypes: Float[Tensor, "k d"]
    grad_mu: Float[Tensor, "n d"]
    grad_usage: Float[Tensor, "k"]
    temperature: float


def plain_assignment(
    z: Float[Tensor, "n d"], prototypes: Float[Tensor, "k d"], temperature: float
) -> SoftAssignment:
    """What soft_assignment gives, in the way one writes it with autograd and n x k matrices."""
    square = prototypes.square().sum(1)
    logits = (2 * einsum(z, prototypes, "n d, k d -> n k") - square) / temperature
    q = logits.softmax(1)
    mu = einsum(q, prototypes, "n k, k d -> n d")
    reconstruction = (z - mu).square().sum(1)
    variance = (einsum(q, square, "n k, k -> n") - mu.square().sum(1)).clamp_min(0)
    log_partition = logits.logsumexp(1)
    free_energy = z.square().sum(1) - temperature * log_partition
    with torch.no_grad():
        entropy = log_partition - (q * logits).sum(1)
    indices = logits.argmax(1)
    return SoftAssignment(mu, reconstruction, variance, free_energy, entropy, q.sum(0), indices)


def make_problem(tokens: int, codes: int, dim: int) -> Problem:
    """Gaussian tokens and prototypes; at T = dim / 4 a token spreads over a few codes."""
    generator = torch.Generator().manual_seed(0)
    z, prototypes, grad_mu, grad_usage = (
        torch.randn(shape, generator=generator)
        for shape in ((tokens, dim), (codes, dim), (tokens, dim), (codes,))
    )
    return Problem(z.requires_grad_(), prototypes.requires_grad_(), grad_mu, grad_usage, dim / 4)


def soft_step(problem: Problem, assignment: Callable[..., Any]) -> Step:
    """Forward and backward of L_q, a usage term and an upstream gradient for mu."""
    z, prototypes, grad_mu, grad_usage, temperature = problem

    def step() -> None:
        z.grad = prototypes.grad = None
        soft = assignment(z, prototypes, temperature)
        loss = competitive_loss(soft).loss.mean() + (soft.usage * grad_usage).sum() / len(z)
        (loss + (soft.mu * grad_mu).sum()).backward()

    return step


def vector_quantize_step(problem: Problem) -> Step:
    """A training step of VectorQuantize: commitment loss and an upstream gradient."""
    from vector_quantize_pytorch import VectorQuantize

    z, prototypes, grad_mu, _, _ = problem
    codes, dim = prototypes.shape
    layer = VectorQuantize(dim=dim, codebook_size=codes, rotation_trick=False, kmeans_init=False)
    layer.train()

    def step() -> None:
        z.grad = None
        quantized, _, loss = layer(z[None])
        (loss.sum() + (quantized[0] * grad_mu).sum()).backward()

    return step


def contestants(problem: Problem, threads: int) -> dict[str, Step]:
    """Everything that is timed at one shape, in the order of one repeat."""
    import faiss

    faiss.omp_set_num_threads(threads)
    z, prototypes = problem.z.detach(), problem.prototypes.detach()
    index = faiss.IndexFlatL2(z.shape[1])
    index.add(prototypes.numpy())
    square = torch.randn(GEMM_SIDE, GEMM_SIDE)

    @torch.no_grad()
    def forward() -> None:
        soft_assignment(z, prototypes, problem.temperature)

    return {
        "streaming": soft_step(problem, soft_assignment),
        "gemm": lambda: torch.mm(square, square),
        "vector_quantize": vector_quantize_step(problem),
        "plain": soft_step(problem, plain_assignment),
        "forward": forward,
        "nearest": lambda: nearest(z, prototypes),
        "faiss": lambda: index.search(z.numpy(), 1),
    }


def timings(config: BenchmarkConfig, codes: int, dim: int, bar: tqdm) -> dict[str, list[float]]:
    """Seconds of every contestant in every repeat, after one warm-up, and the floor of the core.

    The floor is 14 N K D operations (seven products) at the rate of the repeat's own GEMM.
    """
    steps = contestants(make_problem(config.tokens, codes, dim), config.threads)
    seconds = alternate(steps, config.repeats, bar)
    share = 14 * config.tokens * codes * dim / (2 * GEMM_SIDE**3)
    seconds["floor"] = [share * gemm for gemm in seconds["gemm"]]
    return seconds


LOOP_SHARES = ("ddcl_adds", "ema_adds", "data_share")
RATIOS = (
    ("streaming", "floor"),
    ("streaming", "vector_quantize"),
    ("streaming", "plain"),
    ("forward", "faiss"),
    ("nearest", "faiss"),
)


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Ratio of medians, with the smallest and the largest ratio within a repeat."""
    table = {}
    for ours, theirs in RATIOS:
        each = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        table[f"{ours}/{theirs}"] = {
            "ratio": statistics.median(seconds[ours]) / statistics.median(seconds[theirs]),
            "lowest": min(each),
            "highest": max(each),
        }
    return table


class NoQuantizer(nn.Module):
    """Hands the latents to the decoder: the autoencoder that the quantizer is added to."""

    def assign(self, z: Float[Tensor, "*n d"]) -> Assignment:
        zero, counts = z.new_zeros(()), torch.zeros(1, dtype=torch.int64)
        indices = torch.zeros(z.shape[:-1], dtype=torch.int64)
        means = (zero, zero, zero, zero, z[0], zero)
        return Assignment(z, z, indices, *means, counts.to(z.dtype), counts, counts[0])


def loop_steps(images: int, precision: Literal["float32", "bfloat16"]) -> dict[str, Step]:
    """Training steps of the default network for 32x32 images (K = 512, D = 64), with and without
    quantizer, and the cutting of one batch from a set as large as CIFAR-10."""
    pixels = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8)
    stored = ImageArray(pixels, "noise", [""] * len(pixels))
    order = torch.randperm(len(stored))
    pixels = next(stored.batches(order, images))
    config = TrainConfig(precision=precision)
    steps: dict[str, Step] = {"data": lambda: next(stored.batches(order, images))}
    ema = EMAConfig(dim=64, codebook_size=512)
    methods = {"ddcl": DDCLConfig(dim=64, codebook_size=512), "ema": ema, "none": ema}
    for name, quantizer in methods.items():
        model = VQVAE(VQVAEConfig(quantizer=quantizer)).to(memory_format=torch.channels_last)
        if name == "none":
            model.add_module("quantizer", NoQuantizer())
        optimizer = build_optimizer(model, config)
        steps[name] = partial(train_step, model.train(), optimizer, pixels, 0.25, config)
    return steps


def loop(config: BenchmarkConfig, bar: tqdm) -> dict[str, Any]:
    """Median seconds of a training step, and what quantizer and data add to it, as shares."""
    report = {}
    images = max(1, config.tokens // TOKENS_PER_IMAGE)
    for precision in ("float32", "bfloat16"):
        medians = {
            name: statistics.median(values)
            for name, values in alternate(
                loop_steps(images, precision), config.repeats, bar
            ).items()
        }
        report[precision] = {
            "seconds": medians,
            "ddcl_adds": medians["ddcl"] / medians["none"] - 1,
            "ema_adds": medians["ema"] / medians["none"] - 1,
            "data_share": medians["data"] / medians["ddcl"],
        }
    return report


def extra_peak_bytes(contestant: str, tokens: int, codes: int, dim: int, threads: int) -> int:
    """Peak resident memory of one step beyond what was resident before; needs a fresh process."""
    torch.set_num_threads(threads)

    def prepare(tokens: int, codes: int) -> Step:
        problem = make_problem(tokens, codes, dim)
        if contestant == "streaming":
            return soft_step(problem, soft_assignment)
        return vector_quantize_step(problem)

    prepare(64, 64)()  # loads the libraries
    return extra_peak(prepare(tokens, codes))


def memory(config: BenchmarkConfig) -> dict[str, int]:
    """Extra peak bytes by contestant, each in its own process; empty where Linux's /proc is not."""
    if not has_peak_memory():
        return {}
    return {
        name: in_fresh_process(extra_peak_bytes, name, config.tokens, *MEMORY_SHAPE, config.threads)
        for name in ("streaming", "vector_quantize")
    }


def benchmark(config: BenchmarkConfig) -> dict[str, Any]:
    """The whole report, ready for JSON."""
    torch.set_num_threads(config.threads)
    names = ("torch", "vector-quantize-pytorch", "faiss-cpu")
    report: dict[str, Any] = {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in names},
        "cpu": cpu_model(),
        "threads": config.threads,
        "repeats": config.repeats,
        "tokens": config.tokens,
        "shapes": [],
    }
    with tqdm(total=config.repeats * (len(SHAPES) + 2), unit="repeat") as bar:
        for codes, dim in SHAPES:
            wall, cpu = time.perf_counter(), time.process_time()
            seconds = timings(config, codes, dim, bar)
            # Well below the number of threads, the machine was busy with something else.
            pauses = PAUSE_SECONDS * config.repeats * (len(seconds) - 1)  # the floor is no step
            cores = (time.process_time() - cpu) / (time.perf_counter() - wall - pauses)
            medians = {name: statistics.median(x) for name, x in seconds.items()}
            report["shapes"].append(
                {"codes": codes, "dim": dim, "cores": cores}
                | {"seconds": medians, "ratios": ratios(seconds)}
            )
        report["loop"] = loop(config, bar)
    codes, dim = MEMORY_SHAPE
    report["memory"] = {"codes": codes, "dim": dim, "peak_bytes": memory(config)}
    return report


def table(report: dict[str, Any]) -> str:
    """The ratios for a human: median, and range over the repeats."""
    lines = [f"{report['tokens']} tokens, {report['threads']} thread(s), {report['cpu']}"]
    for shape in report["shapes"]:
        lines.append(f"K = {shape['codes']}, D = {shape['dim']}; {shape['cores']:.2f} cores busy")
        for name, r in shape["ratios"].items():
            lines.append(f"  {name:26}{r['ratio']:7.3f}  ({r['lowest']:.3f} to {r['highest']:.3f})")
    lines.append(f"extra peak, K = {report['memory']['codes']}, D = {report['memory']['dim']}")
    for name, peak in report["memory"]["peak_bytes"].items():
        lines.append(f"  {name:26}{peak / 2**20:7.0f}  MiB")
    for precision, values in report["loop"].items():
        shares = (f"{name} {100 * values[name]:.1f} %" for name in LOOP_SHARES)
        lines.append(f"training step, K = 512, D = 64, {precision}: {', '.join(shares)}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """The program; returns its exit status."""

    def action() -> dict[str, Any]:
        config = parse_flags(lambda: tyro.cli(BenchmarkConfig, args=arguments, description=__doc__))
        try:
            report = benchmark(config)
        except (ModuleNotFoundError, PackageNotFoundError) as error:
            advice = "the peers come with: pip install 'softvq[dev]'"
            raise ValueError(f"{error}; {advice}") from None
        if config.out is not None:
            write_json(config.out, report)
        print(table(report), file=sys.stderr)
        return report

    return run_program(action)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
