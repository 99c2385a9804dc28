"""Cloze questions from real news: the newswire of NIST's IE-ER evaluation of 1999, whose names were marked by hand.

They have the form of the CNN questions of Hermann et al. 2015 and are none of them: a sentence or headline of the text
is the question, with one of its entities hidden, and the rest of the text is the passage.
"""

import random
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bnrnn.data.cloze import SPECIAL, Cloze, Text, encode, most_relevant, sentences, tokens
from bnrnn.errors import BnrnnError

URL = "https://raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora/ieer.zip"
NUM_DOCUMENTS = 94
SHORTEST = 6  # words of a question, so that there is something to go by
EVERY = 8  # documents: one for validation and one for the test
MARK = re.compile(r'<b_enamex[^>]*type="(\w+)"[^>]*>(.*?)<e_enamex>', re.DOTALL)


class IEERCloze(Cloze):
    """Questions of one document are all in the same split.

    Args:
        num_sentences: of the passage that are kept, those most relevant to the question as in the shortened CNN
            questions; the answer may not be in them. None keeps all.

    Reads `<data_dir>/ieer/ieer.zip`, or `<data_dir>/cnn_qa/standins/ieer.zip`.
    """

    def __init__(self, data_dir: str, num_sentences: int | None = None) -> None:
        texts: dict[str, list[Text]] = {"train": [], "valid": [], "test": []}
        for n, document in enumerate(load_ieer(Path(data_dir))):
            split = {EVERY - 2: "valid", EVERY - 1: "test"}.get(n % EVERY, "train")
            for passage, question, answer in questions(*document):
                if num_sentences is not None:
                    best = most_relevant(passage, question, num_sentences)
                    passage = [word for sentence, keep in best if keep for word in sentence]
                texts[split].append(Text(passage, question, answer))
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
    """(headline, text) of every document, marks included."""
    found = [path for path in (data_dir / "ieer/ieer.zip", data_dir / "cnn_qa/standins/ieer.zip") if path.exists()]
    if not found:
        raise BnrnnError(
            f"{data_dir / 'ieer/ieer.zip'} is missing: put it there ({URL}), or set BNRNN_DATA to the folder with it"
        )
    try:
        with zipfile.ZipFile(found[0]) as archive:
            names = sorted(name for name in archive.namelist() if re.search(r"_\d{8}$", name))
            content = "".join(archive.read(name).decode("latin-1") for name in names)
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise BnrnnError(f"{found[0]} is damaged ({error}): fetch it again from {URL}") from error
    documents = [
        (" ".join(re.findall(r"<HEADLINE>(.*?)</HEADLINE>", body, re.DOTALL)), text)
        for body, text in re.findall(r"<BODY>((?:(?!</BODY>).)*?<TEXT>(.*?)</TEXT>)", content, re.DOTALL)
    ]
    if len(documents) != NUM_DOCUMENTS:
        raise BnrnnError(f"{found[0]} has {len(documents)} documents, expected {NUM_DOCUMENTS}: fetch it from {URL}")
    return documents


def questions(headline: str, text: str) -> Iterator[Text]:
    """Every sentence and the headline, once for each entity of it that is named in the rest of the text too."""
    names: dict[tuple[str, str], int] = {}
    title, body = (tokens(_anonymous(part, names)) for part in (headline, text))
    cut = sentences(body)
    rests = [[word for m, other in enumerate(cut) if m != n for word in other] for n in range(len(cut))]
    for question, passage in [(title, body), *zip(cut, rests, strict=True)]:
        if len(question) < SHORTEST:
            continue
        for answer in dict.fromkeys(filter(_named, question)):
            if answer in passage:
                yield Text(passage, ["@placeholder" if word == answer else word for word in question], answer)


def numbered_at_random(text: Text, entities: list[str], seed: int) -> Text:
    """The text with other numbers for its entities, as CNN's have: who is named first is often who is asked for."""
    names = dict(zip(entities, random.Random(seed).sample(entities, len(entities)), strict=True))
    passage, question = ([names.get(word, word) for word in words] for words in (text.passage, text.question))
    return Text(passage, question, names[text.answer])


def _anonymous(text: str, names: dict[tuple[str, str], int]) -> str:
    """The text with @entityN for each name, and without other marks.

    A person's last name by itself is the person who was named with it before.
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
