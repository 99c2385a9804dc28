"""Whether torch records the calls of a model: for torch.compile, torch.export, torch.jit.trace or ONNX."""

import torch


def exporting() -> bool:
    """Whether the program that is being recorded must run without this package."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def traced() -> bool:
    """Whether calls are recorded, so that the values of tensors are unknown."""
    return torch.compiler.is_compiling() or exporting()
