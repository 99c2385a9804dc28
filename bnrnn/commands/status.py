"""The table of a campaign: its runs, their states and the estimated time left, without any new measurement."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from bnrnn.report.markdown import NONE, markdown
from bnrnn.training.cells import Cell
from bnrnn.training.progress import Entry, Progress, runs_of


def render(entries: list[Entry], out_dir: Path) -> str:
    """A table with one row per entry, one line for each run in progress, and the total."""
    rows, lines, every = [], [], {}
    for entry in entries:
        runs = runs_of(entry, out_dir)
        states = Counter(run.state for run in runs)
        done = f"{states['finished'] + states['diverged']} of {len(runs)}"
        done += f" ({states['diverged']} diverged)" if states["diverged"] else ""
        active = [f"{_short(cell, entry)} {run.progress}" for cell, run in zip(entry.cells, runs, strict=True)
                  if run.state == "running"]  # fmt: skip
        rows.append([entry.title, done, ", ".join(active) or NONE, str(states["begun"]), str(states["left"]),
                     _hours(runs), ", ".join(entry.claims)])  # fmt: skip
        lines += [f"{run.state}: {run.title}, {run.progress} updates, {_hours([run])} hours left" for run in runs
                  if run.state in ("running", "begun")]  # fmt: skip
        every |= {cell.folder: run for cell, run in zip(entry.cells, runs, strict=True)}
    table = markdown(["runs", "finished", "running", "begun", "left", "hours left", "claims"], rows)
    done = sum(run.state in ("finished", "diverged") for run in every.values())
    lines += [
        f"{done} of {len(every)} runs are done. The others take {_hours(every.values())} core hours, without their "
        "evaluations. The sign ~ marks times that are partly estimated in the campaign's file, not measured."
    ]
    return f"{table}\n" + "".join(f"{line}\n" for line in lines)


def _short(cell: Cell, entry: Entry) -> str:
    """The overrides in which a cell differs from other cells of its entry."""
    same = set.intersection(*(set(c.overrides.items()) for c in entry.cells))
    return " ".join(f"{k}={v}" for k, v in cell.overrides.items() if (k, v) not in same)


def _hours(runs: Collection[Progress]) -> str:
    total, measured = sum(run.hours for run in runs), all(run.measured for run in runs)
    return f"{'' if measured else '~'}{total:.{1 if total < 100 else 0}f}"
