"""Tables and numbers as markdown."""

from collections.abc import Iterable
from statistics import mean, stdev

NONE = "–"


def spread(values: list[float], digits: int, planned: int | None = None) -> str:
    """`mean ± standard deviation (n)`, with how many are missing if some are."""
    if not values:
        return NONE
    n = f"n={len(values)}" + (f" of {planned}" if planned and len(values) < planned else "")
    deviation = f" ± {number(stdev(values), digits)}" if len(values) > 1 else ""
    return f"{number(mean(values), digits)}{deviation} ({n})"


def number(value: float, digits: int) -> str:
    """With thousands separated; of what has exploded the order alone."""
    return f"{value:,.{digits}f}" if abs(value) < 1e9 else f"{value:.0e}"


def markdown(header: list[str], rows: Iterable[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"
