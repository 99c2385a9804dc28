"""The error class for mistakes that a user can correct, and how programs report it."""

import sys
from collections.abc import Callable


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
