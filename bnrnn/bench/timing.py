"""Timing for all benchmarks: cases with several variants, which are measured in turn in one process."""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from bnrnn.errors import BnrnnError
from bnrnn.scan import BACKENDS, backend, set_backend

# Variants that are not engines. Zoneout is that of a layer without normalization.
NN_LSTM, NAIVE, NO_NORM, LAYER_NORM, ZONEOUT = "nn.LSTM", "naive loop", "without norm", "layer norm", "zoneout"
PACKED, PADDED, BN_LSTM = "nn.LSTM, packed", "nn.LSTM, padded", "BN-LSTM"  # on sequences of different lengths
LENGTHS = "uniform between half of T and T"  # of these sequences
TRAINING = "Training step"  # the section of the main benchmark
MIN_ROUNDS, MAX_ROUNDS = 5, 31  # limits of the number of rounds, whatever time they take
_BEGUN = time.monotonic()


@dataclass(frozen=True)
class Plan:
    """The extent of a benchmark."""

    name: str
    full_length: bool  # whether to use T instead of quick_T
    memory: bool  # whether to measure memory too
    threads: tuple[int, ...]
    error_T: int  # largest T for which errors are measured
    seconds: float  # time for the rounds of one case
    thorough: bool = True  # whether training steps are also timed for variants without kernels of their own for GPUs


@dataclass(frozen=True)
class Case:
    """Variants of one computation.

    Args:
        section: the heading of its row on the page.
        base: the variant to whose time the ratios are taken.
        targets: the ratio that a variant should have at most.
        gflop: 10^9 operations of its matrix products; None if they do not determine the speed.
    """

    section: str
    name: str
    variants: dict[str, Callable[[], Any]]
    base: str
    targets: dict[str, float] = field(default_factory=dict)
    gflop: float | None = None


def say(text: str) -> None:
    """Print a line of progress with the time since the start."""
    print(f"[{time.monotonic() - _BEGUN:5.0f} s] {text}", file=sys.stderr, flush=True)


def set_precision(device: torch.device, precision: str) -> None:
    """Set the precision of matrix products, for all variants. Raises BnrnnError if the device does not support it."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.rnn.fp32_precision = "tf32" if precision == "tf32" else "ieee"  # pyright: ignore
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", precision == "bfloat16")
    elif precision != "float32":
        raise BnrnnError(f"precision={precision} needs a GPU: use float32 on {device}")


@cache
def engines(device: torch.device) -> list[str]:
    """The engines that can run float32 on this device. Prints why others cannot."""
    able = []
    for name in BACKENDS:
        try:
            set_backend(name)
            if name != "auto" and backend(device, torch.float32) == name:
                able.append(name)
        except BnrnnError as error:
            say(f"without {name}: {error}")
    set_backend("auto")
    return able


def fastest(device: torch.device) -> str:
    """The engine that `auto` selects on this device. Targets apply to it."""
    return backend(device, torch.float32)


def elapsed(run: Callable[[], Any], device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds of a call, with all that it starts on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start


def time_in_turn(runs: dict[str, Callable[[], Any]], device: torch.device, seconds: float) -> dict[str, list[float]]:
    """The milliseconds of every variant. After a warm-up, variants are timed in turn: load then affects all equally."""
    # CPU time excludes other processes. For several threads it would be their sum, so wall-clock time is used.
    clock = time.process_time if device.type != "cuda" and torch.get_num_threads() == 1 else time.perf_counter

    def milliseconds(run: Callable[[], Any]) -> float:
        return round(1000 * elapsed(run, device, clock), 4)

    for run in runs.values():
        milliseconds(run)
    times: dict[str, list[float]] = {name: [] for name in runs}
    rounds, end = 0, time.monotonic() + seconds
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.monotonic() < end):
        for name, run in runs.items():
            times[name].append(milliseconds(run))
        rounds += 1
    return times


def measure(case: Case, device: torch.device, seconds: float) -> dict[str, Any]:
    """Measure a case and return what is stored: its description and its milliseconds."""
    times = time_in_turn(case.variants, device, seconds)
    set_backend("auto")
    medians = ", ".join(f"{name} {statistics.median(t):.4g}" for name, t in times.items())
    say(f"{case.section}, {case.name}, {torch.get_num_threads()} threads, median ms: {medians}")
    about = {"section": case.section, "name": case.name, "threads": torch.get_num_threads(), "base": case.base}
    return {**about, "targets": case.targets, "gflop": case.gflop, "ms": times}


def ratios(row: dict[str, Any], variant: str) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the ratio of a variant's time to the base's in each round."""
    pairs = zip(row["ms"][variant], row["ms"][row["base"]], strict=True)
    lower, median, upper = statistics.quantiles((time / base for time, base in pairs), n=4, method="inclusive")
    return lower, median, upper


def verdict(row: dict[str, Any], variant: str) -> str:
    """Whether the median ratio meets its target; "undecided" if the target lies between the quartiles."""
    target = row["targets"].get(variant)
    if target is None:
        return "–"
    lower, median, upper = ratios(row, variant)
    if lower <= target < upper:
        return "undecided"
    return "yes" if median <= target else "no"
