import os
import zipfile
from collections import Counter

import pytest

from bnrnn.data import ieer
from bnrnn.data.cloze import Text
from bnrnn.data.ieer import IEERCloze, load_ieer, numbered_at_random, questions
from bnrnn.errors import BnrnnError
from tests.data.test_cloze import originals
from tests.helpers import without_shape_checks

PERSON, PLACE = '<b_enamex type="PERSON">{}<e_enamex>', '<b_enamex type="LOCATION" status="opt">{}<e_enamex>'
TEXT = f"""
   {PLACE.format("NAIROBI")} _ {PERSON.format("Daniel  arap Moi")} spoke on <b_timex type="DATE">Saturday<e_timex>.
   ``{PERSON.format("Moi")} must go at last,'' they sang in {PLACE.format("Nairobi")}. No.
   {PERSON.format("Ann Moss")} left.
"""


def document(headline: str, text: str) -> str:
    return f"<DOC>\n<BODY>\n<HEADLINE>\n{headline}\n</HEADLINE>\n<TEXT>{text}</TEXT>\n</BODY>\n</DOC>\n"


def test_each_entity_that_the_rest_of_the_text_names_is_asked_for():
    title = f"Crowds in {PLACE.format('Nairobi')} protest the taxes"
    found = list(questions(title, TEXT))
    body = ["@entity0", "_", "@entity1", "spoke", "on", "saturday", "."]
    sang = ["``", "@entity1", "must", "go", "at", "last", ",", "''", "they", "sang", "in", "@entity0", "."]
    rest = ["no", ".", "@entity2", "left", "."]

    def hidden(words: list[str], answer: str) -> list[str]:
        return ["@placeholder" if w == answer else w for w in words]

    headline = ["crowds", "in", "@placeholder", "protest", "the", "taxes"]
    assert found[0] == (body + sang + rest, headline, "@entity0")
    assert found[1:] == [
        (sang + rest, hidden(body, "@entity0"), "@entity0"),
        (sang + rest, hidden(body, "@entity1"), "@entity1"),
        (body + rest, hidden(sang, "@entity1"), "@entity1"),
        (body + rest, hidden(sang, "@entity0"), "@entity0"),
    ]


def test_entities_are_numbered_at_random_and_keep_their_places():
    entities = [f"@entity{n}" for n in range(30)]
    text = Text(["@entity0", "met", "@entity1", "and", "@entity0"], ["who", "met", "@entity1", "?"], "@entity0")
    found = [numbered_at_random(text, entities, seed) for seed in range(300)]
    for passage, question, answer in found:
        a, b = passage[0], passage[2]
        assert a != b and passage == [a, "met", b, "and", a] and question == ["who", "met", b, "?"] and answer == a
    counts = Counter(answer for _, _, answer in found)
    assert len(counts) == 30 and max(counts.values()) < 30


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(ieer, "NUM_DOCUMENTS", 16)
    documents = "".join(document(f"About the news number {n} of {PLACE.format('Nairobi')}", TEXT) for n in range(16))
    (tmp_path / "ieer").mkdir()
    with zipfile.ZipFile(tmp_path / "ieer" / "ieer.zip", "w") as archive:
        archive.writestr("ieer/README", "not news")
        archive.writestr("ieer/APW_19980314", documents)
    return tmp_path


def test_of_every_eight_documents_one_validates_and_one_tests(small):
    data = IEERCloze(str(small))
    assert [len(data.splits[split]) for split in ("train", "valid", "test")] == [60, 10, 10]
    asked = {q[1][4] for q in originals(data, "valid") if q[1][0] == "about"}
    assert asked == {"<num>"} and "6" not in data.vocabulary
    assert data.permute_entities and [data.vocabulary[i] for i in data.entities] == ["@entity0", "@entity1", "@entity2"]


def test_of_shortened_passages_the_description_says_how_many_have_the_answer(small):
    path = small / "ieer" / "ieer.zip"
    text = f"""
        {PLACE.format("Nairobi")} voted. A dull day. {PERSON.format("Moi")} won in {PLACE.format("Nairobi")} on a day.
    """
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ieer/APW_19980314", document(f"A dull day in {PLACE.format('Nairobi')} is over", text) * 16)
    data = IEERCloze(str(small), num_sentences=1)
    asked = {" ".join(q): (" ".join(p), a in p) for p, q, a in originals(data, "valid")}
    assert asked == {
        "a dull day in @placeholder is over": ("a dull day .", False),
        "@entity1 won in @placeholder on a day .": ("a dull day .", False),
    }
    assert "has the answer to 0% of the validation questions" in data.description
    assert "has the answer to 100% of the" in IEERCloze(str(small), num_sentences=3).description


def test_what_is_wrong_with_the_archive_is_named(small, tmp_path, monkeypatch):
    with pytest.raises(BnrnnError, match=r"nowhere/ieer/ieer.zip is missing: put it there \(http"):
        load_ieer(tmp_path / "nowhere")
    path = small / "ieer" / "ieer.zip"
    monkeypatch.setattr(ieer, "NUM_DOCUMENTS", 94)
    with pytest.raises(BnrnnError, match=r"ieer.zip has 16 documents, expected 94: fetch it from"):
        load_ieer(small)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(BnrnnError, match=r"ieer.zip is damaged .*: fetch it again from http"):
        load_ieer(small)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Nobody is named here, so that nothing can be asked for.", "no questions for train"),
        ("<b_enamex>" * 5000, "has [0-9,]+ letters or the word @entity, expected at most 40,000 letters without it"),
        (f"{TEXT} @entity99999999999999 spoke.", "letters or the word @entity"),
    ],
)
def test_texts_without_names_and_absurd_ones_are_named(small, text, wrong):
    with zipfile.ZipFile(small / "ieer" / "ieer.zip", "w") as archive:
        archive.writestr("ieer/APW_19980314", document("About the news", text) * 16)
    with pytest.raises(BnrnnError, match=wrong):
        IEERCloze(str(small))


def test_passages_have_a_limit_of_their_words_in_all(small, monkeypatch):
    monkeypatch.setattr(ieer, "MOST_WORDS", 100)
    with pytest.raises(BnrnnError, match="passages of more than 100 words: fetch it again"):
        IEERCloze(str(small))


@pytest.mark.skipif("BNRNN_DATA" not in os.environ, reason="needs IE-ER in BNRNN_DATA")
def test_the_real_newswire_gives_answerable_questions():
    with without_shape_checks():  # of each of two million words
        data = IEERCloze(os.environ["BNRNN_DATA"])
    assert len(load_ieer(ieer.Path(os.environ["BNRNN_DATA"]))) == 94
    for split, least in (("train", 1400), ("valid", 200), ("test", 200)):
        found = originals(data, split)
        assert len(found) > least
        for passage, question, answer in found:
            assert answer in passage and "@placeholder" in question and answer not in question
            assert "<" not in "".join(w for w in passage if w not in ("<unk>", "<num>"))
