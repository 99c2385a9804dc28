"""Arguments of commands, written key=value."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bnrnn.errors import BnrnnError


class Kind(NamedTuple):
    """What the value of an argument may be: how its text is read, which values are valid, and what to write."""

    read: Callable[[str], Any]
    is_valid: Callable[[Any], bool]
    expected: str


HOURS = Kind(float, lambda v: 0 < v < math.inf, "a number of hours above 0, such as hours=3")
JOBS = Kind(int, lambda v: v >= 1, "the number of runs at a time, such as jobs=2")


def read_arguments(arguments: list[str], kinds: Mapping[str, Kind], command: str) -> dict[str, Any]:
    """The values of arguments by their keys; of two with the same key, the last one counts.

    Raises BnrnnError for a key that is not in `kinds`, and for a value that is not valid.
    """
    found = {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in kinds:
            raise BnrnnError(f"{argument} is not an option of {command}: use {', '.join(f'{k}=...' for k in kinds)}")
        try:
            found[key] = kinds[key].read(text)
            is_valid = kinds[key].is_valid(found[key])
        except ValueError:
            is_valid = False
        if not is_valid:
            raise BnrnnError(f"{argument} is not valid: expected {kinds[key].expected}")
    return found
