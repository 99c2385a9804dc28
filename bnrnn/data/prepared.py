"""Prepared data as Arrow datasets of Hugging Face `datasets`. Preparing is parallel and can be resumed.

A prepared folder has a saved `datasets.DatasetDict`, which is memory-mapped when it is loaded, and a file
`checksums.json` with the version, a digest of the sources, and the SHA-256 of every other file. Functions import
`datasets` themselves, because importing it takes seconds.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from bnrnn.data.base import sha256
from bnrnn.errors import BnrnnError, MissingData
from bnrnn.system.files import make_folder, read_json, reading, write_json
from bnrnn.system.processes import children_end_too

CHECKSUMS = "checksums.json"
NUM_PROC = min(8, os.cpu_count() or 1)  # default number of processes; more could fill the memory of a GPU


def read_parts(
    files: Sequence[Path], size: int, read: Callable[[list[str]], Mapping[str, Any]], features: Any, folder: Path,
    version: str, num_proc: int, desc: str,
) -> Any:  # fmt: skip
    """Call `read` on batches of files in parallel, and return its rows, in the order of the files, as a Dataset.

    No process outlives this one, not even the one that `datasets` starts to count the progress.

    Args:
        size: number of files in a batch. Its rows are stored at once as an Arrow file in `folder`; a later call, with
            any number of processes, reads only batches that are not stored (see `digest`).
        features: the columns of the rows and their types.
        version: part of the name of a stored batch; increase it when `read` changes.
        desc: label of the progress bar.
    """
    from datasets import Dataset, concatenate_datasets

    batches = [list(files[n : n + size]) for n in range(0, len(files), size)]
    parts = [folder / f"{digest(batch, version)}.arrow" for batch in batches]
    missing = [
        {"part": str(part), "files": [str(path) for path in batch]}
        for part, batch in zip(parts, batches, strict=True)
        if not part.exists()
    ]
    if missing:
        make_folder(folder)
        write = partial(_write_part, read=read, features=features)
        processes = min(num_proc, len(missing))
        with children_end_too():
            Dataset.from_list(missing).map(
                write, num_proc=processes if processes > 1 else None, desc=desc, new_fingerprint="parts"
            )
    return concatenate_datasets([Dataset.from_file(str(part)) for part in parts])


def _write_part(row: Mapping[str, Any], read: Callable[[list[str]], Mapping[str, Any]], features: Any) -> None:
    from datasets.arrow_writer import ArrowWriter

    unfinished = Path(row["part"]).with_suffix(
        f".{os.getpid()}"
    )  # a process of a killed command may still write its own
    with ArrowWriter(path=str(unfinished), features=features, fingerprint=Path(row["part"]).stem) as writer:
        writer.write_batch(dict(read(row["files"])))
        writer.finalize()
    os.replace(unfinished, row["part"])


def digest(files: Sequence[Path], version: str) -> str:
    """A digest of the names, sizes and modification times of files, and of a version.

    Raises BnrnnError for a file that is missing or is no regular file.
    """
    stats = []
    for path in files:
        with reading(path, "unpack it again"):
            stats.append((path.name, path.stat().st_size, path.stat().st_mtime_ns))
    return sha256(repr((version, stats)).encode())


def save_prepared(folder: Path, splits: Any, version: str, sources: str) -> None:
    """Save the datasets of the splits as a prepared folder, which appears only when it is complete."""
    from datasets import DatasetDict

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    splits = DatasetDict(splits).with_format(None)  # the format depends on the number of processes
    splits.save_to_disk(unfinished)
    about = {"version": version, "sources": sources, "sha256": _checksums(unfinished)}
    write_json(unfinished / CHECKSUMS, about)
    os.replace(unfinished, folder)


def load_prepared(
    folder: Path, version: str, command: str, sources: str | None = None, given: str = "those given"
) -> Any:
    """Verify the files of a prepared folder and memory-map them as a `datasets.DatasetDict`.

    Raises BnrnnError, with the `command` that prepares it, for a folder that is missing, damaged, of another version,
    or prepared from other `sources` if these are given. `given` is what the message calls these.
    """
    from datasets import DatasetDict

    if not folder.exists():
        raise MissingData(f"{folder} is missing: run {command}, or set BNRNN_DATA to the folder of your datasets")
    try:
        content = read_json(folder / CHECKSUMS, "")
        known: dict[str, Any] = {
            "version": content["version"],
            "sources": content["sources"],
            "sha256": {k: str(v) for k, v in content["sha256"].items()},
        }
    except (ValueError, LookupError, TypeError, AttributeError):
        known = {"version": None}
    if known["version"] != version:
        problem = f"is damaged or was prepared by another version of bnrnn: {CHECKSUMS} does not say {version!r}"
    elif wrong := sorted(dict(known["sha256"].items() ^ _checksums(folder).items())):
        problem = f"is damaged: {', '.join(wrong)} and {CHECKSUMS} do not agree"
    elif sources not in (None, known["sources"]):
        problem = f"was, as its {CHECKSUMS} says, prepared from other files than {given}"
    else:
        try:
            return DatasetDict.load_from_disk(str(folder), keep_in_memory=False)
        except Exception as error:  # also for a split without rows
            problem = f"cannot be loaded ({type(error).__name__}: {error}), or has a split without rows"
    raise BnrnnError(f"{folder} {problem}. Delete it and run {command}")


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    found = {}
    for path in files:
        with path.open("rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def list_lengths(column: Any) -> Int[np.ndarray, " N"]:
    """The length of each list of an Arrow column."""
    return np.concatenate([np.diff(chunk.offsets.to_numpy()) for chunk in column.chunks])


def list_values(column: Any) -> Shaped[np.ndarray, " _"]:
    """The values of all lists of an Arrow column, one list after the other."""
    return column.combine_chunks().flatten().to_numpy()
