"""Compiled batch normalization of sequences for float32 on the CPU. reference.py defines the functions."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from bnrnn.scan.arguments import check_memory
from bnrnn.scan.autograd import only_once
from bnrnn.scan.native.build import address, library, plain, sizes_of
from bnrnn.scan.native.threads import num_threads


def _run(name: str, ctx: Any, shape: torch.Size, *tensors: Tensor | None) -> None:
    function = getattr(library(), f"bnrnn_{ctx.kind}_{name}")
    pointers = (ctypes.c_void_p(address(v)) for v in tensors)
    sizes = sizes_of(ctx.batch_sizes)
    function(*shape, int(ctx.batch), ctypes.c_float(ctx.eps), sizes, num_threads(), *pointers)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: str, x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float,
        population: tuple[Tensor, Tensor] | None, batch_sizes: list[int] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        T, _, F = x.shape
        x, num_statistics = plain(x), 1 if kind == "norm_over_time" else T
        empty = (x.new_empty(num_statistics, F) for _ in range(2))
        mean, var = (plain(v) for v in population or empty)
        ctx.kind, ctx.batch, ctx.eps, ctx.batch_sizes = kind, population is None, eps, batch_sizes
        ctx.has_beta = beta is not None
        y = torch.empty_like(x)
        _run("forward", ctx, x.shape, x, gamma, beta, mean, var, y)
        ctx.save_for_backward(x, gamma, mean, var)
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    @only_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        x, gamma, mean, var = saved = ctx.saved_tensors
        check_memory({"kept": saved, "gradients": grads})
        dy, dx = plain(grads[0]), torch.empty_like(x)
        dgamma, dbeta = torch.zeros_like(gamma), torch.zeros_like(gamma)
        _run("backward", ctx, x.shape, x, gamma, mean, var, dy, dx, dgamma, dbeta)
        return None, dx, dgamma, dbeta if ctx.has_beta else None, None, None, None


def normalize_sequence(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _Normalize.apply("norm", x, *args)


def normalize_over_time(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _Normalize.apply("norm_over_time", x, *args)
