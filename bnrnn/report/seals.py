"""The seals of stored evidence: one committed list with the SHA-256 of every file on which pages rest.

Results and analyses have checksums of their own, but whoever edits a number can compute these again, and older files
have none. The list is written by `make seal` alone, so that a change of evidence is a line in a commit.
"""

import hashlib
from pathlib import Path

from bnrnn.errors import BnrnnError
from bnrnn.system.files import read_text, write_text

SEALS = "SEALS"  # in the folder of results, in the form of `sha256sum`
KINDS = (".json", ".jsonl", ".safetensors", ".gz")  # results, analyses, benchmarks; records; models; checkpoints
OTHERS = ("wandb", "slurm", ".submitit")  # folders of files on which no page rests
MOST_NAMED = 5
REMEDY = "restore it with git"


def seal(results: Path) -> int:
    """Write the list of a folder of results. Returns the number of files."""
    found = _digests(results)
    write_text(results / SEALS, "".join(f"{digest}  {name}\n" for name, digest in found.items()))
    return len(found)


def check_seals(results: Path) -> None:
    """Raise BnrnnError, with their names, if files differ from the list, are missing, or are not in it."""
    lines = read_text(results / SEALS, REMEDY, "a list of checksums").splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    found = _digests(results)
    wrong = {
        "changed": [name for name in listed if name in found and found[name] != listed[name]],
        "missing": [name for name in listed if name not in found],
        "not sealed": [name for name in found if name not in listed],
    }
    parts = [f"{what}: {_named(names)}" for what, names in wrong.items() if names]
    if parts:
        raise BnrnnError(
            f"{results / SEALS} does not agree with the files beside it ({'; '.join(parts)}): restore files that "
            "nothing should have changed; after runs of your own, look at the change and run `make seal`"
        )


def _digests(results: Path) -> dict[str, str]:
    """The SHA-256 of the files of a folder on which pages rest, by their names relative to it, sorted."""
    paths = sorted(path for path in results.rglob("*") if path.suffix in KINDS and path.is_file())
    paths = [path for path in paths if not set(OTHERS).intersection(path.relative_to(results).parts)]
    return {str(path.relative_to(results)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
