"""Converts the .question files of Hermann et al. 2015 (arXiv:1506.03340) to what `bnrnn.data.cnn_qa` reads.

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

import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from bnrnn.data.base import sha256
from bnrnn.data.cloze import NUM, SPECIAL, UNK, Text, is_number, most_relevant
from bnrnn.data.cnn_qa import VARIANTS, array_name, digest, read_index
from bnrnn.errors import BnrnnError
from bnrnn.files import atomic_write, write_json

SPLITS = {"train": "training", "valid": "validation", "test": "test"}  # ours, and their folders
SHARD = 2000  # files that are read in one go, and lost if it is interrupted
MAX_SKIPPED = 100  # malformed files


class Malformed(ValueError):
    """What is wrong with a .question file."""


class Shard(NamedTuple):
    """What became of some files: ids are of `words`; `kept` says which belong to the shortened variant."""

    words: list[str]
    ids: np.ndarray
    starts: np.ndarray
    answers: np.ndarray
    kept: np.ndarray


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


def prepare_cnn_qa(data_dir: Path, source: Path | None = None, most_skipped: int = MAX_SKIPPED) -> None:
    """Make `<data_dir>/cnn_qa/prepared/` from `<source>/questions/{training,validation,test}/*.question`.

    Files are read in parallel, and those that were read stay so if the preparation is interrupted. Malformed ones are
    named in `prepared/skipped.txt`. Raises BnrnnError for more than `most_skipped` of them.
    """
    folder = data_dir / "cnn_qa"
    if (folder / "prepared/index.json").exists():
        read_index(folder / "prepared")
        print(f"{folder / 'prepared'}: complete")
        return
    if source is None:
        raise BnrnnError(
            f"{folder / 'prepared'} is missing: with the questions of Hermann et al. 2015 (cnn/questions/...) at hand, "
            f"run `python -m bnrnn.prepare cnn_qa --from DIR --data-dir {data_dir}`"
        )
    shards = list(_shards(source, folder / "shards"))
    _read_all(shards, folder, most_skipped)
    _merge([path for path, _ in shards], folder)
    shutil.rmtree(folder / "shards")
    print(f"{folder / 'prepared'}: complete")


def _shards(source: Path, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Where the content of each SHARD files goes, and their names."""
    for split, theirs in SPLITS.items():
        found = next((p for p in (source / "questions" / theirs, source / theirs) if p.is_dir()), None)
        names = sorted(e.path for e in os.scandir(found) if e.name.endswith(".question")) if found else []
        if not names:
            raise BnrnnError(f"{source / 'questions' / theirs} has no .question files: is --from the folder cnn?")
        for n in range(0, len(names), SHARD):
            yield folder / f"{split}-{n // SHARD:05d}.npz", names[n : n + SHARD]


def _read_all(shards: list[tuple[Path, list[str]]], folder: Path, most_skipped: int) -> None:
    """Read the files of those shards that are not there yet."""
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    skipped: list[str] = []
    total = sum(len(names) for _, names in shards)
    with ProcessPoolExecutor() as pool, tqdm(total=total, unit=" files", desc="reading", disable=None) as bar:
        jobs = {pool.submit(_read_shard, path, names): len(names) for path, names in shards}
        for job in as_completed(jobs):
            skipped += job.result()
            bar.update(jobs[job])
            if len(skipped) > most_skipped:
                pool.shutdown(cancel_futures=True)
                break
    report = folder / "skipped.txt"
    report.write_text("".join(f"{line}\n" for line in sorted(skipped)))
    if len(skipped) > most_skipped:
        first = "\n".join(f"  {line}" for line in skipped[:3])
        raise BnrnnError(
            f"more than {most_skipped} .question files are malformed, of which {report} names those found:\n{first}\n"
            "Unpack the corpus again, or allow for more with --most-skipped N"
        )
    if skipped:
        print(f"{len(skipped)} malformed files were left out, see {report}")


def _read_shard(path: Path, names: list[str]) -> list[str]:
    """Write a shard unless it is there, made of the same files; a line for each file that was left out."""
    about = path.with_suffix(".json")  # written last
    names_digest = sha256("\n".join(names).encode())
    if about.exists():
        known = json.loads(about.read_text())
        if known["names"] == names_digest:
            return known["skipped"]
    skipped, texts = [], []
    for name in names:
        try:
            texts.append(parse(Path(name).read_bytes()))
        except (Malformed, OSError) as error:
            skipped.append(f"{name}: {error}")
    words: dict[str, int] = {}
    ids: list[int] = []
    starts, answers, kept = [0], [], []
    for text in texts:
        for part in (text.passage, text.question):
            ids += [words.setdefault(word, len(words)) for word in part]
            starts.append(len(ids))
        kept += _kept(text) + [True] * len(text.question)
        answers.append(words.setdefault(text.answer, len(words)))
    content = io.BytesIO()
    np.savez(
        content,
        words=np.frombuffer("\n".join(words).encode(), np.uint8),
        ids=np.array(ids, np.int32),
        starts=np.array(starts, np.int64),
        answers=np.array(answers, np.int32),
        kept=np.array(kept, bool),
    )
    with atomic_write(path) as file:
        file.write(content.getbuffer())
    write_json(about, {"names": names_digest, "skipped": skipped})
    return skipped


def _kept(text: Text) -> list[bool]:
    """Which words of the passage are in the sentences most relevant to the question."""
    chosen, begin = [False] * len(text.passage), 0
    for sentence, keep in most_relevant(text.passage, text.question, 4):
        chosen[begin : begin + len(sentence)] = [keep] * len(sentence)
        begin += len(sentence)
    return chosen


def _merge(paths: list[Path], folder: Path) -> None:
    """Put the shards together, in the ids of one vocabulary. index.json is written last and means done."""
    partial, counts, sizes = folder / "prepared.partial", Counter(), Counter()
    shutil.rmtree(partial, ignore_errors=True)
    for variant in VARIANTS:
        (partial / variant).mkdir(parents=True)
    for path in tqdm(paths, unit=" shards", desc="counting", disable=None):
        split, shard = path.name.split("-")[0], _load(path)
        for name, size in (("full", len(shard.ids)), ("top4", int(shard.kept.sum())), ("n", len(shard.answers))):
            sizes[split, name] += size
        sizes[split, "answered"] += answered(shard)
        if split == "train":
            found = np.bincount(shard.ids, minlength=len(shard.words)) + np.bincount(
                shard.answers, minlength=len(shard.words)
            )
            counts.update(dict(zip(shard.words, found.tolist(), strict=True)))
    entities, others = vocabulary(counts)
    words = [*SPECIAL, *entities, *others]
    (partial / "vocabulary.txt").write_text("".join(f"{word}\n" for word in words))
    index = {word: i for i, word in enumerate(words)}
    for split in SPLITS:
        own = [path for path in paths if path.name.startswith(split)]
        for variant in VARIANTS:
            _concatenate(own, partial, split, variant, index, sizes)
    shutil.copy(folder / "skipped.txt", partial)
    files = sorted(p for p in partial.rglob("*") if p.is_file())
    share = sizes["valid", "answered"] / max(1, sizes["valid", "n"])
    about: dict[str, Any] = {"num_entities": len(entities), "num_words": len(words), "answered": round(share, 4)}
    about["sha256"] = {str(p.relative_to(partial)): digest(p) for p in files}
    write_json(partial / "index.json", about)
    shutil.rmtree(folder / "prepared", ignore_errors=True)
    os.replace(partial, folder / "prepared")
    (folder / "skipped.txt").unlink()


def answered(shard: Shard) -> int:
    """How many shortened passages have the answer to their question."""
    starts = shard.starts
    return sum(
        bool((shard.kept[a:b] & (shard.ids[a:b] == answer)).any())
        for a, b, answer in zip(starts[:-1:2], starts[1::2], shard.answers, strict=True)
    )


def vocabulary(counts: Counter[str]) -> tuple[list[str], list[str]]:
    """Entities by number, and the other words by count, of those that occur more than once and are no numbers."""
    common = [word for word, count in counts.items() if count > 1 and not is_number(word)]
    entities = [word for word in common if re.fullmatch(r"@entity\d+", word)]
    others = set(common).difference(entities)
    return sorted(entities, key=lambda word: int(word[7:])), sorted(others, key=lambda word: (-counts[word], word))


def _concatenate(
    paths: Iterable[Path], folder: Path, split: str, variant: str, index: dict[str, int], sizes: Counter[Any]
) -> None:
    """Write the three arrays of a split, one shard after the other."""
    n, k = sizes[split, "n"], sizes[split, variant]
    shapes = {"ids": (k, np.int32), "starts": (2 * n + 1, np.int64), "answers": (n, np.int32)}
    ids, starts, answers = (
        np.lib.format.open_memmap(folder / array_name(variant, split, part), "w+", dtype, (size,))
        for part, (size, dtype) in shapes.items()
    )
    done, end = 0, 0
    for path in paths:
        shard = _load(path)
        new = np.array([NUM if is_number(word) else index.get(word, UNK) for word in shard.words] or [UNK], np.int32)
        own = new[shard.ids] if variant == "full" else new[shard.ids[shard.kept]]
        before = shard.starts if variant == "full" else np.concatenate([[0], np.cumsum(shard.kept)])[shard.starts]
        ids[end : end + len(own)] = own
        starts[2 * done : 2 * done + len(before)] = end + before
        answers[done : done + len(shard.answers)] = new[shard.answers]
        done, end = done + len(shard.answers), end + len(own)
    for array in (ids, starts, answers):
        array.flush()


def _load(path: Path) -> Shard:
    with np.load(path) as arrays:
        words = arrays["words"].tobytes().decode().split("\n")
        return Shard(words, *(arrays[name] for name in Shard._fields[1:]))
