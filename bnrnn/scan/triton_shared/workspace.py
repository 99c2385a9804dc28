"""What the Triton engines share: buffers at fixed addresses, and CUDA graphs captured over them.

A recurrence is thousands of launches of microseconds each, so that launching them costs more than running them. As a
graph they are launched once; a graph needs its data at the same addresses every time.
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
UNITS = 16  # J
DEPTH = 32  # of a product's tile
# Elements of the left factor up to which a product is fused into the step: an estimate from bandwidths, unmeasured.
FUSED_UP_TO = 2**17
MAX_FREE = 16  # workspaces kept for later, all kinds together; the oldest kind goes first


@dataclass(frozen=True)
class Kind:
    """What a workspace is made for. Subclasses name its buffers."""

    device: torch.device
    shape: tuple[int, ...]  # T first
    given: tuple[str, ...]  # the parameters that are there
    batch: bool
    padded: bool
    with_grad: bool
    eps: float
    low: torch.dtype | None
    tf32: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def constants(self, B: int, left_size: int) -> dict[str, Any]:
        """Of every kernel that has a product; `left_size`: elements of its left factor."""
        return {
            "J": UNITS, "K": DEPTH, "TILE": min(64, max(16, triton.next_power_of_2(B))), "BATCH": self.batch,
            "FUSED": left_size <= FUSED_UP_TO,
            "LOW": {None: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[self.low],
            "WIDEN": INTERPRETED,
            "PRECISION": "tf32" if self.tf32 else "ieee",
        }  # fmt: skip


def options(inputs: tuple[Tensor | None, ...], product_dtype: torch.dtype | None) -> dict[str, Any]:
    """Of a Kind: what follows from the tensors of a scan and from torch's settings."""
    return {
        "with_grad": torch.is_grad_enabled() and any(v is not None and v.requires_grad for v in inputs),
        "low": product_dtype if product_dtype != torch.float32 else None,
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",  # what torch.set_float32_matmul_precision sets too
    }


@dataclass
class Workspace:
    """Buffers at fixed addresses for one scan at a time, and the graphs captured over them."""

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
        """Launch the steps: plainly the first time, which compiles them; as a captured graph from the second on.

        Inside a graph that somebody else captures they are launched plainly into that one.
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
        """Copy a scan's arguments to the buffers of their names."""
        with torch.no_grad():
            for name, value in values.items():
                if value is not None and name in self.buffers:
                    self.buffers[name].copy_(value)
            if batch_sizes is not None:
                self.buffers["running"].copy_(torch.tensor(batch_sizes, dtype=torch.int32))


_free: dict[Kind, list[Workspace]] = {}


class Lease:
    """A workspace in use; given back by `release`, or when nobody holds the lease any more."""

    def __init__(self, kind: Kind) -> None:
        free = _free.get(kind)
        self._workspace: Workspace | None = free.pop() if free else Workspace(kind)

    @property
    def workspace(self) -> Workspace:
        """Raises RuntimeError after it was given back."""
        if self._workspace is None:
            raise RuntimeError("this scan was run backward before and its buffers are spent: run it forward again")
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
    """out = left @ right with one leading axis, in the precision of the right factor."""
    if right.dtype == out.dtype:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left.to(right.dtype), right))
