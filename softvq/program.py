"""How the programs end: JSON on stdout, one line on stderr for what went wrong, an exit status.

What they do is in the programs themselves.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from softvq.checkpoint import strict


class Interrupted(Exception):
    """SIGINT came, and the work so far is saved."""


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
    print(json.dumps(strict(result), indent=2))
    return 0


def _fail(line: str, status: int) -> int:
    print(line, file=sys.stderr)
    return status
