"""What the programs share: flags, device, and how they end, with JSON on stdout, or one line on
stderr for what went wrong, and an exit status.

What they do is in the programs themselves.
"""

import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import takewhile
from typing import Any, TypeVar

import torch

from softvq.checkpoint import CONFIG, read_config, strict
from softvq.data import DataConfig

T = TypeVar("T")


class Interrupted(Exception):
    """SIGINT came, and the work so far is saved."""


def find_device(name: str) -> torch.device:
    """The device of that name, or for `auto` cuda where there is one.

    Raises ValueError for one that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None


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
        lines = (line.strip("│ ") for line in box.getvalue().splitlines()[1:])
        complaint = takewhile(lambda line: line.strip("─╰╯"), lines)
        raise ValueError(" ".join(complaint)) from None


def stored_data(run: str) -> DataConfig | None:
    """The data that a run was trained on, None if it does not say.

    Raises ValueError for data that this version cannot read.
    """
    stored = read_config(run).get("data")
    if stored is None:
        return None
    try:
        return DataConfig(**{key: value for key, value in stored.items() if key != "type"})
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the data in {run}/{CONFIG} cannot be read: {error}") from None


def run_program(action: Callable[[], Any]) -> int:
    """Prints what `action` returns as JSON and returns the exit status.

    0 for success, 2 for a user's mistake (ValueError), 1 for a training that broke down
    (ArithmeticError) or a file that cannot be written (OSError), 130 after SIGINT.
    """
    try:
        result = action()
    except ValueError as error:
        return _fail(f"error: {error}", 2)
    except (ArithmeticError, OSError) as error:
        return _fail(f"error: {error}", 1)
    except Interrupted as stop:
        return _fail(f"{stop}; the same command continues it", 130)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    print(json.dumps(strict(result), indent=2))
    return 0


def _fail(line: str, status: int) -> int:
    print(line, file=sys.stderr)
    return status
