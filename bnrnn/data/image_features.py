"""Image features from a pretrained Inception_v3 (Szegedy et al. 2016): 2,048 features per image.

The user downloads torchvision's weights, https://download.pytorch.org/models/inception_v3_google-0cc3c7bd.pth, by hand
and passes the file.
"""

import importlib
import io
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.data.base import sha256
from bnrnn.data.prepared import read_parts
from bnrnn.errors import BnrnnError
from bnrnn.system.files import read_bytes, reading

URL = "https://download.pytorch.org/models/inception_v3_google-0cc3c7bd.pth"
SHA256 = "0cc3c7bd"  # the first digits of the file's SHA-256, which are part of its name
BATCH_SIZE = 32
PART = 4 * BATCH_SIZE  # images whose features are lost if the preparation is interrupted
SIZE = 2048
THUMBNAIL = 160
_libraries = []  # keeps the definitions alive: a torch.library.Library removes them when it is garbage-collected


def inception_v3(weights: Path | None) -> nn.Module:
    """Inception_v3 without its last layer, so that it returns the pooled features (B, 2048), in evaluation mode.

    Args:
        weights: torchvision's weight file. None keeps the random initial weights, for tests.

    Raises BnrnnError if the file is missing or has another checksum.
    """
    trained = None if weights is None else load_weights(weights)
    models = import_torchvision().models
    network = models.inception_v3(weights=None, aux_logits=True, init_weights=False, transform_input=True)
    if trained is not None:
        network.load_state_dict(trained)
    network.fc = nn.Identity()
    return network.eval()


def load_weights(path: Path) -> dict[str, Tensor]:
    """The weights in torchvision's file. Raises BnrnnError if it is missing or has another checksum."""
    if not path.exists():
        raise BnrnnError(f"{path} is missing: download it from {URL}")
    content = read_bytes(path, f"download it from {URL}")
    found = sha256(content)
    if not found.startswith(SHA256):
        raise BnrnnError(f"{path} has SHA-256 {found[:8]}..., expected {SHA256}...: download it from {URL}")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def load_image(path: Path) -> Float[Tensor, "3 299 299"]:
    """Load an image, scale its shorter side to 342 pixels, crop the central 299 x 299 and normalize the colors.

    Raises BnrnnError if the file is missing or is not a readable image.
    """
    from PIL import Image

    transform = import_torchvision().models.Inception_V3_Weights.IMAGENET1K_V1.transforms()
    remedy, what = "fetch it again", "a readable image"
    with reading(path, remedy, what), Image.open(io.BytesIO(read_bytes(path, remedy, what))) as image:
        return transform(image.convert("RGB"))


def extract(files: Sequence[Path], network: nn.Module, parts: Path, name: str, num_proc: int) -> Any:
    """The features of images as a `datasets.Dataset` in float16. Parts that exist are not computed again.

    Every process computes with one thread, or on the GPU, so that the number of processes does not change the result.

    Args:
        parts: folder of the parts.
        name: name of the network.
    """
    from datasets import Features, List, Value

    features = Features(features=List(Value("float16"), length=SIZE))
    read = partial(read_features, network=network)
    return read_parts(files, PART, read, features, parts, f"{name} 1", num_proc, "features")


def read_features(names: Sequence[str], network: nn.Module) -> dict[str, np.ndarray]:
    """The features of these images, computed on the GPU if there is one."""
    device = torch.device(
        "cuda" if torch.cuda.is_available() else "cpu"
    )  # in this process, because CUDA cannot be used after a fork
    network, threads = network.to(device), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            found = [network(images.to(device)).cpu().half().numpy() for images in batches([Path(n) for n in names])]
    finally:
        torch.set_num_threads(threads)
    return {"features": np.concatenate(found)}


def batches(paths: Sequence[Path]) -> Iterator[Float[Tensor, "B 3 299 299"]]:
    for n in range(0, len(paths), BATCH_SIZE):
        yield torch.stack([load_image(path) for path in paths[n : n + BATCH_SIZE]])


def thumbnail(file: Any) -> np.ndarray:
    """A small copy (height, width, 3) of the image in a file. Its longer side has at most THUMBNAIL pixels."""
    from PIL import Image

    with Image.open(file) as image:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        return np.asarray(image.convert("RGB"))


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
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)
    return importlib.import_module("torchvision")
