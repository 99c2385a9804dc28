"""The one error for what a user can mend, and how programs report it."""

import sys
from collections.abc import Callable


class BnrnnError(ValueError):
    """Bad input, data or configuration. The message names the culprit, what was expected and what to do."""


def report_errors(main: Callable[[], None]) -> None:
    """Run a program; what its user can mend ends it with one line, anything else is a bug and keeps its traceback."""
    try:
        main()
    except BnrnnError as error:
        sys.exit(f"error: {error}")
