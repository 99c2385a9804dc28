"""Matrix products before and after the recurrence, computed by the selected engine."""

import torch.nn.functional as F
from torch import Tensor

from bnrnn.scan.arguments import check_memory
from bnrnn.scan.backends import backend
from bnrnn.scan.native import linear as native
from bnrnn.scan.tracing import autocast_is_on, traced


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b for x (T, B, I), W (G, I) and b (G,), computed by the selected engine.

    x may be integer ids (T, B), each of which stands for a one-hot vector. Raises BnrnnError for freed memory.
    """
    check_memory({"x": x, "weight": weight, "bias": bias})
    if not x.is_floating_point():
        y = F.embedding(x, weight.t().contiguous())  # the product with a one-hot row is a column of W
        return y if bias is None else y + bias
    fits = x.dim() == 3 and (x.shape[2], x.dtype, x.device) == (weight.shape[1], weight.dtype, weight.device)
    is_empty = x.numel() == 0 or weight.numel() == 0  # the kernel writes nothing then, not even zeros
    plain = traced() or autocast_is_on(x.device) or not fits  # torch raises the error for wrong shapes
    is_step = len(x) == 1  # packing W for a single step takes the kernel as long as the product itself
    run = F.linear if plain or is_empty or is_step or backend(x.device, x.dtype) != "cpu" else native.linear
    return run(x, weight, bias)
