"""The core hours of the runs that tests of claims still need."""

from collections.abc import Iterator
from pathlib import Path

from bnrnn.report.claims import load_claim
from bnrnn.report.judging import JudgedTest, sides_of, wanted_of
from bnrnn.report.outcome import LEAST_PAIRS
from bnrnn.report.rules import PROPERTY
from bnrnn.training.cells import Cell, expand
from bnrnn.training.progress import last_record, load_known, nearest_speed, total_updates
from bnrnn.training.results import FILE


def hours_of(tested: JudgedTest, results_dir: Path) -> float | None:
    """The core hours of all runs that a test lacks, for three seeds of each of its sides, without evaluations.

    The beginning of an unfinished run counts as done. None if a run's length is unknown, or if no similar run has been
    timed.
    """
    hours: dict[Path, float] = {}
    for cell in _missing(tested, results_dir):
        known = load_known(results_dir / cell.experiment)
        whole, speed = total_updates(cell, known), nearest_speed(cell, known)
        updates = tested.test.get("updates", whole or load_claim(tested.key).get("paper_updates"))
        if updates is None or speed is None:
            return None
        hours[cell.folder] = max(0, updates - last_record(cell.folder)[0]) * speed / 3600
    return sum(hours.values(), 0.0)


def _missing(tested: JudgedTest, results_dir: Path) -> Iterator[Cell]:
    """The cells of the paper's length that a test lacks, also those of which it needs only the beginning."""
    seeds = [str(seed) for seed in range(10)]
    if tested.test["rule"] == PROPERTY:
        key = load_claim(tested.key).get("models")
        if key is not None:  # other analyses train nothing
            yield from _cells(key, {}, seeds[tested.n : LEAST_PAIRS], results_dir)
        return
    sides = sides_of(tested.test)
    for side, present in zip(sides, tested.seeds or [frozenset()] * len(sides), strict=True):
        key = f"{tested.paper}/{side.get('experiment', tested.test['experiment'])}"
        # A finished run that the test does not use, because it lacks a number, is not trained again.
        cells = _cells(key, wanted_of(tested.test, side), [s for s in seeds if s not in present], results_dir)
        finished = {cell.overrides["seed"] for cell in cells if (cell.folder / FILE).exists()}
        left = [s for s in seeds if s not in present and s not in finished][: max(0, LEAST_PAIRS - len(present))]
        yield from (cell for cell in cells if cell.overrides["seed"] in left)


def _cells(key: str, overrides: dict[str, object], seeds: list[str], results_dir: Path) -> list[Cell]:
    if not seeds:
        return []
    quoted = str(results_dir).replace("'", r"\'")
    choices = [f"{name}={value}" for name, value in overrides.items()]
    return expand([f"experiment={key}", "budget=paper", *choices, f"seed={','.join(seeds)}", f"out_dir='{quoted}'"])
