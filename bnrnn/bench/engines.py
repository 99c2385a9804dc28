"""A short check of all engines on a device: errors against float64, and microseconds a time step."""

import statistics
from collections.abc import Iterator
from functools import partial

import torch

from bnrnn.bench.layers import SHAPES, Shape, build, draw, relative_errors, step
from bnrnn.bench.timing import NN_LSTM, engines, fastest, time_in_turn
from bnrnn.errors import first_line
from bnrnn.scan import set_backend

LENGTHS = {"S1": 20, "S2": 4, "S3": 2, "S4": 4, "S5": 4}  # time steps, so that each shape takes seconds
LARGEST = {"float32": 1e-5, "tf32": 5e-3}  # larger errors are wrong


def engine_checks(device: torch.device, lengths: dict[str, int] | None = None) -> Iterator[tuple[bool, str]]:
    """A line for each shape, and whether all is right: the errors of the engines, and the times of a step.

    The error is the largest relative one over outputs, states and all gradients. Whatever a kernel raises is part of
    its line, so that it does not keep the other engines from being checked.
    """
    with_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    limit = LARGEST["tf32" if with_tf32 else "float32"]
    for key, T in (lengths or LENGTHS).items():
        shape = SHAPES[key]
        errors, problems = errors_of(shape, T, device)
        parts = [f"{name} {error:.1e}" for name, error in errors.items()]
        parts += [f"{name} {problem}" for name, problem in problems.items()]
        timed = ""
        try:
            timed = f"; microseconds a step: {times(shape, T, device)}"
        except Exception as error:
            problems["times"] = timed = f"; times: {_one_line(error)}"
        is_right = not problems and all(error < limit for error in errors.values())  # NaN is wrong
        yield is_right, f"{key} {shape.about}: {', '.join(parts)}{timed}"
    set_backend("auto")


def errors_of(shape: Shape, T: int, device: torch.device) -> tuple[dict[str, float], dict[str, str]]:
    """The errors of the engines against float64, and what those have raised that have none."""
    names, errors, problems = engines(device), {}, {}
    try:
        return relative_errors(names, shape, T, device), {}
    except Exception:  # one of them fails: which one?
        for name in names:
            try:
                errors |= relative_errors([name], shape, T, device)
            except Exception as error:
                problems[name] = _one_line(error)
    return errors, problems


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def times(shape: Shape, T: int, device: torch.device) -> str:
    """The time of a training step, divided by T: the fastest engine, and nn.LSTM."""
    x, dy = draw(shape, T, device)
    runs = {name: partial(step, name, build(name, shape, T, device), x, dy) for name in (fastest(device), NN_LSTM)}
    medians = {name: 1000 * statistics.median(ms) / T for name, ms in time_in_turn(runs, device, 0.0).items()}
    return ", ".join(f"{name} {value:,.{0 if value >= 100 else 1}f}" for name, value in medians.items())
