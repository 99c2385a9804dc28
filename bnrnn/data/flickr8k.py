"""Flickr8k (Hodosh et al. 2013), or a part of it: five captions an image, and features made beforehand."""

import csv
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from bnrnn.data.captions import CaptionData, Image
from bnrnn.errors import BnrnnError


class Flickr8k(CaptionData):
    """80 / 10 / 10 % of the images, in an order that is a function of their names alone.

    Reads `<data_dir>/flickr8k/captions*.txt`, lines of `image,caption`, and `*.npz` with `file_name` and `features`.
    """

    def __init__(self, data_dir: str, least_count: int = 4, vocabulary_size: int = 12_000) -> None:
        folder = Path(data_dir, "flickr8k")
        text, features = _only(folder, "captions*.txt"), _only(folder, "*.npz")
        names, values = load_features(features)
        captions = load_captions(text)
        images = pair(captions, names, str(text), str(features))
        name = f"Flickr8k, {len(images):,} of its images, {values.shape[1]} features"
        super().__init__(divide(images, (0.8, 0.1, 0.1)), values, name, least_count, vocabulary_size)


def load_captions(path: Path) -> dict[str, list[str]]:
    """Captions by image. Raises BnrnnError with the line that is none."""
    found: dict[str, list[str]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for n, row in enumerate(csv.reader(file), 1):
            if n == 1 and row == ["image", "caption"]:
                continue
            if len(row) != 2 or not all(part.strip() for part in row):
                raise BnrnnError(f"{path}, line {n}: expected image,caption, found {','.join(row)!r}")
            found.setdefault(row[0], []).append(row[1].strip())
    return found


def load_features(path: Path) -> tuple[list[str], Float[np.ndarray, "N F"]]:
    """Names of images, and their features."""
    try:
        with np.load(path) as arrays:
            names, features = arrays["file_name"], arrays["features"]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise BnrnnError(f"{path} is no file of features ({error}): expected arrays file_name and features") from error
    if features.ndim != 2 or names.shape != (len(features),):
        raise BnrnnError(f"{path} has features of shape {features.shape} for {len(names)} names, expected (N, F)")
    if not np.isfinite(features).all():
        bad = names[~np.isfinite(features).all(1)][0]
        raise BnrnnError(f"{path}: the features of {bad} are not finite numbers")
    return names.tolist(), features


def pair(captions: dict[str, list[str]], names: list[str], text: str, features: str) -> list[Image]:
    """The images that have features and captions. Raises BnrnnError for one that has only one of them."""
    for these, those, what, where in ((captions, names, "features", features), (names, captions, "captions", text)):
        lacking = sorted(set(these).difference(those))
        if lacking:
            raise BnrnnError(f"{lacking[0]}, one of {len(lacking)}, has no {what} in {where}")
    return [Image(name, row, captions[name]) for row, name in enumerate(names)]


def divide(images: Sequence[Image], shares: tuple[float, float, float]) -> dict[str, list[Image]]:
    """Train, valid and test, in the order of the SHA-256 of the images' names."""
    ordered = sorted(images, key=lambda image: hashlib.sha256(image.name.encode()).digest())
    first = round(shares[0] * len(ordered))
    second = first + round(shares[1] * len(ordered))
    return {"train": ordered[:first], "valid": ordered[first:second], "test": ordered[second:]}


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise BnrnnError(
            f"{folder} has {len(found)} files {pattern}, expected 1: put Flickr8k's there, or set BNRNN_DATA to the "
            "folder that holds flickr8k/"
        )
    return found[0]
