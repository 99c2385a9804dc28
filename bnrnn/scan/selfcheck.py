"""A check, at the first use on a GPU, that the Triton engine computes what the reference does.

A table must never fail, or be wrong, because a kernel is on a machine on which nobody has tried it. The check runs two
small scans with their gradients and takes seconds, most of them for compiling. An engine that passes is tried again in
every form of a scan that a model uses (trials.py).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bnrnn.errors import first_line
from bnrnn.scan.backends import triton_engine
from bnrnn.scan.lstm import reference as lstm
from bnrnn.scan.rhn import reference as rhn
from bnrnn.scan.trials import problem_of

T, B, H, D = 3, 20, 24, 2


def problem_on(device: torch.device) -> str | None:
    """What is wrong with the Triton engine on a device, in a few words; None if nothing is."""
    generator = torch.Generator("cpu").manual_seed(0)  # the process's own generators stay as they are
    try:
        with torch.inference_mode(False), torch.enable_grad(), _untuned():
            for engine, reference, shapes in _recurrences():
                drawn = [
                    0.3 * torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
                    for shape in shapes.values()
                ]
                named = dict(zip(shapes, drawn, strict=True))
                if (problem := problem_of(engine, reference, [], named, device)) is not None:
                    return problem
    except Exception as problem:  # a kernel that does not compile or run raises many kinds of errors
        return f"{type(problem).__name__}: {first_line(problem)}"
    return None


def _recurrences() -> Iterator[tuple[Callable, Callable, dict[str, tuple[int, ...]]]]:
    """The engine, the reference and the shapes of their tensors."""
    shapes = {name: shape for name, shape in lstm.shapes(T, B, H).items() if name not in lstm.Statistics._fields}
    yield triton_engine("lstm").triton_scan, lstm.lstm_scan, shapes
    shapes = rhn.shapes(T, B, 2 * H, D, H, 0)
    shapes = {name: shapes[name] for name in ("x_proj", "s", "weight", "bias")}
    yield triton_engine("rhn").rhn_triton_scan, rhn.rhn_scan, shapes


@contextmanager
def _untuned() -> Iterator[None]:
    """Context manager in which nothing is measured to divide the kernels' work: that is for real sizes."""
    before = os.environ.get("BNRNN_TUNE")
    os.environ["BNRNN_TUNE"] = "0"
    try:
        yield
    finally:
        os.environ.pop("BNRNN_TUNE")
        if before is not None:
            os.environ["BNRNN_TUNE"] = before
