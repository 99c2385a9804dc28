"""What several tests share: tolerances, processes, configurations, a web server for a folder."""

import functools
import gc
import multiprocessing
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import patch

import jaxtyping
import torch
from omegaconf import DictConfig
from torch import Tensor

from bnrnn.config import compose_config

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def assert_near(name: str, ref: Tensor, out: Tensor, tol: float | None = None) -> None:
    """Assert that the relative error of `out` is within the tolerance of its precision; NaN fails too."""
    tol = TOLERANCE[out.dtype] if tol is None else tol
    error = (out - ref).norm() / ref.norm().clamp_min(1e-8)
    assert error < tol, f"{name}: relative error {error:.2e}"


@contextmanager
def without_shape_checks() -> Iterator[None]:
    """Context manager without checks of annotated shapes, for code that is repeated often and was checked before."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@contextmanager
def cuda_untouched() -> Iterator[None]:
    """Context manager with one GPU that a program may count, and in which whatever initializes CUDA fails the test.

    CUDA cannot be used in a process that is forked from one that has initialized it.
    """

    def fail(*_: object) -> None:
        raise AssertionError("CUDA was initialized in a process whose workers are forks")

    with (
        patch.object(torch.cuda, "_is_compiled", lambda: True),
        patch.object(torch.cuda, "_device_count_nvml", lambda: 1),
        patch.object(torch.cuda, "_lazy_init", fail),
        patch.object(torch._C, "_cuda_getDeviceCount", fail, create=True),
    ):
        yield


def forked(function: Callable[..., object], *args: object) -> multiprocessing.Process:
    """A running process that calls a function. As a copy of this one it starts at once, without importing torch."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of this process wait for messages only
        process.start()
    return process  # pyright: ignore[reportReturnType]


def composed(*overrides: str) -> DictConfig:
    """A configuration that a test may change. Composing takes long, so that of the same overrides is copied."""
    return _composed(*overrides).copy()


_composed = functools.cache(compose_config)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a local web server that serves the files of a folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # closes connections that failed
