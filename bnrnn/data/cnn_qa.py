"""The CNN questions of Hermann et al. 2015 (arXiv:1506.03340), read from what `bnrnn.data.cnn_qa_prepare` wrote."""

import re
from pathlib import Path
from typing import Any

from bnrnn.data.cloze import SPECIAL, Cloze
from bnrnn.data.prepared import load_prepared
from bnrnn.errors import BnrnnError

COUNTS = {"train": 380_298, "valid": 3_924, "test": 3_198}
VARIANTS = ("full", "top4")
COMMAND = "`bnrnn-prepare cnn_qa --from DIR` (DIR has questions/training/*.question of Hermann et al. 2015)"
VERSION = "CNN questions 1"  # of the prepared data: increase it when the preparation of the same files changes


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
        prepared = load_questions(Path(data_dir))
        vocabulary = prepared["train"].features["answer"].names
        whole = {split: len(prepared[split]) for split in COUNTS} == COUNTS
        name = f"{'CNN' if whole else 'a part of the CNN'} questions, {variant}"
        if variant == "top4":
            answered = prepared["valid"]["answered"][:]
            share = sum(answered) / max(1, len(answered))
            name += f" (the passage has the answer to {share:.0%} of the validation questions)"
        num_entities = sum(re.fullmatch(r"@entity\d+", word) is not None for word in vocabulary)
        entities = range(len(SPECIAL), len(SPECIAL) + num_entities)
        splits = {
            split: prepared[split].select_columns([variant, "question", "answer"]).rename_column(variant, "passage")
            for split in COUNTS
        }
        super().__init__(splits, vocabulary, entities, permute_entities, name)


def load_questions(data_dir: Path, sources: str | None = None) -> Any:
    """The prepared questions as a `datasets.DatasetDict`; the classes of `answer` are the vocabulary."""
    folder = data_dir / "cnn_qa/prepared"
    prepared = load_prepared(folder, VERSION, COMMAND, sources)
    for split in COUNTS:
        features = prepared[split].features if split in prepared else {}
        if not features.keys() >= {*VARIANTS, "question", "answered"} or not hasattr(features.get("answer"), "names"):
            raise BnrnnError(f"{folder} lacks {split} or one of its columns. Delete it and run {COMMAND}")
    return prepared
