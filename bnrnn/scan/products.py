"""Products with the input, by the engine that fits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bnrnn.scan.backends import backend
from bnrnn.scan.native import linear as native


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T for x (T, B, I) and W (G, I), by the chosen engine; x may be ids (T, B) that stand for one-hot rows."""
    if not x.is_floating_point():
        return F.embedding(x, weight.t().contiguous())  # the product with a one-hot row is a column of W
    fits = x.dim() == 3 and (x.shape[2], x.dtype, x.device) == (weight.shape[1], weight.dtype, weight.device)
    plain = torch.is_autocast_enabled(x.device.type) or not fits  # torch names what does not fit
    return F.linear(x, weight) if plain or backend(x.device, x.dtype) != "cpu" else native.linear(x, weight)
