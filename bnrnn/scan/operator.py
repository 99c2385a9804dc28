"""The scans as one operator of a program that torch.compile makes.

torch.compile would unroll a loop over time, and cannot look into a compiled kernel. It calls this operator instead,
whatever the length of the sequence: `Steps` of the recurrence (see lstm/fused.py), forward and backward.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bnrnn.scan.arguments import check_memory
from bnrnn.scan.backends import backend


class Recurrence(NamedTuple):
    """What the operator has to know of a recurrence."""

    # Makes Steps from whether the engine `cpu` runs them, tensors by name, the population and options: with buffers for
    # the backward pass if `keep`, and without a copy of x_proj if `overwrite`.
    prepare: Callable[..., Any]
    shapes: Callable[..., list[tuple[int, ...]]]  # of what the operator returns
    statistics: type  # named tuple of those of the batch or of the population
    kept: tuple[str, ...]  # fields of Steps that the backward pass needs, beside the statistics and `y`


RECURRENCES: dict[str, Recurrence] = {}
OPTIONS = {"eps": 1e-5, "batch_sizes": None, "ended_count": False, "product_dtype": None, "over": "batch",
           "noise": None}  # fmt: skip
LAYOUT = torch.contiguous_format  # of all that the operator returns, as its fake implementation says


def scan(name: str, tensors: Mapping[str, Tensor | None], population: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """(y, last state, statistics) of the recurrence of this name, which RECURRENCES has."""
    kind = RECURRENCES[name]
    given = {key: value for key, value in tensors.items() if value is not None}
    keep = torch.is_grad_enabled() and any(v.requires_grad for v in given.values())
    given |= {key: value for key, value in (population._asdict() if population else {}).items() if value is not None}
    plain = OPTIONS | options
    y, last, *rest = _scan(name, ",".join(given), list(given.values()), *plain.values(), keep)
    return y, last, population or kind.statistics(**dict(zip(_statistics(kind, given), rest, strict=False)))


def _statistics(kind: Recurrence, given: dict[str, Tensor]) -> list[str]:
    """Names of the batch's statistics that are returned: of what has a scale, if the population's are not given."""
    fields = kind.statistics._fields
    if any(name in given for name in fields):
        return []
    return [name for name in fields if f"gamma_{name.partition('_')[2]}" in given]


def _options(*values: Any) -> dict[str, Any]:
    """Options of a scan by name, from an operator's arguments."""
    named = dict(zip(OPTIONS, values, strict=True))
    return named | {"batch_sizes": None if named["batch_sizes"] is None else list(named["batch_sizes"])}


def _with_gradient(kind: Recurrence, given: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that have a gradient: not the population's statistics, nor integers."""
    return [key for key, v in given.items() if key not in kind.statistics._fields and v.is_floating_point()]


def _steps(kind: Recurrence, given: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """Steps by the engine `cpu` where it can run, and else by `fused`."""
    check_memory(given)
    x_proj, fields = given["x_proj"], kind.statistics._fields
    fits = backend(x_proj.device, options["product_dtype"] or x_proj.dtype) == "cpu"
    population = {name: value for name, value in given.items() if name in fields}
    tensors = {name: value for name, value in given.items() if name not in fields}
    return kind.prepare(fits, tensors, kind.statistics(**population) if population else None, **options)


@torch.library.custom_op("bnrnn::scan", mutates_args=())
def _scan(
    name: str,
    names: str,
    tensors: Sequence[Tensor],
    eps: float,
    batch_sizes: Sequence[int] | None,
    ended_count: bool,
    product_dtype: torch.dtype | None,
    over: str,
    noise: Sequence[float] | None,
    keep: bool,
) -> list[Tensor]:
    kind, given = RECURRENCES[name], dict(zip(names.split(","), tensors, strict=True))
    options = _options(eps, batch_sizes, ended_count, product_dtype, over, noise)
    steps = _steps(kind, given, options | {"keep": keep})
    steps.forward()
    y, last = steps.results()
    statistics = [getattr(steps.statistics, name) for name in _statistics(kind, given)]
    kept = [value for field in kind.kept if (value := getattr(steps, field)) is not None] if keep else []
    return [v.clone(memory_format=LAYOUT) if v is last else v for v in (y, last, *statistics, *kept)]


@_scan.register_fake
def _(name: str, names: str, tensors: Sequence[Tensor], *options: Any) -> list[Tensor]:
    kind, given = RECURRENCES[name], dict(zip(names.split(","), tensors, strict=True))
    over = _options(*options[:-1])["over"]
    others = {} if over == OPTIONS["over"] else {"over": over}
    shapes = kind.shapes(given, _statistics(kind, given), keep=options[-1], **others)
    return [tensors[0].new_empty(shape) for shape in shapes]


@torch.library.custom_op("bnrnn::scan_backward", mutates_args=())
def _scan_backward(
    name: str,
    names: str,
    tensors: Sequence[Tensor],
    eps: float,
    batch_sizes: Sequence[int] | None,
    ended_count: bool,
    product_dtype: torch.dtype | None,
    over: str,
    noise: Sequence[float] | None,
    results: Sequence[Tensor],
    dy: Tensor,
    dlast: Tensor,
) -> list[Tensor]:
    """Gradients with respect to the tensors that are no statistics, from what `_scan` returned with `keep`."""
    kind, given = RECURRENCES[name], dict(zip(names.split(","), tensors, strict=True))
    options = _options(eps, batch_sizes, ended_count, product_dtype, over, noise) | {"keep": True, "overwrite": True}
    steps = _steps(kind, given, options)
    seen = _statistics(kind, given)
    fields = [field for field in kind.kept if getattr(steps, field) is not None]
    kept: dict[str, Any] = {f: v.clone() for f, v in zip(fields, results[2 + len(seen) :], strict=True)}
    if hasattr(steps, "y"):
        kept["y"] = results[0]
    if seen:
        kept["statistics"] = kind.statistics(**dict(zip(seen, results[2:], strict=False)))
    grads = replace(steps, **kept).gradients(dy, dlast)
    return [grads[key].contiguous() for key in _with_gradient(kind, given)]


@_scan_backward.register_fake
def _(name: str, names: str, tensors: Sequence[Tensor], *_: Any) -> list[Tensor]:
    given = dict(zip(names.split(","), tensors, strict=True))
    return [given[key].new_empty(given[key].shape) for key in _with_gradient(RECURRENCES[name], given)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    name, names, tensors, *options, _ = inputs
    ctx.arguments = name, names, options
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """The gradients of the operator's arguments, in their order, given those of its results."""
    name, names, options = ctx.arguments
    keys = names.split(",")
    tensors, results = ctx.saved_tensors[: len(keys)], ctx.saved_tensors[len(keys) :]
    have = _with_gradient(RECURRENCES[name], dict(zip(keys, tensors, strict=True)))
    found = _scan_backward(name, names, list(tensors), *options, list(results), grads[0], grads[1])
    by_name = dict(zip(have, found, strict=True))
    return None, None, [by_name.get(key) for key in keys], *[None] * (len(options) + 1)


_scan.register_autograd(_backward, setup_context=_keep)
