"""Features of images by a network that is not trained here: Inception_v3 (Szegedy et al. 2016), 2,048 an image.

Its weights are torchvision's, https://download.pytorch.org/models/inception_v3_google-0cc3c7bd.pth, downloaded by hand
and given as a file.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from bnrnn.data.prepared import read_parts
from bnrnn.data.vision import import_torchvision
from bnrnn.errors import BnrnnError

URL = "https://download.pytorch.org/models/inception_v3_google-0cc3c7bd.pth"
SHA256 = "0cc3c7bd"  # how the file's begins, as its name says
BATCH_SIZE = 32
PART = 4 * BATCH_SIZE  # images whose features are lost if the preparation is interrupted
SIZE = 2048
THUMBNAIL = 160


def inception_v3(weights: Path | None) -> nn.Module:
    """The network up to its pooled features; with weights that are random where none are given.

    Raises BnrnnError for a file that is missing or another.
    """
    models = import_torchvision().models
    network = models.inception_v3(weights=None, aux_logits=True, init_weights=False, transform_input=True)
    if weights is not None:
        if not weights.exists():
            raise BnrnnError(f"{weights} is missing: download it from {URL}")
        found = hashlib.sha256(weights.read_bytes()).hexdigest()
        if not found.startswith(SHA256):
            raise BnrnnError(f"{weights} has SHA-256 {found[:8]}..., expected {SHA256}...: download it from {URL}")
        network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    network.fc = nn.Identity()
    return network.eval()


def load_image(path: Path) -> Float[Tensor, "3 299 299"]:
    """An image as Inception_v3 wants it: shorter side 342, the middle 299 x 299, normalized. Raises BnrnnError."""
    from PIL import Image

    transform = import_torchvision().models.Inception_V3_Weights.IMAGENET1K_V1.transforms()
    try:
        with Image.open(path) as image:
            return transform(image.convert("RGB"))
    except FileNotFoundError as error:
        raise BnrnnError(f"{path} is missing") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise BnrnnError(f"{path} is no image that can be read ({error}): fetch it again") from error


def extract(files: Sequence[Path], network: nn.Module, parts: Path, name: str, num_proc: int) -> Any:
    """A `datasets.Dataset` of the features of images, in float16; parts that are there are not computed again.

    Every process computes with one thread, or on the GPU, so that their number does not change the result. `name`: of
    the network.
    """
    from datasets import Features, List, Value

    features = Features(features=List(Value("float16"), length=SIZE))
    read = partial(read_features, network=network)
    return read_parts(files, PART, read, features, parts, f"{name} 1", num_proc, "features")


def read_features(names: Sequence[str], network: nn.Module) -> dict[str, np.ndarray]:
    """The features of these images, by the network on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # asked here: CUDA does not survive a fork
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
    """A small copy of the image in a file, of THUMBNAIL pixels on its longer side."""
    from PIL import Image

    with Image.open(file) as image:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        return np.asarray(image.convert("RGB"))
