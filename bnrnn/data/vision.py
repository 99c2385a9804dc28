"""The only importer of torchvision, for features of images. It needs help beside a CPU build of torch."""

import importlib
import sys
from types import ModuleType

import torch

_OPERATORS = ("nms", "qnms")
_libraries = []  # a torch.library.Library takes its definitions back when it is collected


def import_torchvision() -> ModuleType:
    """torchvision, also where its compiled operators cannot load because torch is a CPU build (pytorch/vision#9077).

    torchvision's wheels link to CUDA. Beside a CPU torch its own library is skipped, and its import then fails on two
    operators that nobody defined. Their signatures are all it takes; the operators themselves stay unusable.
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
