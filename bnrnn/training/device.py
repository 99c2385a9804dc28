"""The device and the precision of a run."""

import re

import torch

from bnrnn.errors import BnrnnError


def set_precision(name: str, device: torch.device) -> None:
    """Set the precision of float32 matrix products. For bfloat16, the training loop turns autocast on instead.

    Raises BnrnnError for an unknown precision, and for tf32 without a GPU.
    """
    if name not in ("float32", "tf32", "bfloat16"):
        raise BnrnnError(f"precision={name} is unknown: use float32, tf32 or bfloat16")
    if name == "tf32" and device.type != "cuda":
        raise BnrnnError(f"precision=tf32 needs a GPU, but the device is {device}: use float32 or bfloat16")
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")


def choose_device(name: str) -> torch.device:
    """The device of a run; auto selects the GPU if there is one. Raises BnrnnError for a device that does not exist."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(name, str) or re.fullmatch(r"(cpu|cuda)(:\d+)?", name) is None:
        raise BnrnnError(f"device={name} is unknown: use auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BnrnnError(f"device={name} needs a GPU, but torch {torch.__version__} finds none: use device=cpu")
    return torch.device(name)
