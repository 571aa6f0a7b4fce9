"""Several processes train as one does on the joined batch: codebooks, norms, and whole runs.

Two processes on a CPU (gloo); the same functions run in this process alone for comparison.
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from einops import rearrange
from torch import distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from softvq import checkpoint, distributed
from softvq.autoencoder import LatentNorm, VQVAEOutput
from softvq.evaluation import Sums, add_step
from softvq.hierarchical import HierarchicalVQVAE, HierarchicalVQVAEConfig
from softvq.quantizers import DDCLCodebook, build, param_groups
from softvq.quantizers.base import CodebookConfig
from softvq.quantizers.ddcl import DDCLConfig
from softvq.quantizers.ema import EMAVQ, EMAConfig
from softvq.quantizers.straight_through import StraightThroughConfig
from softvq.readout import DDCLHierarchy, DDCLReadoutConfig

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
# Other models than a codebook behind an encoder
MODELS = ("readouts", "2level-ddcl", "2level-vq", "2level-ema")
STEPS = 8
# The joined batches: (images, tokens, width) with a mask, shared out unevenly; the second has no
# real token in the first process, the third no image.
SHARES = [(3, 2), (2, 3), (0, 4), (4, 1), (2, 2), (1, 3), (3, 3), (2, 1)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens near -5 in the first process and near +5 in the second, with a mask."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(sum(SHARES[step]), 9, 6, generator=generator, dtype=torch.float64) - 5
    x[SHARES[step][0] :] += 10
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


class Readouts(nn.Module):
    """Two levels of readouts behind an encoder, and a loss that reads all that they give."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4, bias=False)
        options = dict(dim=4, codebook_size=6, dead_below=0.98, schedule_steps=8)
        levels = DDCLReadoutConfig(heads=2, residual=True, **options), DDCLReadoutConfig(**options)
        self.levels = DDCLHierarchy(levels)

    def forward(self, x, mask):
        outputs = self.levels(self.encoder(x), mask)
        loss = x.new_zeros(())
        for out in outputs:
            loss = loss + out.loss
            loss = loss + distributed.joined_mean((out.tokens - 0.1).square().sum(-1), mask)
            loss = loss + distributed.joined_mean(out.weights[..., 0].square().sum(-1), mask)
        heads = [head for out in outputs for head in out.heads]
        return loss, heads[0]._replace(revived=torch.stack([h.revived for h in heads]).sum())


class TwoLevels(nn.Module):
    """The two-level VQ-VAE on images made of the batch."""

    def __init__(self, config: CodebookConfig) -> None:
        super().__init__()
        network = dict(hidden=4, residual_hidden=2, residual_blocks=1, channels=1, downsamplings=1)
        self.model = HierarchicalVQVAE(
            HierarchicalVQVAEConfig(top=config, bottom=config, **network)
        )

    def forward(self, x, mask):
        # Ten pixels a side, which no stride divides; a part without images is as good as any.
        x = rearrange(x, "b (h w) d -> b 1 h (w d)", h=3).repeat(1, 1, 4, 1)[:, :, :10, :10]
        output = self.model(x)
        loss = distributed.joined_mean((output.reconstruction - x).square(), None) + output.loss
        top, bottom = output.assignments
        return loss, bottom._replace(revived=top.revived + bottom.revived)


def built(name: str) -> nn.Module:
    if name == "readouts":
        return Readouts()
    if name in MODELS:
        codes = dict(dim=3, codebook_size=4)
        configs = {
            "ddcl": DDCLConfig(**codes, dead_below=0.98, schedule_steps=8),
            "vq": StraightThroughConfig(**codes, init="data"),
            "ema": EMAConfig(**codes, dead_below=0.9),
        }
        return TwoLevels(configs[name.removeprefix("2level-")])
    return Model(CONFIGS[name])


def train(name: str) -> list[dict[str, torch.Tensor]]:
    """The state after every step, with the gradients of the encoder and what was revived."""
    torch.manual_seed(0)
    model = built(name).double()
    # A process that draws otherwise must not matter, so long as the first draws the same.
    torch.manual_seed(1 + distributed.rank())
    alone = distributed.process_count() == 1
    wrapped = model if alone else DistributedDataParallel(model)
    # Adam would make full steps of a bias's gradient that is 0 up to rounding.
    method = torch.optim.Adam if name in CONFIGS else torch.optim.SGD
    optimizer = method(param_groups(model, 1e-2, 0.1))
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
    kwargs["timeout"] = timedelta(seconds=60)  # in which one waits for what the other never sends
    torch.manual_seed(0)
    built_before = DDCLCodebook(**SIZE).double()
    dist.init_process_group("gloo", **kwargs)
    results = {name: train(name) for name in (*CONFIGS, *MODELS)}
    torch.manual_seed(0)
    built_after = DDCLCodebook(**SIZE).double()
    rows = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    own = rows[:5] if rank == 0 else rows[5:]
    leaf = own.clone().requires_grad_()
    (distributed.total(leaf.sum()).square() * (rank + 1)).backward()
    logged, part = Sums(), distributed.joined_mean(own[:, 0], None)
    add_step(logged, VQVAEOutput(torch.zeros(len(own), 1, 1, 1), (), part), own[:, 0].mean())
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
        "logged": logged.joined(),
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
        # Of five images in one process and one in the other
        for name in ("loss", "mse"):
            expected = pytest.approx(rows[:, 0].mean().item(), abs=1e-12)
            assert found["logged"].mean(name, "images") == expected
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


@pytest.mark.parametrize("name", [*CONFIGS, *MODELS])
def test_codebooks_are_equal_in_both_processes_and_to_one_on_the_joined_batch(two, name):
    expected = train(name)
    first, second = (result[name] for result in two)
    for step, state in enumerate(expected):
        for key, value in state.items():
            assert torch.equal(first[step][key], second[step][key]), (step, key)
            torch.testing.assert_close(
                first[step][key], value, rtol=1e-9, atol=1e-9, msg=f"{step} {key}"
            )
    if name in ("ddcl", "ema", *MODELS) and name != "2level-vq":
        assert sum(int(state["revived"]) for state in expected) > 0


def test_a_layer_built_before_the_processes_met_does_the_same(two):
    for result in two:
        found = result["functions"]
        assert torch.equal(found["before"], found["after"])
        assert torch.equal(found["after"], two[0]["functions"]["after"])


FLAGS = (
    *("--train.epochs", "3", "--train.batch-size", "16", "--model.hidden", "8"),
    # The last batch is one image, and none in the second process.
    *("--data.train-images", "49", "--data.test-images", "33", "--data.workers", "0"),
    "--train.no-channels-last",
)
CODES = ("--model.quantizer.codebook-size", "16")
TWO_LEVELS = ("--data.source", "photos", "--model.top.codebook-size", "8")
TWO_LEVELS += ("--model.bottom.codebook-size", "16")


def command(out: Path, *flags: str, model: str = "photos-ddcl", processes: int = 2) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    codes = TWO_LEVELS if model.endswith("2level") else CODES
    program = [str(ROOT / "train_vqvae.py"), model, "--out", str(out), *FLAGS, *codes, *flags]
    return [sys.executable, *(launcher if processes > 1 else []), *program]


def run(*arguments, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command(*arguments, **options), capture_output=True, text=True, env=environment, cwd=ROOT
    )


@pytest.mark.parametrize(
    "model",
    [
        "photos-ddcl",
        "photos-ema",
        pytest.param("photos-vq", marks=pytest.mark.slow),
        pytest.param("cifar10-ddcl-2level", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_two_processes_is_that_of_one(tmp_path, model):
    for count in (1, 2):
        # Adam makes steps of the full rate of a bias's gradient that is 0 up to rounding, and
        # these differ: a small rate keeps that small.
        done = run(tmp_path / str(count), "--train.lr", "1e-5", model=model, processes=count)
        assert done.returncode == 0, done.stderr
        # One JSON object, from the first process alone
        assert json.loads(done.stdout)["train_images"] == 49
    records = [checkpoint.read_records(tmp_path / str(count)) for count in (1, 2)]
    assert len(records[1]) == 3
    for one, two in zip(*records, strict=True):
        assert one.keys() == two.keys()
        finest = "_level2" if model.endswith("2level") else ""
        assert two[f"train/tokens{finest}"] == 49 * 64
        assert two[f"test/tokens{finest}"] == 33 * 64
        for key in set(one) - {"seconds"}:
            exact = key.startswith("train/revived")
            assert two[key] == (
                one[key] if exact else pytest.approx(one[key], rel=1e-2, abs=1e-3)
            ), key
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
