"""Tables and numbers as markdown."""

import re
from collections.abc import Iterable
from statistics import mean, stdev

NONE = "–"
BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)  # in a document: its name and its content


def spread(values: list[float], digits: int, planned: int | None = None) -> str:
    """`mean ± standard deviation (n)`. If fewer runs exist than planned, n is shown as `n of planned`."""
    if not values:
        return NONE
    n = f"n={len(values)}" + (f" of {planned}" if planned and len(values) < planned else "")
    deviation = f" ± {number(stdev(values), digits)}" if len(values) > 1 else ""
    return f"{number(mean(values), digits)}{deviation} ({n})"


def number(value: float, digits: int) -> str:
    """A number with thousands separators; from 10^9 on, only its order of magnitude."""
    return f"{value:,.{digits}f}" if abs(value) < 1e9 else f"{value:.0e}"


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"
