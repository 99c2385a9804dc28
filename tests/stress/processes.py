"""Readers and trainings in forked processes: they inherit what this one has imported, so that they start at once."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from bnrnn.config import MENDABLE
from bnrnn.errors import mendable
from tests.helpers import forked

BUG = 99  # exit status after an error that users cannot correct


def run(action: Callable[[], object], output: Path, seconds: float) -> int | None:
    """Run an action in a forked process, which writes to a file. Returns its exit status, negative for a signal.

    Returns None if it was killed after so many seconds. As in the programs for users, an error that the user can
    correct ends it with status 1 and one message.
    """
    process = forked(_reporting_errors, action, output)
    process.join(seconds)
    in_time = process.exitcode is not None
    process.kill()
    process.join()
    return process.exitcode if in_time else None


def _reporting_errors(action: Callable[[], object], output: Path) -> None:
    with output.open("w") as sys.stdout:
        sys.stderr = sys.stdout
        for number in (1, 2):
            os.dup2(sys.stdout.fileno(), number)
        try:
            action()
        except Exception as error:
            cause = mendable(error, *MENDABLE)
            print(f"error: {cause}" if cause else traceback.format_exc(), flush=True)
            os._exit(1 if cause else BUG)
        sys.stdout.flush()
        os._exit(0)
