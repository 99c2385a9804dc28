"""bAbI (Weston et al. 2015, arXiv:1502.05698): stories made by rules, which an attentive reader can learn.

1,000 questions a task for training, of which those of the last tenth of the stories are for validation, and 1,000 for
the test.
"""

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from bnrnn.data.cloze import SPECIAL, Cloze, Text, encode, tokens
from bnrnn.errors import BnrnnError

URL = "http://www.thespermwhale.com/jaseweston/babi/tasks_1-20_v1-2.tar.gz"
NUM_QUESTIONS = 1000


class BAbI(Cloze):
    """Task 1 to 20, in English: the passage is the story so far, the answer one word.

    Reads `<data_dir>/babi/*.tar.gz`, or `<data_dir>/cnn_qa/standins/babi*.tar.gz`.
    """

    def __init__(self, data_dir: str, task: int) -> None:
        texts = load_babi(Path(data_dir), task)
        answers = sorted({text.answer for text in texts["train"]})
        words = {word for text in texts["train"] for word in (*text.passage, *text.question)}
        vocabulary = [*SPECIAL, *answers, *sorted(words.difference(answers))]
        entities = range(len(SPECIAL), len(SPECIAL) + len(answers))
        splits = {split: encode(questions, vocabulary) for split, questions in texts.items()}
        super().__init__(splits, vocabulary, entities, False, f"bAbI task {task}")


def load_babi(data_dir: Path, task: int) -> dict[str, list[Text]]:
    """The questions of a task by split."""
    if not 1 <= task <= 20:
        raise BnrnnError(f"data.task is {task}, expected one of bAbI's tasks, 1 to 20")
    found = [path for name in ("babi/*", "cnn_qa/standins/babi*") for path in sorted(data_dir.glob(f"{name}.tar.gz"))]
    if not found:
        raise BnrnnError(
            f"{data_dir / 'babi'} has no .tar.gz: put bAbI's there ({URL}), or set BNRNN_DATA to the folder that has it"
        )
    path, stories = found[0], {}
    for split in ("train", "test"):
        content = _member(path, rf"(^|/)en/qa{task}_[^/]*_{split}\.txt$")
        stories[split] = list(parse(content, f"{path}, task {task}, {split}"))
        count = sum(map(len, stories[split]))
        if count != NUM_QUESTIONS:
            raise BnrnnError(f"{path} has {count:,} {split} questions of task {task}, expected {NUM_QUESTIONS:,}")
    kept = len(stories["train"]) - len(stories["train"]) // 10
    parts = {"train": stories["train"][:kept], "valid": stories["train"][kept:], "test": stories["test"]}
    return {split: [text for story in part for text in story] for split, part in parts.items()}


def parse(content: str, source: str) -> Iterator[list[Text]]:
    """The questions of each story. A line is a statement, or a question, its answer and supporting facts, tabs between.

    Lines are numbered, and 1 begins a story.
    """
    passage: list[str] = []
    questions: list[Text] = []
    for number, line in enumerate(content.splitlines(), 1):
        match = re.fullmatch(r"(\d+) ([^\t]+)(?:\t(\S+)\t[\d ]*)?", line.rstrip(" "))
        if match is None:
            raise BnrnnError(f"{source}, line {number}: expected a numbered sentence or question, found {line!r}")
        if match[1] == "1":
            if questions:
                yield questions
            passage, questions = [], []
        if match[3] is None:
            passage = passage + tokens(match[2])
        else:
            questions.append(Text(passage, tokens(match[2]), match[3].lower()))
    if questions:
        yield questions


def _member(path: Path, pattern: str) -> str:
    """The text of the one file in the archive whose name matches."""
    try:
        with tarfile.open(path) as archive:
            names = [name for name in archive.getnames() if re.search(pattern, name)]
            if len(names) != 1:
                raise BnrnnError(f"{path} has {len(names)} files like {pattern}, expected 1: is it bAbI, version 1.2?")
            file = archive.extractfile(names[0])
            assert file is not None
            return file.read().decode("utf-8")
    except (OSError, EOFError, tarfile.TarError, UnicodeDecodeError) as error:
        raise BnrnnError(f"{path} is damaged ({error}): fetch it again from {URL}") from error
