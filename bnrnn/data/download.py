"""Fetching one file of a data set from the web."""

import http.client
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bnrnn.errors import BnrnnError


@contextmanager
def downloaded(url: str, folder: Path) -> Iterator[Path]:
    """The file behind `url`, to be verified and then moved into `folder`; what was not moved is deleted in the end.

    It lies inside of `folder`, so that os.replace moves it in one step.
    """
    name = url.rsplit("/", 1)[-1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=folder)
    except OSError as error:
        raise BnrnnError(f"{folder} cannot be written to: {error}") from error
    with temporary:
        path = Path(temporary.name, name)
        try:
            with urllib.request.urlopen(url, timeout=60) as response, path.open("wb") as file:
                shutil.copyfileobj(response, file)
        except (OSError, http.client.HTTPException) as error:
            raise BnrnnError(f"{url} could not be downloaded: {error}\nPut {name} into {folder} by hand") from error
        yield path
