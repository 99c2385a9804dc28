"""The core hours of runs: of those that tests of claims still need, and of cells of a grid."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from bnrnn.report.claim_types import Table
from bnrnn.report.claims import analysis_of, entry_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.outcome import LEAST_PAIRS, JudgedTest
from bnrnn.report.rules import PROPERTY
from bnrnn.training.cells import Cell
from bnrnn.training.progress import last_record, nearest_speed, total_updates
from bnrnn.training.results import FILE


def hours_of_test(tested: JudgedTest, evidence: Evidence) -> float | None:
    """The core hours of all runs that a test lacks, for three seeds of each of its sides, without evaluations.

    The beginning of an unfinished run counts as done. None if a run's length is unknown, or if no similar run has been
    timed.
    """
    hours: dict[Path, float] = {}
    for cell in _missing(tested, evidence):
        known = evidence.known(cell.experiment)
        whole, speed = total_updates(cell, known), nearest_speed(cell, known)
        entry = entry_of(tested.test.key)
        enough = entry.enough_updates if isinstance(entry, Table) else None
        updates = tested.test.updates or enough or whole or entry.paper_updates
        if updates is None or speed is None:
            return None
        hours[cell.folder] = max(0, updates - last_record(cell.folder)[0]) * speed / 3600
    return sum(hours.values(), 0.0)


def hours_of_cell(cell: Cell, evidence: Evidence) -> float | None:
    """The estimated hours of a whole run; None if its length or its speed is unknown."""
    known = evidence.known(cell.experiment)
    updates, speed = total_updates(cell, known), nearest_speed(cell, known)
    return None if updates is None or speed is None else updates * speed / 3600


def _missing(tested: JudgedTest, evidence: Evidence) -> Iterator[Cell]:
    """The cells of the paper's length that a test lacks, also those of which it needs only the beginning."""
    seeds, test = [str(seed) for seed in range(10)], tested.test
    if test.rule == PROPERTY:
        if models := analysis_of(test.key).models:  # other analyses train nothing
            yield from _cells(models, {}, seeds[tested.n : LEAST_PAIRS], evidence)
        return
    for side, present in zip(test.sides, tested.seeds or [frozenset()] * len(test.sides), strict=True):
        # A finished run that the test does not use, because it lacks a number, is not trained again.
        cells = _cells(side.key, side.overrides, [s for s in seeds if s not in present], evidence)
        finished = {cell.overrides["seed"] for cell in cells if (cell.folder / FILE).exists()}
        left = [s for s in seeds if s not in present and s not in finished][: max(0, LEAST_PAIRS - len(present))]
        yield from (cell for cell in cells if cell.overrides["seed"] in left)


def _cells(key: str, overrides: Mapping[str, str], seeds: list[str], evidence: Evidence) -> list[Cell]:
    choices = [f"{name}={value}" for name, value in overrides.items()]
    return evidence.cells(key, *choices, f"seed={','.join(seeds)}") if seeds else []
