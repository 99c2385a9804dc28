"""Downloading the files of data sets with pooch, which verifies a file before it appears."""

from pathlib import Path

from bnrnn.errors import BnrnnError


def fetch(url: str, known_hash: str, folder: Path, name: str | None = None) -> Path:
    """The file behind `url`, in `folder`: downloaded, unless it is there already with this hash.

    Args:
        known_hash: of the file, with its kind, such as "sha256:fcea919c...".
        name: of the file in `folder`; None for that at the end of the URL.

    Raises BnrnnError for a folder that cannot be written to, a download that fails, and a file with another hash; what
    was there before is kept.
    """
    import pooch

    published = url.rsplit("/", 1)[-1]
    by_hand = f"Put {published} into {folder} by hand"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BnrnnError(f"{folder} cannot be written to: {error}") from error
    try:
        return Path(pooch.retrieve(url, known_hash, name or published, folder, progressbar=True))
    except ValueError as error:
        raise BnrnnError(f"{url} is not the published {published}: {error}\n{by_hand}") from error
    except OSError as error:
        raise BnrnnError(f"{url} could not be downloaded: {error}\n{by_hand}") from error
