"""Several processes train as one does on the joined batch: codebooks, norms, and whole runs.

Two processes on a CPU (gloo); the same functions run in this process alone for comparison.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from einops import rearrange
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from softvq import checkpoint, distributed
from softvq.autoencoder import LatentNorm
from softvq.quantizers import DDCLCodebook, build, param_groups
from softvq.quantizers.base import CodebookConfig
from softvq.quantizers.ddcl import DDCLConfig
from softvq.quantizers.ema import EMAVQ, EMAConfig
from softvq.quantizers.straight_through import StraightThroughConfig

ROOT = Path(__file__).parents[1]
SIZE = dict(dim=4, codebook_size=12)
CONFIGS: dict[str, CodebookConfig] = {
    "ddcl": DDCLConfig(**SIZE, dead_below=0.98, schedule_steps=8),
    "ddcl-full": DDCLConfig(**SIZE, gradient="full", dead_below=0.0, schedule_steps=8),
    "ddcl-soft": DDCLConfig(**SIZE, hard_forward_after=1.0, schedule_steps=8),
    "hard": StraightThroughConfig(**SIZE, init="data"),
    "hard-uniform": StraightThroughConfig(**SIZE),
    "ema": EMAConfig(**SIZE, dead_below=0.9, decay=0.5),
}
STEPS = 8
# The joined batches: (images, tokens, width) with a mask, shared out unevenly; the second has no
# real token in the first process, the third no image.
SHARES = [(3, 2), (2, 3), (0, 4), (4, 1), (2, 2), (1, 3), (3, 3), (2, 1)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(SHARES[step]), 9, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(x.shape[:2], generator=generator) < 0.7
    mask[:, 0] = True
    if step == 1:
        mask[: SHARES[1][0]] = False
    return x, mask


class Model(nn.Module):
    def __init__(self, config: CodebookConfig) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4, bias=False)
        self.norm = LatentNorm(4)
        self.codebook = build(config)

    def forward(self, x, mask):
        # 3 x 3 positions: torch's batch_norm has a wrong gradient for some strides of a side of 1.
        z = rearrange(self.encoder(x), "b (h w) d -> b d h w", h=3)
        z = rearrange(self.norm(z), "b d h w -> b (h w) d")
        found = self.codebook.assign(z, mask)
        error = distributed.joined_mean((found.quantized - 0.1).square().sum(-1), mask)
        return error + found.loss, found


def train(config: CodebookConfig) -> list[dict[str, torch.Tensor]]:
    """The state after every step, with the gradients of the encoder and what was revived."""
    torch.manual_seed(0)
    model = Model(config).double()
    # A process that draws otherwise must not matter, so long as the first draws the same.
    torch.manual_seed(1 + distributed.rank())
    alone = distributed.process_count() == 1
    wrapped = model if alone else DistributedDataParallel(model)
    optimizer = torch.optim.Adam(param_groups(model, 1e-2, 0.1))
    states = []
    for step in range(STEPS):
        x, mask = batch(step)
        if not alone:
            own = slice(*((0, SHARES[step][0]), (SHARES[step][0], None))[distributed.rank()])
            x, mask = x[own], mask[own]
        loss, found = wrapped(x, mask)
        optimizer.zero_grad()
        loss.backward()
        state = {
            f"grad/{n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
        counts = distributed.total(found.counts)
        state |= {n: v.clone() for n, v in model.state_dict().items()}
        states.append(state | {"counts": counts, "revived": found.revived})
    return states


def both_processes(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    kwargs = dict(world_size=2, rank=rank, init_method=f"file://{folder}/meet")
    torch.manual_seed(0)
    built_before = DDCLCodebook(**SIZE).double()
    dist.init_process_group("gloo", **kwargs)
    results = {name: train(config) for name, config in CONFIGS.items()}
    torch.manual_seed(0)
    built_after = DDCLCodebook(**SIZE).double()
    rows = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    own = rows[:5] if rank == 0 else rows[5:]
    leaf = own.clone().requires_grad_()
    (distributed.total(leaf.sum()).square() * (rank + 1)).backward()
    averages = EMAVQ(dim=1, codebook_size=1, decay=0.0, smoothing=0.0)
    averages.initialize(torch.zeros(1, 1))
    averages(torch.tensor([[0.0], [2.0]] if rank == 0 else [[10.0]]))
    for codebook in (built_before, built_after):
        torch.manual_seed(3)
        codebook(torch.randn(5 + rank, 4, dtype=torch.float64))
    results["functions"] = {
        "joined": distributed.joined(own),
        "flags": distributed.joined(own[:, 0] > 4),
        "picked": distributed.rows_of_joined(own, torch.tensor([5, 0, 4, 5])),
        "mean": distributed.total(distributed.joined_mean(own, None)) / 2,
        "gradient": leaf.grad,
        "count": distributed.row_count(own),
        "any": distributed.any_process(rank == 1, False),
        "share": distributed.share(rows),
        "averages": averages.prototypes,
        "before": built_before.prototypes.detach(),
        "after": built_after.prototypes.detach(),
    }
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes found, each."""
    folder = tmp_path_factory.mktemp("two")
    multiprocessing.spawn(both_processes, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_collectives_are_those_of_the_joined_rows(two):
    rows = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    for rank, found in enumerate(result["functions"] for result in two):
        assert torch.equal(found["joined"], rows)
        assert found["flags"].tolist() == (rows[:, 0] > 4).tolist()
        assert torch.equal(found["picked"], rows[[5, 0, 4, 5]])
        assert found["mean"].item() == pytest.approx(rows.mean().item(), abs=1e-12)
        # d/dx of (sum)² * 1 and of (sum)² * 2, summed over the processes
        assert (found["gradient"] == 3 * 2 * rows.sum()).all()
        assert found["count"] == 6
        assert found["any"] == [True, False]
        # C11: (0 + 2 + 10) / 3, neither 1 and 10, nor the mean 5.5 of the two means
        assert found["averages"].tolist() == [[4.0]]
        assert torch.equal(found["share"], rows[3 * rank : 3 * rank + 3])


def test_alone_they_are_the_identity():
    x = torch.randn(3, 2, requires_grad=True)
    assert distributed.total(x) is x
    assert distributed.joined(x) is x
    assert distributed.from_first(x) is x
    assert distributed.share(x).shape == (3, 2)
    assert distributed.joined_mean(x[:0], None) == 0
    mask = torch.tensor([True, False, True])
    torch.testing.assert_close(distributed.joined_mean(x[:, 0], mask), x[[0, 2], 0].mean())


@pytest.mark.parametrize("name", CONFIGS)
def test_codebooks_are_equal_in_both_processes_and_to_one_on_the_joined_batch(two, name):
    expected = train(CONFIGS[name])
    first, second = (result[name] for result in two)
    for step, state in enumerate(expected):
        for key, value in state.items():
            assert torch.equal(first[step][key], second[step][key]), (step, key)
            torch.testing.assert_close(
                first[step][key], value, rtol=1e-9, atol=1e-9, msg=f"{step} {key}"
            )
    if name in ("ddcl", "ema"):
        assert sum(int(state["revived"]) for state in expected) > 0


def test_a_layer_built_before_the_processes_met_does_the_same(two):
    for result in two:
        found = result["functions"]
        assert torch.equal(found["before"], found["after"])
        assert torch.equal(found["after"], two[0]["functions"]["after"])


FLAGS = (
    *("--train.epochs", "3", "--train.batch-size", "16", "--model.hidden", "8"),
    *("--data.train-images", "51", "--data.test-images", "33", "--data.workers", "0"),
    *("--model.quantizer.codebook-size", "16", "--train.no-channels-last"),
)


def command(out: Path, *flags: str, model: str = "photos-ddcl", processes: int = 2) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    program = [str(ROOT / "train_vqvae.py"), model, "--out", str(out), *FLAGS, *flags]
    return [sys.executable, *(launcher if processes > 1 else []), *program]


def run(*arguments, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command(*arguments, **options), capture_output=True, text=True, env=environment, cwd=ROOT
    )


@pytest.mark.parametrize("model", ["photos-ddcl", "photos-ema"])
def test_a_run_of_two_processes_is_that_of_one(tmp_path, model):
    for count in (1, 2):
        # Adam makes steps of the full rate of a bias's gradient that is 0 up to rounding, and
        # these differ: a small rate keeps that small.
        done = run(tmp_path / str(count), "--train.lr", "1e-5", model=model, processes=count)
        assert done.returncode == 0, done.stderr
        # One JSON object, from the first process alone
        assert json.loads(done.stdout)["train_images"] == 51
    records = [checkpoint.read_records(tmp_path / str(count)) for count in (1, 2)]
    assert len(records[1]) == 3
    for one, two in zip(*records, strict=True):
        assert one.keys() == two.keys()
        assert two["train/tokens"] == 51 * 64
        assert two["test/tokens"] == 33 * 64
        assert two["train/revived"] == one["train/revived"]
        for key in set(one) - {"seconds", "train/revived"}:
            assert two[key] == pytest.approx(one[key], rel=1e-2, abs=1e-3), key
    weights = [
        checkpoint.read_tensors(tmp_path / str(count) / checkpoint.MODEL)[0] for count in (1, 2)
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-3, atol=2e-4, msg=name)


def workers(out: Path) -> list[int]:
    """The processes that train into a folder, without the one that launched them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:  # ended meanwhile
            continue
        if str(out).encode() in arguments and b"torch.distributed.run" not in arguments:
            found.append(int(path.parent.name))
    return found


def test_a_dead_process_ends_the_run_and_any_number_of_processes_continues_it(tmp_path):
    out = tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launched = subprocess.Popen(
        command(out, "--train.epochs", "2000"),
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert launched.stderr is not None
    deadline = time.monotonic() + 120
    while len(checkpoint.read_records(out) if out.exists() else []) < 2:
        assert time.monotonic() < deadline
        assert launched.poll() is None
        time.sleep(0.2)
    os.kill(workers(out)[-1], signal.SIGKILL)
    killed = time.monotonic()
    _, errors = launched.communicate(timeout=60)
    assert launched.returncode != 0
    assert time.monotonic() - killed < 60
    assert "SIGKILL" in errors or "Signal 9" in errors
    _, far = checkpoint.read_tensors(out / checkpoint.STATE)
    assert int(far["epoch"]) >= 2
    # The same configuration in one process goes on from there, and stops when told to.
    alone = subprocess.Popen(
        command(out, "--train.epochs", "2000", processes=1),
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert alone.stderr is not None
    lines = []
    for line in alone.stderr:
        lines.append(line)
        if "continues after" in line:
            break
    assert f"continues after epoch {far['epoch']}" in lines[-1]
    alone.kill()
    alone.communicate()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--train.batch-size", "15"), "2 processes must divide the batch_size, got 15"),
        (("--data.test-images", "1"), "2 processes need as many test images, got 1"),
    ],
)
def test_what_two_processes_cannot_share_is_refused(tmp_path, flags, message):
    done = run(tmp_path / "run", *flags)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "run").exists()
