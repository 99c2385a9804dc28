"""Copies from the CPU to a GPU for which the program does not wait."""

import torch
from torch import Tensor

from bnrnn.scan.tracing import traced

_captured_from: list[Tensor] = []  # memory from which a captured CUDA graph copies whenever it runs


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device. A GPU copies it from pinned memory when its turn comes: an ordinary copy waits for it."""
    if device.type != "cuda" or tensor.device.type != "cpu" or traced():
        return tensor.to(device)
    pinned = tensor.pin_memory()
    if torch.cuda.is_current_stream_capturing():
        _captured_from.append(pinned)
    return pinned.to(device, non_blocking=True)
