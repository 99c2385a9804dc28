"""The trial of the Triton engine: before its first use in a form of a scan, it is compared with the reference.

The form is all on which the kernels depend: the recurrence, the sizes of its layer, what is normalized and padded, the
precision, and whether a backward pass follows. A trial has few time steps and the sizes of the layer. So it runs the
same kernels as the scan after it: nothing is compiled twice, and a kernel that needs more than the GPU has fails here.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from bnrnn.errors import BnrnnError, first_line
from bnrnn.scan import graphs
from bnrnn.scan.backends import is_chosen, note

T = 9  # time steps of a trial: a chunk of 8 and one of 1 (triton_shared/launches.py)
FEWEST = 12  # sequences of a trial: with 2 or 3, gradients are small differences of large numbers
LARGEST = {"float32": 1e-4, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 5e-2}  # relative error, by precision of products
TIMES = 4  # or so often the error that the reference has in this precision, which is larger in deep highway networks
SMALL = 1e-2  # gradients below this part of the largest one are compared with that part: they may be only rounding
_problems: dict[Hashable, str | None] = {}  # by form

Scan = Callable[..., tuple[Tensor, Any, Any]]
Values = list[Tensor]


@dataclass(frozen=True)
class Trial:
    """A scan that may run on the Triton engine, called as `engine(*tensors, **options)`.

    Args:
        name: of the scan.
        engine, reference: the scan of the Triton engine, and of the reference.
        instead: name of the engine that runs if the Triton engine fails.
        tensors: x_proj (T, B, G), the initial states (B, H), and the weight.
        options: the other arguments.
    """

    name: str
    engine: Scan
    reference: Scan
    instead: str
    tensors: tuple[Tensor, ...]
    options: dict[str, Any]

    def passed(self) -> bool:
        """Whether the Triton engine can run the scan. If not, say so once for each form.

        Raises BnrnnError if that engine was asked for by name, and fails.
        """
        problem = self._problem() if needed(self.tensors[0].device) else None
        if problem is not None and is_chosen("triton"):
            raise BnrnnError(f"backend=triton cannot run {self} ({problem}): use auto")
        note("triton" if problem is None else self.instead)
        return problem is None

    def _problem(self) -> str | None:
        form = self._form()
        if form not in _problems:
            _problems[form] = self._tried()
            if _problems[form] is not None and not is_chosen("triton"):
                message = "The engine `triton` cannot run %s (%s). The engine `%s` runs instead, more slowly."
                logging.getLogger("bnrnn").warning(message, self, _problems[form], self.instead)
        return _problems[form]

    def _tried(self) -> str | None:
        """What is wrong with the engine on random data of this form, in a few words; None if nothing is."""
        device = self.tensors[0].device
        runs = 3 if graphs.possible(device) else 1  # the first one launches each step, the others replay graphs
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(self._keeps()):
                return problem_of(self.engine, self.reference, *self._random(), device, runs)
        except Exception as problem:  # a kernel that does not compile or run raises many kinds of errors
            return f"{type(problem).__name__}: {first_line(problem)}"

    def _form(self) -> Hashable:
        """All on which the kernels depend. They have tiles of 16 sequences, or of a larger power of two."""
        x, *states, weight = self.tensors
        own = {k: tuple(v.shape) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        own["population"] = tuple(v is not None for v in own.get("population") or ())
        own["batch_sizes"] = own.get("batch_sizes") is not None
        sizes = x.shape[2], *(s.shape[1] for s in states), *weight.shape
        precision = torch.backends.cuda.matmul.fp32_precision
        tile = max(4, (x.shape[1] - 1).bit_length())
        return self.name, x.device, tile, precision, self._keeps(), sizes, tuple(sorted(own.items()))

    def _keeps(self) -> bool:
        """Whether a backward pass follows."""
        values = [*self.tensors, *(v for v in self.options.values() if isinstance(v, Tensor))]
        return torch.is_grad_enabled() and any(value.requires_grad for value in values)

    def _random(self) -> tuple[Values, dict[str, Any]]:
        """Random arguments of the same form, on the CPU: the process's own generators stay as they are."""
        generator = torch.Generator("cpu").manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

        x, *states, weight = self.tensors
        B = max(x.shape[1], FEWEST)
        drawn = [draw(T, B, x.shape[2]), *(draw(B, s.shape[1]) for s in states)]
        drawn.append(draw(*weight.shape) / weight.shape[-1] ** 0.5)
        named = {k: 0.3 * draw(*v.shape) if isinstance(v, Tensor) else v for k, v in self.options.items()}
        if (population := self.options.get("population")) is not None:  # means and variances in turn
            values = [None if v is None else draw(T, *v.shape[1:]) for v in population]
            values = [v if v is None else v.abs() + 0.5 if n % 2 else 0.3 * v for n, v in enumerate(values)]
            named["population"] = type(population)(*values) if hasattr(population, "_fields") else tuple(values)
        if self.options.get("batch_sizes") is not None:  # one sequence has no step at all
            named["batch_sizes"] = [B - 1 - t // 2 for t in range(T)]
        return drawn, named

    def __str__(self) -> str:
        """The form, such as `lstm_scan with 20 sequences of 100 units, gamma_hh, bias, padded, without gradients`."""
        parts = [name for name, value in self.options.items() if isinstance(value, Tensor)]
        parts += ["population statistics"] * (self.options.get("population") is not None)
        parts += ["padded"] * (self.options.get("batch_sizes") is not None)
        parts += [_name_of(low)] if (low := self.options.get("product_dtype")) is not None else []
        parts += [] if self._keeps() else ["without gradients"]
        x, weight = self.tensors[0], self.tensors[-1]
        return ", ".join([f"{self.name} with {x.shape[1]} sequences of {weight.shape[-1]} units", *parts])


def needed(device: torch.device) -> bool:
    """Whether to try the engine on a device: not while a graph is captured, since a trial waits for the GPU."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def problem_of(
    engine: Scan, reference: Scan, tensors: Values, options: dict[str, Any], device: torch.device, runs: int = 1
) -> str | None:
    """What is wrong with an engine, compared with the reference in float64, in a few words; None if nothing is.

    Outputs, states and statistics are compared and, if gradients are on, those of all tensors.

    Args:
        tensors, options: the arguments of the scans, with float32 tensors on the CPU.
        runs: so often the engine runs.
    """
    exact = {k: v for k, v in options.items() if k not in ("product_dtype", "overwrite")}
    expected = _everything(reference, tensors, exact, device, torch.float64)
    low = options.get("product_dtype")
    precision = "float32" if low is None else _name_of(low)
    if precision == "float32" and device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        precision = "tf32"
    for run in range(runs):
        error = _largest_error(_everything(engine, tensors, options, device), expected)
        if error < LARGEST[precision]:
            continue
        rounded = _everything(reference, tensors, exact | ({} if low is None else {"product_dtype": low}), device)
        if not error < TIMES * _largest_error(rounded, expected):  # NaN is a problem, too
            return f"its error is {error:.1e}" + (" when graphs are replayed" if run else "")
    return None


def _everything(
    scan: Scan, tensors: Values, options: dict[str, Any], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[Values, Values]:
    """The outputs of a scan with its statistics, and the gradients, of which there are none if they are off."""
    keep = torch.is_grad_enabled()
    given, named = tree_map_only(Tensor, lambda v: v.to(device, dtype, copy=True), (tensors, options))
    leaves = [value.requires_grad_(keep) for value in (*given, *named.values()) if isinstance(value, Tensor)]
    with torch.autocast(device.type, enabled=False):
        y, state, used = scan(*given, **named)
        results = [y, *tree_leaves(state)]
        outputs = [*results, *(value for value in tree_leaves(used) if isinstance(value, Tensor))]
        if not keep:
            return outputs, []
        total = torch.stack([value.sin().sum() for value in results]).sum()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [value.detach() for value in outputs], list(gradients)


def _largest_error(found: tuple[Values, Values], exact: tuple[Values, Values]) -> float:
    """The largest relative error of outputs and gradients; NaN if there is one."""
    least = SMALL * torch.stack([value.norm() for value in exact[1]]).max() if exact[1] else torch.zeros(())
    pairs = [(a, b, b.norm()) for a, b in zip(found[0], exact[0], strict=True)]
    pairs += [(a, b, b.norm().maximum(least)) for a, b in zip(found[1], exact[1], strict=True)]
    return torch.stack([(a - b).norm() / norm for a, b, norm in pairs]).max().item()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
