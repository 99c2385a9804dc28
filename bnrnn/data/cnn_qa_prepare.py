"""Converts the .question files of Hermann et al. 2015 (arXiv:1506.03340) to Arrow datasets for `bnrnn.data.cnn_qa`.

A .question file has five sections, separated by empty lines:

    https://www.cnn.com/...

    passage, one line, words and punctuation marks separated by spaces

    question with one @placeholder

    @entity3

    @entity0:Some Name
    @entity3:Other Name

The vocabulary follows the reader released with Cooijmans et al. 2016: words are in lower case, all numbers are one
word, and words that occur only once in the training split are left out.
"""

import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bnrnn.data.base import sha256
from bnrnn.data.cloze import NUM, SPECIAL, UNK, Text, is_number, most_relevant
from bnrnn.data.cnn_qa import COMMAND, VERSION, load_questions
from bnrnn.data.prepared import digest, read_parts, save_prepared
from bnrnn.errors import BnrnnError, MissingData
from bnrnn.system.files import atomic_write, read_bytes
from bnrnn.system.processes import children_end_too

SPLITS = {"train": "training", "valid": "validation", "test": "test"}  # our split, and the folder of the corpus
PART = 2000  # files that are read together; an interrupted preparation reads at most so many again per process
MAX_SKIPPED = 100  # largest number of malformed files that are left out
WORDS = ("full", "top4", "question", "answer", "malformed")  # columns of what was read, words with spaces between


class Malformed(ValueError):
    """A malformed .question file; the message says what is wrong with it."""


def parse(content: bytes) -> Text:
    """The question in a file, in lower case. Raises Malformed."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Malformed(f"byte {error.start} is no UTF-8") from error
    sections = text.strip("\n").split("\n\n")
    if len(sections) != 5:
        raise Malformed(f"{len(sections)} sections with empty lines between, expected 5: URL to entities")
    passage, question, answer = (section.lower().split() for section in sections[1:4])
    entities = {line.split(":", 1)[0].lower() for line in sections[4].splitlines()}
    if not passage or "@placeholder" not in question:
        raise Malformed("no words in the passage" if not passage else "no @placeholder in the question")
    if len(answer) != 1 or answer[0] not in entities:
        raise Malformed(f"the answer {' '.join(answer)!r} is not among the entities")
    return Text(passage, question, answer[0])


def prepare_cnn_qa(
    data_dir: Path, source: Path | None = None, most_skipped: int = MAX_SKIPPED, num_proc: int = 1
) -> None:
    """Make `<data_dir>/cnn_qa/prepared/` from `<source>/questions/{training,validation,test}/*.question`.

    `num_proc` processes read the files. An interrupted preparation resumes, with any number of them. Malformed files
    are named in `cnn_qa/skipped.txt`. Raises BnrnnError for more than `most_skipped` of them, and if the folder is
    there but damaged or prepared from other files.
    """
    folder = data_dir / "cnn_qa"
    files = None if source is None else {split: _question_files(source, theirs) for split, theirs in SPLITS.items()}
    sources = None if files is None else digest([path for of_split in files.values() for path in of_split], VERSION)
    if (folder / "prepared").exists():
        load_questions(data_dir, sources)
        print(f"{folder / 'prepared'}: complete")
        return
    if files is None or sources is None:
        raise MissingData(f"{folder / 'prepared'} is missing: run {COMMAND}")
    words = _read(files, folder, most_skipped, num_proc)
    for split, of_split in files.items():
        if all(words[split]["malformed"][:]):
            raise BnrnnError(f"{of_split[0].parent} has no question that can be read: unpack the corpus again")
    save_prepared(folder / "prepared", _encode(words, folder / "parts", num_proc), VERSION, sources)
    shutil.rmtree(folder / "parts")
    print(f"{folder / 'prepared'}: complete")


def _question_files(source: Path, theirs: str) -> list[Path]:
    found = next((p for p in (source / "questions" / theirs, source / theirs) if p.is_dir()), None)
    files = sorted(path for path in found.iterdir() if path.suffix == ".question") if found else []
    if not files:
        raise BnrnnError(f"{source / 'questions' / theirs} has no .question files: is --from the folder cnn?")
    return files


def _read(files: Mapping[str, Sequence[Path]], folder: Path, most_skipped: int, num_proc: int) -> dict[str, Any]:
    """The questions of each split as words. Raises BnrnnError for too many malformed files."""
    from datasets import Features, Value

    features = Features(dict.fromkeys(WORDS, Value("string")))
    read = partial(read_questions, most_skipped=most_skipped)
    words = {
        split: read_parts(of_split, PART, read, features, folder / "parts", VERSION, num_proc, f"reading {split}")
        for split, of_split in files.items()
    }
    skipped = [line for split in words.values() for line in split["malformed"][:] if line]
    with atomic_write(folder / "skipped.txt") as file:
        file.write("".join(f"{line}\n" for line in skipped).encode())
    if len(skipped) > most_skipped:
        raise _too_many(skipped, most_skipped)
    if skipped:
        print(f"{len(skipped)} malformed files were left out, see {folder / 'skipped.txt'}")
    return words


def _too_many(skipped: list[str], most_skipped: int) -> BnrnnError:
    first = "\n".join(f"  {line}" for line in skipped[:3])
    return BnrnnError(
        f"more than {most_skipped} .question files are malformed, such as\n{first}\n"
        "Unpack the corpus again, or allow for more with --most-skipped N"
    )


def read_questions(names: Sequence[str], most_skipped: int) -> dict[str, list[str]]:
    """The questions in these files, words separated by spaces. A malformed file has only its name and its error."""
    rows: dict[str, list[str]] = {column: [] for column in WORDS}
    for name in names:
        text, malformed = Text([], [], ""), ""
        try:
            text = parse(read_bytes(Path(name), "unpack the corpus again", most=1 << 24))
        except Malformed as error:
            malformed = f"{name}: {error}"
        except BnrnnError as error:  # names the file
            malformed = str(error)
        kept = [sentence for sentence, keep in most_relevant(text.passage, text.question, 4) if keep]
        values = (text.passage, chain.from_iterable(kept), text.question, [text.answer], [malformed])
        for column, value in zip(WORDS, values, strict=True):
            rows[column].append(" ".join(value))
    skipped = [line for line in rows["malformed"] if line]
    if len(skipped) > most_skipped:  # no need to read the rest
        raise _too_many(skipped, most_skipped)
    return rows


def _encode(words: Mapping[str, Any], folder: Path, num_proc: int) -> dict[str, Any]:
    """The questions of each split as ids of one vocabulary, without malformed files."""
    from datasets import ClassLabel, Features, List, Value

    names = [*SPECIAL, *vocabulary(_count(words["train"]))]
    passage = List(Value("int32"))
    features = Features(
        full=passage, top4=passage, question=passage, answer=ClassLabel(names=names), answered=Value("bool")
    )
    encode = partial(encode_questions, index={word: i for i, word in enumerate(names)})
    options: dict[str, Any] = {
        "batched": True, "num_proc": num_proc if num_proc > 1 else None, "desc": "numbering words",
        "features": features, "remove_columns": list(WORDS), "load_from_cache_file": False,
        "new_fingerprint": sha256(repr(names).encode())[:32],
    }  # fmt: skip
    with children_end_too():
        return {
            split: rows.map(encode, cache_file_name=str(folder / f"{split}.ids.arrow"), **options)
            for split, rows in words.items()
        }


def _count(words: Any) -> Counter[str]:
    """The number of occurrences of every word in passages, questions and answers."""
    counts: Counter[str] = Counter()
    for rows in tqdm(words.iter(1000), "counting words", -(-len(words) // 1000), disable=None):
        for text in chain(rows["full"], rows["question"], rows["answer"]):
            counts.update(text.split())
    return counts


def vocabulary(counts: Mapping[str, int]) -> list[str]:
    """Words that occur more than once and are not numbers: entities by number, then others, most frequent first."""
    common = [word for word, count in counts.items() if count > 1 and not is_number(word) and word not in SPECIAL]
    entities = [word for word in common if re.fullmatch(r"@entity\d+", word)]
    others = set(common).difference(entities)
    return [
        *sorted(entities, key=lambda word: int(word[7:])),
        *sorted(others, key=lambda word: (-counts[word], word)),
    ]


class Ids(dict[str, int]):
    """The id of a word: its own if it is in the vocabulary, else NUM or UNK."""

    def __missing__(self, word: str) -> int:
        self[word] = NUM if is_number(word) else UNK
        return self[word]


def encode_questions(rows: Mapping[str, Sequence[str]], index: Mapping[str, int]) -> dict[str, list[Any]]:
    """Ids of the words, and whether the shortened passage has the answer; malformed rows are left out."""
    ids, found = Ids(index), [n for n, malformed in enumerate(rows["malformed"]) if not malformed]
    encoded: dict[str, list[Any]] = {
        column: [[ids[word] for word in rows[column][n].split()] for n in found]
        for column in ("full", "top4", "question")
    }
    encoded["answer"] = [ids[rows["answer"][n]] for n in found]
    encoded["answered"] = [rows["answer"][n] in rows["top4"][n].split() for n in found]
    return encoded
