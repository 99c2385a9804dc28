"""Scans of several trainings in one process, computed in one call along the axis of replicas.

Each training is a thread (bnrnn.training.turns). Within `handing_over`, a scan of a thread becomes a `Forward`, and its
backward pass a `Backward`. The thread hands these calls over and waits. When all threads wait, the calls of equal form
are computed by `compute`: it stacks their tensors, runs one scan, and gives each call its part of the results.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bnrnn.scan.arguments import form_of
from bnrnn.scan.autograd import only_once

Outputs = tuple[Tensor | None, ...]  # the first two have gradients
Run = Callable[[dict[str, Tensor]], Outputs]
_thread = threading.local()


@dataclass(eq=False)
class Graph:
    """A scan that was computed: its inputs and outputs for the backward pass, with the axis of replicas."""

    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    owners: list[Any]  # whose replicas these are, in this order


@dataclass(eq=False)
class Call:
    """What a thread, its owner, hands over. Later it has an `answer` or an `error`."""

    owner: Any = field(default=None, init=False)
    answer: Outputs = field(default=(), init=False)
    error: BaseException | None = field(default=None, init=False)


@dataclass(eq=False)
class Forward(Call):
    """A scan. `group` is its form: scans of the same form are computed together, by the `run` of one of them."""

    group: Hashable
    run: Run
    tensors: dict[str, Tensor]
    graph: Graph | None = field(default=None, init=False)  # None without gradients
    place: int = field(default=0, init=False)  # index on the axis of replicas


@dataclass(eq=False)
class Backward(Call):
    """The backward pass of one replica. All replicas of a graph must be computed together."""

    group: Graph
    place: int
    grads: tuple[Tensor, ...]


@contextmanager
def handing_over(hand_over: Callable[[Call], Outputs]) -> Iterator[None]:
    """Context manager in which the scans of this thread are handed over. The function returns the answer of a call."""
    _thread.hand_over = hand_over
    try:
        yield
    finally:
        del _thread.hand_over


def is_handed_over() -> bool:
    """Whether the scans of this thread are handed over."""
    return hasattr(_thread, "hand_over")


def scan(kind: Hashable, run: Run, tensors: dict[str, Tensor]) -> Outputs:
    """Hand a scan over, and return its outputs. Gradients flow through the first two outputs.

    Args:
        kind: all on which `run` depends beside the tensors.
        run: computes the scan from tensors with a leading axis of replicas.
    """
    needs = [torch.is_grad_enabled() and value.requires_grad for value in tensors.values()]
    given = {
        key: value.detach().requires_grad_(need) for (key, value), need in zip(tensors.items(), needs, strict=True)
    }
    form = kind, tuple(tensors), tuple(needs), form_of(tuple(tensors.values()))
    return _Scan.apply(Forward(form, run, given), *tensors.values())


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Forward, *tensors: Tensor) -> Outputs:
        outputs = _thread.hand_over(call)
        ctx.graph, ctx.place = call.graph, call.place
        ctx.mark_non_differentiable(*(value for value in outputs[2:] if value is not None))
        return outputs

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        graph, ctx.graph = ctx.graph, None
        if graph is None:
            raise RuntimeError("this scan was already run backward, which freed its buffers: run it forward again")
        return None, *_thread.hand_over(Backward(graph, ctx.place, grads[:2]))


def compute(calls: list[Any]) -> None:
    """Compute the calls of one group, and set their answers. An error is the error of each of them."""
    try:
        (_forward if isinstance(calls[0], Forward) else _backward)(calls)
    except Exception as error:
        for call in calls:
            call.error = error


def _forward(calls: list[Forward]) -> None:
    each = zip(*(call.tensors.values() for call in calls), strict=True)
    with torch.no_grad():
        stacked = [torch.stack(values).requires_grad_(values[0].requires_grad) for values in each]
    keep = any(value.requires_grad for value in stacked)
    with torch.set_grad_enabled(keep):
        outputs = calls[0].run(dict(zip(calls[0].tensors, stacked, strict=True)))
    y, state, *_ = outputs
    assert y is not None and state is not None
    graph = Graph(stacked, (y, state), [call.owner for call in calls]) if keep else None
    for place, call in enumerate(calls):
        call.answer = tuple(None if value is None else value.detach()[place] for value in outputs)
        call.graph, call.place = graph, place


def _backward(calls: list[Backward]) -> None:
    graph, given = calls[0].group, {call.place: call.grads for call in calls}
    grads = [
        # A replica that has ended since the forward pass gives no gradient.
        torch.stack([given[n][k] if n in given else torch.zeros_like(output[n]) for n in range(len(graph.owners))])
        for k, output in enumerate(graph.outputs)
    ]
    leaves = [value for value in graph.inputs if value.requires_grad]
    found = iter(torch.autograd.grad(graph.outputs, leaves, grads, allow_unused=True))
    of_inputs = [next(found) if value.requires_grad else None for value in graph.inputs]
    for call in calls:
        call.answer = tuple(None if grad is None else grad[call.place] for grad in of_inputs)
