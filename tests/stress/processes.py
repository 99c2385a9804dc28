"""Forked processes: they inherit what this one has imported, so that starting one takes milliseconds."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from bnrnn.errors import mendable

BUG = 99  # exit status after an error that users cannot correct


def forked(action: Callable[[], object], output: Path, seconds: float) -> int | None:
    """Run an action in a forked process, which writes to a file. Returns its exit status, negative for a signal.

    Returns None if it was killed after so many seconds. As in the programs for users, an error that the user can
    correct ends it with status 1 and one message.
    """
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _run(action, output)
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        left = end - time.monotonic()
        if left <= 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(min(left, 0.002))


def _run(action: Callable[[], object], output: Path) -> None:
    status = BUG
    try:
        file = output.open("w")
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        action()
        status = 0
    except Exception as error:
        if (cause := mendable(error, HydraException, OmegaConfBaseException)) is None:
            traceback.print_exc()
        else:
            print(f"error: {cause}")
            status = 1
    finally:
        sys.stdout.flush()
        os._exit(status)
