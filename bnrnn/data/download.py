"""Downloads the files of data sets with pooch, which verifies a file before it moves it to its final path."""

from pathlib import Path

from bnrnn.errors import BnrnnError
from bnrnn.system.files import make_folder


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
