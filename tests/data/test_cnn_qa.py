"""The preparation of the CNN questions, compared with a simple reading of the same files."""

import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bnrnn.data import cnn_qa_prepare
from bnrnn.data.cnn_qa import CNNQA
from bnrnn.data.cnn_qa_prepare import Malformed, parse, prepare_cnn_qa
from bnrnn.errors import BnrnnError
from tests.data.cnn_corpus import STORIES, make, spell
from tests.data.test_cloze import originals, spelled

ROOT = Path(__file__).parents[2]
SIZES = {"training": 23, "validation": 4, "test": 3}
SPLITS = {"train": "training", "valid": "validation", "test": "test"}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(cnn_qa_prepare, "SHARD", 5)
    return make(tmp_path / "cnn", SIZES)


def plainly(corpus: Path, split: str, known: set[str] | None = None) -> list[tuple]:
    """The questions of a split in lower case, in the order of the files' names."""
    found = []
    for path in sorted((corpus / "questions" / SPLITS[split]).iterdir()):
        _, passage, question, answer, _ = path.read_text().split("\n\n")
        read = [tuple(w for w in part.lower().split()) for part in (passage, question, answer)]
        if known is not None:
            read = [tuple(w if w in known else "<num>" if w[0].isdigit() else "<unk>" for w in part) for part in read]
        found.append((read[0], read[1], *read[2]))
    return found


def test_the_arrays_have_what_the_files_have(corpus, tmp_path):
    prepare_cnn_qa(tmp_path, corpus)
    data = CNNQA(str(tmp_path))
    counts = collections.Counter(w for q in plainly(corpus, "train") for w in (*q[0], *q[1], q[2]))
    known = {w for w, n in counts.items() if n > 1 and not w[0].isdigit()}
    assert known == set(data.vocabulary[4:]) and "word5" not in known.intersection(["3,500", "100"])
    assert [data.vocabulary[i] for i in data.entities] == [f"@entity{n}" for n in (0, 1, 2, 3, 5, 7, 10)]
    for split in SPLITS:
        assert originals(data, split) == plainly(corpus, split, known)
    assert data.description.startswith("a part of the CNN questions, full: 23 / 4 / 3 questions")
    assert (tmp_path / "cnn_qa/prepared/skipped.txt").read_text() == ""
    assert sorted(p.name for p in (tmp_path / "cnn_qa").iterdir()) == ["prepared"]


def test_the_shortened_passages_are_the_four_most_relevant_sentences(corpus, tmp_path):
    prepare_cnn_qa(tmp_path, corpus)
    full, short = (originals(CNNQA(str(tmp_path), variant), "train") for variant in ("full", "top4"))
    for (whole, *rest), (kept, *same) in zip(full, short, strict=True):
        assert rest == same and len(kept) < len(whole)
        assert collections.Counter(kept) <= collections.Counter(whole)
        assert sum(w in (".", "!", "?") for w in kept) == 4
    validation = originals(CNNQA(str(tmp_path), "top4"), "valid")
    share = sum(answer in passage for passage, _, answer in validation) / len(validation)
    assert f"(the passage has the answer to {share:.0%} of the validation" in CNNQA(str(tmp_path), "top4").description
    bridge = next(p for p, q, _ in short if "mayor" in q)
    assert " ".join(bridge).startswith(
        "@entity1 ( @entity0 ) -- the mayor of @entity2 , @entity5 , opened a new bridge"
    )


def test_training_batches_rename_entities_and_evaluation_does_not(corpus, tmp_path):
    prepare_cnn_qa(tmp_path, corpus)
    data = CNNQA(str(tmp_path), "top4")
    given = sorted(originals(data, "train"))
    epoch = [q for b in data.batches("train", 6, torch.Generator().manual_seed(0)) for q in spelled(data, b)]
    assert sorted(epoch) != given and len(epoch) == len(given)
    as_they_are = CNNQA(str(tmp_path), "top4", permute_entities=False)
    same = [q for b in as_they_are.batches("train", 6, torch.Generator().manual_seed(0)) for q in spelled(data, b)]
    assert sorted(same) == given
    test = [q for b in data.batches("test", 6) for q in spelled(data, b)]
    assert sorted(test) == sorted(originals(data, "test"))


PASSAGE, QUESTION, ANSWER, ENTITIES = STORIES[1]


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (spell(PASSAGE, QUESTION, ANSWER, ENTITIES).replace("\n\n@entity3\n\n", "\n\n").encode(), "4 sections"),
        (spell(PASSAGE, QUESTION, "@entity4", ENTITIES).encode(), "the answer '@entity4' is not among the entities"),
        (spell(PASSAGE, QUESTION, "@entity3 @entity10", ENTITIES).encode(), "the answer '@entity3 @entity10' is not"),
        (spell(PASSAGE, "who won", ANSWER, ENTITIES).encode(), "no @placeholder in the question"),
        (spell(" ", QUESTION, ANSWER, ENTITIES).encode(), "no words in the passage"),
        (spell("caf\xe9", QUESTION, ANSWER, ENTITIES).encode("latin-1"), "byte 26 is no UTF-8"),
        (b"", "1 sections"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_named_and_left_out_up_to_a_limit(corpus, tmp_path, capsys, content, wrong):
    with pytest.raises(Malformed, match=wrong):
        parse(content)
    bad = corpus / "questions" / "training" / "bad.question"
    bad.write_bytes(content)
    with pytest.raises(BnrnnError, match=r"more than 0 .question files are malformed, of which .*skipped.txt names"):
        prepare_cnn_qa(tmp_path, corpus, most_skipped=0)
    assert not (tmp_path / "cnn_qa/prepared").exists()
    prepare_cnn_qa(tmp_path, corpus, most_skipped=1)
    assert "1 malformed files were left out" in capsys.readouterr().out
    [line] = (tmp_path / "cnn_qa/prepared/skipped.txt").read_text().splitlines()
    assert line.startswith(f"{bad}: ")
    assert len(originals(CNNQA(str(tmp_path)), "train")) == 23


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "bnrnn.prepare", *map(str, arguments)]


def test_a_killed_preparation_resumes_and_ends_with_the_same_bytes(tmp_path):
    corpus = make(tmp_path / "cnn", {"training": 5000, "validation": 40, "test": 40}, length=300)
    arguments = command("cnn_qa", "--from", corpus, "--data-dir")
    killed, shards = tmp_path / "killed", tmp_path / "killed/cnn_qa/shards"
    process = subprocess.Popen([*arguments, str(killed)], cwd=ROOT, start_new_session=True)
    while process.poll() is None and not any(shards.glob("*.json")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in shards.glob("*.npz") if path.with_suffix(".json").exists()}
    assert 1 <= len(before) < 5
    stamps = {}
    subprocess.run([*arguments, str(tmp_path / "whole")], cwd=ROOT, check=True, capture_output=True)
    resumed = subprocess.Popen([*arguments, str(killed)], cwd=ROOT, stdout=subprocess.DEVNULL)
    while resumed.poll() is None:
        stamps |= {path: path.stat().st_mtime_ns for path in before if path.exists()}
        time.sleep(0.01)
    assert resumed.returncode == 0 and stamps == before, "what was read is not read again"
    first, second = ((tmp_path / name / "cnn_qa/prepared/index.json").read_text() for name in ("whole", "killed"))
    assert first == second and len(json.loads(first)["sha256"]) == 20
    again = subprocess.run([*arguments, str(killed)], cwd=ROOT, check=True, capture_output=True, text=True)
    assert again.stdout.endswith("cnn_qa/prepared: complete\n")


def test_other_files_under_the_name_of_a_shard_are_read(corpus, tmp_path):
    folder = tmp_path / "cnn_qa" / "shards"
    folder.mkdir(parents=True)
    for split in SPLITS:
        (folder / f"{split}-00000.json").write_text(json.dumps({"names": "others", "skipped": []}))
    prepare_cnn_qa(tmp_path, corpus)
    assert len(originals(CNNQA(str(tmp_path)), "train")) == 23


@pytest.mark.parametrize("name", ["full/train.ids.npy", "full/test.answers.npy", "vocabulary.txt"])
def test_a_damaged_array_is_an_error(corpus, tmp_path, name):
    prepare_cnn_qa(tmp_path, corpus)
    path = tmp_path / "cnn_qa/prepared" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BnrnnError, match=rf"{name} is damaged: delete .*prepared and prepare it again"):
        CNNQA(str(tmp_path))
    path.unlink()
    with pytest.raises(BnrnnError, match=rf"{name} is missing: delete"):
        CNNQA(str(tmp_path))


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(BnrnnError, match=r"prepared/index.json is missing: run .*bnrnn.prepare cnn_qa --from DIR"):
        CNNQA(str(tmp_path))
    with pytest.raises(BnrnnError, match=r"data.variant is 'top3': use full or top4"):
        CNNQA(str(tmp_path), "top3")
    with pytest.raises(BnrnnError, match=r"questions/training has no .question files: is --from the folder cnn\?"):
        prepare_cnn_qa(tmp_path, tmp_path)
    with pytest.raises(BnrnnError, match=r"prepared is missing: with the questions of Hermann .*--from DIR"):
        prepare_cnn_qa(tmp_path)


def test_arrays_are_mapped_not_loaded(corpus, tmp_path):
    prepare_cnn_qa(tmp_path, corpus)
    assert all(isinstance(array, np.memmap) for split in CNNQA(str(tmp_path)).splits.values() for array in split)
