"""The stored runs with which new ones are compared: those of a folder such as results/, or those in the package."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from bnrnn.config import CONF, PACKAGE, ROOT
from bnrnn.data.base import sha256
from bnrnn.errors import BnrnnError
from bnrnn.report.run import Run
from bnrnn.report.runs import read_run, run_files
from bnrnn.report.summary import Summary, found_results, summarize
from bnrnn.report.unfinished import load_unfinished
from bnrnn.system.files import read_text, reading
from bnrnn.training.log import METRICS, record_lines, say_left_out
from bnrnn.training.results import Result

SHIPPED = PACKAGE / "evidence.jsonl"  # setup.py writes it into the package


def summary_of(run: Run) -> Summary:
    """The summary of a run that was read from its folder."""
    records = sha256(b"".join(record_lines(run.folder / METRICS)))
    return summarize(asdict(run.result), run.records, records)


@dataclass
class Stored:
    """The stored runs by experiment, read when they are needed, from a folder or from the file in the package."""

    path: Path = field(default_factory=lambda: ROOT / "results" if ROOT != PACKAGE else SHIPPED)

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise BnrnnError(f"{self.path} does not exist: give a folder of stored runs with --results")
        self.finished, self.unfinished = cache(self._finished), cache(self._unfinished)
        self._shipped = [] if self.path.is_dir() else list(_read_lines(self.path))

    def _finished(self, key: str) -> list[Summary]:
        """The finished runs of an experiment. Damaged ones are reported and left out."""
        if not self.path.is_dir():
            return [summary for summary in self._shipped if summary.key == key]
        return list(self._read_folder(key))

    def _read_folder(self, key: str) -> Iterable[Summary]:
        for path in run_files(key, self.path):
            try:
                budget, result, records = read_run(key, path, self.path)
            except BnrnnError as error:
                say_left_out(str(error))
            else:
                yield summary_of(Run(path.parent, result.overrides, budget, result, records, stale=False))

    def _unfinished(self, key: str) -> list[Summary]:
        """The runs of an experiment that have not ended; the package has none of these."""
        if not (self.path / key).is_dir() or not (CONF / "experiment" / f"{key}.yaml").exists():
            return []
        return [summary_of(run) for run in load_unfinished(key, self.path)]


def _read_lines(path: Path) -> Iterable[Summary]:
    remedy, what = "install bnrnn again, or give a folder of stored runs with --results", "a file of stored runs"
    with reading(path, remedy, what):
        for line in read_text(path, remedy, what).splitlines():
            yield Summary.of_line(line)


def load_new(folder: Path) -> tuple[list[Run], list[str]]:
    """The finished runs below a folder, and a message for each damaged one. Whether they are stale is not known yet."""
    runs, damaged = [], []
    for path in sorted(found_results(folder.absolute())):
        try:
            result = Result.read(path)
            budget, result, records = read_run(result.name, path, _results_dir(path, result.name))
            runs.append(Run(path.parent, result.overrides, budget, result, records, stale=False))
        except BnrnnError as error:
            damaged.append(str(error))
    return runs, damaged


def _results_dir(path: Path, key: str) -> Path:
    """The folder that has the experiment's folder with this result. Raises BnrnnError if it lies elsewhere."""
    parents = [path, *path.parents]
    for parent in parents[2:]:  # the experiment's folder has one for the budget
        if parent.as_posix().endswith(f"/{key}"):
            return Path(str(parent)[: -len(key) - 1] or "/")
    raise BnrnnError(f"{path} is a result of {key}, and is in no folder of this name: move it there")
