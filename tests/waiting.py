"""Tensors of a GPU without having one, and what a program must not do with them if it shall not wait for the GPU.

Tensors on torch's device "meta" have no values, so that looking at one is an error: `item`, `tolist`, `bool`, `nonzero`
and copies to the CPU raise one. `nothing_waits` raises AssertionError for the rest. It does not see a Python list that
is used as an index.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

META = torch.device("meta")
COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
ALLOWED = {"to_device", "moved"}  # functions that copy from pinned memory: transfer.py, and `Batch.to`


class _Watch(TorchDispatchMode):
    """Raises AssertionError for operations with tensors on both devices, and for copies from ordinary memory.

    A single number on the CPU may take part: a kernel gets it as an argument.
    """

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = op(*args, **(kwargs or {}))
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        there = any(value.device == META for value in tree_leaves((given, result)) if isinstance(value, Tensor))
        here = [value for value in given if value.device != META]
        if op in COPIES:
            assert not (there and here) or _is_allowed(), f"{op} waits: it copies from ordinary memory"
        else:
            assert not (there and any(value.dim() for value in here)), f"{op} has tensors on two devices"
        return result


def _is_allowed() -> bool:
    """Whether one of the ALLOWED functions is being called."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name not in ALLOWED:
        frame = frame.f_back
    return frame is not None


def _from_values(make: Any) -> Any:
    """A function that makes a tensor from values in ordinary memory: not on the GPU."""

    def checked(*args: Any, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        assert tensor.device != META, f"{make.__name__} waits: it copies from ordinary memory"
        return tensor

    return checked


def _no_text(*_: Any, **__: Any) -> str:
    raise AssertionError("printing a tensor waits")


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Context manager in which nothing may wait for the GPU, which is the device META."""
    with (
        patch.object(torch, "is_autocast_enabled", lambda *_: False),  # cannot be asked about this device
        patch.object(torch, "tensor", _from_values(torch.tensor)),
        patch.object(torch, "as_tensor", _from_values(torch.as_tensor)),
        patch.object(Tensor, "new_tensor", _from_values(Tensor.new_tensor)),
        patch.object(torch._tensor_str, "_str", _no_text),
        _Watch(),
    ):
        yield


def on_meta(values: Any) -> Any:
    """The same values with their tensors on META; those of floating point are float32, and need gradients."""

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value.to(META)
        return torch.empty(value.shape, dtype=torch.float32, device=META, requires_grad=True)

    return tree_map_only(Tensor, moved, values)
