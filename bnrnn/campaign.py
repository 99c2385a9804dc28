"""Trains missing runs for a given time, the most valuable first, in the order of conf/campaign.yaml.

python -m bnrnn.campaign hours=3 jobs=2        train with two workers for three hours; run it again to resume
python -m bnrnn.campaign status                print which runs are finished, running and left; measure nothing
python -m bnrnn.campaign work                  run one worker until no run is left
python -m bnrnn.campaign pack                  compress small checkpoints of unfinished runs, so they can be committed

All commands take file=... (default conf/campaign.yaml) and out_dir=... (default results). `work` also takes lane=long
or lane=short.
"""

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError, mendable, report_errors
from bnrnn.processes import end_with
from bnrnn.report.progress import LONG, Entry, load_entries, render
from bnrnn.train import train
from bnrnn.training import checkpoint
from bnrnn.training.cells import Cell
from bnrnn.training.checkpoint import CHECKPOINT
from bnrnn.training.lock import Locked, is_being_trained
from bnrnn.training.log import say
from bnrnn.training.results import FILE
from bnrnn.training.stop import Interrupted, Stop

MENDABLE = (HydraException, OmegaConfBaseException)
NICE = 19
MOST_PACKED = 2_000_000  # bytes of the largest compressed checkpoint that should be committed
STOPPED = (128 + signal.SIGTERM, -signal.SIGTERM)  # exit statuses of a worker that was told to stop


@dataclass
class Options:
    """The command and the options of the command line."""

    command: str = "train"  # train, work, status, pack
    hours: float = math.nan
    jobs: int = 1
    file: Path = ROOT / "conf" / "campaign.yaml"
    out_dir: Path = Path("results")
    lane: str = ""
    parent: int = 0  # id of the process that started this worker
    report: int = -1  # file descriptor to which a worker writes its failures


def work(cells: list[Cell], failed: dict[Path, str]) -> None:
    """Train the cells in order, skipping those that are done or that another process trains, until none is left.

    Several processes may work on the same cells. A cell that fails is added to `failed` with the reason, and is not
    tried again. Raises Interrupted after SIGTERM or SIGINT, after a checkpoint was saved.
    """

    def is_open(cell: Cell) -> bool:
        return cell.folder not in failed and not (cell.folder / FILE).exists() and not is_being_trained(cell.folder)

    with _stopping_at_once():
        while (cell := next(filter(is_open, cells), None)) is not None:
            try:
                train(cell.cfg, cell.folder, cell.overrides, f"{cell.title}:")
            except Locked:
                continue  # another worker has started this cell
            except Exception as error:
                if (cause := mendable(error, *MENDABLE)) is None:  # a bug, but it must not stop the other runs
                    traceback.print_exc()
                reason = " ".join(str(cause or f"{type(error).__name__}: {error}").split())  # in one line
                failed[cell.folder] = f"{cell.title} failed: {reason}"
                say(failed[cell.folder])


@contextmanager
def _stopping_at_once() -> Iterator[None]:
    """Context manager in which SIGTERM and SIGINT raise Interrupted at once.

    Training replaces these signal handlers, because it first saves a checkpoint (bnrnn.training.stop).
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(f"{signal.Signals(number).name}: stopped between two updates or runs; nothing is lost")

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def in_order(entries: list[Entry], lane: str) -> list[Cell]:
    """The cells of all entries, in the order of the list. With a lane, the entries of that lane come first."""
    if lane:
        entries = sorted(entries, key=lambda entry: entry.long != (lane == LONG))
    return [cell for entry in entries for cell in entry.cells]


def run_worker(options: Options) -> int:
    """Run one worker. The exit status is 1 if runs failed, and 128 plus the number of SIGTERM after a signal."""
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    os.environ["TQDM_DISABLE"] = "1"  # the bars of several workers would overwrite each other
    failed: dict[Path, str] = {}
    try:
        with _stopping_at_once():
            if options.parent:
                end_with(options.parent)
            work(in_order(load_entries(options.file, options.out_dir), options.lane), failed)
    except Interrupted as stopped:
        say(str(stopped))
        return 128 + signal.SIGTERM
    finally:
        lines = "".join(f"{line}\n" for line in failed.values())
        if options.report >= 0:
            os.write(options.report, lines.encode())
        else:
            print(lines, end="", flush=True)
    return 1 if failed else 0


def run_campaign(options: Options) -> int:
    """Start the workers, stop them when the time is over or a signal arrives, and print the progress."""
    entries = load_entries(options.file, options.out_dir)  # here, so that an error in the file is reported only once
    deadline = time.monotonic() + 3600 * options.hours
    with Stop() as stop, tempfile.TemporaryFile("w+") as report:
        lanes = [""] if options.jobs == 1 else [LONG, *["short"] * (options.jobs - 1)]
        workers = [_start(options, lane, report.fileno()) for lane in lanes]
        while stop.received is None and time.monotonic() < deadline and any(w.poll() is None for w in workers):
            time.sleep(0.1)
        for worker in workers:
            worker.terminate()
        statuses = [worker.wait() for worker in workers]
        print(f"\n{render(entries, options.out_dir)}", end="", flush=True)
        report.seek(0)
        failures = list(dict.fromkeys(report.read().splitlines()))
        failures += [f"a worker ended with exit status {s}: see its message above" for s in statuses
                     if s not in (0, 1, *STOPPED) or (s == 1 and not failures)]  # fmt: skip
        print("".join(f"{line}\n" for line in failures), end="", flush=True)
        if stop.received is not None:
            sys.exit(128 + stop.received)
    return 1 if failures else 0


def _start(options: Options, lane: str, report: int) -> subprocess.Popen[bytes]:
    """Start a worker in its own process group: Ctrl-C reaches only the present process, which then stops the worker."""
    given = {"file": options.file, "out_dir": options.out_dir, "lane": lane, "parent": os.getpid(), "report": report}
    command = [sys.executable, "-m", "bnrnn.campaign", "work", *(f"{k}={v}" for k, v in given.items() if v != "")]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[report], process_group=0)


def pack(options: Options) -> None:
    """Compress the checkpoints of all unfinished runs, and print which ones are too large."""
    for cell in in_order(load_entries(options.file, options.out_dir), ""):
        path = cell.folder / CHECKPOINT
        if path.exists() and not is_being_trained(cell.folder):
            small = checkpoint.pack(path, MOST_PACKED)
            name = checkpoint.packed(path) if small else path
            say(f"{name}: " + ("packed" if small else f"more than {MOST_PACKED:,} bytes, not packed"))


def parse(arguments: list[str]) -> Options:
    """The options of the command line. Raises BnrnnError for unknown commands and options, and for wrong values."""
    command = arguments[0] if arguments and "=" not in arguments[0] else "train"
    own = {"train": ("hours", "jobs"), "work": ("lane", "parent", "report"), "status": (), "pack": ()}
    if command not in own:
        raise BnrnnError(f"{command} is not a command of bnrnn.campaign: use hours=3 jobs=2, status, work or pack")
    kinds: dict[str, tuple[Callable[[str], Any], Callable[[Any], bool], str]] = {
        "hours": (float, lambda v: 0 < v < math.inf, "a number of hours above 0, such as hours=3"),
        "jobs": (int, lambda v: v >= 1, "a number of workers, such as jobs=2"),
        "lane": (str, lambda v: v in (LONG, "short"), f"lane={LONG} or lane=short"),
        "file": (Path, lambda v: v.is_file(), "a file that exists, such as file=conf/campaign.yaml"),
        "out_dir": (Path, lambda v: not v.is_file(), "a folder, such as out_dir=results"),
        "parent": (int, lambda v: v > 0, "the number of a process"),
        "report": (int, lambda v: v >= 0, "a file descriptor"),
    }
    options = Options(command)
    for argument in arguments[command != "train" :]:
        key, _, text = argument.partition("=")
        known = (*own[command], "file", "out_dir")
        if key not in known:
            raise BnrnnError(f"{argument} is not an option of `{command}`: use {', '.join(f'{k}=...' for k in known)}")
        convert, is_valid, expected = kinds[key]
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not is_valid(value):
            raise BnrnnError(f"{argument} is not valid: expected {expected}")
        setattr(options, key, value)
    if command == "train" and math.isnan(options.hours):
        raise BnrnnError("hours=... is missing: set the number of hours to train, such as hours=3")
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    if options.command == "status":
        print(render(load_entries(options.file, options.out_dir), options.out_dir), end="")
    elif options.command == "pack":
        pack(options)
    else:
        sys.exit(run_worker(options) if options.command == "work" else run_campaign(options))


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # makes hydra pass exceptions on unchanged
    report_errors(main, *MENDABLE)


if __name__ == "__main__":
    cli()
