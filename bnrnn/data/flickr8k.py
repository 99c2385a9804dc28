"""Flickr8k (Hodosh et al. 2013), or a part of it: five captions per image, and precomputed features."""

import csv
import io
from pathlib import Path

import numpy as np

from bnrnn.data.captions import CaptionData, divide, load_features, pair
from bnrnn.data.image_features import thumbnail
from bnrnn.errors import BnrnnError, MissingData
from bnrnn.system.files import read_text, reading, tar_members


class Flickr8k(CaptionData):
    """The images split 80 / 10 / 10 % into train / valid / test; the name of an image alone decides its split.

    Reads `<data_dir>/flickr8k/captions*.txt`, with lines `image,caption`, and `<data_dir>/flickr8k/*.npz` with the
    arrays `file_name` (N,) and `features` (N, F). Raises BnrnnError if a file is missing or damaged.
    """

    def __init__(self, data_dir: str, least_count: int = 4, vocabulary_size: int = 12_000) -> None:
        folder = Path(data_dir, "flickr8k")
        text, features = _only(folder, "captions*.txt"), _only(folder, "*.npz")
        names, values = load_features(features)
        captions = load_captions(text)
        images = pair(captions, names, str(text), str(features))
        name = f"Flickr8k, {len(images):,} of its images, {values.shape[1]} features"
        super().__init__(divide(images, (0.8, 0.1, 0.1)), values, name, least_count, vocabulary_size)
        self.folder = folder

    def thumbnails(self, split: str, count: int) -> list[np.ndarray]:
        if not any(self.folder.glob("*.tar")):
            return []
        return thumbnails([image.name for image in self.images[split][:count]], self.folder)


def thumbnails(names: list[str], folder: Path) -> list[np.ndarray]:
    """Small copies (height, width, 3) of images in the .tar files of a folder.

    Raises BnrnnError for an image that is missing or cannot be read.
    """
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.tar")):
        with reading(path, "fetch it again", "an archive of images"):
            members = tar_members(path, lambda name: Path(name).name in names)
            found |= {Path(name).name: thumbnail(io.BytesIO(content)) for name, content in members.items()}
    missing = [name for name in names if name not in found]
    if missing:
        raise BnrnnError(f"{missing[0]} is not in a .tar file of {folder}: put Flickr8k's images there")
    return [found[name] for name in names]


def load_captions(path: Path) -> dict[str, list[str]]:
    """The captions of each image, by file name. Raises BnrnnError with the number of the first malformed line."""
    found: dict[str, list[str]] = {}
    remedy = "fetch it again"
    with reading(path, remedy):
        for n, row in enumerate(csv.reader(io.StringIO(read_text(path, remedy), newline="")), 1):
            if n == 1 and row == ["image", "caption"]:
                continue
            if len(row) != 2 or not all(part.strip() for part in row):
                raise BnrnnError(f"{path}, line {n}: expected image,caption, found {','.join(row)!r}")
            found.setdefault(row[0], []).append(row[1].strip())
    if not found:
        raise BnrnnError(f"{path} is empty, expected lines image,caption: {remedy}")
    return found


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise MissingData(
            f"{folder} has {len(found)} files {pattern}, expected 1: put the file of Flickr8k there, or set BNRNN_DATA "
            "to the folder that holds flickr8k/"
        )
    return found[0]
