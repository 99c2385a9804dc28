"""A display of the runs of a sweep that train in several processes: a line for each run, and one for all."""

import math
import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from bnrnn.training.cells import Cell
from bnrnn.training.failures import failure
from bnrnn.training.progress import load_known, run_of
from bnrnn.training.results import FILE

OVER = ("finished", "diverged", "failed")
OTHER_LINES = 4  # of the terminal, which are not for runs
SECONDS = 1.0  # between two looks at the files of the runs


class Live:
    """Context manager that shows the progress of runs while other processes train them. Nothing is measured.

    Outside a terminal it shows nothing, and the processes print lines. In a terminal they must be silent.

    Args:
        cells: the runs of one sweep.
        since: runs that failed before this time count as open.
        console: the terminal; that of the process by default.
    """

    def __init__(self, cells: list[Cell], since: float, console: Console | None = None) -> None:
        self.cells, self.since, self.looked = cells, since, -math.inf
        self.console = console or Console()
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[count]}", justify="right"),
            TextColumn("{task.fields[state]}"), console=self.console, auto_refresh=False,
        )  # fmt: skip
        whole = {"total": len(cells), "count": "", "state": ""}
        self.whole = self.progress.add_task("all", **whole) if self.is_shown else None
        shared = set.intersection(*(set(cell.overrides.items()) for cell in cells))
        self.names = [" ".join(f"{k}={v}" for k, v in cell.overrides.items() if (k, v) not in shared) for cell in cells]
        self.tasks = {}

    @property
    def is_shown(self) -> bool:
        return self.console.is_terminal

    def __enter__(self) -> "Live":
        if self.is_shown:
            self.progress.start()
            self.refresh()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_shown:
            self.refresh()
            self.progress.stop()

    def look(self) -> None:
        """Show the present state, at most once a second."""
        if self.is_shown and time.monotonic() - self.looked >= SECONDS:
            self.refresh()

    def refresh(self) -> None:
        """Read the files of the runs, and show them: running ones first, as many as the terminal has lines for."""
        self.looked = time.monotonic()
        known = load_known(self.cells[0].sweep_folder.parent)
        runs = [run_of(cell, known, math.nan) for cell in self.cells]
        states = [self._state(cell, run.state) for cell, run in zip(self.cells, runs, strict=True)]
        order = sorted(range(len(runs)), key=lambda n: (states[n] != "running", states[n] in OVER))
        shown = set(order[: max(1, self.console.height - OTHER_LINES)])
        for n, (run, state) in enumerate(zip(runs, states, strict=True)):
            if n not in self.tasks:
                self.tasks[n] = self.progress.add_task(self.names[n] or "the only run", count="", state="")
            left = "last evaluation" if run.done == run.total else f"{in_words(run.hours)} left"
            left = f", {left}" if state == "running" and math.isfinite(run.hours) else ""
            self.progress.update(self.tasks[n], completed=run.done, total=run.total, count=run.progress,
                                 state=state + left, visible=n in shown)  # fmt: skip
        counts = Counter(states)
        text = ", ".join(f"{counts[state]} {state}" for state in dict.fromkeys(states))
        if self.whole is not None:
            over = sum(counts[state] for state in OVER)
            self.progress.update(self.whole, completed=over, count=f"{over}/{len(runs)}", state=text)
        self.progress.refresh()

    def _state(self, cell: Cell, state: str) -> str:
        has_failed = not (cell.folder / FILE).exists() and failure(cell.folder, self.since) is not None
        return "failed" if has_failed else state


def in_words(hours: float) -> str:
    """A duration in hours or, below one hour, in minutes."""
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.0f} min"
