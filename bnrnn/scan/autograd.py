"""The steps of an engine as one autograd function."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from bnrnn.errors import BnrnnError
from bnrnn.scan.arguments import check_memory

ALTERNATIVE = "call bnrnn.scan.set_backend('reference') before the forward pass"


@runtime_checkable
class Steps(Protocol):
    """All time steps of a scan, as an engine runs them."""

    def fields(self) -> dict[str, Any]:
        """The arguments of the constructor by name: all values that `gradients` needs."""
        ...

    def forward(self) -> None:
        """Run the steps. Fills buffers, of which some are already there."""
        ...

    def results(self) -> tuple[Tensor, Tensor]:
        """y and the last state, after the forward pass."""
        ...

    def gradients(self, dy: Tensor, dlast: Tensor, /) -> dict[str, Tensor | None]:
        """The gradients of the arguments by name, given those of `results`. Overwrites buffers."""
        ...


def run(engine: Callable[..., Steps], steps: Steps, inputs: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Run the forward pass of `steps` and return y and the last state, through which gradients flow to `inputs`.

    Args:
        engine: makes steps from their fields.
        inputs: the tensors by their names in the gradients.

    Raises RuntimeError in a second backward pass, and BnrnnError if a gradient shall be differentiated.
    """
    return _Scan.apply(engine, steps, tuple(inputs), *inputs.values())


def only_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that is derived by hand, and so cannot be differentiated: raises BnrnnError if it shall be."""

    @wraps(backward)
    def checked(*args: Any) -> Any:
        if torch.is_grad_enabled():  # what create_graph=True asks for
            raise BnrnnError(f"this engine cannot differentiate a gradient (create_graph=True): {ALTERNATIVE}")
        return backward(*args)

    return checked


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, engine: Callable[..., Steps], steps: Steps, names: tuple[str, ...], *_: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        steps.forward()
        results = steps.results()
        # Autograd keeps the tensors. It raises an error if one is changed before the backward pass, and can move them
        # elsewhere or have them computed a second time (torch.utils.checkpoint).
        leaves, form = tree_flatten(steps.fields())
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        others = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        ctx.engine, ctx.names, ctx.form, ctx.others, ctx.spent = engine, names, form, others, False
        return results

    @staticmethod
    @only_once
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        if ctx.spent:
            raise RuntimeError(
                f"this scan was already run backward, which spent its buffers: run it forward again, or {ALTERNATIVE}"
            )
        saved = ctx.saved_tensors
        check_memory({"kept": saved, "gradients": given})
        tensors = iter(saved)
        leaves = [next(tensors) if other is None else other[0] for other in ctx.others]
        ctx.spent = True
        gradients = ctx.engine(**tree_unflatten(leaves, ctx.form)).gradients(*given)
        return None, None, None, *(gradients.get(name) for name in ctx.names)
