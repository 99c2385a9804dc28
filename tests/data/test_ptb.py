import os
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate

from bnrnn.config import compose_config
from bnrnn.data import ptb
from bnrnn.data.base import sha256
from bnrnn.data.ptb import PTBChar, PTBWord, prepare_ptb
from bnrnn.errors import BnrnnError
from tests.helpers import served

DATA = Path(os.environ.get("BNRNN_DATA", "data"))
NAMES = list(ptb.CHECKSUMS)
real = pytest.mark.skipif(
    not all((DATA / "ptb" / name).exists() for name in NAMES), reason="needs the Penn Treebank in BNRNN_DATA"
)
CONTENTS = {
    "ptb.train.txt": b" no it was n't \n it was <unk> monday N \n it is n't \n" * 10,
    "ptb.valid.txt": b" it is monday \n" * 10,
    "ptb.test.txt": b" monday it was \n was it \n" * 10,
}


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """A folder with three short texts, with the checksums patched to accept them."""
    (tmp_path / "ptb").mkdir()
    for name, content in CONTENTS.items():
        (tmp_path / "ptb" / name).write_bytes(content)
        monkeypatch.setitem(ptb.CHECKSUMS, name, sha256(content))
    return tmp_path


def replace(folder: Path, monkeypatch, name: str, content: bytes) -> None:
    (folder / "ptb" / name).write_bytes(content)
    monkeypatch.setitem(ptb.CHECKSUMS, name, sha256(content))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("authors", b" it is monday\n" * 10), ("mikolov_char", b"it is monday\n" * 10)],
)
def test_characters_are_spelled_by_the_rule_asked_for(small, text, expected):
    data = PTBChar(str(small), text, length=5)
    assert bytes(data.splits["valid"]) == expected
    assert data.splits["train"].tobytes().count(b"<unk>") == 10
    symbols = sorted(set(data.splits["train"].tobytes()))
    assert data.output_size == len(symbols)
    batch = next(data.batches("valid", 100))
    assert bytes(symbols[i] for i in batch.inputs.T.flatten()[:4]) == expected[:4]


def test_an_unknown_text_is_refused(small):
    with pytest.raises(BnrnnError, match=r"data.text is 'penn': use 'authors' or 'mikolov_char'"):
        PTBChar(str(small), "penn")


def test_a_character_that_training_never_shows_is_refused(small, monkeypatch):
    replace(small, monkeypatch, "ptb.test.txt", b" it was \n it is x \n" * 10)
    with pytest.raises(BnrnnError, match=r"ptb.test.txt: the byte at position 15 is b'x', expected one of"):
        PTBChar(str(small), length=5)


def test_words_are_numbered_as_they_appear_with_eos_for_each_line(small):
    data = PTBWord(str(small), window=4)
    assert b" ".join(data.vocabulary) == b"no it was n't <eos> <unk> monday N is"
    assert list(data.vocabulary.values()) == list(range(9)) == list(range(data.output_size))
    assert data.splits["train"][:15].tolist() == [0, 1, 2, 3, 4, 1, 2, 5, 6, 7, 4, 1, 8, 3, 4]
    assert data.splits["test"].tolist() == [6, 1, 2, 4, 2, 1, 4] * 10
    assert data.description == "Penn Treebank: 150 / 40 / 70 words, 9 types"


def test_a_word_that_training_never_shows_is_refused(small, monkeypatch):
    replace(small, monkeypatch, "ptb.valid.txt", b" it is tuesday \n")
    with pytest.raises(BnrnnError, match=r"ptb.valid.txt has 'tuesday', expected only words of ptb.train.txt"):
        PTBWord(str(small), window=4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("load", [lambda folder: PTBChar(folder, length=5), lambda folder: PTBWord(folder, window=4)])
def test_every_file_is_verified(small, name, load):
    (small / "ptb" / name).write_bytes(b"other")
    with pytest.raises(BnrnnError, match=rf"ptb/{name} is not the published {name}"):
        load(str(small))


def test_missing_and_damaged_files_are_downloaded_and_no_others(small, tmp_path, monkeypatch, capsys):
    source, folder = (small / "ptb").rename(small / "mirror"), tmp_path / "fresh/ptb"
    with served(source) as address:
        monkeypatch.setattr(ptb, "URL", address)
        prepare_ptb(folder.parent)
        (folder / NAMES[0]).write_bytes(b"damaged")
        (folder / NAMES[2]).unlink()
        (source / NAMES[1]).unlink()
        prepare_ptb(folder.parent)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS
    prepare_ptb(folder.parent)  # complete, so nothing is downloaded
    assert capsys.readouterr().out == f"{folder}: complete\n" * 3


def test_configs_build_both_data_sets(small):
    cfg = compose_config("data=ptb_char", f"data_dir={small}", "data.length=20")
    chars = instantiate(cfg.data)
    assert (chars.t_max, chars.state_noise) == (19, 0.0)
    assert chars.description.startswith("Penn Treebank, text=authors: 490 / 140 / 230 characters")
    words = instantiate(compose_config("data=ptb_word", f"data_dir={small}").data)
    assert (words.t_max, words.state_noise) == (20, 0.0)


@real
def test_the_authors_text_has_the_counts_of_their_code():
    data = PTBChar(str(DATA))
    assert data.description == "Penn Treebank, text=authors: 5,059,550 / 396,412 / 446,184 characters, 50 symbols"
    assert (data.input_size, data.output_size, data.t_max) == (50, 50, 99)
    assert data.num_segments("train") == 50_594
    assert data.num_batches("train", 64) == 791
    last = list(data.batches("train", 64, torch.Generator().manual_seed(0), start=790))
    assert [b.inputs.shape for b in last] == [(99, 34)]
    num, pieces = data.extra_tests()["one_sequence"]
    assert (num, sum(len(b.inputs) for b in pieces)) == (447, 446_183)


@real
def test_mikolovs_text_is_what_his_character_files_spell():
    data = PTBChar(str(DATA), "mikolov_char")
    assert data.description == "Penn Treebank, text=mikolov_char: 5,017,482 / 393,042 / 442,423 characters, 50 symbols"
    for split, text in data.splits.items():
        path = DATA / "ptb" / f"ptb.char.{split}.txt"
        if path.exists():
            symbols = path.read_bytes().replace(b" ", b"").replace(b"_", b" ")
            assert symbols == text.tobytes()


@real
def test_words_have_the_counts_that_papers_give():
    data = PTBWord(str(DATA), window=20)
    assert data.description == "Penn Treebank: 929,589 / 73,760 / 82,430 words, 10,000 types"
    assert data.num_batches("train", 32) == 1_453  # of 29,048 steps; Laurent et al. count the 1,452 full windows
    assert [word.decode() for word in data.vocabulary][:3] == ["aer", "banknote", "berlitz"]
