"""Compiled kernels for float32 on the CPU: the LSTM's recurrence over a whole sequence, and what surrounds it.

Built on first use with the machine's C++ compiler in seconds; cached by source, flags and processor. It has a plain C
interface for ctypes, because torch's extension builder takes half a minute for torch's headers.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bnrnn.errors import BnrnnError
from bnrnn.scan.lstm import Statistics
from bnrnn.scan.lstm_fused import PARAMETERS, Sequence

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "lstm_cpu.cpp", FOLDER / "rhn_cpu.cpp", FOLDER / "norm_cpu.cpp"]
HEADERS = [FOLDER / "cpu_products.h", FOLDER / "cpu_blocks.h"]
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"]
FLAGS += ["-shared", "-fPIC"]


def compiler() -> str | None:
    """The C++ compiler to build with: $CXX, g++ or clang++; None if there is none."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )


def _processor() -> str:
    """What -march=native depends on, so that a cache on a shared disk serves each kind of processor its own build."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(command: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as part:
        built = Path(part) / path.name
        for openmp in (["-fopenmp"], []):  # not every compiler has it; without it there is one thread
            run = subprocess.run(
                [command, *FLAGS, *openmp, *map(str, SOURCES), "-o", str(built)], capture_output=True, text=True
            )
            if not run.returncode:
                break
        else:
            raise BnrnnError(f"backend=cpu: {command} could not build its kernels: {run.stderr.strip()[:2000]}")
        os.replace(built, path)  # several processes may build at once: the last one wins, all are the same


@cache
def library() -> ctypes.CDLL:
    """The built kernels. Raises BnrnnError, with what the compiler said, where they cannot be built."""
    command = compiler()
    if command is None:
        raise BnrnnError("backend=cpu needs a C++ compiler (g++ or clang++): install one, or use backend=reference")
    identity = [*(path.read_text() for path in (*SOURCES, *HEADERS)), *FLAGS, command, _processor()]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bnrnn"
    path = folder / f"kernels-{key}.so"
    if not path.exists():
        try:
            _build(command, path)
        except OSError as error:
            raise BnrnnError(f"backend=cpu: {path} cannot be written ({error}): set XDG_CACHE_HOME") from error
    kernels = ctypes.CDLL(str(path))
    kernels.bnrnn_lstm_packed_size.restype = ctypes.c_int64
    return kernels


def address(tensor: Tensor | None) -> int | None:
    """Address of a contiguous float32 tensor; null for None."""
    return None if tensor is None else tensor.data_ptr()


class _Lstm(ctypes.Structure):
    """`struct Lstm` of lstm_cpu.cpp."""

    _fields_ = (
        [(name, ctypes.c_int32) for name in ("T", "B", "H", "batch", "threads")]
        + [("eps", ctypes.c_float)]
        + [(name, ctypes.POINTER(ctypes.c_int32)) for name in ("running", "counted")]
        + [(name, ctypes.c_void_p) for name in (
            "weight_hh", *PARAMETERS, "h_0", "c_0", *Statistics._fields, "feature", "weight_ih", "packed", "x", "u",
            "c", "y", "dy", "dh", "dc", *(f"d{name}" for name in PARAMETERS), "dweight_ih", "dweight_hh",
        )]
    )  # fmt: skip


def sizes_of(values: list[int] | None) -> Any:
    return None if values is None else (ctypes.c_int32 * len(values))(*values)


class CpuEngine:
    """Whole sequences in the compiled kernel."""

    def __init__(self) -> None:
        self.library = library()

    def _arguments(self, s: Sequence, y: Tensor, **others: Tensor) -> _Lstm:
        T, B, H = s.c.shape
        tensors = {"weight_hh": s.weight_hh, "h_0": s.h_0, "c_0": s.c_0, "u": s.u, "c": s.c, "y": y,
                   **s.parameters, **s.statistics._asdict(), **others}  # fmt: skip
        x = {"x": s.x} if s.weight_ih is None else {"feature": s.x, "weight_ih": s.weight_ih}
        return _Lstm(
            T=T, B=B, H=H, batch=int(s.batch), threads=torch.get_num_threads(), eps=s.eps,
            running=sizes_of(s.batch_sizes), counted=None if s.ended_count else sizes_of(s.batch_sizes),
            **{name: address(tensor) for name, tensor in {**x, **tensors}.items()},
        )  # fmt: skip

    def forward(self, s: Sequence, y: Tensor) -> None:
        H = s.c.shape[2]
        packed = s.c.new_empty(self.library.bnrnn_lstm_packed_size(H))
        self.library.bnrnn_lstm_pack(
            H, ctypes.c_void_p(address(s.weight_hh)), ctypes.c_void_p(address(packed)), torch.get_num_threads()
        )
        self.library.bnrnn_lstm_forward(ctypes.byref(self._arguments(s, y, packed=packed)))

    def backward(self, s: Sequence, y: Tensor, dy: Tensor, dh: Tensor, dc: Tensor, grads: dict[str, Tensor]) -> Tensor:
        assert s.u is not None
        dweight = s.weight_hh.new_zeros(s.weight_hh.shape[::-1])
        gradients = {f"d{name}": grad for name, grad in grads.items()}
        arguments = self._arguments(s, y, dy=dy, dh=dh, dc=dc, dweight_hh=dweight, **gradients)
        self.library.bnrnn_lstm_backward(ctypes.byref(arguments))
        return dweight.t()


def _product(a: Tensor, b: Tensor, transposed: bool = False, out: Tensor | None = None) -> Tensor:
    """a @ b, or a.T @ b if `transposed`; added to `out` if given. b or its transpose is contiguous, as a is."""
    m, k = (a.shape[1], a.shape[0]) if transposed else a.shape
    c = a.new_empty(m, b.shape[1]) if out is None else out
    columns = not b.is_contiguous()
    library().bnrnn_product(
        m, b.shape[1], k, ctypes.c_void_p(address(a)), int(transposed), ctypes.c_void_p(address(b)),
        ctypes.c_int64(b.stride(1) if columns else b.stride(0)), int(columns), ctypes.c_void_p(address(c)),
        int(out is not None), torch.get_num_threads(),
    )  # fmt: skip
    return c


def sum_of_outer(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of a.T @ b over the pairs, all of the same widths."""
    m, n = (v.shape[1] for v in pairs[0])
    if -n % 16 * m > -m % 16 * n:  # panels are 16 columns wide: leave the smaller part of one unused
        return sum_of_outer([(b, a) for a, b in pairs]).t()
    total = None
    for a, b in pairs:
        total = _product(a, b, transposed=True, out=total) if len(a) else total
    assert total is not None
    return total


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, weight)
        return _product(x.flatten(0, 1), weight.t()).unflatten(0, x.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous().flatten(0, 1)
        dx = _product(dy, weight).view_as(x) if ctx.needs_input_grad[0] else None
        return dx, sum_of_outer([(dy, x.flatten(0, 1))])


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for x (T, B, I) and W (G, I), by the compiled product.

    torch's own reaches two thirds of its speed where sizes are no multiples of 16 (AMD EPYC, 650 units).
    """
    return _Linear.apply(x, weight)
