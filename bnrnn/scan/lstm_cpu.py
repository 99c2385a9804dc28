"""Compiled kernels for float32 on the CPU (lstm_cpu.cpp): the fused time step, and the normalization of the input.

Built on first use with the machine's C++ compiler in about a second; cached by source, flags and processor. It has a
plain C interface for ctypes, because torch's extension builder takes half a minute for torch's headers.
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
from bnrnn.scan.lstm_fused import Saved

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-shared", "-fPIC"]
BLOCK = 16  # units in a block of the kernel


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
        run = subprocess.run([command, *FLAGS, str(SOURCE), "-o", str(built)], capture_output=True, text=True)
        if run.returncode:
            raise BnrnnError(f"backend=cpu: {command} could not build {SOURCE.name}: {run.stderr.strip()[:2000]}")
        os.replace(built, path)  # several processes may build at once: the last one wins, all are the same


@cache
def library() -> ctypes.CDLL:
    """The built kernels. Raises BnrnnError, with what the compiler said, where they cannot be built."""
    command = compiler()
    if command is None:
        raise BnrnnError("backend=cpu needs a C++ compiler (g++ or clang++): install one, or use backend=reference")
    key = hashlib.sha256("\0".join([SOURCE.read_text(), *FLAGS, command, _processor()]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "bnrnn"
    path = folder / f"lstm_cpu-{key}.so"
    if not path.exists():
        try:
            _build(command, path)
        except OSError as error:
            raise BnrnnError(f"backend=cpu: {path} cannot be written ({error}): set XDG_CACHE_HOME") from error
    return ctypes.CDLL(str(path))


def _at(tensor: Tensor | None, t: int | None = None) -> ctypes.c_void_p:
    """Address of a contiguous tensor, or of its step t; null for None."""
    if tensor is None:
        return ctypes.c_void_p(None)
    return ctypes.c_void_p(tensor.data_ptr() + (0 if t is None else t * tensor.stride(0) * tensor.element_size()))


class CpuSteps:
    """Steps in the compiled kernel."""

    def __init__(self) -> None:
        self.library = library()
        self.scratch = torch.empty(0)

    def _scratch(self, batch_size: int) -> Tensor:
        if len(self.scratch) < batch_size:
            self.scratch = torch.empty(batch_size, 5 * BLOCK)
        return self.scratch

    def forward(self, s: Saved, t: int, h: Tensor) -> None:
        B, H = s.c.shape[1:]
        self.library.bnrnn_lstm_forward(
            B, H, int(s.batch), ctypes.c_float(s.eps), _at(s.u, t), _at(s.x, t), _at(s.c_prev(t)), _at(s.gamma_hh),
            _at(s.mean_hh, t), _at(s.rstd_hh, t), _at(s.gamma_c), _at(s.beta_c), _at(s.mean_c, t), _at(s.rstd_c, t),
            _at(s.c, t), _at(h), _at(self._scratch(B)),
        )  # fmt: skip

    def backward(
        self, s: Saved, t: int, dh: Tensor, dc: Tensor, da: Tensor, sums: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        B, H = s.c.shape[1:]
        self.library.bnrnn_lstm_backward(
            B, H, int(s.batch), _at(s.u, t), _at(s.x, t), _at(s.c_prev(t)), _at(s.c, t), _at(s.gamma_hh),
            _at(s.rstd_hh, t), _at(s.gamma_c), _at(s.beta_c), _at(s.mean_c, t), _at(s.rstd_c, t), _at(dh), _at(dc),
            _at(da), *map(_at, sums), _at(self._scratch(B)),
        )  # fmt: skip


class _NormalizeSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, population: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        T, B, F = x.shape
        x = x.contiguous()
        if population is None:
            mean, rstd = x.new_empty(T, F), x.new_empty(T, F)
        else:
            mean, rstd = population[0].contiguous(), (population[1] + eps).rsqrt()
        y = torch.empty_like(x)
        library().bnrnn_norm_forward(
            T, B, F, int(population is None), ctypes.c_float(eps), _at(x), _at(gamma), _at(beta), _at(mean), _at(rstd),
            _at(y),
        )  # fmt: skip
        ctx.save_for_backward(x, gamma, mean, rstd)
        ctx.batch, ctx.has_beta = population is None, beta is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, gamma, mean, rstd = ctx.saved_tensors
        dy, dx = grads[0].contiguous(), torch.empty_like(x)
        dgamma, dbeta = torch.zeros_like(gamma), torch.zeros_like(gamma)
        pointers = map(_at, (x, gamma, mean, rstd, dy, dx, dgamma, dbeta))
        library().bnrnn_norm_backward(*x.shape, int(ctx.batch), *pointers)
        return dx, dgamma, dbeta if ctx.has_beta else None, None, None


def normalize_sequence(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, population: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """bnrnn.scan.norm.normalize_sequence by the compiled kernel."""
    return _NormalizeSequence.apply(x, gamma, beta, eps, population)
