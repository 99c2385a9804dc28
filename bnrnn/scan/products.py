"""Linear layers around the recurrence, by the engine that fits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bnrnn.scan.backends import backend
from bnrnn.scan.native import linear as native
from bnrnn.scan.tracing import traced


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x (T, B, I), W (G, I) and b (G,), by the chosen engine.

    x may be ids (T, B) that stand for one-hot rows; then there is no bias.
    """
    if not x.is_floating_point():
        return F.embedding(x, weight.t().contiguous())  # the product with a one-hot row is a column of W
    fits = x.dim() == 3 and (x.shape[2], x.dtype, x.device) == (weight.shape[1], weight.dtype, weight.device)
    plain = traced() or torch.is_autocast_enabled(x.device.type) or not fits  # torch names what does not fit
    run = F.linear if plain or backend(x.device, x.dtype) != "cpu" else native.linear
    return run(x, weight, bias)
