"""Workers: processes that train the runs of a list, one after the other, until none is left.

Sweeps, campaigns and the tasks of a Slurm job share this loop. The lock of each run keeps them apart, so any number of
workers may be at work, and workers can be added at any time.
"""

import math
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

from bnrnn.config import MENDABLE
from bnrnn.errors import BnrnnError, first_line, lacks_memory, mendable
from bnrnn.system.locks import Locked, NoLocks, holder, is_being_trained, this_process
from bnrnn.system.processes import end_with
from bnrnn.train import train
from bnrnn.training.cells import Cell
from bnrnn.training.failures import clear_failure, failure, record_failure
from bnrnn.training.log import say, write_log
from bnrnn.training.provenance import git_commit
from bnrnn.training.results import FILE
from bnrnn.training.stop import Interrupted, Stop

STOPPED = 128 + signal.SIGTERM  # exit status of a worker that was told to stop
BROKEN = 75  # exit status of a worker that cannot use the GPU any more; another process may
PATIENCE = 600.0  # seconds for a worker to save its run after SIGTERM; then it is killed
MOST_DEATHS = 2  # a run whose process is killed so often has failed
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2}


class BrokenDevice(Exception):
    """The GPU can no longer be used in this process."""


def work(cells: list[Cell], since: float, failed: set[Path]) -> None:
    """Train the cells in order, skipping those that are done or that another process trains, until none is left.

    Several processes may work on the same cells. The message of a cell that fails is written to its folder, and the
    cell is added to `failed`; no worker tries a cell again that has failed after the time `since`.

    Raises Interrupted after SIGTERM or SIGINT, after a checkpoint was saved, NoLocks if locks do not work there, and
    BrokenDevice if the GPU can no longer be used in this process.
    """

    def is_open(cell: Cell) -> bool:
        try:
            has_failed = cell.folder in failed or failure(cell.folder, since) is not None
            left = not has_failed and not (cell.folder / FILE).exists() and not is_being_trained(cell.folder)
            unreadable.discard(cell.folder)
            return left
        except OSError as error:  # such as a stale file handle of a network file system
            if cell.folder not in unreadable:
                say(f"{cell.title}: passed over, because its folder cannot be read ({error})")
            unreadable.add(cell.folder)
            return False

    unreadable: set[Path] = set()
    with stopping_at_once() as received:
        while (cell := next(filter(is_open, cells), None)) is not None:
            try:
                clear_failure(cell.folder)
                cfg = cell.cfg
                if received:  # python prints and ignores exceptions in the clean-up of a library's generators
                    raise received[0]
                train(cfg, cell.folder, cell.overrides, f"{cell.title}:")
            except NoLocks:
                raise
            except Locked:
                continue  # another worker has started this cell
            except Exception as error:
                if received:  # an error while a library cleaned up after Interrupted, which it replaced
                    raise received[0] from error
                if is_broken(error):
                    with suppress(BnrnnError):
                        write_log(cell.folder, f"the GPU can no longer be used in this process: {first_line(error)}")
                    raise BrokenDevice(f"{cell.title}: {first_line(error)}") from error
                failed.add(cell.folder)
                _report(cell, error)
    failed |= unreadable


def is_broken(error: Exception) -> bool:
    """Whether the error says that no other run can use the GPU in this process either."""
    signs = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")
    is_fault = any(sign in str(error) for sign in signs) and "no kernel image" not in str(error)
    return is_fault and not lacks_memory(error)


def _report(cell: Cell, error: Exception) -> None:
    """Print why a cell failed, and write it to its folder."""
    if (cause := mendable(error, *MENDABLE)) is None:  # a bug, but it must not stop the other runs
        traceback.print_exception(error)
    reason = " ".join(str(cause or f"{type(error).__name__}: {error}").split())  # in one line
    say(f"{cell.title} failed: {reason}")
    try:
        record_failure(cell.folder, reason)
        write_log(cell.folder, f"failed: {''.join(traceback.format_exception(error)) if cause is None else reason}")
    except BnrnnError as refused:
        say(str(refused))


@contextmanager
def stopping_at_once() -> Iterator[list[Interrupted]]:
    """Context manager in which SIGTERM and SIGINT raise Interrupted at once. Yields what was raised, in a list.

    Training replaces these signal handlers, because it first saves a checkpoint (bnrnn.training.stop).
    """

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        received.append(Interrupted(f"{name}: stopped between two updates or runs; nothing is lost", number))
        raise received[-1]

    received: list[Interrupted] = []
    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_worker(cells: list[Cell], since: float, parent: int = 0) -> int:
    """Run one worker, which ends with its parent. The exit status is 1 if runs failed, and STOPPED after a signal."""
    git_commit()  # at the start, because files may change while it trains
    os.environ["TQDM_DISABLE"] = "1"  # the bars of several workers would overwrite each other
    failed: set[Path] = set()
    try:
        with stopping_at_once():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            if parent:
                end_with(parent)
            work(cells, since, failed)
    except Interrupted as stopped:
        say(str(stopped))
        return STOPPED
    except BrokenDevice as error:
        say(f"{error}: this process ends, because the GPU can no longer be used in it")
        return BROKEN
    except NoLocks as error:
        say(f"error: {error}")
        return 1
    return 1 if failed else 0


def run_team(
    lists: list[list[Cell]], since: float, stop: Stop, seconds: float = math.inf,
    look: Callable[[], None] = lambda: None, is_silent: bool = False,
) -> list[int]:  # fmt: skip
    """Run several workers, and return their exit statuses. A signal that `stop` receives stops all of them.

    A worker that does not stop within PATIENCE is killed. The workers are forks of this process, so that starting them
    costs nothing. A worker that dies before is replaced. The new one resumes the interrupted run. If that dies too, the
    run counts as failed: one that needs too much memory must not stop the others.

    Args:
        lists: the cells of each worker, in its order.
        seconds: the time after which the workers are stopped.
        look: called several times a second.
        is_silent: whether the workers print nothing, because a display shows their progress.
    """
    git_commit()  # before the first fork: a later one runs the code that this process has read
    deaths: Counter[Path] = Counter()
    end, told = time.monotonic() + seconds, math.inf  # told: when the workers were told to stop
    team = [_fork(cells, since, is_silent) for cells in lists]
    while True:
        if told == math.inf and (stop.received is not None or time.monotonic() >= end):
            told = time.monotonic()
            for worker in team:
                worker.terminate()
        for i, (worker, cells) in enumerate(zip(team, lists, strict=True)):
            if worker.is_alive() and time.monotonic() - told > PATIENCE:
                say(f"worker {worker.pid} did not stop within {PATIENCE:g} seconds and is killed: its run resumes from "
                    "its last checkpoint")  # fmt: skip
                worker.kill()
                worker.join()
            elif told == math.inf and not worker.is_alive() and _may_be_replaced(worker, cells, since, deaths):
                team[i] = _fork(cells, since, is_silent)
        if not any(worker.is_alive() for worker in team):
            return [STOPPED if worker.exitcode == -signal.SIGTERM else worker.exitcode or 0 for worker in team]
        look()
        time.sleep(0.2)


def _fork(cells: list[Cell], since: float, is_silent: bool) -> ForkProcess:
    """Start a worker. It begins with all signals blocked, until it has its own handlers."""
    parent = os.getpid()

    def run() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm warns all processes; the parent sends SIGTERM instead
        if is_silent:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        sys.exit(run_worker(cells, since, parent))

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        worker = get_context("fork").Process(target=run)
        worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return worker


def _may_be_replaced(worker: ForkProcess, cells: list[Cell], since: float, deaths: Counter[Path]) -> bool:
    """Whether a worker that has ended may be replaced: if it was killed, or its GPU broke, while it trained a run.

    The second time, the run counts as failed.
    """
    status, name = worker.exitcode or 0, this_process(worker.pid or 0)
    if status >= 0 and status != BROKEN:
        return False
    how = "was killed by " + signal.Signals(-status).name if status < 0 else "could not use the GPU"
    may_be = False
    for cell in cells:
        if _is_held(cell, name, since):
            deaths[cell.folder] += 1
            say(f"{cell.title}: its process {how}")
            if deaths[cell.folder] >= MOST_DEATHS:
                smaller = "if memory is short, use a smaller JOBS or batch_size"
                remedy = smaller if status < 0 else "see its run.log"
                _report(cell, BnrnnError(f"its process {how}, and another ended before: {remedy}"))
            may_be = True
    return may_be


def _is_held(cell: Cell, name: str, since: float) -> bool:
    """Whether this process holds the lock of the run, or held it last, and the run is neither finished nor failed."""
    try:
        return holder(cell.folder) == name and not (cell.folder / FILE).exists() and failure(cell.folder, since) is None
    except OSError:  # the folder cannot be read
        return False
