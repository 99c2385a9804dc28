"""Trains missing runs for a given time, the most valuable first, in the order of conf/campaign.yaml.

bnrnn-campaign hours=3 jobs=2        train with two workers for three hours; run it again to resume
bnrnn-campaign status                print which runs are finished, running and left; measure nothing. With
                                     since=2026-11-24T09:00 also how many core hours were kept since then
bnrnn-campaign work                  run one worker until no run is left
bnrnn-campaign compress              compress small checkpoints of unfinished runs, so they can be committed

All commands take file=... (default conf/campaign.yaml) and out_dir=... (default results). Training also takes
device=cpu. `work` takes lane=long or lane=short: it leaves the entries that the file marks with the other lane for the
end. With jobs=2 or more, one worker has the lane `long`, and the others have the lane `short`.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from bnrnn.commands.arguments import HOURS, JOBS, Kind, read_arguments
from bnrnn.commands.kept import render_kept
from bnrnn.commands.status import render
from bnrnn.commands.workers import MENDABLE, PATIENCE, STOPPED, may_be_replaced, run_worker, was_killed
from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.system.locks import is_being_trained
from bnrnn.training import checkpoint
from bnrnn.training.cells import Cell
from bnrnn.training.checkpoint import CHECKPOINT
from bnrnn.training.failures import failure
from bnrnn.training.log import say
from bnrnn.training.progress import LANES, Entry, load_entries
from bnrnn.training.states import check_results
from bnrnn.training.stop import Stop

NICE = 19
LARGEST = 2_000_000  # bytes of the largest compressed checkpoint that should be committed


def _time(text: str) -> float:
    """Seconds since 1970, given as such or as a date and time."""
    return float(text) if text.replace(".", "").isdecimal() else datetime.fromisoformat(text).timestamp()


OWN = {  # the options of each command; all of them take file=... and out_dir=...
    "train": ("hours", "jobs", "device"),
    "work": ("lane", "device", "parent", "since"),
    "status": ("since",),
    "compress": (),
}
KINDS = {
    "hours": HOURS,
    "jobs": JOBS,
    "device": Kind(str, lambda v: v in ("auto", "cpu", "cuda"), "device=auto, device=cpu or device=cuda"),
    "lane": Kind(str, lambda v: v in LANES, f"lane={' or lane='.join(LANES)}"),
    "file": Kind(Path, Path.is_file, "a file that exists, such as file=conf/campaign.yaml"),
    "out_dir": Kind(Path, lambda v: not v.is_file(), "a folder, such as out_dir=results"),
    "parent": Kind(int, lambda v: v > 0, "the number of a process"),
    "since": Kind(_time, lambda v: 0 <= v < math.inf, "a time, such as since=2026-11-24T09:00"),
}


@dataclass
class Options:
    """The command and the options of the command line."""

    command: str = "train"  # train, work, status, compress
    hours: float = math.nan
    jobs: int = 1
    file: Path = ROOT / "conf" / "campaign.yaml"
    out_dir: Path = Path("results")
    lane: str = ""
    device: str = ""  # auto, cpu or cuda; that of the configuration if it is not given
    parent: int = 0  # id of the process that started this worker
    since: float = field(default_factory=time.time)  # runs that failed earlier are tried again


def in_order(entries: list[Entry], lane: str) -> list[Cell]:
    """The cells of all entries, in the order of the list. With a lane, the entries of other lanes come last."""
    if lane:
        entries = sorted(entries, key=lambda entry: entry.lane not in ("", lane))
    return [cell for entry in entries for cell in entry.cells]


def run_nicely(options: Options) -> int:
    """Run one worker at low priority, and return its exit status."""
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    cells = in_order(load_entries(options.file, options.out_dir, options.device), options.lane)
    if not options.parent:
        check_results(cells)
    return run_worker(cells, options.since, options.parent)


def run_campaign(options: Options) -> int:
    """Start the workers, stop them when the time is over or a signal arrives, and print the progress."""
    entries = load_entries(options.file, options.out_dir, options.device)  # here, so that an error is reported once
    check_results(in_order(entries, ""))
    deadline = time.monotonic() + 3600 * options.hours
    with Stop() as stop:
        lanes = [""] if options.jobs == 1 else [LANES[0], *[LANES[1]] * (options.jobs - 1)]
        workers = [_start(options, lane) for lane in lanes]
        cells, deaths = in_order(entries, ""), Counter[Path]()
        while stop.received is None and time.monotonic() < deadline:
            found = [worker.poll() for worker in workers]  # once: a worker that ends later is seen at the next turn
            for i, status in enumerate(found):
                killed = was_killed(status)
                if killed and may_be_replaced(workers[i].pid, status or 0, cells, options.since, deaths):
                    workers[i], found[i] = _start(options, lanes[i]), None
            if None not in found:
                break
            time.sleep(0.1)
        statuses = _stop(workers)
        print(f"\n{render(entries, options.out_dir)}", end="", flush=True)
        failures = [f"{cell.title} failed: {reason}" for cell in in_order(entries, "")
                    if (reason := failure(cell.folder, options.since)) is not None]  # fmt: skip
        failures += [f"a worker ended with exit status {s}: see its message above" for s in statuses
                     if s not in (0, 1, STOPPED, -signal.SIGTERM) or (s == 1 and not failures)]  # fmt: skip
        print("".join(f"{line}\n" for line in failures), end="", flush=True)
        if stop.received is not None:
            sys.exit(128 + stop.received)
    return 1 if failures else 0


def _start(options: Options, lane: str) -> subprocess.Popen[bytes]:
    """Start a worker in its own process group: Ctrl-C reaches only the present process, which then stops the worker."""
    given = {"file": options.file, "out_dir": options.out_dir, "lane": lane, "parent": os.getpid(),
             "since": options.since, "device": options.device}  # fmt: skip
    command = [sys.executable, "-m", "bnrnn.commands.campaign", "work"]
    command += [f"{k}={v}" for k, v in given.items() if v != ""]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)


def _stop(workers: list[subprocess.Popen[bytes]]) -> list[int]:
    """Tell the workers to save their runs and end. Kill those that do not within PATIENCE. Returns exit statuses."""
    for worker in workers:
        worker.terminate()
    end = time.monotonic() + PATIENCE
    for worker in workers:
        try:
            worker.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            say(f"worker {worker.pid} did not stop within {PATIENCE:g} seconds and is killed: its run resumes from its "
                "last checkpoint")  # fmt: skip
            worker.kill()
    return [worker.wait() for worker in workers]


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
        raise BnrnnError(f"{command} is not a command of bnrnn-campaign: use hours=3 jobs=2, status, work or compress")
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
        if any(argument.startswith("since=") for argument in sys.argv):
            print(render_kept(options.out_dir, datetime.fromtimestamp(options.since)))
    elif options.command == "compress":
        compress(options)
    else:
        sys.exit(run_nicely(options) if options.command == "work" else run_campaign(options))


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # makes hydra pass exceptions on unchanged
    report_errors(main, *MENDABLE, usage=__doc__)


if __name__ == "__main__":
    cli()
