"""Stopping a run on SIGTERM and SIGINT: between two updates, after a checkpoint was saved."""

import signal
import sys
import threading
from types import FrameType

from bnrnn.errors import error_text


class Interrupted(SystemExit):
    """The run was saved and stopped after the signal `number`. As a SystemExit it also ends a sweep."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message, number)
        self.code = message  # what python prints if nobody catches it

    @property
    def status(self) -> int:
        """The exit status by which shells know the signal: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + int(self.args[1])

    def __str__(self) -> str:
        return str(self.args[0])


class Stop:
    """Context manager that records SIGTERM and SIGINT until the next `check`. A second SIGINT interrupts at once.

    It also counts how often the process was stopped (SIGSTOP, Ctrl-Z) and continued, in `continued`. A signal that
    arrives after the last `check` is raised again at the end of the context, so it is never lost. An error in the
    context, such as a checkpoint that cannot be written, is printed before that.

    In a Slurm job, submitit has a handler for SIGUSR2, Slurm's warning that the time is nearly over: it queues the job
    again and exits. The context records this signal too, and raises it again at its end, when the run is saved.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.continued = 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received != signal.SIGUSR2:  # queuing a job again ends in a SIGTERM of its own
            self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _continue(self, number: int, frame: FrameType | None) -> None:
        self.continued += 1

    def __enter__(self) -> "Stop":
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM, signal.SIGINT]
            numbers += [signal.SIGUSR2] if callable(signal.getsignal(signal.SIGUSR2)) else []
            self.previous = {n: signal.signal(n, self._receive) for n in numbers}
            self.previous[signal.SIGCONT] = signal.signal(signal.SIGCONT, self._continue)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        unseen = error[1] is None or isinstance(error[1], Exception)
        if self.received is not None and (unseen or self.received == signal.SIGUSR2):
            if isinstance(error[1], Exception):
                self.tell(error[1])
            signal.raise_signal(self.received)

    def tell(self, error: Exception) -> None:
        """Print an error that would be concealed, because the signal ends the process."""
        print(f"error: {error_text(error)}", file=sys.stderr, flush=True)

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self.received is not None:
            name = signal.Signals(self.received).name
            raise Interrupted(f"{name}: saved; the same command resumes from here", self.received)
