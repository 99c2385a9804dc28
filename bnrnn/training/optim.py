"""RMSProp as the papers' authors used it, which differs from torch's, and the learning-rate schedule of the papers."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError

LARGEST = 1e38  # of the numbers of a configuration: float32 holds none beyond 3.4e38


class RMSProp(torch.optim.Optimizer):
    """RMSProp as in Blocks, the framework of Cooijmans et al. 2016.

        v ← decay v + (1 - decay) g²;   step = lr g / max(√v, 1e-5)

    torch.optim.RMSprop divides by √v + eps instead. `momentum` > 0 adds heavy-ball momentum: this is how
    reimplementations by others read the paper's "0.9 momentum" (D4). The authors' code has no momentum.

    Raises BnrnnError for a decay or momentum outside [0, 1).
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-3, decay: float = 0.9, momentum: float = 0.0) -> None:
        for name, value in {"decay": decay, "momentum": momentum}.items():
            if not 0 <= value < 1:
                raise BnrnnError(f"optim.{name} must be in [0, 1), got {value}")
        super().__init__(params, {"lr": lr, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, self.state[p], **{k: group[k] for k in ("lr", "decay", "momentum")})

    def _step(self, p: Tensor, g: Tensor, state: dict[str, Tensor], lr: float, decay: float, momentum: float) -> None:
        if not state:
            state["v"] = torch.zeros_like(p)
            if momentum:
                state["velocity"] = torch.zeros_like(p)
        v = state["v"].mul_(decay).addcmul_(g, g, value=1 - decay)
        step = g / v.sqrt().clamp_min_(1e-5)
        if momentum:
            step = state["velocity"].mul_(momentum).add_(step)
        p.add_(step, alpha=-lr)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if what an optimizer has loaded does not fit its parameters and options."""
    for group in optimizer.param_groups:
        for name, default in optimizer.defaults.items():
            if type(default) is float and not (
                isinstance(group.get(name), (int, float)) and math.isfinite(group[name])
            ):
                raise ValueError(f"{name} of its optimizer is no finite number")
        for p in group["params"]:
            if any(isinstance(v, Tensor) and v.shape not in ((), p.shape) for v in optimizer.state.get(p, {}).values()):
                raise ValueError("its optimizer has values of other shapes than the weights")


def learning_rate(lr: float, epoch: int, after: int, divisor: float | int, every: int = 1) -> float:
    """The rate stays at lr for `after` epochs, then is divided by `divisor` every `every` epochs. epoch counts from 0.

    Laurent et al. 2015, section 4.2.2: "divided by 2 every epoch after the 6th" means that the 7th epoch is the first
    with a lower rate. Raises BnrnnError for a rate that a divisor below 1 has made too large.
    """
    try:
        rate = lr / divisor ** max(0, -(-(epoch + 1 - after) // every))
    except OverflowError:
        return 0.0
    except ZeroDivisionError:
        rate = math.inf
    if rate > LARGEST:
        raise BnrnnError(
            f"lr_decay.divisor={divisor:g} makes the learning rate {rate:g} in epoch {epoch + 1}: use a divisor from 1"
        )
    return rate
