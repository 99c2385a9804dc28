"""The CNN questions of Hermann et al. 2015 (arXiv:1506.03340), read from what `bnrnn.data.cnn_qa_prepare` wrote."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from bnrnn.data.cloze import SPECIAL, Cloze, Split
from bnrnn.errors import BnrnnError

COUNTS = {"train": 380_298, "valid": 3_924, "test": 3_198}
VARIANTS = ("full", "top4")
PARTS = ("ids", "starts", "answers")


class CNNQA(Cloze):
    """The CNN questions, with whole or shortened passages.

    Args:
        variant: "full" keeps whole passages. "top4" keeps the four sentences that are most relevant to the question. In
            the paper's version of "top4", 57 % of the validation passages contain the answer; `description` gives the
            percentage of ours.
        permute_entities: see Cloze.

    Raises BnrnnError for an unknown variant and for files that are missing or damaged.
    """

    def __init__(self, data_dir: str, variant: str = "full", permute_entities: bool = True) -> None:
        if variant not in VARIANTS:
            raise BnrnnError(f"data.variant is {variant!r}: use {' or '.join(VARIANTS)}")
        folder = Path(data_dir, "cnn_qa", "prepared")
        index = read_index(folder)
        vocabulary = _verified(folder, "vocabulary.txt", index).read_text().splitlines()
        splits = {
            split: Split(*(np.load(_verified(folder, array_name(variant, split, part), index), "r") for part in PARTS))
            for split in COUNTS
        }
        whole = {split: len(questions.answers) for split, questions in splits.items()} == COUNTS
        name = f"{'CNN' if whole else 'a part of the CNN'} questions, {variant}"
        if variant == "top4":
            name += f" (the passage has the answer to {index['answered']:.0%} of the validation questions)"
        entities = range(len(SPECIAL), len(SPECIAL) + index["num_entities"])
        super().__init__(splits, vocabulary, entities, permute_entities, name)


def array_name(variant: str, split: str, part: str) -> str:
    return f"{variant}/{split}.{part}.npy"


def read_index(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "index.json").read_text())
    except FileNotFoundError as error:
        raise BnrnnError(
            f"{folder / 'index.json'} is missing: run `python -m bnrnn.prepare cnn_qa --from DIR`, where DIR "
            "has questions/training/*.question of Hermann et al. 2015, or set BNRNN_DATA to the folder with cnn_qa/"
        ) from error


def _verified(folder: Path, name: str, index: dict[str, Any]) -> Path:
    """The path of a file whose checksum is that of the index."""
    path = folder / name
    if not path.exists() or digest(path) != index["sha256"].get(name):
        raise BnrnnError(
            f"{path} is {'damaged' if path.exists() else 'missing'}: delete {folder} and prepare it again with "
            "`python -m bnrnn.prepare cnn_qa --from DIR`"
        )
    return path


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
