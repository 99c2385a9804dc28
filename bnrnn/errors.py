"""The error class for mistakes that a user can correct, and how programs report it."""

import math
import sys
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any


class BnrnnError(ValueError):
    """Bad input, data or configuration. The message names the file or key, what was expected and what to do."""


def mendable(error: Exception, *also: type[Exception]) -> Exception | None:
    """The error if a user can correct it (a BnrnnError or one of the types in `also`), or None if it is a bug.

    If hydra's instantiate has wrapped a BnrnnError, that BnrnnError is returned.
    """
    cause = error.__cause__ if isinstance(error.__cause__, BnrnnError) else error
    return cause if isinstance(cause, (BnrnnError, *also)) else None


def report_errors(main: Callable[[], None], *also: type[Exception]) -> None:
    """Run a program. An error that the user can correct (see `mendable`) ends it with one message.

    Any other error is a bug and keeps its traceback.
    """
    try:
        main()
    except Exception as error:
        if (cause := mendable(error, *also)) is None:
            raise
        sys.exit(f"error: {cause}")


def check_size(name: str, value: Any) -> None:
    """Raise BnrnnError unless value is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise BnrnnError(f"{name} must be an integer, got {value!r}")
    if int(value) < 1:
        raise BnrnnError(f"{name} must be at least 1, got {value}")


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise BnrnnError unless value is a finite number between low and high."""
    if not isinstance(value, Real) or not math.isfinite(value) or not low <= float(value) <= high:
        limits = f" from {low} to {high}" if low > -math.inf or high < math.inf else ""
        raise BnrnnError(f"{name} must be a finite number{limits}, got {value!r}")
