"""The progress of a run and the time that its updates take."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bnrnn.training.stop import Stop


@dataclass
class TrainState:
    """The progress of a run. A checkpoint also has the model, the optimizer and the random generators."""

    run_id: str
    commits: list[str]  # commits of the code that trained parts of the run
    update: int = 0  # number of updates so far
    evaluated: int = 0  # update of the last evaluation
    num_records: int = 0  # in metrics.jsonl
    seconds: float = 0.0  # time spent in updates, without the time for which the process was stopped
    cpu_seconds: float | None = 0.0  # processor time of these updates; None if a part did not record it
    pieces: list[dict[str, Any]] = field(default_factory=list)  # what trained each part; see bnrnn.training.pieces
    window: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))  # sums since the last record
    largest_norm: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))  # since the last record
    loss: float = math.nan  # in the last record
    carried: tuple[Tensor, ...] = ()  # the last state of the sequences of the last update
    best: dict[str, Any] | None = None  # update, metrics and weights of the best evaluation
    best_population: dict[str, Any] | None = None  # the same, selected by validation with population statistics
    diverged: bool = False


class Clock:
    """The time of one update. `stop` tells whether the process was stopped meanwhile."""

    def __init__(self, stop: Stop) -> None:
        self.stop, self.continued = stop, stop.continued
        self.started, self.cpu_started = time.monotonic(), time.process_time()

    def add_to(self, state: TrainState) -> None:
        """Add the time since the beginning. Of an update within which the process was stopped, only processor time."""
        elapsed, cpu = time.monotonic() - self.started, time.process_time() - self.cpu_started
        state.seconds += min(cpu, elapsed) if self.stop.continued > self.continued else elapsed
        if state.cpu_seconds is not None:
            state.cpu_seconds += cpu
