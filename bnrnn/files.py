"""Writing files atomically: a file is the old one or the new one, never half of one."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the place of `path` at the end; after an error `path` is what it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically, one line a value."""
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
