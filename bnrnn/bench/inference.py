"""Measures the speed of trained layers against torch.nn.LSTM: over a whole sequence, and in calls of one step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bnrnn.bench.layers import SHAPES, Shape
from bnrnn.bench.timing import NN_LSTM, NO_NORM, Case, Plan
from bnrnn.layers.population import estimate_population_statistics
from bnrnn.layers.stack import LSTM, Stack

BN_LSTM = "BN-LSTM"
BATCHES = (1, 64)
CALLS = 20  # calls of one step in a measurement
WHOLE, STEPS = {1: 1.2, 64: 1.0}, {1: 1.3, 64: 1.3}  # target ratios to nn.LSTM by batch size, on one thread of a CPU


def models(shape: Shape, T: int, device: torch.device) -> dict[str, nn.Module]:
    """The layers in evaluation mode, with population statistics, by variant."""
    torch.manual_seed(0)
    normalized = LSTM(shape.I, shape.H, shape.num_layers, norm="batch", t_max=T).to(device)
    estimate_population_statistics(normalized, [torch.randn(T, 8, shape.I, device=device)])
    plain = nn.LSTM(shape.I, shape.H, shape.num_layers).to(device)
    without = LSTM(shape.I, shape.H, shape.num_layers).to(device)
    return {NN_LSTM: plain.eval(), BN_LSTM: normalized.eval(), NO_NORM: without.eval()}


def whole(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """A function that processes a sequence in one call."""

    def run() -> None:
        with torch.inference_mode():
            model(x)

    return run


def in_steps(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """A function that makes CALLS calls of one step. Each starts from the last state of the previous call."""

    def run() -> None:
        state = None
        with torch.inference_mode():
            for step in range(CALLS):
                _, state = model(x[:1], state, **({"t_start": step} if isinstance(model, Stack) else {}))

    return run


def inference_cases(device: torch.device, plan: Plan, names: tuple[str, ...] = ("S1", "S2", "S4")) -> Iterator[Case]:
    for name in names:
        shape = SHAPES[name]
        T = shape.T if plan.full_length else shape.quick_T
        found = models(shape, T, device)
        for B in BATCHES:
            x = torch.randn(T, B, shape.I, device=device)
            for how, build, target in ((f"T {T}", whole, WHOLE[B]), (f"{CALLS} calls of one step", in_steps, STEPS[B])):
                runs = {variant: build(model, x) for variant, model in found.items()}
                targets = {BN_LSTM: target, NO_NORM: target} if device.type == "cpu" else {}
                yield Case("Evaluation", f"{name}, B {B}, {how}", runs, NN_LSTM, targets)
