"""Writing files atomically: readers find the old file or the complete new one, never a part of it."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Context manager with a file to write, which replaces `path` at the end. After an error, `path` is unchanged."""
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
    """Write JSON atomically, with one value per line."""
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
