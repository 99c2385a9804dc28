"""How the runs of a sweep stand: finished, failed, running or left."""

import os
from collections import Counter

from bnrnn.errors import BnrnnError
from bnrnn.system.locks import is_being_trained
from bnrnn.training.cells import Cell
from bnrnn.training.failures import failure
from bnrnn.training.log import LOG
from bnrnn.training.options import check_options, naming_nearest_key
from bnrnn.training.results import FILE, Result, check_same_config, config_record, is_stale


def state_of(cell: Cell, since: float) -> str:
    """finished, failed (after a time), running or left. A run that has diverged is finished."""
    if (cell.folder / FILE).exists():
        return "finished"
    return "failed" if failure(cell.folder, since) else "running" if is_being_trained(cell.folder) else "left"


def check_cells(cells: list[Cell]) -> None:
    """Raise BnrnnError for wrong options, as one message before anything is trained, and for results of others."""
    with naming_nearest_key():
        check_options(cells[0].cfg, cells[0].overrides)
        check_results(cells)


def check_results(cells: list[Cell]) -> None:
    """Raise BnrnnError for a stored result that is damaged or was made with another configuration than its cell has."""
    for cell in cells:
        path = cell.folder / FILE
        if path.exists():
            result = Result.read(path)
            if without_deletions(result.overrides) != without_deletions(cell.overrides):
                raise BnrnnError(
                    f"{path} is the result of another run ({', '.join(f'{k}={v}' for k, v in result.overrides.items())}"
                    "): move its folder to that run, or remove it"
                )
            if is_stale(cell.experiment, cell.budget, result):  # composes only once for all seeds
                check_same_config(result.config, config_record(cell.cfg), path)


def without_deletions(overrides: dict[str, str]) -> dict[str, str]:
    """The overrides without deletions, whose values are not stored."""
    return {key: value for key, value in overrides.items() if not key.startswith("~")}


def summary(cells: list[Cell], since: float) -> str:
    """The number of runs in each state, such as "3 of 8 finished, 1 failed, 4 left"."""
    counts = Counter(state_of(cell, since) for cell in cells)
    return ", ".join(f"{counts[s]} of {len(cells)} finished" if s == "finished" else f"{counts[s]} {s}"
                     for s in ("finished", "running", "failed", "left") if counts[s] or s == "finished")  # fmt: skip


def failures_of(cells: list[Cell], since: float) -> list[str]:
    """A line for each run that has failed after a time: its overrides, the message and its log."""
    return [failure_line(cell) for cell in cells if state_of(cell, since) == "failed"]


def failure_line(cell: Cell) -> str:
    """One line about a run that failed: its name, the error, and its log."""
    return f"failed: {cell.title}: {failure(cell.folder)} (log: {os.path.relpath(cell.folder / LOG)})"
