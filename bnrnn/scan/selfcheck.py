"""A check, at the first use on a GPU, that the Triton engine computes what the reference does.

A table must never fail, or be wrong, because a kernel is on a machine on which nobody has tried it. The check runs two
small scans with their gradients and takes seconds, most of them for compiling.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from bnrnn.scan.backends import triton_engine
from bnrnn.scan.lstm import reference as lstm
from bnrnn.scan.rhn import reference as rhn

T, B, H, D = 3, 20, 24, 2
LARGEST = {False: 1e-4, True: 2e-2}  # error, without and with TF32


def problem_on(device: torch.device) -> str | None:
    """What is wrong with the Triton engine on a device, in a few words; None if nothing is."""
    with_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False), _untuned():
            error = max(largest_error(*recurrence, device) for recurrence in _recurrences())
    except Exception as problem:  # a kernel that does not compile or run raises many kinds of errors
        return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
    return None if error < LARGEST[with_tf32] else f"its error is {error:.1e}"  # NaN is a problem, too


def _recurrences() -> Iterator[tuple[Callable, Callable, dict[str, tuple[int, ...]]]]:
    """The engine, the reference and the shapes of their tensors."""
    shapes = {name: shape for name, shape in lstm.shapes(T, B, H).items() if name not in lstm.Statistics._fields}
    yield triton_engine("lstm").triton_scan, lstm.lstm_scan, shapes
    shapes = rhn.shapes(T, B, 2 * H, D, H, 0)
    shapes = {name: shapes[name] for name in ("x_proj", "s", "weight", "bias")}
    yield triton_engine("rhn").rhn_triton_scan, rhn.rhn_scan, shapes


def largest_error(
    engine: Callable, reference: Callable, shapes: dict[str, tuple[int, ...]], device: torch.device
) -> float:
    """The largest relative error of outputs and gradients against the reference in float64."""
    generator = torch.Generator().manual_seed(0)  # the process's own generators stay as they are
    drawn = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def run(scan: Callable, dtype: torch.dtype) -> list[Tensor]:
        given = {name: value.to(device, dtype).requires_grad_() for name, value in drawn.items()}
        y, state, _ = scan(**given)
        outputs = [y, *(state if isinstance(state, tuple) else (state,))]
        total = torch.stack([value.sin().sum() for value in outputs]).sum()
        return [*outputs, *torch.autograd.grad(total, list(given.values()))]

    pairs = zip(run(engine, torch.float32), run(reference, torch.float64), strict=True)
    return torch.stack([(found - exact).norm() / exact.norm() for found, exact in pairs]).max().item()


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
