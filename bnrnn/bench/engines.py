"""A short check of all engines on a device: errors against float64, and microseconds a time step."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

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
    """The time of a training step, divided by T: the fastest engine, nn.LSTM and, on a GPU, lower bounds."""
    x, dy = draw(shape, T, device)
    best = fastest(device)
    runs: dict[str, Callable[[], Any]] = {
        name: partial(step, name, build(name, shape, T, device), x, dy) for name in (best, NN_LSTM)
    }
    if device.type == "cuda":
        runs |= lower_bounds(shape, T, device)
    medians = {name: 1000 * statistics.median(ms) / T for name, ms in time_in_turn(runs, device, 0.0).items()}
    return ", ".join(f"{name} {value:,.{0 if value >= 100 else 1}f}" for name, value in medians.items())


def lower_bounds(shape: Shape, T: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """CUDA graphs of what no engine can avoid: the products with W_hh, forward and backward, and launching kernels."""
    h = torch.randn(shape.B, shape.H, device=device)
    gates = torch.randn(shape.B, 4 * shape.H, device=device)
    weight, one = torch.randn(4 * shape.H, shape.H, device=device), torch.zeros(1, device=device)
    forward, backward = torch.empty_like(gates), torch.empty_like(h)

    def products() -> None:
        for _ in range(shape.num_layers * T):
            torch.mm(h, weight.t(), out=forward)
            torch.mm(gates, weight, out=backward)

    def launches() -> None:
        for _ in range(2 * shape.num_layers * T):
            one.add_(1)

    return {"products alone": _graph(products), "empty kernels": _graph(launches)}


def _graph(work: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of the work, ready to be replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
