"""Questions about a passage, answered with one word of the vocabulary (Hermann et al. 2015, arXiv:1506.03340)."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bnrnn.data.base import FILE, SHUFFLED, DataDefaults, by_length, count_even, render_sizes
from bnrnn.data.prepared import list_lengths, list_values
from bnrnn.errors import BnrnnError
from bnrnn.inputs import QUESTIONS, Batch, Question

SPECIAL = ("<nil>", "<eos>", "<unk>", "<num>")  # ids 0 to 3
NIL, UNK, NUM = 0, 2, 3
SENTENCE_ENDS = frozenset(".!?")
CLOSING = frozenset(("''", '"', "'", ")"))
# Words that do not help to find the sentence that answers a question.
STOP_WORDS = """a an and are as at be been but by for from had has have he her his how i in is it its not of on or 's
said she that the their they this to was were what when where which who will with would you @placeholder"""
STOPS = frozenset(STOP_WORDS.split())


class Cloze(DataDefaults):
    """Batches of questions whose passages have similar lengths.

    A pass uses every question once; `bnrnn.data.base.by_length` forms the batches.

    Args:
        splits: for `train`, `valid` and `test` a `datasets.Dataset` with a row for each question. Its columns are
            `passage` and `question`, lists of ids, and `answer`, an id.
        vocabulary: the word of each id.
        entities: the ids of the entities, which are consecutive. An answer is one of them.
        permute_entities: whether each training batch permutes the ids of the entities at random, so that a model
            cannot learn anything about a single entity.
        name: name of the dataset in descriptions and error messages.

    Raises BnrnnError for a split with fewer than two questions.
    """

    kind = QUESTIONS
    metric = "error"
    evaluation_orders = (FILE, SHUFFLED)  # the released code of the readers shuffles neither validation nor test (D29)
    selects_by = "accuracy"

    def __init__(
        self,
        splits: Mapping[str, Any],
        vocabulary: Sequence[str],
        entities: range,
        permute_entities: bool,
        name: str,
    ) -> None:
        for split, questions in splits.items():
            if len(questions) < 2:
                raise BnrnnError(f"{name}: {split} has {len(questions)} questions, expected at least 2")
        self.splits = {split: questions.with_format("arrow") for split, questions in splits.items()}
        self.lengths = {split: list_lengths(questions[:]["passage"]) for split, questions in self.splits.items()}
        self.vocabulary, self.entities = list(vocabulary), entities
        self.permute_entities = permute_entities
        self.input_size = self.output_size = len(self.vocabulary)
        self.t_max = int(max(self.lengths["train"].max(), list_lengths(self.splits["train"][:]["question"]).max()))
        self.description = (
            f"{name}: {render_sizes(splits)} questions, {len(self.vocabulary):,} words, {len(entities)} entities"
        )

    def num_batches(self, split: str, batch_size: int) -> int:
        return count_even(len(self.splits[split]), batch_size)

    def batches(
        self, split: str, batch_size: int, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[Batch]:
        """One pass from batch `start` on. With a generator, questions are shuffled and entities may be permuted."""
        chosen = by_length(self.lengths[split], batch_size, generator)
        seeds = None if generator is None else torch.randint(2**62, (len(chosen),), generator=generator)
        for n in range(start, len(chosen)):
            names = torch.arange(len(self.vocabulary))
            if seeds is not None and self.permute_entities:
                drawn = torch.randperm(len(self.entities), generator=torch.Generator().manual_seed(int(seeds[n])))
                names[self.entities.start : self.entities.stop] = self.entities.start + drawn
            yield self._batch(split, chosen[n], names)

    def select(self, split: str, chosen: Int[np.ndarray, " B"]) -> Batch:
        """One batch with the questions of a split at these indices."""
        return self._batch(split, chosen, torch.arange(len(self.vocabulary)))

    def _batch(self, split: str, chosen: Int[np.ndarray, " B"], names: Int[Tensor, " V"]) -> Batch:
        rows = self.splits[split][chosen.tolist()].combine_chunks()

        def read(part: str) -> tuple[Int[Tensor, " T"], ...]:
            ids = names[torch.from_numpy(list_values(rows[part]).astype(np.int64))]
            return ids.split(list_lengths(rows[part]).tolist())

        passages, questions = read("passage"), read("question")
        inputs = Question(
            pad_sequence(list(passages), padding_value=NIL),
            [len(x) for x in passages],
            pad_sequence(list(questions), padding_value=NIL),
            [len(x) for x in questions],
            self._candidates(passages),
        )
        answers = torch.from_numpy(rows["answer"].to_numpy().astype(np.int64))
        return Batch(inputs, names[answers][None])

    def _candidates(self, passages: Iterable[Int[Tensor, " _"]]) -> Int[Tensor, "C B"]:
        found = []
        for passage in passages:
            entities = passage[(passage >= self.entities.start) & (passage < self.entities.stop)].unique()
            found.append(entities if len(entities) else torch.arange(self.entities.start, self.entities.stop))
        size = max(len(entities) for entities in found)
        return torch.stack([torch.cat([x, x[:1].expand(size - len(x))]) for x in found], dim=1)


class Text(NamedTuple):
    """One question as words in lower case."""

    passage: list[str]
    question: list[str]
    answer: str


def tokens(text: str) -> list[str]:
    """Split running text into words, numbers, @entities and punctuation marks, in lower case."""
    return re.findall(r"@\w+|[a-z0-9]+(?:[.,'-][a-z0-9]+)*|``|''|[^\sa-z0-9]", text.lower())


def is_number(word: str) -> bool:
    """Whether the word becomes NUM: it begins with a digit and has no letters."""
    return word[:1].isdigit() and not any(character.isalpha() for character in word)


def encode(texts: Iterable[Text], vocabulary: Sequence[str]) -> Any:
    """The ids of the texts, as a `datasets.Dataset` in memory. Numbers become NUM, words outside the vocabulary UNK."""
    from datasets import Dataset  # slow to import

    index = {word: i for i, word in enumerate(vocabulary)}
    rows: dict[str, list[Any]] = {"passage": [], "question": [], "answer": []}
    for text in texts:
        for column, words in (("passage", text.passage), ("question", text.question)):
            rows[column].append([NUM if is_number(word) else index.get(word, UNK) for word in words])
        rows["answer"].append(index.get(text.answer, UNK))
    return Dataset.from_dict(rows)


def sentences(words: list[str]) -> list[list[str]]:
    """Cut a text after `.`, `!` and `?`. Closing quotation marks and brackets stay with the sentence before them."""
    found, begin = [], 0
    for i, word in enumerate(words):
        follows = words[i + 1] if i + 1 < len(words) else None
        ended = word in SENTENCE_ENDS or (word in CLOSING and i > begin and words[i - 1] in SENTENCE_ENDS)
        if follows is None or (ended and follows not in CLOSING and follows not in SENTENCE_ENDS):
            found.append(words[begin : i + 1])
            begin = i + 1
    return found


def most_relevant(passage: list[str], question: list[str], count: int) -> list[tuple[list[str], bool]]:
    """Every sentence, and whether it is one of the `count` that share most distinct words with the question (D19)."""
    wanted = {word for word in question if word not in STOPS and any(c.isalnum() for c in word)}
    cut = sentences(passage)
    best = sorted(range(len(cut)), key=lambda n: -len(wanted.intersection(cut[n])))[:count]
    return [(sentence, n in best) for n, sentence in enumerate(cut)]
