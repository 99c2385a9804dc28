"""Optimizers that torch has only in another form."""

from collections.abc import Iterable

import torch
from torch import Tensor

from bnrnn.errors import BnrnnError


class RMSProp(torch.optim.Optimizer):
    """RMSProp as in the authors' framework (Blocks): v ← decay v + (1 - decay) g²; step = lr g / max(√v, 1e-5).

    It differs from torch.optim.RMSprop by the maximum in place of a sum. `momentum` > 0 adds heavy-ball momentum, which
    is what third-party ports made of the paper's "0.9 momentum" (D4); the authors' code has none.
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
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                state = self.state[p]
                if not state:
                    state["v"] = torch.zeros_like(p)
                    if group["momentum"]:
                        state["velocity"] = torch.zeros_like(p)
            grads = [p.grad for p in params]
            v = [self.state[p]["v"] for p in params]
            torch._foreach_mul_(v, group["decay"])
            torch._foreach_addcmul_(v, grads, grads, 1 - group["decay"])
            scale = torch._foreach_sqrt(v)
            torch._foreach_clamp_min_(scale, 1e-5)
            steps = torch._foreach_div(grads, scale)
            if group["momentum"]:
                velocity = [self.state[p]["velocity"] for p in params]
                torch._foreach_mul_(velocity, group["momentum"])
                torch._foreach_add_(velocity, steps)
                steps = velocity
            torch._foreach_add_(params, steps, alpha=-group["lr"])
