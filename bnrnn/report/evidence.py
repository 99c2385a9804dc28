"""What is stored in a folder such as results/: the runs of all experiments, and the numbers of analyses."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from bnrnn.config import CONF, sweep
from bnrnn.data.base import sha256
from bnrnn.errors import BnrnnError
from bnrnn.report.claim_types import Analysis, PaperEntry
from bnrnn.report.claims import has_entry, in_grid, table_of
from bnrnn.report.run import Run
from bnrnn.report.summary import found_results
from bnrnn.system.files import read_record
from bnrnn.training import checkpoint
from bnrnn.training.cells import Cell, expand
from bnrnn.training.log import REMEDY, read_jsonl, record_lines, say_left_out
from bnrnn.training.progress import Known, load_known
from bnrnn.training.results import FILE, METRICS, Result

BUDGET = "paper"  # of unfinished runs: shorter ones finish soon


class Evidence:
    """The evidence in a folder. Everything is read when it is needed, and once: pass this object to all who need it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for method in (self.runs, self.unfinished, self.shown, self.records, self.known, self.numbers):
            setattr(self, method.__name__, cache(method))

    def runs(self, key: str) -> list[Run]:
        """The finished runs of an experiment, in the order of its grid. Damaged ones are reported and left out."""
        grid = table_of(key).grid if has_entry(key) else sweep(key)

        def place(run: Run) -> list[int]:
            found = ((values, run.overrides.get(option, "")) for option, values in grid.items())
            return [values.index(value) if value in values else len(values) for values, value in found]

        paths = run_files(self.folder / key)
        return sorted(_all_that_can_be_read(lambda path: read_run(key, path, self.folder), paths), key=place)

    def unfinished(self, key: str) -> list[Run]:
        """The runs of an experiment's grid with the paper's length that have a checkpoint and no result, in its order.

        The status of such a run is "unfinished". It has no metrics, and the records to which its checkpoint belongs.
        Pages show their curves; claims and tables do not use them. Damaged ones are reported and left out.
        """
        if not (self.folder / key).is_dir() or not (CONF / "experiment" / f"{key}.yaml").exists():
            return []
        cells = self.cells(key)
        return _all_that_can_be_read(_read_unfinished, [cell for cell in cells if not (cell.folder / FILE).exists()])

    def shown(self, key: str) -> list[Run]:
        """The finished runs of a table, and those of other entries that its rows show too, as runs of these rows."""
        table, found = table_of(key), list(self.runs(key))
        for row, given in table.borrows.items():
            lender, where = given["experiment"], {name: v for name, v in given.items() if name != "experiment"}
            for run in self.runs(lender):
                if where.items() <= run.overrides.items() and in_grid(lender, run.overrides):
                    found.append(replace(run, overrides=run.overrides | {table.rows: row}))
        return found

    def records(self, key: str) -> dict[Path, list[dict[str, Any]]]:
        """The records of all runs of an experiment by their folders, also of those that are still being trained."""
        return {path.parent: read_jsonl(path) for path in sorted((self.folder / key).rglob(METRICS))}

    def known(self, key: str) -> list[Known]:
        """Length and speed of all runs of an experiment, from which the cost of others is estimated."""
        results = {run.folder / FILE: run.result for run in self.runs(key)}
        return load_known(self.folder / key, read=lambda path: results.get(path) or Result.read(path))

    def numbers(self, key: str) -> dict[str, Any]:
        """The numbers of an analysis. Raises BnrnnError if they are damaged or missing."""
        return read_record(self.folder / f"{key}.json", f"make reproduce-{key.replace('/', '-')}")

    def cells(self, key: str, *overrides: str) -> list[Cell]:
        """The cells of an experiment at the paper's length, as far as they have these overrides, with their folders."""
        quoted = str(self.folder).replace("'", r"\'")
        return expand([f"experiment={key}", f"budget={BUDGET}", *overrides, f"out_dir='{quoted}'"])

    def has_numbers(self, key: str) -> bool:
        """Whether an analysis has been run."""
        return (self.folder / f"{key}.json").exists()

    def is_measured(self, entry: PaperEntry) -> bool:
        """Whether an entry has any results."""
        return self.has_numbers(entry.key) if isinstance(entry, Analysis) else bool(run_files(self.folder / entry.key))


def in_figures(key: str, runs: Iterable[Run]) -> list[Run]:
    """The runs that the figures of an experiment show: those of its recipe's grid, of any length."""
    return [run for run in runs if in_grid(key, run.overrides) and not run.stale]


def run_files(folder: Path) -> list[Path]:
    """The result files of an experiment's folder. An override such as model=captioner/lstm makes one more level."""
    return sorted(path for path in found_results(folder) if path.parent != folder)


def read_run(key: str, path: Path, results_dir: Path) -> Run:
    """The run of a result file. Raises BnrnnError if it is damaged or of another run."""
    result = Result.read(path)
    budget, *name = path.relative_to(results_dir / key).parts[:-1]
    if result.name != key or not is_named_by("/".join(name), result.overrides):
        raise BnrnnError(
            f"{path.parent} has the result of another run ({', '.join(f'{k}={v}' for k, v in result.overrides.items())}"
            "): move it to the folder of that run, or remove it"
        )
    return Run(path.parent, result.overrides, budget, result, *_records(path.parent, FILE, result.records_sha256))


def is_named_by(folder: str, overrides: dict[str, str]) -> bool:
    """Whether the name of a run's folder has these overrides and no others. Values of deletions are not compared."""

    def parts(text: str) -> list[str]:
        found = (part.lstrip("+") for part in text.split(","))
        return sorted(part.partition("=")[0] if part.startswith("~") else part for part in found)

    return parts(folder) == parts(",".join(f"{key}={value}" for key, value in overrides.items()))


def _read_unfinished(cell: Cell) -> Run | None:
    saved = checkpoint.load(cell.folder / checkpoint.CHECKPOINT)
    if saved is None:
        return None
    state = saved["state"]
    records = _records(cell.folder, checkpoint.CHECKPOINT, saved.get("records_sha256"), state["num_records"])
    environment = state["pieces"][-1] if state["pieces"] else {"device": "unknown"}
    best = state["best"]["update"] if state["best"] else 0
    result = Result(
        cell.experiment, cell.overrides, "unfinished", state["update"], best, {}, state["seconds"], 0, state["commits"],
        environment, saved["config"], pieces=state["pieces"],
    )  # fmt: skip
    return Run(cell.folder, cell.overrides, BUDGET, result, *records)


def _records(folder: Path, of: str, digest: str | None, most: int | None = None) -> tuple[list[dict[str, Any]], str]:
    """The records of a run to which another of its files belongs, and their checksum.

    Raises BnrnnError if there are fewer than this file knows of, or if they have another checksum than it names.
    """
    lines = record_lines(folder / METRICS)[:most]
    found = sha256(b"".join(lines))
    if len(lines) < (most or 0) or digest not in (None, found):
        raise BnrnnError(f"{folder / METRICS} has other records than those to which {of} belongs: {REMEDY}")
    return [json.loads(line) for line in lines], found


def _all_that_can_be_read(read: Callable[[Any], Run | None], sources: Iterable[Any]) -> list[Run]:
    """The runs of all sources that have one. Damaged ones are reported and left out."""
    runs = []
    for source in sources:
        try:
            run = read(source)
        except BnrnnError as error:
            say_left_out(str(error))
        else:
            runs += [run] if run else []
    return runs
