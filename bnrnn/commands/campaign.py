"""Trains missing runs for a given time, the most valuable first, in the order of conf/campaign.yaml.

bnrnn-campaign hours=3 jobs=2        train with two workers for three hours; run it again to resume
bnrnn-campaign status                print which runs are finished, running and left; measure nothing. With
                                     since=2026-11-24T09:00 also how many core hours were kept since then
bnrnn-campaign compress              compress small checkpoints of unfinished runs, so they can be committed

All commands take file=... (default conf/campaign.yaml) and out_dir=... (default results). Training also takes
device=cpu. With jobs=2 or more, one worker has the lane `long`, and the others have the lane `short`: they leave the
entries that the file marks with the other lane for the end.
"""

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from bnrnn.commands.arguments import HOURS, JOBS, Kind, read_arguments
from bnrnn.commands.kept import render_kept
from bnrnn.commands.workers import STOPPED, run_team
from bnrnn.config import MENDABLE, ROOT
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.report.markdown import NONE, markdown
from bnrnn.system.locks import is_being_trained
from bnrnn.training import checkpoint
from bnrnn.training.cells import Cell
from bnrnn.training.checkpoint import CHECKPOINT
from bnrnn.training.failures import failure
from bnrnn.training.log import say
from bnrnn.training.progress import LANES, Entry, Progress, load_entries, runs_of
from bnrnn.training.states import check_results
from bnrnn.training.stop import Stop

NICE = 19
LARGEST = 2_000_000  # bytes of the largest compressed checkpoint that should be committed
OWN = {  # the options of each command; all of them take file=... and out_dir=...
    "train": ("hours", "jobs", "device"),
    "status": ("since",),
    "compress": (),
}
KINDS = {
    "hours": HOURS,
    "jobs": JOBS,
    "device": Kind(str, lambda v: v in ("auto", "cpu", "cuda"), "device=auto, device=cpu or device=cuda"),
    "file": Kind(Path, Path.is_file, "a file that exists, such as file=conf/campaign.yaml"),
    "out_dir": Kind(Path, lambda v: not v.is_file(), "a folder, such as out_dir=results"),
    "since": Kind(datetime.fromisoformat, lambda v: v.year >= 1970, "a time, such as since=2026-11-24T09:00"),
}


@dataclass
class Options:
    """The command and the options of the command line."""

    command: str = "train"  # train, status, compress
    hours: float = math.nan
    jobs: int = 1
    file: Path = ROOT / "conf" / "campaign.yaml"
    out_dir: Path = Path("results")
    device: str = ""  # auto, cpu or cuda; that of the configuration if it is not given
    since: datetime | None = None  # the moment from which `status` also counts the core hours that were kept


def in_order(entries: list[Entry], lane: str) -> list[Cell]:
    """The cells of all entries, in the order of the list. With a lane, the entries of other lanes come last."""
    if lane:
        entries = sorted(entries, key=lambda entry: entry.lane not in ("", lane))
    return [cell for entry in entries for cell in entry.cells]


def run_campaign(options: Options) -> int:
    """Train with several workers until the time is over or a signal arrives, and print the progress."""
    entries = load_entries(options.file, options.out_dir, options.device)
    cells, since = in_order(entries, ""), time.time()
    check_results(cells)
    lanes = [""] if options.jobs == 1 else [LANES[0], *[LANES[1]] * (options.jobs - 1)]
    with Stop() as stop:
        statuses = run_team([in_order(entries, lane) for lane in lanes], since, stop, 3600 * options.hours)
        print(f"\n{render(entries, options.out_dir)}", end="", flush=True)
        failures = [f"{cell.title} failed: {reason}" for cell in cells
                    if (reason := failure(cell.folder, since)) is not None]  # fmt: skip
        failures += [f"a worker ended with exit status {status}: see its message above" for status in statuses
                     if status not in (0, 1, STOPPED) or (status == 1 and not failures)]  # fmt: skip
        print("".join(f"{line}\n" for line in failures), end="", flush=True)
        if stop.received is not None:
            sys.exit(128 + stop.received)
    return 1 if failures else 0


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


def compress(options: Options) -> None:
    """Compress the checkpoints of all unfinished runs, and print which ones are too large."""
    for cell in in_order(load_entries(options.file, options.out_dir), ""):
        path = cell.folder / CHECKPOINT
        if path.exists() and checkpoint.existing(path) == path and not is_being_trained(cell.folder):
            small = checkpoint.compress(path, LARGEST)
            name = checkpoint.compressed(path) if small else path
            say(f"{name}: " + ("compressed" if small else f"more than {LARGEST:,} bytes, not compressed"))


def parse(arguments: list[str]) -> Options:
    """The options of the command line. Raises BnrnnError for unknown commands and options, and for wrong values."""
    command = arguments[0] if arguments and "=" not in arguments[0] else "train"
    if command not in OWN:
        raise BnrnnError(f"{command} is not a command of bnrnn-campaign: use hours=3 jobs=2, status or compress")
    kinds = {key: KINDS[key] for key in (*OWN[command], "file", "out_dir")}
    options = Options(command, **read_arguments(arguments[command != "train" :], kinds, f"`{command}`"))
    if command == "train" and math.isnan(options.hours):
        raise BnrnnError("hours=... is missing: set the number of hours to train, such as hours=3")
    return options


def main() -> None:
    """Run the command that the arguments name."""
    options = parse(sys.argv[1:])
    if options.command == "status":
        print(render(load_entries(options.file, options.out_dir), options.out_dir), end="")
        if options.since is not None:
            print(render_kept(options.out_dir, options.since))
    elif options.command == "compress":
        compress(options)
    else:
        os.setpriority(os.PRIO_PROCESS, 0, NICE)  # also of the workers
        sys.exit(run_campaign(options))


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    report_errors(main, *MENDABLE, usage=__doc__)


if __name__ == "__main__":
    cli()
