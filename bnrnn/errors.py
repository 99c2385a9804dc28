"""The one error for what a user can mend, and how programs report it."""

import sys
from collections.abc import Callable


class BnrnnError(ValueError):
    """Bad input, data or configuration. The message names the culprit, what was expected and what to do."""


def report_errors(main: Callable[[], None], *also: type[Exception]) -> None:
    """Run a program; what its user can mend (BnrnnError, and the types in `also`) ends it with one message.

    Anything else is a bug and keeps its traceback. An error inside of hydra's instantiate is unwrapped.
    """
    try:
        main()
    except Exception as error:
        cause = error.__cause__ if isinstance(error.__cause__, BnrnnError) else error
        if not isinstance(cause, (BnrnnError, *also)):
            raise
        sys.exit(f"error: {cause}")
