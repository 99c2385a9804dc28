"""Checks of a scan's arguments. Compiled engines read memory by address: wrong shapes or dtypes must not reach them."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan.tracing import traced, values_known

MOST_FORMS = 1000  # remembered by each check


def once_per_form(check: Callable[[Tensor, dict[str, Any]], None]) -> Callable[[Tensor, dict[str, Any]], None]:
    """A check that depends only on shapes, dtypes and devices: it runs once for each combination of these.

    Looking it up takes half the time of the check itself, which matters in calls of one time step.
    """
    passed: set[Any] = set()

    @wraps(check)
    def checked(x: Tensor, given: dict[str, Any]) -> None:
        if traced():
            return check(x, given)
        form = (form_of(x), *given, *map(form_of, given.values()))
        if form not in passed:
            check(x, given)
            if len(passed) >= MOST_FORMS:
                passed.clear()
            passed.add(form)

    return checked


def form_of(value: Any) -> Any:
    """Shape, dtype and device of a tensor, or a plain value, in a form that can be compared and hashed."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    return tuple(map(form_of, value)) if isinstance(value, (tuple, list)) else value


def check_tensors(x: Tensor, shapes: dict[str, tuple[int, ...]], values: dict[str, Any], of: str = "x_proj") -> None:
    """Raise BnrnnError for a tensor that has another shape than expected, or another dtype or device than x.

    Args:
        shapes: the expected shape by name.
        values: the arguments by name; those that are not tensors are ignored.
        of: the name of x in the message.
    """
    for name, value in values.items():
        if isinstance(value, Tensor):
            expected, found = (shapes[name], x.dtype, x.device), (tuple(value.shape), value.dtype, value.device)
            if found != expected:
                raise BnrnnError(f"{name} does not match {of}: expected {expected}, got {found}")


def check_memory(values: Mapping[str, Any]) -> None:
    """Raise BnrnnError for a tensor whose storage is smaller than its shape needs, because it was freed or cut.

    This can change between two calls with the same shapes, so every call checks it, before the first tensor is read.

    Args:
        values: the arguments by name, which may be tuples; those that are not tensors are ignored.
    """
    if not values_known():
        return
    for name, value in values.items():
        if isinstance(value, Tensor):
            found = value.untyped_storage().nbytes()
            if (found != value.nbytes or not value.is_contiguous()) and found < _bytes_needed(value):
                raise BnrnnError(
                    f"the memory of {name} has {found} bytes, and its shape {tuple(value.shape)} needs "
                    f"{_bytes_needed(value)}: it was freed, so compute it again"
                )
        elif isinstance(value, tuple):
            check_memory({f"{name}[{n}]": v for n, v in enumerate(value)})


def _bytes_needed(value: Tensor) -> int:
    """The number of bytes from the beginning of a tensor's storage to its last value."""
    if value.numel() == 0:
        return 0
    last = sum((int(size) - 1) * int(step) for size, step in zip(value.shape, value.stride(), strict=True))
    return (int(value.storage_offset()) + last + 1) * value.itemsize


def check_not_empty(T: int, H: int) -> None:
    """Raise BnrnnError unless a scan has at least one time step and one unit."""
    if T == 0 or H == 0:
        raise BnrnnError(f"a scan needs at least one time step and one unit, got T = {T} and H = {H}")


def check_sizes(batch_sizes: list[int] | None, T: int, B: int) -> None:
    """Raise BnrnnError unless batch_sizes are T numbers from B to 1 that never increase."""
    if batch_sizes is not None:
        downwards = [B, *batch_sizes, 1]
        if len(batch_sizes) != T or sorted(downwards, reverse=True) != downwards:
            raise BnrnnError(
                f"batch_sizes must be {T} numbers between {B} and 1, one per step, never increasing: got {batch_sizes}"
            )


def statistics_by_name(population: Any, terms: tuple[str, ...], given: dict[str, Any]) -> dict[str, Tensor | None]:
    """The population statistics, a named tuple or None, as a dictionary.

    Args:
        terms: the terms that may be normalized, such as "hh".
        given: the arguments of the scan; a term is normalized if its gamma is given.

    Raises BnrnnError if the statistics of a normalized term are missing.
    """
    if population is None:
        return {}
    found = population._asdict()
    for name in (f"{kind}_{term}" for term in terms for kind in ("mean", "var")):
        gamma = f"gamma_{name.partition('_')[2]}"
        if given.get(gamma) is not None and found[name] is None:
            raise BnrnnError(f"population.{name} is None, expected a tensor because {gamma} is given")
    return found


def raised(value: Any) -> Any:
    """Convert a tensor of floating point, or those of a named tuple, to float32; return any other value unchanged."""
    if isinstance(value, tuple):
        return type(value)(*map(raised, value))
    return value.to(torch.float32) if isinstance(value, Tensor) and value.is_floating_point() else value
