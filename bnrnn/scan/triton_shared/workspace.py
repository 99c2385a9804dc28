"""Buffers at fixed addresses, and CUDA graphs over them, which the Triton engines share.

A recurrence launches thousands of kernels that each run for microseconds, so launching takes longer than computing. A
captured CUDA graph launches them all at once, but needs its data at the same addresses every time.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run in Python, on CPU tensors
UNITS = 16  # J, the units of a program
DEPTH = 32  # depth of a product's tile
# A step computes its product itself if the left factor has at most so many elements. Estimated from memory bandwidths,
# not measured.
FUSED_UP_TO = 2**17
MAX_FREE = 16  # maximum number of unused workspaces; those of the kind that was used longest ago are freed first


@dataclass(frozen=True)
class Kind:
    """The scans that a workspace can run: device, shape and options. Subclasses define the buffers."""

    device: torch.device
    shape: tuple[int, ...]  # T first
    given: tuple[str, ...]  # names of the parameters that are not None
    batch: bool  # whether to use batch statistics
    padded: bool
    with_grad: bool
    eps: float
    low: torch.dtype | None  # lower precision of products
    tf32: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def constants(self, B: int, left_size: int) -> dict[str, Any]:
        """Compile-time constants of a kernel with a product whose left factor has `left_size` elements."""
        return {
            "J": UNITS, "K": DEPTH, "TILE": min(64, max(16, triton.next_power_of_2(B))), "BATCH": self.batch,
            "FUSED": left_size <= FUSED_UP_TO,
            "LOW": {None: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[self.low],
            "WIDEN": INTERPRETED,
            "PRECISION": "tf32" if self.tf32 else "ieee",
        }  # fmt: skip


def options(inputs: tuple[Tensor | None, ...], product_dtype: torch.dtype | None) -> dict[str, Any]:
    """Those fields of a Kind that depend on the tensors of a scan and on torch's settings."""
    return {
        "with_grad": torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs),
        "low": product_dtype if product_dtype != torch.float32 else None,
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",  # torch.set_float32_matmul_precision sets it
    }


@dataclass
class Workspace:
    """Buffers at fixed addresses, which one scan at a time uses, and the CUDA graphs captured over them."""

    kind: Any
    buffers: dict[str, Tensor] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind = self.kind
        self.buffers = {name: torch.empty(shape, device=kind.device) for name, shape in kind.shapes().items()}
        if kind.padded:
            self.buffers["running"] = torch.empty(kind.shape[0], dtype=torch.int32, device=kind.device)

    def run(self, name: str, steps: Callable[["Workspace"], None]) -> None:
        """Launch the steps: one by one the first time, which compiles them, and as a captured graph afterwards.

        While the caller captures a graph of its own, the steps are launched one by one and become part of that graph.
        """
        self.uses[name] = self.uses.get(name, 0) + 1
        on_gpu = self.kind.device.type == "cuda"
        if not on_gpu or self.uses[name] == 1 or torch.cuda.is_current_stream_capturing():
            return steps(self)
        if name not in self.graphs:
            self.graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[name], capture_error_mode="thread_local"):
                steps(self)
        self.graphs[name].replay()

    def get(self, *names: str) -> dict[str, Tensor | None]:
        return {name: self.buffers.get(name) for name in names}

    def fill(self, batch_sizes: list[int] | None, **values: Tensor | None) -> None:
        """Copy the arguments of a scan into the buffers of the same names."""
        with torch.no_grad():
            for name, value in values.items():
                if value is not None and name in self.buffers:
                    self.buffers[name].copy_(value)
            if batch_sizes is not None:
                self.buffers["running"].copy_(torch.tensor(batch_sizes, dtype=torch.int32))


_free: dict[Kind, list[Workspace]] = {}


class Lease:
    """The right to use a workspace. It ends with `release`, or when the lease is garbage-collected."""

    def __init__(self, kind: Kind) -> None:
        free = _free.get(kind)
        self._workspace: Workspace | None = free.pop() if free else Workspace(kind)

    @property
    def workspace(self) -> Workspace:
        """The workspace. Raises RuntimeError after `release`."""
        if self._workspace is None:
            raise RuntimeError("this scan was already run backward, which freed its buffers: run it forward again")
        return self._workspace

    def release(self) -> None:
        if self._workspace is None:
            return
        kind, workspace = self._workspace.kind, self._workspace
        self._workspace = None
        _free[kind] = [*_free.pop(kind, []), workspace]
        while sum(map(len, _free.values())) > MAX_FREE:
            oldest = next(iter(_free))
            _free[oldest] = _free[oldest][1:]
            if not _free[oldest]:
                del _free[oldest]

    __del__ = release


def product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right for tensors with one leading axis, in the precision of the right factor."""
    if right.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left.to(right.dtype), right))
