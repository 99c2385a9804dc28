"""The progress of a run and the time that its updates take."""

import math
import time
from collections.abc import Callable, Mapping
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


def is_weights(value: Any) -> bool:
    """Whether a stored value is a dictionary of tensors."""
    return isinstance(value, Mapping) and all(isinstance(v, Tensor) for v in value.values())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_duration(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _is_sum(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dtype == torch.float64


def _is_piece(value: Any) -> bool:
    plain = isinstance(value, Mapping) and all(isinstance(v, (str, int, float)) for v in value.values())
    return plain and _is_count(value.get("update"))


def _is_best(value: Any) -> bool:
    return value is None or (
        isinstance(value, Mapping)
        and _is_count(value.get("update"))
        and is_weights(value.get("model"))
        and isinstance(metrics := value.get("metrics"), Mapping)
        and all(map(_is_number, metrics.values()))
    )


STORED: dict[str, Callable[[Any], bool]] = {  # what the fields of a TrainState in a checkpoint may be
    "run_id": lambda v: isinstance(v, str) and len(v) <= 128,
    "commits": lambda v: isinstance(v, list) and all(isinstance(c, str) for c in v),
    "update": _is_count,
    "evaluated": _is_count,
    "num_records": _is_count,
    "seconds": _is_duration,
    "cpu_seconds": lambda v: v is None or _is_duration(v),
    "pieces": lambda v: isinstance(v, list) and all(map(_is_piece, v)),
    "window": lambda v: _is_sum(v, (4,)),
    "largest_norm": lambda v: _is_sum(v, ()),
    "loss": _is_number,
    "carried": lambda v: isinstance(v, (tuple, list)) and all(isinstance(c, Tensor) for c in v),
    "best": _is_best,
    "best_population": _is_best,
    "diverged": lambda v: isinstance(v, bool),
}


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ValueError unless stored fields of a TrainState have their types and are in their ranges."""
    for name, is_valid in STORED.items():
        if name in fields and not is_valid(fields[name]):
            value = fields[name]
            raise ValueError(f"{name} is {value if _is_number(value) else f'a {type(value).__name__} of another kind'}")
    reached = [fields.get("evaluated", 0), *(b["update"] for b in map(fields.get, ("best", "best_population")) if b)]
    if max(reached) > fields.get("update", 0):
        raise ValueError(f"it was evaluated at update {max(reached):,}, after its last, {fields.get('update', 0):,}")


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
