"""Checkpoints: saving and restoring everything that an interrupted run needs to resume with identical results."""

import gzip
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bnrnn.errors import BnrnnError
from bnrnn.files import atomic_write

CHECKPOINT = "checkpoint.pt"  # the file of an unfinished run
MODEL = "model.pt"  # the file of a finished run: the selected weights with population statistics


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: if the process is killed, the previous checkpoint remains."""
    with atomic_write(path) as file:
        torch.save(state, file)


def load(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint to the CPU, or its compressed copy if only that exists. Returns None if neither exists.

    Raises BnrnnError for a file that cannot be read.
    """
    found = next((p for p in (path, packed(path)) if p.exists()), None)
    if found is None:
        return None
    try:
        with gzip.open(found) if found.suffix == ".gz" else found.open("rb") as file:
            return torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise almost any exception
        raise BnrnnError(f"{found} cannot be read ({error}): remove it to start the run again") from error


def packed(path: Path) -> Path:
    """The path of a checkpoint's compressed copy, which may be committed to the repository."""
    return path.with_name(path.name + ".gz")


def pack(path: Path, most: int) -> bool:
    """Write the compressed copy of a checkpoint. If it has more than `most` bytes, remove it and return False."""
    content = gzip.compress(path.read_bytes(), mtime=0)
    if len(content) > most:
        packed(path).unlink(missing_ok=True)
        return False
    with atomic_write(packed(path)) as file:
        file.write(content)
    return True


def remove(path: Path) -> None:
    """Remove a checkpoint and its compressed copy."""
    path.unlink(missing_ok=True)
    packed(path).unlink(missing_ok=True)


def random_state() -> dict[str, Any]:
    """The states of all random generators, as tensors, numbers and lists."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest],
        "python": random.getstate(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the states of all random generators."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
