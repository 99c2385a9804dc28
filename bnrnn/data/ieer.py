"""Cloze questions from news texts of NIST's IE-ER evaluation of 1999, in which people marked all names by hand.

The questions have the format of the CNN questions of Hermann et al. 2015, but are not part of them. The question is a
sentence or the headline of a text with one of its entities hidden; the rest of the text is the passage.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bnrnn.data.cloze import SPECIAL, Cloze, Text, encode, most_relevant, sentences, tokens
from bnrnn.data.download import find_archive
from bnrnn.errors import BnrnnError
from bnrnn.system.files import reading, zip_members

URL = "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/ieer.zip"
NUM_DOCUMENTS = 94
MOST = 1 << 21  # bytes of all files; they have 540,978
MOST_LETTERS = 40_000  # of a document; the longest has 14,294
MOST_WORDS = 1 << 24  # of all passages; they have 1,709,873
SHORTEST = 6  # minimum number of words in a question: shorter ones hardly say what is asked for
EVERY = 8  # of so many documents, one is for validation and one for the test
MARK = re.compile(r'<b_enamex[^>]*type="(\w+)"[^>]*>(.*?)<e_enamex>', re.DOTALL)


class IEERCloze(Cloze):
    """All questions of one document are in the same split.

    Args:
        num_sentences: number of sentences that a passage keeps, those most relevant to the question, as in the
            shortened CNN questions. They may lack the answer. None keeps all sentences.

    Reads `<data_dir>/ieer/ieer.zip`, or `<data_dir>/cnn_qa/standins/ieer.zip`. Raises BnrnnError if the file is missing
    or damaged.
    """

    def __init__(self, data_dir: str, num_sentences: int | None = None) -> None:
        texts: dict[str, list[Text]] = {"train": [], "valid": [], "test": []}
        num_words = 0
        for n, document in enumerate(load_ieer(Path(data_dir))):
            split = {EVERY - 2: "valid", EVERY - 1: "test"}.get(n % EVERY, "train")
            for passage, question, answer in questions(*document):
                num_words += len(passage)
                if num_words > MOST_WORDS:
                    raise BnrnnError(f"IE-ER has passages of more than {MOST_WORDS:,} words: fetch it again from {URL}")
                if num_sentences is not None:
                    best = most_relevant(passage, question, num_sentences)
                    passage = [word for sentence, keep in best if keep for word in sentence]
                texts[split].append(Text(passage, question, answer))
        if not all(texts.values()):
            lacking = next(split for split, part in texts.items() if not part)
            raise BnrnnError(f"IE-ER has no questions for {lacking}, expected names in its texts: fetch it from {URL}")
        counts = Counter(word for x in texts["train"] for word in (*x.passage, *x.question))
        mentioned = (w for split in texts.values() for x in split for w in (*x.passage, *x.question, x.answer))
        most = max(int(word.removeprefix("@entity")) for word in mentioned if _named(word))
        entities = [f"@entity{n}" for n in range(most + 1)]
        texts = {
            split: [numbered_at_random(x, entities, n) for n, x in enumerate(part)] for split, part in texts.items()
        }
        others = sorted(word for word, count in counts.items() if count > 1 and not _named(word))
        answered = sum(x.answer in x.passage for x in texts["valid"]) / len(texts["valid"])
        name = f"IE-ER cloze (the passage has the answer to {answered:.0%} of the validation questions)"
        vocabulary = [*SPECIAL, *entities, *others]
        splits = {split: encode(part, vocabulary) for split, part in texts.items()}
        super().__init__(splits, vocabulary, range(len(SPECIAL), len(SPECIAL) + len(entities)), True, name)


def load_ieer(data_dir: Path) -> list[tuple[str, str]]:
    """The (headline, text) of every document, with the markup. Raises BnrnnError if the file is missing or damaged."""
    path = find_archive(data_dir, ("ieer/ieer.zip", "cnn_qa/standins/ieer.zip"), URL)
    with reading(path, f"fetch it again from {URL}"):
        members = zip_members(path, partial(re.search, r"_\d{8}$"), MOST)
    content = "".join(text.decode("latin-1") for _, text in sorted(members.items()))
    documents = []
    for body in content.split("<BODY>")[1:]:
        before, begins, text = body.partition("</BODY>")[0].partition("<TEXT>")
        text, ends, _ = text.partition("</TEXT>")
        if begins and ends:
            documents.append((" ".join(re.findall(r"<HEADLINE>(.*?)</HEADLINE>", before, re.DOTALL)), text))
        if len(body) > MOST_LETTERS or "@entity" in body.lower():
            raise BnrnnError(
                f"{path}: a document has {len(body):,} letters or the word @entity, expected at most "
                f"{MOST_LETTERS:,} letters without it: fetch it from {URL}"
            )
    if len(documents) != NUM_DOCUMENTS:
        raise BnrnnError(f"{path} has {len(documents)} documents, expected {NUM_DOCUMENTS}: fetch it from {URL}")
    return documents


def questions(headline: str, text: str) -> Iterator[Text]:
    """The questions of a document: its headline and each sentence, once for each entity that the rest also names."""
    names: dict[tuple[str, str], int] = {}
    title, body = (tokens(_anonymous(part, names)) for part in (headline, text))
    cut = sentences(body)
    for n, question in enumerate([title, *cut]):
        if len(question) < SHORTEST or not any(map(_named, question)):
            continue
        passage = body if n == 0 else [word for m, other in enumerate(cut, 1) if m != n for word in other]
        for answer in dict.fromkeys(filter(_named, question)):
            if answer in passage:
                yield Text(passage, ["@placeholder" if word == answer else word for word in question], answer)


def numbered_at_random(text: Text, entities: list[str], seed: int) -> Text:
    """Give the entities of a text random numbers, as the CNN questions do.

    Numbers in the order of appearance would help to guess: the answer is often the entity that is named first.
    """
    names = dict(zip(entities, random.Random(seed).sample(entities, len(entities)), strict=True))
    passage, question = ([names.get(word, word) for word in words] for words in (text.passage, text.question))
    return Text(passage, question, names[text.answer])


def _anonymous(text: str, names: dict[tuple[str, str], int]) -> str:
    """Replace each name by @entityN and remove other markup.

    A last name alone stands for the latest person before it with that last name.
    """

    def replace(match: re.Match[str]) -> str:
        kind, name = match[1], " ".join(match[2].lower().split())
        if (kind, name) not in names:
            whole = [key for key in names if kind == key[0] == "PERSON" and key[1].split()[-1:] == [name]]
            names[kind, name] = names[whole[-1]] if whole else len(set(names.values()))
        return f" @entity{names[kind, name]} "

    return re.sub(r"<[^>]*>", " ", MARK.sub(replace, text))


def _named(word: str) -> bool:
    return word.startswith("@entity")
