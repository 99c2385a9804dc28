"""The one error for what a user can mend, and how programs report it."""

import sys
from collections.abc import Callable


class BnrnnError(ValueError):
    """Bad input, data or configuration. The message names the culprit, what was expected and what to do."""


def mendable(error: Exception, *also: type[Exception]) -> Exception | None:
    """What a user can mend of an error (BnrnnError, and the types in `also`), or None: then it is a bug.

    An error inside of hydra's instantiate is unwrapped.
    """
    cause = error.__cause__ if isinstance(error.__cause__, BnrnnError) else error
    return cause if isinstance(cause, (BnrnnError, *also)) else None


def report_errors(main: Callable[[], None], *also: type[Exception]) -> None:
    """Run a program; what its user can mend (see `mendable`) ends it with one message.

    Anything else is a bug and keeps its traceback.
    """
    try:
        main()
    except Exception as error:
        if (cause := mendable(error, *also)) is None:
            raise
        sys.exit(f"error: {cause}")
