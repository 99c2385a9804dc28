"""Checkpoints: saving and restoring everything that an interrupted run needs to resume with identical results.

A file of weights is an ordinary file of torch.save, which is a zip archive. Its zip comment has the version of its
content and the SHA-256 of all bytes before the comment.
"""

import gzip
import hashlib
import io
import os
import random
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bnrnn.data.base import sha256
from bnrnn.system.files import atomic_write, check_listed, read_bytes, reading
from bnrnn.training.state import check_fields, is_weights

CHECKPOINT = "checkpoint.pt"  # the file of an unfinished run
MODEL = "model.pt"  # the file of a finished run: the selected weights with population statistics
VERSION = 1  # of the content; increase it when older code could not read the file correctly
PARTS = ("state", "model", "optimizer", "random", "config")  # what a checkpoint has; a model has two of them
ZIP_END = b"PK\x05\x06"  # begins the last 22 bytes of a zip archive, which end with the length of its comment
REMEDY = "remove it to start the run again"
MOST = 4 << 30  # bytes of a checkpoint, whose tensors fill the memory only after they were verified
MOST_COMPRESSED = 1 << 28  # bytes in a compressed copy, which is decompressed into memory: larger ones have none
MOST_VALUES = 10_000  # in a configuration


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: the previous one remains until the new one was read back and verified.

    Raises BnrnnError if the system refuses to write, as on a full disk.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_write(path, check=_check_written) as file:
        file.write(sealed(buffer.getvalue()))


def _check_written(path: Path) -> None:
    with path.open("rb") as file:
        check_seal(file)


def load(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint to the CPU, or its compressed copy (see `existing`). Returns None if neither exists.

    Files that were written before there were checksums are accepted; the CRC-32 of each of their tensors is verified.
    Raises BnrnnError for a file that is damaged, of a newer version, or no checkpoint or model.
    """
    found = existing(path)
    if found is None:
        return None
    return _read(found, path.name, REMEDY)


def existing(path: Path) -> Path | None:
    """The path of the checkpoint or of its compressed copy, damaged or not; None without both.

    Of both, it is the one with more updates: a copy from another machine may be ahead. Raises BnrnnError if one of the
    two is damaged.
    """
    found = [p for p in (path, compressed(path)) if p.exists() or p.is_symlink()]
    if len(found) < 2:
        return next(iter(found), None)
    return max(found, key=lambda p: _read(p, path.name, "remove it to resume from the other one")["state"]["update"])


def _read(found: Path, name: str, remedy: str) -> dict[str, Any]:
    """The content of a file of weights, compressed or not, that is called `name` without compression."""
    with reading(found, remedy, "a checkpoint"), _opened(found, remedy) as file:
        check_seal(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
        _check_parts(state, name)
    return state


def _opened(found: Path, remedy: str) -> Any:
    """Open a file of weights, decompressed. A plain file stays on the disk until it was verified."""
    if found.suffix == ".gz":
        return io.BytesIO(read_bytes(found, remedy, "a checkpoint", MOST_COMPRESSED))
    check_listed(found)
    return found.open("rb")


def sealed(content: bytes) -> bytes:
    """A zip archive without a comment, with its version and checksum as the comment."""
    seal = f"bnrnn {VERSION} sha256 ".encode()
    content = content[:-2] + (len(seal) + 64).to_bytes(2, "little")
    return content + seal + sha256(content).encode()


def check_seal(file: Any) -> None:
    """Verify a file of weights by its checksum or, without one, by the CRC-32 of each file in it. Raises ValueError.

    Also raises for a file that takes more memory than its size: torch.save does not compress.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 100))
    end = file.read()
    seal = re.search(rb"bnrnn (\d{1,9}) sha256 ([0-9a-f]{64})\Z", end)
    if size > MOST:
        raise ValueError(f"more than {MOST:,} bytes")
    if seal is None and end[-22:-18] != ZIP_END:
        raise ValueError("it is incomplete, damaged or another kind of file")
    if seal is not None and _hash(file, size - len(seal[0])) != seal[2].decode():
        raise ValueError("it does not have its checksum")
    if seal is not None and int(seal[1]) > VERSION:
        raise ValueError(f"it has version {int(seal[1])} of a newer bnrnn, expected at most {VERSION}")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(m.compress_type != zipfile.ZIP_STORED for m in members) or sum(m.file_size for m in members) > size:
            raise ValueError("its content is compressed, or larger than the file")
        if seal is None and archive.testzip() is not None:
            raise ValueError("it is incomplete, damaged or another kind of file")
    file.seek(0)


def _hash(file: Any, size: int) -> str:
    """The SHA-256 of the first bytes of a file."""
    found = hashlib.sha256()
    file.seek(0)
    while size > 0 and (chunk := file.read(min(size, 1 << 20))):
        found.update(chunk)
        size -= len(chunk)
    return found.hexdigest()


def _check_parts(state: Any, name: str) -> None:
    """Raise ValueError if the content is not that of the file with this name."""
    parts = PARTS if name == CHECKPOINT else ("model", "config")
    if not isinstance(state, Mapping) or not all(isinstance(state.get(part), Mapping) for part in parts):
        raise ValueError(f"expected {', '.join(parts)} in it")
    if not is_weights(state["model"]):
        raise ValueError("its model has other values than tensors")
    _check_number_of_values(state["config"])
    if "state" in parts:
        check_fields(state["state"])


def _check_number_of_values(tree: Any) -> None:
    """Raise ValueError for a configuration of absurd size. A value that occurs in several places counts in each."""
    found, left = 0, [tree]
    while left:
        value = left.pop()
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        found += 1 + len(parts)
        if found > MOST_VALUES:
            raise ValueError(f"its configuration has more than {MOST_VALUES:,} values")
        left.extend(parts)


def compressed(path: Path) -> Path:
    """The path of a checkpoint's compressed copy, which may be committed to the repository."""
    return path.with_name(path.name + ".gz")


def compress(path: Path, most: int) -> bool:
    """Write the compressed copy of a checkpoint. If it would be too large, remove it and return False.

    Args:
        most: its largest size in bytes. It also may not have more than MOST_COMPRESSED bytes when decompressed.
    """
    with reading(path, REMEDY, "a checkpoint"), path.open("rb") as file:
        check_seal(file)
        content = gzip.compress(file.read(MOST_COMPRESSED + 1), mtime=0)
        size = file.tell()
    if len(content) > most or size > MOST_COMPRESSED:
        compressed(path).unlink(missing_ok=True)
        return False
    with atomic_write(compressed(path)) as file:
        file.write(content)
    return True


def remove(path: Path) -> None:
    """Remove a checkpoint and its compressed copy."""
    path.unlink(missing_ok=True)
    compressed(path).unlink(missing_ok=True)


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the random generators of a run on this device, as tensors, numbers and lists."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the states of the random generators. Earlier checkpoints have those of all GPUs of their machine."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.set_rng_state(state["cuda"][min(number, len(state["cuda"]) - 1)], device)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))


def seed_everything(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
