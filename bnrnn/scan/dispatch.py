"""What all scans do around their engines: products of lower precision, and the call of the engine that was chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bnrnn.scan.arguments import raised
from bnrnn.scan.backends import OUTSIDE, engine_of, note, product_dtype, say_that_fused_runs, without_autocast
from bnrnn.scan.graphs import Captured
from bnrnn.scan.trials import Trial

LARGE = 2**20  # parameters of W_hh, of an LSTM with 512 units


@dataclass(frozen=True)
class Engines:
    """The engines of one recurrence, called as `engines(x_proj, *tensors, **options)`.

    Args:
        scan: the function that calls this. On a GPU it stays outside of compiled programs.
        reference: the scan as a readable loop.
        operator: the scan as one operator of a compiled program.
        fused: runs a scan. Its first argument is one of the next two classes.
        compiled, steps: the classes that compute the steps for the engines `cpu` and `fused`.
        triton: given the options of a scan, returns the scan of the engine `triton`, or the name of what that engine
            lacks.
        single: whether the engine `cpu` may compute a single time step with torch's operations, as the reference does.
    """

    scan: Callable[..., Any]
    reference: Callable[..., Any]
    operator: Callable[..., Any]
    fused: Callable[..., Any]
    compiled: type
    steps: type
    triton: Callable[[dict[str, Any]], Callable[..., Any] | str]
    single: bool = True

    def __call__(self, x_proj: Tensor, *tensors: Tensor, overwrite: bool = False, **options: Any) -> Any:
        """Run the scan on the selected engine. With `overwrite`, it may reuse the memory of x_proj."""
        name = engine_of(x_proj, options.get("product_dtype"))
        if name == "outside":
            outside: Any = torch.compiler.disable(self.scan, reason=OUTSIDE)
            return outside(x_proj, *tensors, **options)
        if name == "cpu" and self.single and len(x_proj) == 1 and options.get("noise") is None:
            name = "reference" if _is_costly_to_pack(tensors[-1]) else name
        if name == "reference":
            return self.reference(x_proj, *tensors, **options)
        if name == "operator":
            return self.operator(x_proj, *tensors, **options)
        if overwrite:
            options["overwrite"] = True
        if name == "triton":
            run = self.triton(options)
            if isinstance(run, str):
                say_that_fused_runs(run)
                note("fused")
            elif Trial(self.scan.__name__, run, self.reference, "fused", (x_proj, *tensors), options).passed():
                return run(x_proj, *tensors, **options)
        steps = self.compiled if name == "cpu" else partial(Captured, self.steps)
        return self.fused(steps, x_proj, *tensors, **options)


def _is_costly_to_pack(weight: Tensor) -> bool:
    """Whether packing W_hh (G, H) for the kernels takes as long as a step's product: in training for every call.

    Without gradients, packed weights are kept. They only pay while they fit into a processor's cache.
    """
    return torch.is_grad_enabled() or weight.numel() >= LARGE


def in_float32(run: Callable[..., Any], x_proj: Tensor, *tensors: Tensor, **options: Any) -> Any:
    """Run a scan of float32 tensors with products of a lower precision, where autocast or the tensors ask for one.

    Args:
        run: the scan. Its option `product_dtype` gets the lower precision.
        tensors: its initial states, and its weight.

    Returns what `run` returns. y has the dtype of x_proj, and the last states have those of the initial ones.
    """
    low = product_dtype(x_proj.device, x_proj.dtype)
    with without_autocast(x_proj.device):
        if low is None:
            return run(x_proj, *tensors, **options)
        options = {name: raised(value) for name, value in options.items()} | {"product_dtype": low}
        y, state, *used = run(raised(x_proj), *map(raised, tensors), **options)
    if isinstance(state, Tensor):
        return y.to(x_proj.dtype), state.to(tensors[0].dtype), *used
    return y.to(x_proj.dtype), tuple(s.to(given.dtype) for s, given in zip(state, tensors, strict=False)), *used
