"""Whether torch records the calls of a model: for torch.compile, torch.export, torch.jit.trace or ONNX."""

import torch


def exporting() -> bool:
    """Whether the program that is being recorded must run without this package."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def traced() -> bool:
    """Whether calls are recorded, for a program that runs later."""
    return torch.compiler.is_compiling() or exporting()


def transformed() -> bool:
    """Whether this runs within torch.func: a scan is then differentiated or vectorized operation by operation."""
    return torch._C._are_functorch_transforms_active()


def values_known() -> bool:
    """Whether the values of tensors can be looked at."""
    return not traced() and not transformed()


def autocast_is_on(device: torch.device) -> bool:
    """Whether autocast is on for this kind of device. Tensors without values (`meta`) have none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
