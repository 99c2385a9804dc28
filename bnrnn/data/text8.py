"""text8, the first 10^8 characters of a cleaned Wikipedia (Mahoney 2009), as in Cooijmans et al. 2016, section 5.3."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from bnrnn.data.base import render_sizes
from bnrnn.data.download import fetch, is_good
from bnrnn.data.language import CHUNK, Segments, check_symbols
from bnrnn.errors import BnrnnError, MissingData
from bnrnn.system.files import atomic_write, check_listed, reading, whole_zip

URL = "http://mattmahoney.net/dc/text8.zip"
ARCHIVE = "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232"  # SHA-256 of text8.zip
SIZE = 100_000_000
CRC32 = 0x7D6BE66F
BEGINNING = b" anarchism originated as a term of abuse"
SYMBOLS = b" abcdefghijklmnopqrstuvwxyz"


class Text8(Segments):
    """text8, split 90 / 5 / 5 % into train / valid / test.

    Args:
        prefix: whether to use a file with only the beginning of text8.
        valid_segments: validate on the first so many segments, as the authors' text8.py does; None uses all.
        length, test_lengths, state_noise: see Segments.

    Reads one of `text8`, `text8.zip` and `text8*.gz` in `<data_dir>/text8/`; the plain file is memory-mapped. Raises
    BnrnnError if it is missing or damaged.
    """

    def __init__(
        self,
        data_dir: str,
        prefix: bool = False,
        length: int = 180,
        test_lengths: Sequence[int] = (1000,),
        valid_segments: int | None = None,
        state_noise: float = 0.0,
    ) -> None:
        text = load_text8(Path(data_dir), prefix)
        part = len(text) // 20
        splits = {"train": text[: -2 * part], "valid": text[-2 * part : -part], "test": text[-part:]}
        name = "text8-prefix" if prefix else "text8"
        description = f"{name}: {render_sizes(splits)} characters, {len(SYMBOLS)} symbols"
        if valid_segments is not None:
            splits["valid"] = splits["valid"][: valid_segments * length]
        super().__init__(splits, SYMBOLS, length, test_lengths, description, state_noise)


def load_text8(data_dir: Path, prefix: bool) -> UInt8[np.ndarray, " _"]:
    """The bytes of text8, with verified checksum, or, with `prefix`, of a file with its beginning."""
    remedy = f"run `make data` (or `bnrnn-prepare text8 --data-dir {data_dir}`)"
    remedy += " and use data=text8" if prefix else ""
    path = _find(data_dir / "text8", prefix, remedy)
    text = _open(path, remedy)
    if not len(text):
        raise BnrnnError(f"{path} is empty, expected text8 or a beginning of it: {remedy}")
    if prefix:
        _check_prefix(path, text)
    else:
        _check_whole(str(path), text, f"{remedy}, or use the beginning of text8 that you have with data=text8_prefix")
    return text


def prepare_text8(data_dir: Path) -> None:
    """Download text8 unless `<data_dir>/text8/` has it. The file appears there after verification."""
    folder = data_dir / "text8"
    if not is_good(load_text8, data_dir, False):
        archive = fetch(URL, f"sha256:{ARCHIVE}", folder, "text8-downloaded.zip")  # keeps a text8.zip of the user
        with atomic_write(folder / "text8") as file:
            file.write(_open(archive, f"put text8.zip into {folder} by hand").data)
        archive.unlink()  # the plain file is enough, and can be memory-mapped
    print(f"{folder}: complete")


def _find(folder: Path, prefix: bool, remedy: str) -> Path:
    """The file to read. If there are several, the plain file or the .zip is the whole text8 and a .gz is a prefix."""
    plain = [path for path in (folder / "text8", folder / "text8.zip") if path.exists() or path.is_symlink()][:1]
    packed = sorted(folder.glob("text8*.gz"))
    chosen = packed or plain if prefix else plain or packed
    if not chosen:
        raise MissingData(f"{folder / 'text8'} is missing: {remedy}, or set BNRNN_DATA to the folder that holds text8/")
    if len(chosen) > 1:
        raise BnrnnError(f"{folder} has {', '.join(path.name for path in chosen)}, expected a single text8*.gz")
    return chosen[0]


def _open(path: Path, remedy: str) -> UInt8[np.ndarray, " _"]:
    """The bytes of a plain file, memory-mapped, or those in a compressed file: at most one more than text8 has."""
    with reading(path, remedy):
        check_listed(path)
        if path.suffix == ".zip":
            with whole_zip(path) as archive, archive.open("text8") as file:
                return np.frombuffer(file.read(SIZE + 1), np.uint8)
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                return np.frombuffer(file.read(SIZE + 1), np.uint8)
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)


def _check_whole(source: str, text: UInt8[np.ndarray, " _"], remedy: str) -> None:
    if len(text) != SIZE:
        found = f"more than {SIZE:,}" if len(text) > SIZE else f"{len(text):,}"
        raise MissingData(f"{source} is not all of text8: it has {found} bytes, expected {SIZE:,}: {remedy}")
    crc32 = 0
    for start in range(0, SIZE, CHUNK):
        crc32 = zlib.crc32(text[start : start + CHUNK].data, crc32)
    if crc32 != CRC32:
        raise BnrnnError(f"{source} is not text8: it has CRC-32 {crc32:08x}, expected {CRC32:08x}: {remedy}")


def _check_prefix(path: Path, text: UInt8[np.ndarray, " _"]) -> None:
    if len(text) >= SIZE:
        raise BnrnnError(f"{path} has {SIZE:,} bytes or more, expected only the beginning of text8: use data=text8")
    begin = bytes(text[: len(BEGINNING)])
    if begin != BEGINNING:
        raise BnrnnError(f"{path} is not the beginning of text8: it begins with {begin!r}, expected {BEGINNING!r}")
    check_symbols(str(path), text, SYMBOLS)
