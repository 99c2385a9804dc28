"""The stored runs with which new ones are compared: those of a folder such as results/, or those in the package."""

from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path

from bnrnn.config import PACKAGE, ROOT
from bnrnn.errors import BnrnnError
from bnrnn.report.evidence import Evidence, read_run
from bnrnn.report.run import Run
from bnrnn.report.summary import Summary, found_results, summarize
from bnrnn.system.files import read_text, reading
from bnrnn.training.results import Result

SHIPPED = PACKAGE / "evidence.jsonl"  # setup.py writes it into the package


def summary_of(run: Run) -> Summary:
    """The summary of a run that was read from its folder."""
    return summarize(asdict(run.result), run.records, run.records_sha256)


class Stored:
    """The stored runs by experiment, from a folder or from the file in the package, which has no unfinished ones."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or (ROOT / "results" if ROOT != PACKAGE else SHIPPED)
        if not self.path.exists():
            raise BnrnnError(f"{self.path} does not exist: give a folder of stored runs with --results")
        self.evidence = Evidence(self.path)
        self.shipped = None if self.path.is_dir() else list(_read_lines(self.path))
        for method in (self.finished, self.unfinished):
            setattr(self, method.__name__, cache(method))

    def finished(self, key: str) -> list[Summary]:
        """The finished runs of an experiment. Damaged ones are reported and left out."""
        if self.shipped is not None:
            return [summary for summary in self.shipped if summary.key == key]
        return [summary_of(run) for run in self.evidence.runs(key)]

    def unfinished(self, key: str) -> list[Summary]:
        """The runs of an experiment that have not ended."""
        return [summary_of(run) for run in self.evidence.unfinished(key)]


def _read_lines(path: Path) -> Iterable[Summary]:
    remedy, what = "install bnrnn again, or give a folder of stored runs with --results", "a file of stored runs"
    with reading(path, remedy, what):
        for line in read_text(path, remedy, what).splitlines():
            yield Summary.of_line(line)


def load_new(folder: Path) -> tuple[list[Run], list[str]]:
    """The finished runs below a folder, and a message for each damaged one."""
    runs, damaged = [], []
    for path in sorted(found_results(folder.absolute())):
        try:
            key = Result.read(path).name
            runs.append(read_run(key, path, _results_dir(path, key)))
        except BnrnnError as error:
            damaged.append(str(error))
    return runs, damaged


def _results_dir(path: Path, key: str) -> Path:
    """The folder that has the experiment's folder with this result. Raises BnrnnError if it lies elsewhere."""
    for parent in path.parents[1:]:  # the experiment's folder has one for the budget
        if parent.as_posix().endswith(f"/{key}"):
            return Path(str(parent)[: -len(key) - 1] or "/")
    raise BnrnnError(f"{path} is a result of {key}, and is in no folder of this name: move it there")
