"""The tasks of choosing.py: models with their data.

phones needs speech/timit_sample.tar.gz in the folder BNRNN_DATA; words and characters need ptb/ (docs/data.md).
"""

import io
import math
import os
import re
import tarfile
import wave
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import bnrnn

NUM_UNITS = 128
T_MAX = {"phones": 40, "characters": 50, "words": 16}  # the longest sequence of training
PLAIN, SMALL, MIXED, RESET = "as described", "batches of 4", "mixed lengths", "state not carried"  # how it is trained
LARGE, NOTHING = 256, -100  # batch size of evaluation; target of padding
LIMITS = {"train": 2_000_000, "valid": 100_000}  # characters


class Task(nn.Module):
    """A model with its data. A batch has the arguments of the model, and last the targets."""

    sequences: list[Tensor]
    is_new: list[bool]  # whether a sequence is one of validation

    def __init__(self, options: dict, case: str, task: str, sizes: tuple[int, int], num_lstms: int = 1) -> None:
        super().__init__()
        self.case, self.T, (input_size, num_classes) = case, T_MAX[task], sizes
        self.lstms = nn.ModuleList(bnrnn.LSTM(input_size, NUM_UNITS, t_max=self.T, **options) for _ in range(num_lstms))
        self.head = nn.Linear(NUM_UNITS, num_classes)

    def chunks(self, split: str, size: int) -> Iterator[list[int]]:
        """The indices of a split in random batches of sequences of similar lengths, or of mixed lengths."""
        order = torch.randperm(len(self.sequences)).tolist()
        chosen = [i for i in order if self.is_new[i] == (split == "valid")]
        if self.case != MIXED:
            chosen.sort(key=lambda i: len(self.sequences[i]))
        found = [chosen[i : i + size] for i in range(0, len(chosen) - 1, size)]
        yield from (found[i] for i in torch.randperm(len(found)))

    def batches(self, split: str, size: int) -> Iterator[tuple[Tensor, ...]]:
        raise NotImplementedError

    def score(self) -> float:
        """The share of new sequences of which every class is right."""
        right = []
        for *inputs, y in self.batches("valid", LARGE):
            right.append(((self(*inputs).argmax(-1) == y) | (y == NOTHING)).view(-1, y.shape[-1]).all(0))
        return torch.cat(right).float().mean().item()


class Phones(Task):
    """Logits (B, V) of the phone of padded frames (T, B, 40)."""

    def __init__(self, options: dict, case: str) -> None:
        super().__init__(options, case, "phones", (40, 61))
        self.sequences, self.labels, self.is_new = load_phones()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        _, (h, _) = self.lstms[0](x, lengths=lengths)
        return self.head(h[-1])

    def batches(self, split: str, size: int) -> Iterator[tuple[Tensor, ...]]:
        for some in self.chunks(split, size):
            x = [self.sequences[i] for i in some]
            yield pad_sequence(x), torch.tensor([len(each) for each in x]), self.labels[some]


class Words(Task):
    """Logits (T, B, 27) of the letters backwards. 0 is the padding, the end, and what the decoder reads first."""

    def __init__(self, options: dict, case: str) -> None:
        super().__init__(options, case, "words", (32, 27), num_lstms=2)
        self.embedding = nn.Embedding(27, 32)
        self.sequences, self.is_new = load_words()

    def forward(self, word: Tensor, lengths: Tensor, written: Tensor) -> Tensor:
        encoder, decoder = self.lstms
        _, state = encoder(self.embedding(word), lengths=lengths)
        y, _ = decoder(self.embedding(written), state, lengths=lengths + 1)
        return self.head(y)

    def batches(self, split: str, size: int) -> Iterator[tuple[Tensor, ...]]:
        for some in self.chunks(split, size):
            words, end = [self.sequences[i] for i in some], torch.zeros(1, dtype=torch.long)
            written = pad_sequence([torch.cat([end, word.flip(0)]) for word in words])
            targets = pad_sequence([torch.cat([word.flip(0), end]) for word in words], padding_value=NOTHING)
            yield pad_sequence(words), torch.tensor([len(word) for word in words]), written, targets


class Characters(Task):
    """Logits (T, B, V) of the next character for ids (T, B). The model keeps its state for the next window."""

    def __init__(self, options: dict, case: str) -> None:
        self.texts, num_symbols = load_characters()
        super().__init__(options, case, "characters", (64, num_symbols))
        self.embedding, self.state, self.t_start = nn.Embedding(num_symbols, 64), None, 0

    def forward(self, ids: Tensor) -> Tensor:
        y, (h, c) = self.lstms[0](self.embedding(ids), self.state, t_start=self.t_start)
        self.state = None if self.case == RESET else (h.detach(), c.detach())
        return self.head(y)

    def batches(self, split: str, size: int) -> Iterator[tuple[Tensor, ...]]:
        """Windows, in order, of parallel streams of the text."""
        text = self.texts[split]
        streams, self.state = text[: len(text) // size * size].view(size, -1).T, None
        for t in range(0, len(streams) - self.T, self.T):
            yield streams[t : t + self.T], streams[t + 1 : t + self.T + 1]

    def score(self, counted: bool = False) -> float:
        """Bits per character. If counted, t_start continues over windows: all but the first are beyond t_max."""
        losses = []
        for n, (ids, targets) in enumerate(self.batches("valid", 20)):
            self.t_start = n * self.T if counted else 0
            losses.append(F.cross_entropy(self(ids).flatten(0, 1), targets.flatten()).item())
        self.t_start = 0
        return sum(losses) / len(losses) / math.log(2)


def folder() -> Path:
    return Path(os.environ.get("BNRNN_DATA", "data"))


@cache
def load_phones() -> tuple[list[Tensor], Tensor, list[bool]]:
    """The spectra of all phones in 40 bands, their classes, and whether the speaker is one of validation."""
    with tarfile.open(folder() / "speech/timit_sample.tar.gz") as tar:
        names = [name for name in tar.getnames() if name.endswith((".wav", ".phn"))]
        files = {name: tar.extractfile(name).read() for name in names}  # pyright: ignore[reportOptionalMemberAccess]
    frames, phones, speakers = [], [], []
    for name in sorted(name for name in files if name.endswith(".phn") and "/sa" not in name):  # sa: read by everyone
        with wave.open(io.BytesIO(files[name.replace(".phn", ".wav")])) as sound:
            samples = torch.frombuffer(bytearray(sound.readframes(sound.getnframes())), dtype=torch.int16).float()
        power = torch.stft(samples, 512, 160, 400, torch.hann_window(400), return_complex=True).abs()  # (257, T)
        bands = F.adaptive_avg_pool1d(power.T, 40).clamp_min(1).log()
        bands = (bands - bands.mean(0)) / bands.std(0)
        for begin, end, phone in (line.split() for line in files[name].decode().splitlines()):
            if phone != "h#":  # the silence before and after a sentence
                frames.append(bands[int(begin) // 160 : int(end) // 160 + 1][: T_MAX["phones"]])
                phones.append(phone)
                speakers.append(name.split("/")[1])
    classes, voices = sorted(set(phones)), sorted(set(speakers))
    return frames, torch.tensor([classes.index(p) for p in phones]), [voices.index(s) % 4 == 0 for s in speakers]


@cache
def load_words() -> tuple[list[Tensor], list[bool]]:
    """The words of Penn Treebank in letters, and whether a word is one of validation: every tenth."""
    found = set((folder() / "ptb/ptb.train.txt").read_text().split())
    words = sorted(word for word in found if re.fullmatch(r"[a-z]{2,15}", word))
    return [torch.tensor([ord(letter) - 96 for letter in word]) for word in words], [
        i % 10 == 0 for i in range(len(words))
    ]


@cache
def load_characters() -> tuple[dict[str, Tensor], int]:
    """The training text, 100,000 characters of validation, and the number of symbols."""
    texts = {s: (folder() / f"ptb/ptb.char.{s}.txt").read_text().split() for s in ("train", "valid")}
    numbers = {symbol: n for n, symbol in enumerate(sorted(set(texts["train"])))}
    return {s: torch.tensor([numbers[symbol] for symbol in text[: LIMITS[s]]]) for s, text in texts.items()}, len(
        numbers
    )


TASKS: dict[str, Any] = {"phones": Phones, "characters": Characters, "words": Words}
