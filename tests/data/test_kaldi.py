"""Kaldi's archives: the reader reads what Kaldi's own code has written, and errors name files that do not match."""

import gzip
from pathlib import Path

import kaldi_native_io
import numpy as np
import pytest
import torch

from bnrnn.data.base import SequenceData
from bnrnn.data.kaldi import KaldiFrames
from bnrnn.errors import BnrnnError

F, STATES = 5, 7
SIZES = {"train": [30, 12, 44, 9, 60], "valid": [14, 20], "test": [11, 25, 8]}


def features_of(split: str) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(len(split))
    return {
        f"{split}{n}": (3 + draw.standard_normal((size, F)) * (n + 1)).astype("f4")
        for n, size in enumerate(SIZES[split])
    }


def states_of(split: str) -> dict[str, list[int]]:
    draw = np.random.default_rng(10 + len(split))
    return {f"{split}{n}": draw.integers(STATES, size=size).tolist() for n, size in enumerate(SIZES[split])}


def write_states(path: Path, states: dict[str, list[int]]) -> None:
    with kaldi_native_io.Int32VectorWriter(
        f"ark{',t' if path.suffix == '.txt' else ''}:{path.with_suffix('')}"
    ) as writer:
        for key, values in states.items():
            writer.write(key, values)
    content = path.with_suffix("").read_bytes()
    path.with_suffix("").unlink()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


@pytest.fixture
def wsj(tmp_path, monkeypatch):
    """Archives of three splits, with two utterances per speaker, and alignments in each of the three formats."""
    for split, ending in (("train", "1.gz"), ("valid", "ark"), ("test", "txt")):
        folder = tmp_path / "wsj" / split
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)  # so that the paths in the .scp are relative to it
        sums: dict[str, np.ndarray] = {}
        with kaldi_native_io.FloatMatrixWriter("ark,scp:feats.ark,feats.scp") as writer:
            for n, (key, features) in enumerate(features_of(split).items()):
                writer.write(key, features)
                of_this = np.zeros((2, F + 1))
                of_this[:, :F] = features.sum(0), (features.astype("f8") ** 2).sum(0)
                of_this[0, F] = len(features)
                sums[f"speaker{n // 2}"] = sums.get(f"speaker{n // 2}", 0) + of_this
        with kaldi_native_io.DoubleMatrixWriter("ark,scp:cmvn.ark,cmvn.scp") as writer:
            for speaker, values in sums.items():
                writer.write(speaker, values)
        Path("utt2spk").write_text("".join(f"{split}{n} speaker{n // 2}\n" for n in range(len(SIZES[split]))))
        states = states_of(split)
        if split == "train":  # in two files
            write_states(folder / "ali.2.gz", {k: states.pop(k) for k in ("train0", "train4")})
        write_states(folder / f"ali.{ending}", states)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(folder: Path, **options) -> KaldiFrames:
    return KaldiFrames(str(folder), "wsj", STATES, F, **options)


@pytest.mark.parametrize("normalize", ["none", "speaker", "global"])
def test_what_kaldi_wrote_is_what_is_read(wsj, normalize):
    data = load(wsj, normalize=normalize)
    assert isinstance(data, SequenceData)
    assert (data.input_size, data.output_size, data.t_max) == (F, STATES, 60)
    of_all = np.concatenate(list(features_of("train").values()))
    for split, utterances in data.splits.items():
        features, states = features_of(split), states_of(split)
        assert {u.name: u.labels.tolist() for u in utterances} == states
        for n, utterance in enumerate(utterances):
            expected = features[utterance.name]
            if normalize == "speaker":
                own = np.concatenate(
                    [features[f"{split}{k}"] for k in range(n // 2 * 2, n // 2 * 2 + 2) if k < len(features)]
                )
                expected = (expected - own.mean(0)) / own.std(0)
            elif normalize == "global":
                expected = (expected - of_all.mean(0)) / of_all.std(0)
            np.testing.assert_allclose(utterance.read(), expected, rtol=1e-4, atol=1e-4)
    batch = next(data.batches("train", 2, torch.Generator().manual_seed(0)))
    assert batch.inputs.x.dtype == torch.float32 and batch.targets.max() < STATES


def test_compressed_archives_are_read_too(wsj):
    features = features_of("test")
    with kaldi_native_io.CompressedMatrixWriter(f"ark,scp:{wsj}/c.ark,{wsj}/wsj/test/feats.scp") as writer:
        for key, values in features.items():
            writer.write(key, values, kaldi_native_io.CompressionMethod.kAutomaticMethod)
    for utterance in load(wsj, normalize="none").splits["test"]:
        np.testing.assert_allclose(utterance.read(), features[utterance.name], atol=0.1)


def test_long_utterances_are_left_out_and_counted(wsj):
    data = load(wsj, max_frames=40)
    assert [u.name for u in data.splits["train"]] == ["train0", "train1", "train3"]
    assert data.description.endswith("7 states; left out, longer than 40 frames: 2 (train2, train4)")
    of_44 = load(wsj, max_frames=44)  # a length that is allowed
    assert [u.name for u in of_44.splits["train"]] == ["train0", "train1", "train2", "train3"]


def test_a_few_utterances_without_an_alignment_are_left_out_and_counted(wsj, monkeypatch):
    states = states_of("test")
    del states["test1"]
    write_states(wsj / "wsj/test/ali.txt", states)
    for share, percent in ((0.05, "5%"), (0.3, "30%")):  # it is one of three
        monkeypatch.setattr("bnrnn.data.kaldi.MAX_SKIPPED", share)
        message = f"1 of 3 utterances have no alignment, expected at most {percent}; the first is test1"
        with pytest.raises(BnrnnError, match=message):
            load(wsj)
    monkeypatch.setattr("bnrnn.data.kaldi.MAX_SKIPPED", 0.4)
    data = load(wsj)
    assert [u.name for u in data.splits["test"]] == ["test0", "test2"]
    assert data.description.endswith("left out, without an alignment: 1 (test1)")
    monkeypatch.setattr("bnrnn.data.frames.SHOWN", 0)
    assert load(wsj).description.endswith("alignment: 1 (...)")


def changed(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_contradicting_files_are_named(wsj):
    test, states = wsj / "wsj/test", states_of("test")
    for alignment, message in [
        ({**states, "test1": [0] * 26}, r"the alignment of test1 has 26 frames, its features have 25"),
        (
            {**states, "test1": [0] * 24 + [STATES]},
            r"states \d to 7, expected 0 to 6: if these are transition ids, convert them with `ali-to-pdf`",
        ),
    ]:
        write_states(test / "ali.txt", alignment)
        with pytest.raises(BnrnnError, match=message):
            load(wsj)
    write_states(test / "ali.txt", states)
    write_states(test / "ali.2.gz", {"test0": states["test0"]})
    with pytest.raises(BnrnnError, match=r"ali.txt: test0 has a second alignment, expected one"):
        load(wsj)
    whole = (test / "ali.2.gz").read_bytes()
    (test / "ali.2.gz").write_bytes(whole[:-6])
    with pytest.raises(BnrnnError, match=r"ali.2.gz is not an archive of alignments"):
        load(wsj)
    (test / "ali.2.gz").unlink()
    with pytest.raises(BnrnnError, match=r"feats.ark:\d+: train0 has 5 features a frame, expected 9: write"):
        KaldiFrames(str(wsj), "wsj", STATES, 9, normalize="none")
    with pytest.raises(BnrnnError, match=r"statistics of speaker0 have shape \(2, 6\), expected \(2, 10\)"):
        KaldiFrames(str(wsj), "wsj", STATES, 9, normalize="global")
    with pytest.raises(BnrnnError, match=r"data.normalize=all is unknown"):
        load(wsj, normalize="all")
    for name, old, new, message in [
        (
            "utt2spk",
            "test1 speaker0",
            "test1 nobody",
            r"test1: expected its speaker in .*utt2spk and the speaker's statistics in cmvn.scp",
        ),
        ("utt2spk", "test1 speaker0", "test1", r"utt2spk, line 2: expected a new key and a value, found 'test1'"),
        ("utt2spk", "test1", "test0", r"line 2: expected a new key"),
        ("feats.scp", "test1 feats.ark", "test1 none.ark", r"none.ark is missing: .*feats.scp names it for test1"),
        ("feats.scp", "feats.ark:6", "feats.ark:7", r"feats.ark:7 has no features of test0"),
    ]:
        before = (test / name).read_text()
        changed(test / name, old, new)
        with pytest.raises(BnrnnError, match=message):
            load(wsj)
        (test / name).write_text(before)
    (test / "ali.txt").unlink()
    with pytest.raises(BnrnnError, match=r"test has no ali\*.gz, ali\*.ark or ali\*.txt: write alignments"):
        load(wsj)


def test_features_that_are_not_finite_are_named(wsj):
    features = features_of("train")
    features["train2"][5, 1] = np.inf
    with kaldi_native_io.FloatMatrixWriter(f"ark,scp:{wsj}/n.ark,{wsj}/wsj/train/feats.scp") as writer:
        for key, values in features.items():
            writer.write(key, values)
    with pytest.raises(BnrnnError, match=r"train2 has features that are not finite numbers"):
        list(load(wsj, normalize="none").batches("train", 2))


def test_an_archive_that_ends_too_early_is_named(wsj):
    path = wsj / "wsj/train/feats.ark"
    path.write_bytes(path.read_bytes()[:-100])
    data = load(wsj, normalize="none")
    with pytest.raises(BnrnnError, match=r"feats.ark:\d+ is damaged: "):
        list(data.batches("train", 2))
