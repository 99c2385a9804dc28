"""Importing torchvision, for image features. Only this module imports it: with a CPU build of torch it needs a fix."""

import importlib
import sys
from types import ModuleType

import torch

_OPERATORS = ("nms", "qnms")
_libraries = []  # keeps the definitions alive: a torch.library.Library removes them when it is garbage-collected


def import_torchvision() -> ModuleType:
    """Import torchvision, also with a CPU build of torch, where its operators cannot load (pytorch/vision#9077).

    torchvision's wheels link to CUDA. With a CPU build of torch, torchvision skips its compiled library, and its import
    then fails because two operators are undefined. Declaring their signatures lets the import succeed; the two
    operators themselves remain unusable.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
    return importlib.import_module("torchvision")
