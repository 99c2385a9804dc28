"""What one task of a Slurm job runs, and what Slurm says about tasks. Submitit starts the task and queues it again."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bnrnn.commands.workers import run_team
from bnrnn.errors import BnrnnError
from bnrnn.system.locks import check_locks, holder, is_being_trained, slurm_job
from bnrnn.training.cells import Cell, expand
from bnrnn.training.log import say
from bnrnn.training.stop import Stop

SECONDS = 60  # an answer of Slurm that takes longer is none
# Slurm's warning ends a process that has no handler for it. Submitit has one only after it has imported torch, seconds
# after the start. This program blocks the signal before anything is imported, and becomes the command in its arguments.
# The block stays, so a signal that arrives meanwhile waits until `Task` removes it.
BLOCKING = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def python_command() -> str:
    """The shell command by which a task starts Python, with SIGUSR2 blocked."""
    return shlex.join([sys.executable, "-I", "-S", "-c", BLOCKING, sys.executable])


@dataclass
class Queued:
    """A task in Slurm's queue: its job's number, its name, state and nodes, and why it waits."""

    job: str
    name: str
    state: str
    reason: str
    nodes: str


def squeue(*arguments: str) -> str:
    """The output of squeue. Raises BnrnnError, with Slurm's message, if Slurm does not answer."""
    try:
        command = ["squeue", "--noheader", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS).stdout
    except FileNotFoundError:
        raise BnrnnError("squeue is missing: use LAUNCHER=slurm on a machine that submits jobs to Slurm") from None
    except subprocess.CalledProcessError as error:
        raise BnrnnError(f"squeue does not answer ({' '.join(error.stderr.split())})") from None
    except subprocess.TimeoutExpired:
        raise BnrnnError(f"squeue does not answer within {SECONDS} seconds") from None


def queued(jobs: Collection[str]) -> list[Queued]:
    """The tasks of these jobs that wait or run. Raises BnrnnError if Slurm does not answer."""
    found = []
    lines = squeue("--array", f"--user={os.getuid()}", "--format=%F|%K|%T|%N|%r").splitlines() if jobs else []
    for line in lines:
        job, index, state, nodes, reason = line.split("|", 4)
        if job in jobs:
            found.append(Queued(job, job if index == "N/A" else f"{job}_{index}", state, reason, nodes))
    return found


def is_preempted() -> bool:
    """Whether a job of higher priority takes the place of the present one, which may use the rest of its grace time."""
    try:
        state, since = squeue(f"--jobs={slurm_job()}", "--Format=State:30,PreemptTime:30").split()[:2]
    except (BnrnnError, ValueError):
        return False
    return state == "RUNNING" and since != "N/A"


@dataclass
class Task:
    """One task: it works on the open cells of a sweep, with several processes that share its resources.

    Args:
        arguments: the overrides of the sweep.
        jobs: number of processes.
        since: when the task was submitted. Cells that have failed later are not tried again.
        patience: seconds to wait for the locks of processes that a failed node has left behind.
        most: how often the task is queued again after its time limit, for the message.

    Submitit queues the task again on SIGUSR2, with which Slurm warns that the time is nearly over. The signal is
    blocked when the process begins (`python_command`), and is unblocked here, where submitit has its handler.
    """

    arguments: list[str]
    jobs: int
    since: float
    patience: float
    most: int

    def checkpoint(self) -> Any:
        """What submitit shall run when the task is queued again: the same."""
        import submitit.helpers

        return submitit.helpers.DelayedSubmission(self)

    def __call__(self) -> None:
        from submitit.core.utils import UncompletedJobError

        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
            self._work(expand(self.arguments))
        except UncompletedJobError:
            sys.exit(f"not queued again: it has reached its time limit {self.most + 1} times (max_num_timeout)")
        except BnrnnError as error:
            sys.exit(f"error: {error}")

    def _work(self, cells: list[Cell]) -> None:
        check_locks(cells[0].sweep_folder)
        statuses: list[int] = []
        with Stop() as stop:  # at its end, submitit's handler of SIGUSR2 queues the task again and exits
            is_free = self._wait_for_predecessor(cells, stop)
            if is_free:
                statuses = run_team([cells] * self.jobs, self.since, stop)
        if not is_free:
            say(f"queued again: after {self.patience:.0f} seconds, an earlier process of this job still trains")
            signal.raise_signal(signal.SIGUSR2)
        if stop.received is not None:
            if is_preempted():
                say("preempted: queued again")
                signal.raise_signal(signal.SIGUSR2)
            say(f"stopped by {signal.Signals(stop.received).name}; the runs are saved, and a worker can resume them")
            sys.exit(128 + stop.received)
        if any(statuses):
            sys.exit(1)

    def _wait_for_predecessor(self, cells: list[Cell], stop: Stop) -> bool:
        """Wait until no process of this job trains that was left on a failed node. Returns whether that has come."""
        end, me = time.monotonic() + self.patience, f"Slurm job {slurm_job()}"
        while stop.received is None:
            left = [c for c in cells if holder(c.folder).endswith(me) and is_being_trained(c.folder)]
            if not left:
                break
            say(f"waiting: {left[0].title} is still trained by {holder(left[0].folder)}, from before a node failed")
            if time.monotonic() > end:
                return False
            time.sleep(5)
        return True


def folder_of(cells: list[Cell]) -> Path:
    """The folder of a sweep's jobs: their logs, what they run, and which sweep was submitted."""
    return cells[0].sweep_folder / "slurm"
