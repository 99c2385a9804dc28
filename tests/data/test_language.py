from itertools import chain

import numpy as np
import pytest
import torch

from bnrnn.data.base import SequenceData, count_batches, in_batches
from bnrnn.data.language import PIECE, Segments, Streams, check_symbols
from bnrnn.errors import BnrnnError
from bnrnn.inputs import Batch

SYMBOLS = b"\nabcdefg"
LENGTHS = {"train": 1_037, "valid": 205, "test": 2_345}


@pytest.fixture
def texts() -> dict[str, np.ndarray]:
    """Random text in which all segments differ."""
    rng = np.random.default_rng(0)
    return {split: rng.choice(np.frombuffer(SYMBOLS, np.uint8), size) for split, size in LENGTHS.items()}


@pytest.fixture
def segments(texts) -> Segments:
    return Segments(texts, SYMBOLS, length=10, test_lengths=[20, 150])


def ids(text: np.ndarray) -> list[int]:
    return [SYMBOLS.index(byte) for byte in bytes(text)]


def rows(batches: list[Batch]) -> list[list[int]]:
    """The sequences of symbols from which batches were made: the inputs, then the last target."""
    return [[*x.tolist(), int(y[-1])] for b in batches for x, y in zip(b.inputs.T, b.targets.T, strict=True)]


def assert_same(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
        assert a[2:] == b[2:]


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_both_kinds_are_sequence_data(segments):
    streams = Streams({"train": torch.arange(9)}, vocabulary_size=9, window=2)
    assert isinstance(segments, SequenceData)
    assert isinstance(streams, SequenceData)
    assert (segments.input_size, segments.output_size, segments.t_max) == (8, 8, 9)
    assert (streams.input_size, streams.output_size, streams.t_max) == (9, 9, 2)
    assert (segments.metric, segments.selects_by) == ("bpc", "accuracy")
    assert (streams.metric, streams.selects_by) == ("ppl", "loss")


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("split", LENGTHS)
def test_targets_are_the_inputs_shifted_by_one(segments, split, shuffled):
    for batch in segments.batches(split, 7, seeded() if shuffled else None):
        assert batch.inputs.shape == batch.targets.shape == (9, batch.inputs.shape[1])
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert torch.equal(batch.targets[:-1], batch.inputs[1:])
        assert (batch.carried, batch.t_start) == (False, 0)


@pytest.mark.parametrize("split", LENGTHS)
def test_in_order_all_segments_that_fit_are_read_and_in_training_all_but_one(segments, texts, split):
    text = ids(texts[split])
    found = rows(list(segments.batches(split, 7)))
    assert len(found) == {"train": 102, "valid": 20, "test": 234}[split]
    assert list(chain(*found)) == text[: len(found) * 10]


def test_a_training_pass_has_each_segment_from_its_offset_on_once(segments, texts):
    text, offsets = ids(texts["train"]), set()
    for seed in range(60):
        found = rows(list(segments.batches("train", 7, seeded(seed))))
        offset = int(torch.randint(10, (), generator=seeded(seed)))
        expected = [text[t : t + 10] for t in range(offset, offset + 1020, 10)]
        assert found != expected, "shuffled"
        assert sorted(found) == sorted(expected)
        offsets.add(offset)
    assert offsets == set(range(10))


def test_the_largest_offset_stays_inside_of_the_shortest_text():
    data = Segments({"train": np.frombuffer(b"abcdefgabc" * 2, np.uint8)}, SYMBOLS, length=10)
    for seed in range(60):
        assert len(rows(list(data.batches("train", 7, seeded(seed))))[0]) == 10


@pytest.mark.parametrize("split", LENGTHS)
def test_a_shuffled_pass_is_decided_by_the_generator_alone(segments, split):
    once = list(segments.batches(split, 7, seeded(1)))
    torch.manual_seed(99)
    np.random.seed(99)
    assert_same(list(segments.batches(split, 7, seeded(1))), once)
    assert sorted(rows(once)) != rows(once)
    assert rows(list(segments.batches(split, 7, seeded(2)))) != rows(once)


@pytest.mark.parametrize(
    ("count", "batch_size"), [(1, 1), (1, 4), (4, 1), (5, 2), (8, 4), (9, 4), (10, 4), (27_777, 128)]
)
def test_batches_are_consecutive_and_full_and_none_has_one_sequence_if_they_may_have_more(count, batch_size):
    batches = in_batches(torch.arange(count), batch_size)
    assert torch.equal(torch.cat(batches), torch.arange(count)) and len(batches) == count_batches(count, batch_size)
    sizes = [len(batch) for batch in batches]
    assert set(sizes[:-1]) <= {batch_size} and max(sizes) <= batch_size + 1
    assert min(sizes) > 1 or 1 in (count, batch_size)


def test_a_pass_in_batches_that_would_leave_one_segment_over_can_be_normalized(texts):
    segments = Segments(texts, SYMBOLS, length=10, test_lengths=[20])
    for split in ("train", "valid", "test"):
        count = segments.num_segments(split)
        batches = list(segments.batches(split, count - 1))
        assert len(batches) == segments.num_batches(split, count - 1) == 1 and batches[0].inputs.shape[1] == count


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("split", LENGTHS)
def test_the_number_of_batches_is_the_number_of_batches(segments, split, shuffled):
    for batch_size in (1, 6, 7, 1000):
        found = list(segments.batches(split, batch_size, seeded() if shuffled else None))
        assert len(found) == segments.num_batches(split, batch_size)
        assert {b.inputs.shape[1] for b in found[:-1]} <= {batch_size}


@pytest.mark.parametrize("start", [0, 1, 14, 15])
def test_a_resumed_pass_continues_with_the_same_segments(segments, start):
    assert segments.num_batches("train", 7) == 15
    whole = list(segments.batches("train", 7, seeded()))
    assert_same(list(segments.batches("train", 7, seeded(), start)), whole[start:])


def test_one_sequence_is_the_whole_test_text_piece_by_piece(segments, texts):
    num, pieces = segments.extra_tests()["one_sequence"]
    pieces, text = list(pieces), ids(texts["test"])
    assert torch.cat([b.inputs for b in pieces]).tolist() == [[i] for i in text[:-1]]
    assert torch.cat([b.targets for b in pieces]).tolist() == [[i] for i in text[1:]]
    assert [len(b.inputs) for b in pieces] == [PIECE, PIECE, 344]
    assert [(b.carried, b.t_start) for b in pieces] == [(False, 0), (True, PIECE), (True, 2 * PIECE)]
    assert num == 3


@pytest.mark.parametrize("size", [2, PIECE, PIECE + 1, PIECE + 2])
def test_one_sequence_ends_with_the_text_however_long_it_is(texts, size):
    data = Segments(texts | {"test": texts["test"][:size]}, SYMBOLS, length=2)
    num, pieces = data.extra_tests()["one_sequence"]
    assert torch.cat([b.targets for b in pieces]).flatten().tolist() == ids(texts["test"][1:size])
    assert num == len(list(data.extra_tests()["one_sequence"][1])) == (2 if size == PIECE + 2 else 1)


def test_other_lengths_of_test_segments_cover_the_test_text_too(segments, texts):
    tests = segments.extra_tests()
    assert list(tests) == ["one_sequence", "segments_20", "segments_150"]
    for name, length, widths in (("segments_20", 20, [100, 17]), ("segments_150", 150, [15])):
        num, batches = tests[name]
        batches = list(batches)
        assert num == len(batches)
        assert [b.inputs.shape for b in batches] == [(length - 1, width) for width in widths]
        assert list(chain(*rows(batches))) == ids(texts["test"])[: sum(widths) * length]
        assert not any(b.carried or b.t_start for b in batches)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"train": 19}, {}, "train has 19 characters: expected at least 20 for segments of 10"),
        ({"valid": 9}, {}, "valid has 9 characters: expected at least 10 for segments of 10"),
        ({"test": 0}, {}, "test has 0 characters: expected at least 10 for segments of 10"),
        ({}, {"test_lengths": (5000,)}, "test has 2,345 characters: expected at least 5,000 for segments of 5000"),
        ({}, {"length": 1}, "data.length or data.test_lengths has 1: expected 2 symbols or more"),
        ({}, {"test_lengths": (0,)}, "data.length or data.test_lengths has 0"),
    ],
)
def test_a_text_too_short_for_its_segments_is_refused(texts, sizes, options, message):
    texts |= {split: texts[split][:size] for split, size in sizes.items()}
    with pytest.raises(BnrnnError, match=message):
        Segments(texts, SYMBOLS, **{"length": 10} | options)


def test_a_mapped_text_is_read_only_where_a_batch_needs_it(tmp_path, texts):
    path = tmp_path / "text"
    path.write_bytes(bytes(texts["train"]))
    mapped = np.memmap(path, np.uint8, "r")
    data = Segments({"train": mapped}, SYMBOLS, length=10)
    assert data.splits["train"] is mapped
    assert_same(
        list(data.batches("train", 7, seeded())), list(Segments(texts, SYMBOLS, 10).batches("train", 7, seeded()))
    )


def test_the_first_byte_that_is_no_symbol_is_named_with_its_position(monkeypatch):
    text = np.frombuffer(b"abcdefg" * 10 + b"a?c!", np.uint8)
    for chunk in (1, 7, 71, 72, 1000):
        monkeypatch.setattr("bnrnn.data.language.CHUNK", chunk)
        with pytest.raises(BnrnnError, match=r"somewhere: the byte at position 71 is b'\?', expected one of b'\\nabc"):
            check_symbols("somewhere", text, SYMBOLS)
        check_symbols("somewhere", text[:71], SYMBOLS)


TOKENS = torch.randperm(1_000, dtype=torch.int32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("window", [1, 7, 20, 5_000])
def test_streams_joined_again_are_the_text(window, batch_size):
    data = Streams({"train": TOKENS}, vocabulary_size=1_000, window=window)
    batches = list(data.batches("train", batch_size))
    length = 1_000 // batch_size
    expected = TOKENS[: batch_size * length].reshape(batch_size, length).long()
    assert torch.equal(torch.cat([b.inputs for b in batches]).T, expected[:, :-1])
    assert torch.equal(torch.cat([b.targets for b in batches]).T, expected[:, 1:])
    assert [len(b.inputs) for b in batches[:-1]] == [window] * (len(batches) - 1)
    assert 1 <= len(batches[-1].inputs) <= window
    assert len(batches) == data.num_batches("train", batch_size)


def test_streams_continue_from_window_to_window_and_ignore_the_generator():
    data = Streams({"train": TOKENS}, vocabulary_size=1_000, window=20)
    batches = list(data.batches("train", 8))
    assert [b.carried for b in batches] == [False] + [True] * 6
    assert {b.t_start for b in batches} == {0}
    assert batches[0].inputs.dtype == batches[0].targets.dtype == torch.int64
    assert_same(list(data.batches("train", 8, seeded())), batches)
    assert data.extra_tests() == {}


@pytest.mark.parametrize("start", [0, 1, 6, 7])
def test_a_resumed_pass_of_streams_continues_with_the_same_windows(start):
    data = Streams({"train": TOKENS}, vocabulary_size=1_000, window=20)
    assert data.num_batches("train", 8) == 7
    assert_same(list(data.batches("train", 8, start=start)), list(data.batches("train", 8))[start:])


def test_more_streams_than_the_text_has_tokens_for_are_refused():
    data = Streams({"valid": TOKENS}, vocabulary_size=1_000, window=20)
    assert data.num_batches("valid", 500) == 1
    for batch_size, each in ((501, 1), (1_001, 0)):
        message = f"valid has 1,000 tokens, {each} for each of {batch_size:,} streams: expected at least 2"
        with pytest.raises(BnrnnError, match=message):
            data.num_batches("valid", batch_size)
        with pytest.raises(BnrnnError, match=message):
            next(data.batches("valid", batch_size))


def test_a_window_without_steps_is_refused():
    with pytest.raises(BnrnnError, match=r"data.window is 0: expected 1 or more steps"):
        Streams({"train": TOKENS}, vocabulary_size=1_000, window=0)
