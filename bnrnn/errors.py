"""The error class for mistakes that a user can correct, and how programs report it."""

import errno
import io
import math
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any


class BnrnnError(ValueError):
    """Bad input, data or configuration. The message names the file or key, what was expected and what to do."""


class MissingData(BnrnnError):
    """A dataset, a part of it, or a package that reads it is not there. The message says how to get it."""


def first_line(error: Exception) -> str:
    """The first line of the message of an error, or the name of its type if it has no message."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def mendable(error: Exception, *also: type[Exception]) -> Exception | None:
    """The error if a user can correct it, or None if it is a bug.

    A user can correct a BnrnnError, the types in `also`, errors of the system that name a file, a package that is not
    installed, and a lack of memory. If hydra's instantiate has wrapped such an error, that error is returned.
    """
    if isinstance(error, BnrnnError):
        return error
    cause = error.__cause__ if isinstance(error.__cause__, (BnrnnError, OSError, ModuleNotFoundError)) else error
    if isinstance(cause, (BnrnnError, *also)):
        return cause
    if isinstance(cause, OSError) and cause.filename is not None:
        remedy = (
            "use shorter names" if cause.errno == errno.ENAMETOOLONG else "choose another path, or correct this one"
        )
        return BnrnnError(f"{cause.filename} cannot be used ({cause.strerror}): {remedy}")
    if isinstance(cause, ModuleNotFoundError) and cause.name and cause.name.split(".")[0] != "bnrnn":
        need = "pip install 'bnrnn[train]' brings what training needs"
        return MissingData(f"the package {cause.name} is not installed: {need}")
    if lacks_memory(error):
        return BnrnnError(
            f"not enough memory ({first_line(error)}): use a smaller batch_size or population_batch_size, or another "
            "machine; what was saved is unchanged"
        )
    return None


def lacks_memory(error: Exception) -> bool:
    """Whether memory ran out: Python's and CUDA's error have their own types, torch's on a CPU is a RuntimeError."""
    signs = ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory", "CUDA error: out of memory",
             "CUBLAS_STATUS_ALLOC_FAILED")  # fmt: skip
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in signs)


def error_text(error: Exception) -> str:
    """The message of an error that a user can correct; of a bug also its type and where it was raised."""
    cause = mendable(error)
    return "".join(traceback.format_exception(error)).rstrip() if cause is None else str(cause)


def report_errors(main: Callable[[], None], *also: type[Exception], usage: str | None = None) -> None:
    """Run a program. An error that the user can correct (see `mendable`) ends it with one message.

    Any other error is a bug and keeps its traceback. Ctrl-C ends it with the exit status 130.

    Args:
        usage: what --help prints, for programs that do not read this option themselves.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack some characters, such as dashes
    if usage is not None and {"-h", "--help"} & set(sys.argv[1:]):
        print(usage.strip())
        return
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            sys.exit(128 + signal.SIGPIPE)
        if (cause := mendable(error, *also)) is None:
            raise
        sys.exit(f"error: {cause}")


def _nobody_reads() -> bool:
    """Whether the reader of the output, such as `head`, has ended. What is left of the output is then thrown away."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    has_ended = any(event & select.POLLERR for _, event in poll.poll(0))
    if has_ended:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return has_ended


def check_size(name: str, value: Any, at_least: int = 1) -> None:
    """Raise BnrnnError unless value is an integer of at least 1, or of another limit."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise BnrnnError(f"{name} must be an integer, got {value!r}")
    if int(value) < at_least:
        raise BnrnnError(f"{name} must be at least {at_least}, got {value}")


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise BnrnnError unless value is a finite number between low and high."""
    if not isinstance(value, Real) or not math.isfinite(value) or not low <= float(value) <= high:
        limits = f" from {low} to {high}" if low > -math.inf or high < math.inf else ""
        raise BnrnnError(f"{name} must be a finite number{limits}, got {value!r}")
