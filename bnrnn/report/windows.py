"""Compares our curves with the paper's within windows of updates, and marks numbers of an earlier evaluation order."""

from itertools import pairwise
from statistics import mean
from typing import Any

from bnrnn.config import key_label
from bnrnn.report.markdown import markdown, spread
from bnrnn.report.run import Run, depends_on_order
from bnrnn.report.runs import longest

WINDOWS = """Means over all points of the paper's curve, and over all our evaluations, within windows of updates (above
the first bound, up to the second); ours are mean ± standard deviation over runs.
"""
IN_FILE_ORDER = "\\*"  # marks numbers of batch statistics in the order of the file


def in_cell(key: str, run: Run, claim: dict[str, Any], row: str, col: str) -> bool:
    """Whether a run belongs to this cell and has no other overrides."""
    return run.in_grid(key) and run.overrides.get(claim["rows"]) == row and run.overrides.get(claim["cols"]) == col


def render_curve(key: str, claim: dict[str, Any], curve: dict[str, Any], runs: list[Run]) -> str:
    """The means of the paper's points and of our evaluations, in every window of updates that a run has passed."""
    rows, fresh = [], longest(run for run in runs if not run.stale)
    for row, cols in curve["points"].items():
        for col, points in cols.items():
            cell = [run for run in fresh if in_cell(key, run, claim, row, col)]
            for low, high in pairwise(curve["windows"]):
                published = [value for update, value in points.items() if low < update <= high]
                passed = [run for run in cell if max(run.series(curve["metric"]), default=0) >= high]
                ours = [value for run in passed if (value := run.mean_within(curve["metric"], low, high)) is not None]
                if published and ours:
                    in_file = [run for run in passed if run.file_order_until > low]
                    shown = marked(spread(ours, 3), in_file, curve["metric"])
                    window = f"{low:,} to {high:,}"
                    theirs = f"{mean(published):.3f} (points: {len(published)})"
                    difference = f"{mean(ours) - mean(published):+.3f}"
                    rows.append([f"`{row}`", f"`{col}`", window, theirs, shown, difference])
    if not rows:
        return "No run has passed one of the windows of updates in which curves are compared.\n"
    table = markdown([key_label(claim["rows"]), claim["cols"], "updates", "paper", "ours", "difference"], rows)
    return with_footnote(f"{WINDOWS}\n{table}")


def marked(text: str, runs: list[Run], metric: str) -> str:
    """The text with a mark if it is of batch statistics of runs that were evaluated in the order of the file."""
    return f"{text} {IN_FILE_ORDER}" if depends_on_order(metric) and any(run.in_file_order for run in runs) else text


def with_footnote(table: str) -> str:
    """A table with the meaning of the mark, if the table has one."""
    about = (
        "evaluated in the order of the file; the authors' evaluations and our later ones are shuffled (see the notes)"
    )
    return f"{table}\n{IN_FILE_ORDER} {about}.\n" if IN_FILE_ORDER in table else table
