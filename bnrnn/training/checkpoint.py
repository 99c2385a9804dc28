"""Checkpoints: saving and restoring everything that an interrupted run needs to resume with identical results.

A file of weights is an ordinary file of torch.save, which is a zip archive. Its zip comment has the version of its
content and the SHA-256 of all bytes before the comment.
"""

import gzip
import io
import random
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bnrnn.data.base import sha256
from bnrnn.system.files import atomic_write, read_bytes, reading

CHECKPOINT = "checkpoint.pt"  # the file of an unfinished run
MODEL = "model.pt"  # the file of a finished run: the selected weights with population statistics
VERSION = 1  # of the content; increase it when older code could not read the file correctly
PARTS = ("state", "model", "optimizer", "random", "config")  # what a checkpoint has; a model has two of them
ZIP_END = b"PK\x05\x06"  # begins the last 22 bytes of a zip archive, which end with the length of its comment
REMEDY = "remove it to start the run again"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: the previous one remains until the new one was read back and verified.

    Raises BnrnnError if the system refuses to write, as on a full disk.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with atomic_write(path, check=lambda partial: unsealed(partial.read_bytes())) as file:
        file.write(sealed(buffer.getvalue()))


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
    with reading(found, remedy, "a checkpoint"):
        content = unsealed(read_bytes(found, remedy, "a checkpoint"))
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        _check_parts(state, name)
    return state


def sealed(content: bytes) -> bytes:
    """A zip archive without a comment, with its version and checksum as the comment."""
    seal = f"bnrnn {VERSION} sha256 ".encode()
    content = content[:-2] + (len(seal) + 64).to_bytes(2, "little")
    return content + seal + sha256(content).encode()


def unsealed(content: bytes) -> bytes:
    """The content, verified by its checksum or, without one, by the CRC-32 of each file in it. Raises ValueError."""
    seal = re.search(rb"bnrnn (\d+) sha256 ([0-9a-f]{64})\Z", content[-100:])
    if seal is None:
        if content[-22:-18] != ZIP_END or zipfile.ZipFile(io.BytesIO(content)).testzip() is not None:
            raise ValueError("it is incomplete, damaged or another kind of file")
    elif sha256(content[: -len(seal[0])]) != seal[2].decode():
        raise ValueError("it does not have its checksum")
    elif int(seal[1]) > VERSION:
        raise ValueError(f"it has version {int(seal[1])} of a newer bnrnn, expected at most {VERSION}")
    return content


def _check_parts(state: Any, name: str) -> None:
    """Raise ValueError if the content is not that of the file with this name."""
    parts = PARTS if name == CHECKPOINT else ("model", "config")
    if not isinstance(state, Mapping) or not all(isinstance(state.get(part), Mapping) for part in parts):
        raise ValueError(f"expected {', '.join(parts)} in it")


def compressed(path: Path) -> Path:
    """The path of a checkpoint's compressed copy, which may be committed to the repository."""
    return path.with_name(path.name + ".gz")


def compress(path: Path, most: int) -> bool:
    """Write the compressed copy of a checkpoint. If it has more than `most` bytes, remove it and return False."""
    content = gzip.compress(unsealed(read_bytes(path, REMEDY, "a checkpoint")), mtime=0)
    if len(content) > most:
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
