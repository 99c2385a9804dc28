"""Published files of data sets: downloading them with pooch, which verifies a file before it moves it, and reading."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bnrnn.data.base import sha256
from bnrnn.errors import BnrnnError, MissingData
from bnrnn.system.files import make_folder, read_bytes

MOST = 1 << 26  # bytes of a file; the largest, of MNIST, has 47,040,016


def fetch(url: str, known_hash: str, folder: Path, name: str | None = None) -> Path:
    """Download a file into `folder`, unless a file with this hash is there already, and return its path.

    Args:
        known_hash: algorithm and hash of the file, such as "sha256:fcea919c...".
        name: name of the file in `folder`; None takes the last part of the URL.

    Raises BnrnnError if the folder cannot be written to, the download fails or the file has another hash. A file that
    was there before is then kept.
    """
    import pooch

    published = url.rsplit("/", 1)[-1]
    by_hand = f"Put {published} into {folder} by hand"
    make_folder(folder)
    try:
        return Path(pooch.retrieve(url, known_hash, name or published, folder, progressbar=True))
    except ValueError as error:
        raise BnrnnError(f"{url} is not the published {published}: {error}\n{by_hand}") from error
    except OSError as error:
        raise BnrnnError(f"{url} could not be downloaded: {error}\n{by_hand}") from error


def find_archive(data_dir: Path, patterns: Sequence[str], url: str) -> Path:
    """The first file that matches one of the patterns. Raises MissingData, with the URL of the file, without one."""
    found = [path for pattern in patterns for path in sorted(data_dir.glob(pattern))]
    if not found:
        raise MissingData(
            f"{data_dir / patterns[0]} is missing: put it there ({url}), or set BNRNN_DATA to the folder that holds "
            f"{patterns[0].partition('/')[0]}/"
        )
    return found[0]


def read_published(folder: Path, name: str, checksum: str, packed: str = "") -> bytes:
    """The content of a file, which has this SHA-256 when it is decompressed.

    Args:
        folder: a folder of data, which is called by the name that `bnrnn-prepare` takes.
        packed: the ending of the compressed file, such as .gz, which is read if there is no plain one.

    Raises BnrnnError for a file that is missing or has another checksum.
    """
    command = f"`make data` (or `bnrnn-prepare {folder.name} --data-dir {folder.parent}`)"
    path = next((path for path in (folder / name, folder / f"{name}{packed}") if path.exists()), None)
    if path is None:
        raise MissingData(
            f"{folder / name}{packed} is missing: run {command}, or set BNRNN_DATA to the folder that holds "
            f"{folder.name}/"
        )
    content = read_bytes(path, f"fetch it again with {command}", most=MOST)
    if (found := sha256(content)) != checksum:
        raise BnrnnError(
            f"{path} is not the published {name}: its {len(content):,} bytes begin with {content[:20]!r} and have "
            f"SHA-256 {found[:16]}..., expected {checksum[:16]}...: fetch it again with {command}"
        )
    return content


def is_good(read: Callable[..., object], *given: object) -> bool:
    """Whether a file can be read without a BnrnnError. If so, it is not downloaded again."""
    try:
        read(*given)
    except BnrnnError:
        return False
    return True
