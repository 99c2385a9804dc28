"""Files: reading those that may be damaged with one message for any fault, and writing atomically."""

import errno
import gzip
import hashlib
import io
import json
import os
import re
import stat
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from bnrnn.errors import BnrnnError, first_line

OLD = 3600  # seconds after which an unfinished file is one of a process that was killed
MOST = 1 << 28  # bytes that are read into memory at most, also from a compressed file
MOST_JSON, MOST_VALUES = 100_000_000, 1 << 22  # of a JSON file; COCO's largest has 92 MB and 3.5 million values
MOST_MEMBERS = 100_000  # of a tar archive
CHUNK = 1 << 24
SUMS = "SHA256SUMS"


@contextmanager
def reading(path: Path, remedy: str, what: str = "") -> Iterator[None]:
    """Context manager for reading a file: any error in it becomes a BnrnnError with the path and the remedy.

    A damaged file can raise almost any exception in the library that reads it. A path that is no regular file, such as
    a folder, a dangling link or a pipe, which could block for ever, is an error before anything is opened.

    Args:
        what: what the file was expected to be, such as "a feature file", for the message.
    """
    try:
        _check_regular(path)
        yield
    except BnrnnError:
        raise
    except Exception as error:
        kind = f"{type(error).__name__}: " if isinstance(error, (LookupError, TypeError)) else ""
        state = f"is not {what}" if what else "is damaged"
        raise BnrnnError(f"{path} {state} ({kind}{first_line(error)}): {remedy}") from error


def _check_regular(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise OSError("its link leads nowhere" if path.is_symlink() else "the file is missing") from None
    if not stat.S_ISREG(mode):
        raise OSError("it is a folder" if stat.S_ISDIR(mode) else "it is no regular file")


def open_regular(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file as `open` does, but follow no link to another file, and never wait for the other end of a pipe.

    Raises OSError for a path that is no regular file.
    """

    def opener(name: str, flags: int) -> int:
        try:
            number = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "it is a link", name) from None
            if error.errno == errno.ENXIO:  # a pipe that nobody reads
                raise OSError(errno.ENXIO, "it is no regular file", name) from None
            raise
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise OSError(errno.EINVAL, "it is no regular file", name)
        return number

    return open(path, mode, opener=opener, **options)


def check_listed(path: Path) -> None:
    """Compare a file with its line in the SHA256SUMS of its folder, as `sha256sum * > SHA256SUMS` writes it.

    Many formats have no checksum of their own: a changed letter is only another text. A folder without this file is
    not checked. Raises ValueError for a file that differs or is not listed, and BnrnnError for a damaged list.
    """
    sums = path.with_name(SUMS)
    if not sums.exists() and not sums.is_symlink():
        return
    with reading(sums, f"write it again with `sha256sum * > {SUMS}`", "a list of checksums"), sums.open("rb") as file:
        lines = read_at_most(file, 1 << 24).decode("utf-8").splitlines()
        pairs = [re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line) for line in lines]
        listed = {pair[2]: pair[1] for pair in pairs if pair is not None}
        if len(listed) < len(lines):
            raise ValueError(f"line {pairs.index(None) + 1 if None in pairs else len(lines)} is no checksum of a file")
    if path.name not in listed:
        raise ValueError(f"{SUMS} beside it does not list it")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != listed[path.name]:
            raise ValueError(f"it does not have its checksum in {SUMS}")


def read_bytes(path: Path, remedy: str, what: str = "", most: int = MOST) -> bytes:
    """The content of a file; a file with the ending .gz is decompressed. Raises BnrnnError, also above `most` bytes."""
    with reading(path, remedy, what):
        check_listed(path)
        with opened(path) as file:
            return read_at_most(file, most)


def opened(path: Path) -> Any:
    """Open a file to read bytes; a file with the ending .gz is decompressed."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def read_at_most(file: Any, most: int = MOST) -> bytes:
    """All bytes of an open file. Raises ValueError, before it fills the memory, if there are more than `most`."""
    content = io.BytesIO()
    while chunk := file.read(CHUNK):
        content.write(chunk)
        if content.tell() > most:
            raise ValueError(f"more than {most:,} bytes")
    return content.getvalue()


def read_text(path: Path, remedy: str, what: str = "") -> str:
    """The text of a UTF-8 file. Raises BnrnnError."""
    with reading(path, remedy, what):
        return read_bytes(path, remedy, what).decode("utf-8")


def read_json(path: Path, remedy: str, what: str = "") -> Any:
    """The content of a JSON file. Raises BnrnnError, also above MOST_JSON bytes and MOST_VALUES values."""
    with reading(path, remedy, what):
        content = read_bytes(path, remedy, what, MOST_JSON)
        if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES:,} values")
        return json.loads(content)


def tar_members(path: Path, wanted: Callable[[str], Any], most: int = MOST) -> dict[str, bytes]:
    """The regular files of a tar archive whose names are wanted. Links and devices in it are never followed or opened.

    The whole archive is read, so that the checksum at the end of a .gz is verified. Raises ValueError if a wanted name
    is no regular file, if the files have more than `most` bytes in all, for more than MOST bytes in a .gz, and for more
    than MOST_MEMBERS members.
    """
    check_listed(path)
    found: dict[str, bytes] = {}
    total = 0
    with _decompressed(path) as content, tarfile.open(fileobj=content, mode="r:") as archive:
        for number, member in enumerate(archive):
            if number == MOST_MEMBERS:
                raise ValueError(f"more than {MOST_MEMBERS:,} members")
            if wanted(member.name):
                file = archive.extractfile(member) if member.isreg() else None
                if file is None:
                    raise ValueError(f"{member.name} is no regular file")
                total += member.size
                if total > most:
                    raise ValueError(f"its files have more than {most:,} bytes")
                found[member.name] = file.read()
        while chunk := content.read(CHUNK):
            if chunk.strip(b"\0"):
                raise ValueError("something follows its end")
    return found


def _decompressed(path: Path) -> Any:
    """Open a file; a file with the ending .gz is decompressed into memory."""
    if path.suffix != ".gz":
        return path.open("rb")
    with opened(path) as file:
        return io.BytesIO(read_at_most(file))


def zip_members(path: Path, wanted: Callable[[str], Any], most: int = MOST) -> dict[str, bytes]:
    """The files of a zip archive whose names are wanted, checksums verified.

    Raises ValueError if they have more than `most` bytes in all.
    """
    check_listed(path)
    with whole_zip(path) as archive:
        members = [member for member in archive.infolist() if wanted(member.filename)]
        if sum(member.file_size for member in members) > most:
            raise ValueError(f"its files have more than {most:,} bytes")
        return {member.filename: archive.read(member) for member in members}


@contextmanager
def whole_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive. Raises ValueError if the file has anything before or after the archive."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        file.seek(-22 - len(archive.comment), os.SEEK_END)
        first = min((member.header_offset for member in archive.infolist()), default=0)
        if first != 0 or file.read(4) != b"PK\5\6":
            raise ValueError("something is before the beginning or after the end of the archive")
        yield archive


def make_folder(path: Path) -> None:
    """Make a folder and its parents. Raises BnrnnError with its path if that is impossible."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager for writing a file: an error of the system, such as a full disk, becomes a BnrnnError."""
    try:
        yield
    except OSError as error:
        raise BnrnnError(
            f"{path} cannot be written ({error.strerror or error}): make room or make it writable, then start again; "
            "what was there before is unchanged"
        ) from error


@contextmanager
def atomic_write(path: Path, check: Callable[[Path], object] | None = None) -> Iterator[IO[bytes]]:
    """Context manager with a file to write, which replaces `path` at the end. After an error, `path` is unchanged.

    Until then it is `<name>.<random>.partial`, so several processes may write `path` at once: the last one counts. What
    killed processes left is removed after an hour.

    Args:
        check: is called with the path of the written file before it replaces the old one, and raises if it is damaged.

    Raises BnrnnError if the system refuses to write.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex[:8]}.partial")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f"{escape(path.name)}.*.partial"):
            with suppress(FileNotFoundError):
                if time.time() - leftover.stat().st_mtime > OLD:
                    leftover.unlink()
        try:
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if check is not None:
                check(partial)
            os.replace(partial, path)
            _sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk, so that a replaced file survives a power failure."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(number)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, with one value per line."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Write measured numbers as JSON, with their SHA-256 as the key `sha256`, atomically."""
    write_json(path, content | {"sha256": checksum(content)})


def read_record(path: Path, remedy: str, what: str = "") -> dict[str, Any]:
    """What `write_record` wrote. A file from before there were checksums has none, and is accepted.

    Raises BnrnnError for a damaged or changed file. Spaces and line ends do not matter.
    """
    with reading(path, remedy, what):
        content = read_json(path, remedy, what)
        found = content.pop("sha256", None)
        if found is not None and found != checksum(content):
            raise ValueError("it does not have its checksum")
    return content


def checksum(content: dict[str, Any]) -> str:
    """The SHA-256 of JSON values, whatever the order of the keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text atomically."""
    with atomic_write(path) as file:
        file.write(text.encode())
