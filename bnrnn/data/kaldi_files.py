"""Kaldi's files as data, never as commands: lists of places in archives, alignments, and shapes of matrices.

Kaldi's own reader runs the text before a `|` as a command. So this module refuses `|`, decompresses and reads
alignments itself, and passes only names of files in archives to kaldi-native-io.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bnrnn.errors import BnrnnError, MissingData
from bnrnn.system.files import check_listed, opened, read_text, reading

REMEDY = "write it again with Kaldi"
MOST_FRAMES = 1 << 20  # of one alignment; more are three hours of speech
MOST_STATES = 1 << 27  # of all alignments; more are 370 hours
BINARY, INTEGER = b"\0B", np.dtype([("size", "u1"), ("value", "<i4")])


def library() -> ModuleType:
    try:
        import kaldi_native_io
    except ImportError as error:
        raise BnrnnError("reading Kaldi's archives needs kaldi-native-io: pip install 'bnrnn[speech]'") from error
    return kaldi_native_io


def load_table(path: Path) -> dict[str, str]:
    """Read lines of a key and a value. Raises BnrnnError for an empty file, a malformed line or a repeated key."""
    if not path.exists():
        raise MissingData(
            f"{path} is missing: write it with Kaldi (docs/data.md), or set BNRNN_DATA to the folder of your datasets"
        )
    found: dict[str, str] = {}
    for n, line in enumerate(read_text(path, REMEDY, "a list of Kaldi").splitlines(), 1):
        key, _, value = line.strip().partition(" ")
        if not key or not value.strip() or key in found:
            raise BnrnnError(f"{path}, line {n}: expected a new key and a value, found {line!r}")
        found[key] = value.strip()
    if not found:
        raise BnrnnError(f"{path} is empty, expected a key and a value in each line: {REMEDY}")
    return found


def load_scp(path: Path) -> dict[str, str]:
    """The `<archive>:<offset>` of each key, with full paths.

    Raises BnrnnError for a pipe, and for an archive that is missing or does not have its checksum.
    """
    found, archives = load_table(path), set[Path]()
    for key, where in found.items():
        if "|" in where:
            raise BnrnnError(
                f"{path}: {key} is read from a command, expected a file: write the features with copy-feats"
            )
        archive = Path(path.parent, where.rpartition(":")[0] or where)
        if not archive.exists():
            raise BnrnnError(f"{archive} is missing: {path} names it for {key}")
        if "|" in str(archive):
            raise BnrnnError(f"{archive} has a | in its path, which Kaldi takes for a command: rename the folder")
        if archive not in archives:
            with reading(archive, REMEDY, "an archive of matrices"):
                check_listed(archive)
        archives.add(archive)
        found[key] = os.path.abspath(path.parent / where)
    return found


def load_alignments(folder: Path) -> dict[str, np.ndarray]:
    """The states of every aligned utterance, by its name. Raises BnrnnError for missing or damaged files."""
    paths = sorted(path for ending in ("gz", "ark", "txt") for path in folder.glob(f"ali*.{ending}"))
    if not paths:
        raise BnrnnError(f"{folder} has no ali*.gz, ali*.ark or ali*.txt: write alignments there with ali-to-pdf")
    found: dict[str, np.ndarray] = {}
    total = 0
    for path in paths:
        with reading(path, REMEDY, "an archive of alignments"), opened(path) as file:
            check_listed(path)
            if path.stat().st_size == 0:
                raise ValueError("it is empty")
            for key, states in _alignments(file):
                if key in found:
                    raise BnrnnError(f"{path}: {key} has a second alignment, expected one: remove the old ali* files")
                found[key] = states
                total += len(states)
                if total > MOST_STATES:
                    raise ValueError(f"more than {MOST_STATES:,} states")
    return found


def _alignments(file: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and states of each entry of an archive, binary or text. Raises ValueError for a damaged one.

    A binary entry is the name, a space, BINARY, the number of integers and the integers. Each of these numbers is a
    byte with the size of an integer, which is 4, and the integer.
    """
    while name := _word(file):
        start = file.read(2)
        if start == BINARY:
            (count,) = _integers(file, 1, name)
            if not 0 <= count <= MOST_FRAMES:
                raise ValueError(f"{name} claims {count:,} states")
            yield name, _integers(file, int(count), name)
        else:
            line = start + (b"" if start.endswith(b"\n") else file.readline(16 * MOST_FRAMES))
            if not line.endswith(b"\n"):
                raise ValueError(f"it ends within {name}, or {name} has more than {MOST_FRAMES:,} states")
            yield name, np.array([int(word) for word in line.split()], np.int32)


def _integers(file: Any, count: int, name: str) -> np.ndarray:
    content = file.read(INTEGER.itemsize * count)
    if len(content) != INTEGER.itemsize * count:
        raise ValueError(f"it ends within {name}")
    found = np.frombuffer(content, INTEGER)
    if (found["size"] != 4).any():
        raise ValueError(f"{name} has no list of 32-bit integers")
    return found["value"].astype(np.int32)


def _word(file: Any) -> str:
    """The next name, up to a space; empty at the end of the file. Raises ValueError without a name."""
    word = b""
    while (byte := file.read(1)) not in (b"", b" "):
        word += byte
        if len(word) > 1000 or byte in b"\n\0":
            raise ValueError(f"expected the name of an utterance, found {word[:20]!r}")
    if word and not byte:
        raise ValueError("it ends within a name")
    if byte and not word:
        raise ValueError("expected the name of an utterance, found a space")
    return word.decode()


def shape(name: str, where: str) -> tuple[int, int]:
    """Number of rows and columns of a matrix in an archive. Raises BnrnnError if it cannot be read.

    Also raises if the archive is too small for the matrix: every compression of Kaldi keeps a byte for each number.
    """
    archive = Path(where.rpartition(":")[0] or where)
    with reading(archive, REMEDY, "an archive of matrices"):
        try:
            found: Any = library().MatrixShape.read(where)
        except RuntimeError as error:
            raise BnrnnError(f"{where} has no features of {name}: {kaldi_reason(error)}") from error
        if found.num_rows < 1 or found.num_cols < 1 or found.num_rows * found.num_cols > archive.stat().st_size:
            raise ValueError(f"{name} claims {found.num_rows:,} x {found.num_cols:,} numbers")
    return found.num_rows, found.num_cols


def kaldi_reason(error: Exception) -> str:
    """What Kaldi's library says has gone wrong, without the places in its code."""
    lines = [line.removeprefix("[E] ") for line in str(error).splitlines() if line.startswith("[E]")]
    return lines[0] if lines else str(error)
