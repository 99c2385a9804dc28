import io
import os
import tarfile
from pathlib import Path

import pytest

from bnrnn.data import babi
from bnrnn.data.babi import BAbI, load_babi, parse
from bnrnn.data.cloze import Text
from bnrnn.errors import BnrnnError
from tests.data.test_cloze import originals

STORIES = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Mary went to the Hallway.
5 Where is Mary? \thallway\t4
1 John took the milk.
2 Is John in the park? \tno\t1
"""
MOVED = ["mary", "moved", "to", "the", "bathroom", ".", "john", "went", "to", "the", "hallway", "."]


@pytest.fixture
def small(tmp_path, monkeypatch):
    """An archive with 20 short stories of a task; each has one question."""
    monkeypatch.setattr(babi, "NUM_QUESTIONS", 20)
    for split, name in (("train", "Mary"), ("test", "Zoe")):
        lines = [f"1 {name} went to the room{n % 3}.\n2 Where is {name}? \troom{n % 3}\t1\n" for n in range(20)]
        write(tmp_path / "babi" / "tasks.tar.gz", f"tasks_1-20_v1-2/en/qa1_single_{split}.txt", "".join(lines))
    return tmp_path


def write(path: Path, name: str, content: str) -> None:
    """Add a file to an archive."""
    path.parent.mkdir(exist_ok=True)
    kept = {}
    if path.exists():
        with tarfile.open(path) as archive:
            kept = {n: archive.extractfile(n).read() for n in archive.getnames()}
    with tarfile.open(path, "w:gz") as archive:
        for n, data in (kept | {name: content.encode()}).items():
            info = tarfile.TarInfo(n)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_a_question_is_about_its_story_so_far():
    first, second = parse(STORIES, "stories")
    question = ["where", "is", "mary", "?"]
    assert first == [
        Text(MOVED, question, "bathroom"),
        Text([*MOVED, "mary", "went", "to", "the", "hallway", "."], question, "hallway"),
    ]
    assert second == [Text(["john", "took", "the", "milk", "."], ["is", "john", "in", "the", "park", "?"], "no")]


@pytest.mark.parametrize("line", ["Mary moved.", "1", "1 Where is Mary?\tbathroom", ""])
def test_a_line_of_another_form_is_an_error(line):
    with pytest.raises(BnrnnError, match=r"babi, line 2: expected a numbered sentence or question, found "):
        list(parse(f"1 Mary moved.\n{line}\n2 John went.\n", "babi"))


@pytest.mark.parametrize("content", ["1 a\n" + "2 a b\n" * 5001, "1 Is it? \tno\t1\n" * 1001])
def test_an_endless_story_and_too_many_questions_are_named(content):
    with pytest.raises(
        BnrnnError, match=r"expected at most 10,000 words in a story and 1,000 questions: fetch it again"
    ):
        list(parse(content, "babi"))


def test_the_last_tenth_of_the_training_stories_validates(small):
    data = BAbI(str(small), 1)
    assert [len(data.splits[split]) for split in ("train", "valid", "test")] == [18, 2, 20]
    assert [answer for *_, answer in originals(data, "valid")] == ["room0", "room1"]
    assert [data.vocabulary[i] for i in data.entities] == ["room0", "room1", "room2"]
    passage, question, _ = originals(data, "test")[0]
    assert passage == ("<unk>", "went", "to", "the", "room0", ".") and question == ("where", "is", "<unk>", "?")


def test_what_is_wrong_with_the_archive_is_named(small, tmp_path):
    with pytest.raises(BnrnnError, match=r"data.task is 21, expected one of bAbI's tasks, 1 to 20"):
        BAbI(str(small), 21)
    with pytest.raises(BnrnnError, match=r"tasks.tar.gz has 0 files like .*qa2_.*: is it bAbI, version 1.2\?"):
        BAbI(str(small), 2)
    with pytest.raises(BnrnnError, match=r"nowhere/babi/\*.tar.gz is missing: put it there \(http"):
        load_babi(tmp_path / "nowhere", 1)
    path = small / "babi" / "tasks.tar.gz"
    write(path, "tasks_1-20_v1-2/en/qa1_single_test.txt", "1 Zoe left.\n")
    with pytest.raises(BnrnnError, match=r"tasks.tar.gz has 0 test questions of task 1, expected 20"):
        BAbI(str(small), 1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(BnrnnError, match=r"tasks.tar.gz is damaged .*: fetch it again from http"):
        BAbI(str(small), 1)


@pytest.mark.skipif("BNRNN_DATA" not in os.environ, reason="needs bAbI in BNRNN_DATA")
@pytest.mark.parametrize("task", [1, 2, 6, 20])
def test_every_answer_of_the_real_tasks_is_known(task):
    data = BAbI(os.environ["BNRNN_DATA"], task)
    counts = {split: len(questions) for split, questions in data.splits.items()}
    assert counts["train"] + counts["valid"] == counts["test"] == 1000 and 90 <= counts["valid"] <= 100
    for split in data.splits.values():
        rows = split.with_format(None)[:]
        assert min(map(min, rows["passage"] + rows["question"])) > 2 and set(rows["answer"]) <= set(data.entities)
