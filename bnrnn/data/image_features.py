"""Image features from a pretrained Inception_v3 (Szegedy et al. 2016): 2,048 features per image.

The user downloads torchvision's weights, https://download.pytorch.org/models/inception_v3_google-0cc3c7bd.pth, by hand
and passes the file.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from bnrnn.data.vision import import_torchvision
from bnrnn.errors import BnrnnError
from bnrnn.files import write_json

URL = "https://download.pytorch.org/models/inception_v3_google-0cc3c7bd.pth"
SHA256 = "0cc3c7bd"  # the first digits of the file's SHA-256, which are part of its name
BATCH_SIZE = 32
SIZE = 2048
THUMBNAIL = 160


def inception_v3(weights: Path | None) -> nn.Module:
    """Inception_v3 without its last layer, so that it returns the pooled features (B, 2048), in evaluation mode.

    Args:
        weights: torchvision's weight file. None keeps the random initial weights, for tests.

    Raises BnrnnError if the file is missing or has another checksum.
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
    """Load an image, scale its shorter side to 342 pixels, crop the central 299 x 299 and normalize the colors.

    Raises BnrnnError if the file is missing or is not a readable image.
    """
    from PIL import Image

    transform = import_torchvision().models.Inception_V3_Weights.IMAGENET1K_V1.transforms()
    try:
        with Image.open(path) as image:
            return transform(image.convert("RGB"))
    except FileNotFoundError as error:
        raise BnrnnError(f"{path} is missing") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise BnrnnError(f"{path} cannot be read as an image ({error}): fetch it again") from error


def extract(
    paths: Sequence[Path], network: Callable[[Tensor], Tensor], folder: Path, about: dict[str, Any],
    device: torch.device,
) -> None:  # fmt: skip
    """Write `features.npy`, float16 of shape (N, SIZE), and `index.json` into a folder.

    An interrupted extraction resumes if it was started with the same `about`, which names the images and the network.
    Otherwise the extraction starts again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    partial, progress = folder / "features.partial.npy", folder / "progress.json"
    state = {"about": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest(), "done": 0}
    if progress.exists() and partial.exists():
        known = json.loads(progress.read_text())
        state = known if known["about"] == state["about"] else state
    mode = "r+" if state["done"] else "w+"
    features = np.lib.format.open_memmap(partial, mode, np.float16, (len(paths), SIZE))
    for start, images in batches(paths, state["done"]):
        with torch.no_grad():
            features[start : start + len(images)] = network(images.to(device)).cpu().half().numpy()
        features.flush()
        write_json(progress, {**state, "done": start + len(images)})
    os.replace(partial, folder / "features.npy")
    with (folder / "features.npy").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    write_json(folder / "index.json", {**about, "sha256": digest})
    progress.unlink()


def load_extracted(folder: Path, remedy: str) -> tuple[Float[np.ndarray, "N F"], dict[str, Any]]:
    """Memory-map the features (N, F) that `extract` wrote, verify their checksum, and return them with the index.

    Raises BnrnnError, which ends with `remedy`, if a file is missing or damaged.
    """
    index, path = folder / "index.json", folder / "features.npy"
    if not index.exists() or not path.exists():
        raise BnrnnError(f"{index if path.exists() else path} is missing: {remedy}")
    about = json.loads(index.read_text())
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != about["sha256"]:
        raise BnrnnError(f"{path} is damaged: delete {folder} and {remedy}")
    features = np.load(path, "r")
    if len(features) != len(about["images"]):
        raise BnrnnError(f"{path} has {len(features):,} rows for {len(about['images']):,} images: {remedy}")
    return features, about


def batches(paths: Sequence[Path], start: int = 0) -> Iterator[tuple[int, Float[Tensor, "B 3 299 299"]]]:
    """Yield (index of its first image, batch of images) from image `start` on, and show a progress bar."""
    with tqdm(total=len(paths), initial=start, unit=" images", desc="features", disable=None) as bar:
        for n in range(start, len(paths), BATCH_SIZE):
            images = torch.stack([load_image(path) for path in paths[n : n + BATCH_SIZE]])
            yield n, images
            bar.update(len(images))


def thumbnail(file: Any) -> np.ndarray:
    """A small copy (height, width, 3) of the image in a file. Its longer side has at most THUMBNAIL pixels."""
    from PIL import Image

    with Image.open(file) as image:
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        return np.asarray(image.convert("RGB"))
