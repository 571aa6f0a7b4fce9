"""What the programs share: flags, device, the state of a training on disk, and how they end, with
JSON on stdout, or one line on stderr for what went wrong, and an exit status.

What they do is in the programs themselves.
"""

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed as dist
from torch import nn

from softvq import checkpoint
from softvq.data import DataConfig
from softvq.evaluation import Sums
from softvq.training import restore, training_state

T = TypeVar("T")


class Interrupted(Exception):
    """SIGINT came, and the work so far is saved."""


class Progress(NamedTuple):
    """How far a training is."""

    epoch: int
    """Epochs done."""
    step: int
    """Steps done in the next one."""
    seconds: float
    """What those steps took."""
    sums: Sums
    """What they logged."""


def save_state(
    out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> None:
    """Writes all that `resume` needs, in process 0; the sums are those of all processes."""
    progress = progress._replace(sums=progress.sums.joined())
    if not is_first():
        return
    far = {"epoch": str(progress.epoch), "step": str(progress.step)}
    state = training_state(model, optimizer, progress.sums)
    checkpoint.write_tensors(
        out / checkpoint.STATE, state, {**far, "seconds": repr(progress.seconds)}
    )


def resume(out: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Puts the state in the folder back, if there is one, and says how far it is.

    Raises ValueError for a state that does not fit or does not say.
    """
    if not (out / checkpoint.STATE).exists():
        return Progress(0, 0, 0.0, Sums())
    state, far = checkpoint.read_tensors(out / checkpoint.STATE)
    sums = restore(state, model, optimizer)
    if not {"epoch", "step", "seconds"} <= far.keys():
        raise ValueError(f"the training state in {out} does not say how far it is")
    epoch, step = int(far["epoch"]), int(far["step"])
    tell(f"{out}: continues after epoch {epoch}, step {step}")
    if not is_first():
        # What was logged before counts once.
        sums.tensors = {name: torch.zeros_like(value) for name, value in sums.tensors.items()}
    return Progress(epoch, step, float(far["seconds"]), sums)


def find_device(name: str) -> torch.device:
    """The device of that name, or for `auto` cuda where there is one.

    Raises ValueError for one that is not there.
    """
    if name == "auto":
        own = os.environ.get("LOCAL_RANK", "0")
        return torch.device(f"cuda:{own}" if torch.cuda.is_available() else "cpu")
    try:
        one = torch.zeros(1, device=name)
        one.item()  # the device meta has no values
        return one.device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


def launched_processes() -> int:
    """Number of processes that torchrun started, joined already or not; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Joins the processes that torchrun started, and parts them again; alone, does nothing."""
    if launched_processes() == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group()
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process is the one that prints and writes, before the others are joined too."""
    return os.environ.get("RANK", "0") == "0"


def tell(line: str) -> None:
    """One line on stderr, from process 0 alone."""
    if is_first():
        print(line, file=sys.stderr)


@contextmanager
def interruptions() -> Iterator[Callable[[], bool]]:
    """Tells whether SIGINT came; a second one stops at once."""
    seen: list[int] = []

    def note(number: int, _frame: Any) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


def parse_flags(parse: Callable[[], T]) -> T:
    """What `parse`, a call of tyro, returns; its boxed complaints become one ValueError."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return parse()
    except SystemExit as stop:
        if not stop.code:
            raise
        # A title, and the complaint between two rules, in ASCII where the terminal has no other.
        rows = (line.strip("│| ") for line in box.getvalue().splitlines()[1:])
        complaint = takewhile(_is_text, dropwhile(lambda row: not _is_text(row), rows))
        # tyro has a name of its own for the parser of one model's flags.
        raise ValueError(" ".join(complaint).replace("__tyro-dummy-inner__.", "")) from None


def _is_text(row: str) -> bool:
    return bool(row.strip("─╰╯-+"))


def stored_data(run: str) -> DataConfig | None:
    """The data that a run was trained on, None if it does not say.

    Raises ValueError for data that this version cannot read.
    """
    stored = checkpoint.read_config(run).get("data")
    if stored is None:
        return None
    try:
        return DataConfig(**{key: value for key, value in stored.items() if key != "type"})
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the data in {run}/{checkpoint.CONFIG} cannot be read: {error}") from None


def run_program(action: Callable[[], Any], with_torchrun: bool = False) -> int:
    """Prints what `action` returns as JSON, in process 0, and returns the exit status.

    Where torchrun started several processes, an action that does not know them is refused.
    0 for success, 2 for a user's mistake (ValueError), 1 for a training that broke down
    (ArithmeticError), too little memory or a file that cannot be written (OSError), 130 after
    SIGINT.
    """
    try:
        if launched_processes() > 1 and not with_torchrun:
            raise ValueError("this program runs in one process; start it without torchrun")
        result = action()
        if is_first():
            print(json.dumps(checkpoint.strict(result), indent=2), flush=True)
    except BrokenPipeError:
        # Nobody reads on; without this, Python would complain once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ValueError as error:
        return _fail(f"error: {error}", 2)
    except (ArithmeticError, OSError) as error:
        return _fail(f"error: {error}", 1)
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch has no class of its own for this.
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        return _fail(f"error: too little memory: {str(error).splitlines()[0]}", 1)
    except Interrupted as stop:
        return _fail(f"{stop}; the same command continues it", 130)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    return 0


def _fail(line: str, status: int) -> int:
    print(line, file=sys.stderr)
    return status
