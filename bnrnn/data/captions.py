"""Batches of captions and image features for a captioner. An image has several captions; its features are fixed."""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bnrnn.data.base import DataDefaults, count_even, render_sizes
from bnrnn.data.prepared import list_values
from bnrnn.errors import BnrnnError, MissingData
from bnrnn.inputs import CAPTIONS, END, IGNORE, START, Batch, Captioned, References
from bnrnn.system.files import read_json, reading, zip_members

SPECIAL = ("<start>", "<end>", "<unk>")  # ids 0 to 2
UNK = 2  # START and END are 0 and 1


class Image(NamedTuple):
    """One image: its name, the row of its features in the feature array, and its captions."""

    name: str
    row: int
    captions: list[str]


def words_of(caption: str) -> list[str]:
    """The words and punctuation marks of a caption, in lower case."""
    return re.findall(r"\w+(?:['-]\w+)*|[^\w\s]", caption.lower())


def vocabulary_of(captions: Iterable[str], least: int, most: int) -> list[str]:
    """SPECIAL, then the words that occur at least `least` times, the most frequent first; `most` entries in all."""
    counts = Counter(word for caption in captions for word in words_of(caption))
    common = sorted((word for word, n in counts.items() if n >= least), key=lambda word: (-counts[word], word))
    return [*SPECIAL, *common][:most]


class ArrowFeatures:
    """The column `features` of a `datasets.Dataset` as an array (N, F). Indexing reads from memory-mapped files."""

    def __init__(self, images: Any) -> None:
        self.images = images.select_columns(["features"]).with_format("arrow")
        self.shape = (len(images), images.features["features"].length)

    def __getitem__(self, rows: Sequence[int]) -> Float[np.ndarray, "B F"]:
        return list_values(self.images[rows]["features"]).reshape(len(rows), -1)


class CaptionData(DataDefaults):
    """Batches of single captions. An image occurs once in a pass for each of its captions.

    Args:
        images: the images of `train`, `valid` and `test`.
        features: the features of all images (N, F); they may be memory-mapped.
        name: name of the dataset in descriptions and error messages.
        least_count: words that occur less often in the training captions become UNK.
        vocabulary_size: maximum number of entries in the vocabulary, SPECIAL included.

    Raises BnrnnError for an empty split, an image without captions, or a missing pycocoevalcap.
    """

    kind = CAPTIONS
    metric = "ppl"
    selects_by = "loss"

    def __init__(
        self,
        images: Mapping[str, Sequence[Image]],
        features: Float[np.ndarray, "N F"] | ArrowFeatures,
        name: str,
        least_count: int = 4,
        vocabulary_size: int = 12_000,
    ) -> None:
        for split, members in images.items():
            lacking = next((image.name for image in members if not image.captions), None)
            if lacking is not None or not members:
                found = f"image {lacking} has no caption" if lacking else "the split has no image"
                raise BnrnnError(f"{name}, {split}: {found}, expected at least one")
        if find_spec("pycocoevalcap") is None:  # fail now, not after training
            raise MissingData("scoring captions needs pycocoevalcap: pip install 'bnrnn[captions]'")
        self.images, self.features = dict(images), features
        self.vocabulary = vocabulary_of((c for i in images["train"] for c in i.captions), least_count, vocabulary_size)
        index = {word: i for i, word in enumerate(self.vocabulary)}
        self.captions: dict[str, list[tuple[int, list[int]]]] = {  # row, ids
            split: [(i.row, [index.get(w, UNK) for w in words_of(c)]) for i in members for c in i.captions]
            for split, members in images.items()
        }
        self.input_size = self.output_size = len(self.vocabulary)
        self.feature_size = features.shape[1]
        self.t_max = 1 + max(len(ids) for _, ids in self.captions["train"])
        self.description = f"{name}: {render_sizes(images)} images, {len(self.vocabulary):,} words"

    def num_batches(self, split: str, batch_size: int) -> int:
        return count_even(len(self.captions[split]), batch_size)

    def batches(
        self, split: str, batch_size: int, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[Batch]:
        """One pass over the captions, from batch `start` on. The sizes of batches differ by at most one caption."""
        N, total = len(self.captions[split]), self.num_batches(split, batch_size)
        order = range(N) if generator is None else torch.randperm(N, generator=generator).tolist()
        for k in range(start, total):
            yield self._batch([self.captions[split][n] for n in order[N * k // total : N * (k + 1) // total]])

    def _batch(self, chosen: list[tuple[int, list[int]]]) -> Batch:
        features = torch.from_numpy(self.features[[row for row, _ in chosen]].astype(np.float32))
        words = pad_sequence([torch.tensor([START, *ids]) for _, ids in chosen], padding_value=END)
        targets = pad_sequence([torch.tensor([*ids, END]) for _, ids in chosen], padding_value=IGNORE)
        return Batch(Captioned(features, words, [1 + len(ids) for _, ids in chosen]), targets)

    def references(self, split: str) -> References:
        """Features and reference captions of the images of a split."""
        return References(self.features_of(split), [image.captions for image in self.images[split]], self.spell)

    def features_of(self, split: str) -> Float[Tensor, "N F"]:
        """Features of the images of a split, in the order of `images[split]`."""
        return torch.from_numpy(self.features[[image.row for image in self.images[split]]].astype(np.float32))

    def thumbnails(self, split: str, count: int) -> list[np.ndarray]:
        """Small copies (height, width, 3) of the first images of a split; [] where only their features are known."""
        return []

    def spell(self, ids: Iterable[int]) -> str:
        """The words of a caption, from its ids up to END."""
        words = []
        for i in ids:
            if i == END:
                break
            words.append(self.vocabulary[i])
        return " ".join(words)


def load_annotations(path: Path) -> dict[str, list[str]]:
    """The captions of each image in a COCO annotation file, by file name. Raises BnrnnError for another format."""
    with reading(path, "fetch COCO's annotations again", "a COCO caption file"):
        content = read_json(path, "fetch COCO's annotations again", "a COCO caption file")
        names = {image["id"]: str(image["file_name"]) for image in content["images"]}
        found: dict[str, list[str]] = {}
        for annotation in content["annotations"]:
            found.setdefault(names[annotation["image_id"]], []).append(annotation["caption"].strip())
    return found


def load_features(path: Path) -> tuple[list[str], Float[np.ndarray, "N F"]]:
    """The image names and features (N, F) in an .npz file. Raises BnrnnError for wrong shapes and non-finite values."""
    remedy = "expected arrays file_name and features; compute them again"
    with reading(path, remedy, "a feature file"):
        arrays = zip_members(path, ("file_name.npy", "features.npy").__contains__)
        names, features = (np.load(io.BytesIO(arrays[f"{name}.npy"])) for name in ("file_name", "features"))
        if features.dtype.kind not in "fiu" or names.dtype.kind != "U":
            raise ValueError(f"names are {names.dtype}, features {features.dtype}")
    if features.ndim != 2 or features.shape[1] < 1 or names.shape != (len(features),):
        raise BnrnnError(f"{path} has features of shape {features.shape} for {names.size} names, expected (N, F)")
    finite = (np.abs(features) <= np.finfo(np.float32).max).all(1)  # models compute in float32; NaN is False
    if not finite.all():
        raise BnrnnError(f"{path}: the features of {names[~finite][0]} are not finite numbers: compute them again")
    return names.tolist(), features


def pair(captions: dict[str, list[str]], names: list[str], text: str, features: str) -> list[Image]:
    """One Image for each name, with its captions. Raises BnrnnError for an image that lacks features or captions."""
    pairs = ((captions, names, "features", features, text), (names, captions, "captions", text, features))
    for these, those, what, where, other in pairs:
        lacking = sorted(set(these).difference(those))
        if lacking:
            raise BnrnnError(
                f"{len(lacking)} images have no {what} in {where}; the first is {lacking[0]}: add them, or "
                f"remove these images from {other}"
            )
    return [Image(name, row, captions[name]) for row, name in enumerate(names)]


def divide(images: Sequence[Image], shares: tuple[float, float, float]) -> dict[str, list[Image]]:
    """Split images into train, valid and test, in the order of the SHA-256 of their names.

    Args:
        shares: fractions of `train` and `valid`; the test split gets the remaining images.
    """
    ordered = sorted(images, key=lambda image: hashlib.sha256(image.name.encode()).digest())
    first = round(shares[0] * len(ordered))
    second = first + round(shares[1] * len(ordered))
    return {"train": ordered[:first], "valid": ordered[first:second], "test": ordered[second:]}
