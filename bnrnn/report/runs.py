"""Reads the finished runs of an experiment from results/."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bnrnn.config import sweep
from bnrnn.data.base import sha256
from bnrnn.errors import BnrnnError
from bnrnn.report.claims import load_claim, rows_of
from bnrnn.report.run import Run
from bnrnn.training.log import METRICS, REMEDY, record_lines, say_left_out
from bnrnn.training.results import FILE, Result
from bnrnn.training.states import is_stale


def run_files(key: str, results_dir: Path) -> list[Path]:
    """The result files of an experiment. An override such as model=captioner/lstm makes a folder one level deeper.

    Folders may be links, such as those of runs that were moved to another disk.
    """
    folders = os.walk(results_dir / key, followlinks=True)
    found = (Path(folder, FILE) for folder, names, files in folders if FILE in (*names, *files))
    return sorted(path for path in found if path.parent != results_dir / key)


def read_run(key: str, path: Path, results_dir: Path) -> tuple[str, Result, list[dict[str, Any]]]:
    """The budget, the result and the records of a run. Raises BnrnnError if they are damaged or of another run."""
    result = Result.read(path)
    budget, *name = path.relative_to(results_dir / key).parts[:-1]
    if not is_named_by("/".join(name), result.overrides):
        raise BnrnnError(
            f"{path.parent} has the result of another run ({', '.join(f'{k}={v}' for k, v in result.overrides.items())}"
            "): move it to the folder of that run, or remove it"
        )
    lines = record_lines(path.parent / METRICS)
    if result.records_sha256 not in (None, sha256(b"".join(lines))):
        raise BnrnnError(f"{path.parent / METRICS} has other records than those to which {FILE} belongs: {REMEDY}")
    return budget, result, [json.loads(line) for line in lines]


def is_named_by(folder: str, overrides: dict[str, str]) -> bool:
    """Whether the name of a run's folder has these overrides and no others. Values of deletions are not compared."""
    rest = re.sub(r",\++", ",", f",{folder},") if folder else ","
    for key, value in overrides.items():
        if key.startswith("~"):
            rest = re.sub(rf",{re.escape(key)}(=[^,]*)?(?=,)", "", rest, count=1)
        elif f",{key}={value}," not in rest:
            return False
        else:
            rest = rest.replace(f",{key}={value},", ",", 1)
    return rest == ","


def load_runs(key: str, results_dir: Path) -> list[Run]:
    """The finished runs of an experiment, in the order of its grid. Damaged ones are reported and left out."""
    runs = []
    for path in run_files(key, results_dir):
        try:
            budget, result, records = read_run(key, path, results_dir)
        except BnrnnError as error:
            say_left_out(str(error))
        else:
            runs.append(Run(path.parent, result.overrides, budget, result, records, is_stale(key, budget, result)))
    claim = load_claim(key)
    grid = sweep(key) | ({claim["rows"]: rows_of(key)} if claim.get("rows_shown") else {})

    def place(run: Run) -> list[int]:
        return [
            values.index(v) if (v := run.overrides.get(k, "")) in values else len(values) for k, values in grid.items()
        ]

    return sorted(runs, key=place)


def load_borrowed(key: str, results_dir: Path) -> list[Run]:
    """The finished runs of other experiments that rows of this one show too, as runs of these rows (`borrows`)."""
    claim, found = load_claim(key), []
    for row, given in claim.get("borrows", {}).items():
        where = {name: value for name, value in given.items() if name != "experiment"}
        for run in load_runs(given["experiment"], results_dir):
            own = {name: value for name, value in run.overrides.items() if name in where}
            if own == where and run.in_grid(given["experiment"]):
                found.append(replace(run, overrides=run.overrides | {claim["rows"]: row}))
    return found


def in_figures(key: str, runs: Iterable[Run]) -> list[Run]:
    """The runs that the figures of an experiment show: those of its recipe's grid, of any length."""
    return [run for run in runs if not run.stale and run.in_grid(key)]


def group(runs: Iterable[Run]) -> dict[tuple[str, tuple[tuple[str, str], ...]], list[Run]]:
    """Group runs that differ only in their seed, by budget and other overrides."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        cell = tuple((k, v) for k, v in run.overrides.items() if k != "seed")
        groups.setdefault((run.budget, cell), []).append(run)
    return groups


def longest(runs: Iterable[Run]) -> list[Run]:
    """Keep the longest of the runs that differ only in their budget.

    Curves of the others are its beginning, unless the program changed in between.
    """
    kept: dict[frozenset[tuple[str, str]], Run] = {}
    for run in runs:
        cell = frozenset((k, v) for k, v in run.overrides.items() if not k.startswith("budget."))
        if cell not in kept or run.result.updates > kept[cell].result.updates:
            kept[cell] = run
    return list(kept.values())
