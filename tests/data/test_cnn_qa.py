"""The preparation of the CNN questions, compared with a simple reading of the same files."""

import collections
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from datasets.table import MemoryMappedTable

from bnrnn.commands import prepare
from bnrnn.data import cnn_qa_prepare
from bnrnn.data.cnn_qa import CNNQA, VERSION, load_questions
from bnrnn.data.cnn_qa_prepare import Malformed, parse, prepare_cnn_qa
from bnrnn.data.prepared import save_prepared
from bnrnn.errors import BnrnnError
from tests.data.cnn_corpus import STORIES, make, spell
from tests.data.test_cloze import originals, spelled

ROOT = Path(__file__).parents[2]
SIZES = {"training": 23, "validation": 4, "test": 3}
SPLITS = {"train": "training", "valid": "validation", "test": "test"}


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(cnn_qa_prepare, "PART", 5)
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


def test_the_prepared_questions_are_those_of_the_files(corpus, tmp_path, monkeypatch):
    arguments = ["cnn_qa", "--from", corpus, "--data-dir", tmp_path, "--num-proc", 1]
    monkeypatch.setattr(sys, "argv", ["prepare", *map(str, arguments)])
    prepare.main()
    data = CNNQA(str(tmp_path))
    counts = collections.Counter(w for q in plainly(corpus, "train") for w in (*q[0], *q[1], q[2]))
    known = {w for w, n in counts.items() if n > 1 and not w[0].isdigit()}
    assert known == set(data.vocabulary[4:]) and "word5" not in known.intersection(["3,500", "100"])
    assert [data.vocabulary[i] for i in data.entities] == [f"@entity{n}" for n in (0, 1, 2, 3, 5, 7, 10)]
    for split in SPLITS:
        assert originals(data, split) == plainly(corpus, split, known)
    assert data.description.startswith("a part of the CNN questions, full: 23 / 4 / 3 questions")
    assert (tmp_path / "cnn_qa/skipped.txt").read_text() == ""
    assert sorted(p.name for p in (tmp_path / "cnn_qa").iterdir()) == ["prepared", "skipped.txt"]


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


def test_training_batches_rename_entities_unless_they_are_to_be_kept(corpus, tmp_path):
    prepare_cnn_qa(tmp_path, corpus)
    given = sorted(originals(CNNQA(str(tmp_path)), "train"))
    for data, same in ((CNNQA(str(tmp_path)), False), (CNNQA(str(tmp_path), permute_entities=False), True)):
        epoch = [q for b in data.batches("train", 6, torch.Generator().manual_seed(0)) for q in spelled(data, b)]
        assert (sorted(epoch) == given) == same and len(epoch) == len(given)


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
    with pytest.raises(BnrnnError, match=r"more than 0 .question files are malformed, such as\n  .*bad.question: "):
        prepare_cnn_qa(tmp_path, corpus, most_skipped=0)
    assert not (tmp_path / "cnn_qa/prepared").exists()
    prepare_cnn_qa(tmp_path, corpus, most_skipped=1)
    assert "1 malformed files were left out" in capsys.readouterr().out
    [line] = (tmp_path / "cnn_qa/skipped.txt").read_text().splitlines()
    assert line.startswith(f"{bad}: ")
    assert len(originals(CNNQA(str(tmp_path)), "train")) == 23


def files_read(monkeypatch) -> list[str]:
    """A list of the files that this process will read from now on."""
    read, original = [], cnn_qa_prepare.read_questions

    def spy(names, **options):
        read.extend(names)
        return original(names, **options)

    monkeypatch.setattr(cnn_qa_prepare, "read_questions", spy)
    return read


PREPARE = """
import sys
from pathlib import Path

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo") and not isinstance(arguments[1], (str, bytes)):
        raise OSError("the network must not be used")

sys.addaudithook(refuse)
from bnrnn.data import cnn_qa_prepare
cnn_qa_prepare.PART = 5
cnn_qa_prepare.prepare_cnn_qa(Path(sys.argv[1]), Path(sys.argv[2]), num_proc=2)
"""


def processes_of(session: int) -> list[str]:
    """The command lines of the processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append((path / "cmdline").read_text())
        except OSError:
            pass  # it has ended meanwhile
    return found


@pytest.mark.slow
def test_a_killed_preparation_resumes_and_the_number_of_processes_changes_no_byte(tmp_path, monkeypatch):
    corpus = make(tmp_path / "cnn", {"training": 200, "validation": 4, "test": 4}, length=300)
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | {"HOME": str(tmp_path / "home")}
    killed = subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(tmp_path / "killed"), str(corpus)],
        cwd=ROOT, env=environment, start_new_session=True, stderr=subprocess.PIPE,
    )  # fmt: skip
    while killed.poll() is None and not any((tmp_path / "killed").rglob("*.arrow")):
        time.sleep(0.002)
    killed.kill()  # the parent alone: its workers must end by themselves
    killed.wait()
    end = time.monotonic() + 60
    while processes_of(killed.pid):
        assert time.monotonic() < end, processes_of(killed.pid)
        time.sleep(0.01)
    message = killed.communicate()[1]
    assert killed.returncode == -signal.SIGKILL, message
    kept = len(list((tmp_path / "killed/cnn_qa/parts").glob("*.arrow")))
    assert 1 <= kept < 40
    monkeypatch.setattr(cnn_qa_prepare, "PART", 5)
    prepare_cnn_qa(tmp_path / "whole", corpus, num_proc=2)
    read = files_read(monkeypatch)
    prepare_cnn_qa(tmp_path / "killed", corpus, num_proc=1)
    assert len(read) == len(set(read)) == 208 - 5 * kept
    one, other = ((tmp_path / name / "cnn_qa/prepared/checksums.json").read_text() for name in ("whole", "killed"))
    assert one == other and one.count(".arrow") == 3
    assert not (tmp_path / "home").exists(), "all that is written stays in the folder of the data"


def test_a_file_that_has_changed_is_read_again(corpus, tmp_path, monkeypatch):
    training = sorted((corpus / "questions/training").iterdir())
    last = sorted((corpus / "questions/test").iterdir())[-1]
    good = last.read_text()
    last.write_text("")
    with pytest.raises(BnrnnError, match=r"more than 0 .question files are malformed"):
        prepare_cnn_qa(tmp_path, corpus, most_skipped=0)
    last.write_text(good)
    training[7].write_text(training[7].read_text().replace("news.example/1", "news.example/2"))
    read = files_read(monkeypatch)
    prepare_cnn_qa(tmp_path, corpus)
    assert read == [str(p) for p in (*training[5:10], *sorted(last.parent.iterdir()))]


def prepared(tmp_path: Path, corpus: Path) -> Path:
    prepare_cnn_qa(tmp_path, corpus)
    return tmp_path / "cnn_qa/prepared"


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda f: flip(f / "train/data-00000-of-00001.arrow"), "is damaged: train/data-00000-of-00001.arrow"),
        (lambda f: (f / "valid/data-00000-of-00001.arrow").unlink(), "is damaged: valid/data-00000-of-00001.arrow"),
        (lambda f: flip(f / "test/dataset_info.json"), "is damaged: test/dataset_info.json"),
        (lambda f: flip(f / "checksums.json"), "is damaged"),
        (lambda f: (f / "checksums.json").unlink(), "is damaged or was prepared by another version"),
        (
            lambda f: (f / "checksums.json").write_text('{"version": "COCO captions 1"}'),
            "is damaged or was prepared by another version",
        ),
        (shutil.rmtree, "is missing"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named_with_the_command_that_prepares_it(corpus, tmp_path, change, wrong):
    folder = prepared(tmp_path, corpus)
    change(folder)
    with pytest.raises(BnrnnError, match=rf"{folder} {wrong}.*un `bnrnn-prepare cnn_qa --from DIR`"):
        CNNQA(str(tmp_path))


def without(change):
    """A change of the prepared splits that is stored with right checksums."""

    def apply(folder: Path) -> None:
        splits = {split: load_questions(folder.parents[1])[split] for split in SPLITS}
        change(splits)
        save_prepared(folder.with_name("changed"), splits, VERSION, "")
        shutil.rmtree(folder)
        folder.with_name("changed").rename(folder)

    return apply


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda s: s.update(valid=s["valid"].select(range(0))), "cannot be loaded .*, or has a split without rows"),
        (lambda s: s.pop("test"), "lacks test or one of its columns"),
        (lambda s: s.update(train=s["train"].remove_columns("full")), "lacks train or one of its columns"),
    ],
)
def test_a_prepared_folder_without_questions_or_columns_is_named(corpus, tmp_path, change, wrong):
    folder = prepared(tmp_path, corpus)
    without(change)(folder)
    with pytest.raises(BnrnnError, match=rf"{folder} {wrong}.*elete it and run `bnrnn-prepare cnn_qa"):
        CNNQA(str(tmp_path))


def test_a_split_without_questions_and_a_dangling_link_are_named_before_anything_is_written(corpus, tmp_path):
    for path in (corpus / "questions/validation").iterdir():
        path.write_text("no question")
    with pytest.raises(BnrnnError, match=r"questions/validation has no question that can be read: unpack the corpus"):
        prepare_cnn_qa(tmp_path, corpus)
    (corpus / "questions/validation/a.question").symlink_to("nowhere")
    with pytest.raises(BnrnnError, match=r"a.question is damaged \(its link leads nowhere\): unpack it again"):
        prepare_cnn_qa(tmp_path, corpus)
    assert not (tmp_path / "cnn_qa/prepared").exists()


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_questions_that_were_prepared_from_other_files_are_not_taken_for_these(corpus, tmp_path, capsys):
    folder = prepared(tmp_path, corpus)
    for source in (corpus, None):
        prepare_cnn_qa(tmp_path, source)
        assert capsys.readouterr().out.endswith("prepared: complete\n")
    path = next((corpus / "questions/test").iterdir())
    path.write_text(path.read_text().replace("news.example/1", "news.example/2"))
    with pytest.raises(BnrnnError, match=rf"{folder} was, as .* says, prepared from other files than those given. Del"):
        prepare_cnn_qa(tmp_path, corpus)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(BnrnnError, match=r"data.variant is 'top3': use full or top4"):
        CNNQA(str(tmp_path), "top3")
    with pytest.raises(BnrnnError, match=r"questions/training has no .question files: is --from the folder cnn\?"):
        prepare_cnn_qa(tmp_path, tmp_path)
    with pytest.raises(BnrnnError, match=r"prepared is missing: run .*--from DIR"):
        prepare_cnn_qa(tmp_path)


def test_questions_are_mapped_not_loaded(corpus, tmp_path):
    prepare_cnn_qa(tmp_path, corpus)
    splits = [split.data for variant in ("full", "top4") for split in CNNQA(str(tmp_path), variant).splits.values()]
    assert len(splits) == 6 and all(isinstance(table, MemoryMappedTable) for table in splits)
