"""Damages inputs, reads them in forked processes, and counts what comes of it."""

import io
import os
import pickle
import random
import resource
import signal
import stat
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import trange

from bnrnn.errors import BnrnnError
from tests.stress.inputs import REASONS, Input, contents, fingerprint, make_inputs
from tests.stress.processes import forked

CPU_SECONDS, SECONDS = 120, 1800.0  # a reader that takes longer hangs; on a busy machine, seconds alone say little
MEMORY = 4 << 30  # bytes that a reader may use, beside those of the imported libraries
RUN = "touch PWNED"
OTHERS = (b"\x1f\x8b\x08\0", b"PK\3\4", b"[1, 2]", b"null", b"5\n", b"<html>not found</html>\n", b"\x80\2}q\0.")


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, (RUN,)


def _commands() -> list[bytes]:
    """Contents that run a command if a reader is careless."""
    saved, array = io.BytesIO(), io.BytesIO()
    torch.save({"model": _Evil(), "config": {}}, saved)
    np.save(array, np.array([_Evil()], dtype=object), allow_pickle=True)
    return [
        pickle.dumps(_Evil()), saved.getvalue(), array.getvalue(),
        f"!!python/object/apply:os.system ['{RUN}']\n".encode(),
        f"a {RUN} |\n".encode(), f"zoe ;{RUN};cat x |[0:1]\n".encode(),
    ]  # fmt: skip


def damaged(good: bytes, rng: random.Random) -> dict[str, bytes]:
    """The content of a file after each kind of damage."""
    at = rng.randrange(len(good))

    def replaced(part: bytes) -> bytes:
        return good[:at] + part + good[at + len(part) :]

    return {
        "truncated": good[:at],
        "flipped bit": replaced(bytes([good[at] ^ 1 << rng.randrange(8)])),
        "huge number": replaced(b"\xff\xff\xff\x7f"),
        "NaN": replaced(np.array(np.nan, "<f4").tobytes()),
        "empty": b"",
        "other type": rng.choice(OTHERS),
        "not UTF-8": good[:at] + b"\xff\xfe" + good[at:],
        "command": rng.choice(_commands()),
        "doubled": good + good,
        "links": _links(good),
    }


def _links(good: bytes) -> bytes:
    """An archive of links with the names of its files; another file followed by zeros."""
    try:
        with tarfile.open(fileobj=io.BytesIO(good)) as archive:
            names = archive.getnames()
    except tarfile.TarError:
        return good + bytes(100)
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
    return content.getvalue()


def place(path: Path, good: bytes, rng: random.Random) -> str:
    """Put something damaged in the place of a good file. Returns the kind of damage."""
    made = {kind: content for kind, content in damaged(good, rng).items() if content != good}
    kind = rng.choice([*made, "folder", "dangling link", "endless file", "pipe"])
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("dangling link", "endless file"):
        path.symlink_to("nowhere" if kind == "dangling link" else "/dev/zero")
    else:
        path.write_bytes(made[kind])
    return kind


def damage_inputs(folder: Path, count: int, rng: random.Random) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """Damage inputs so many times, one file at a time.

    Returns how often each outcome occurred, and the same for each kind of input. Outcomes are `named`, `unnamed`,
    `traceback`, `hang`, `killed`, `altered`, `ran a command`, `accepted, reads the same` and `accepted, differs`.
    Every input that is none of `named` and `accepted, reads the same` is printed.
    """
    here = Path.cwd()
    os.chdir(folder)  # where a command would leave its file
    try:
        inputs = make_inputs(folder)
        expected = {one.name: _undamaged(one, folder / "output") for one in inputs}
        total, by_kind = Counter[str](), Counter[tuple[str, str]]()
        for n in trange(count, desc="damaging inputs", disable=None):
            one = inputs[n % len(inputs)]
            path = rng.choice(one.files)
            one.restore()
            kind = place(path, one.good[path], rng)
            found, message = _read(one, path, folder, expected[one.name])
            total[found] += 1
            by_kind[one.name, found] += 1
            if found != "named":
                print(f"{one.name}: {path.relative_to(one.folder)}, {kind}: {found}. {message}", flush=True)
        return total, by_kind
    finally:
        os.chdir(here)


def _undamaged(one: Input, output: Path) -> str:
    """The fingerprint of the good input. Also imports in this process what its reader needs, except for training."""
    one.restore()
    if "resumed" not in one.name and "options" not in one.name:
        one.read()
    if forked(lambda: print("\n" + fingerprint(one.read())), output, SECONDS) != 0:
        raise BnrnnError(f"{one.name}: the undamaged files cannot be read: {output.read_text()}")
    one.restore()
    return output.read_text().splitlines()[-1]


def _read(one: Input, path: Path, folder: Path, expected: str) -> tuple[str, str]:
    """The outcome of reading a damaged input, and the last line that its reader printed."""
    before, output = _state(one.folder), folder / "output"

    def read() -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        print("\n" + fingerprint(one.read()))

    status = forked(read, output, SECONDS)
    text = output.read_text(errors="replace")
    last = (text.splitlines() or [""])[-1]
    if (folder / "PWNED").exists():
        (folder / "PWNED").unlink()
        return "ran a command", last
    if status == 0:
        same = last == expected
        return ("accepted, reads the same", "") if same else ("accepted, differs", REASONS.get(one.name, "no reason"))
    if status in (None, -signal.SIGXCPU):
        return "hang", last
    if _state(one.folder) != before:
        return "altered", last
    if status == 1:
        # A prepared folder and the file in it may stand apart in the message.
        is_named = path.name in text and str(one.folder) in text
        is_named = is_named or any(f"{name}{end}" in text for name in one.names for end in " ='\n")
        return ("named" if is_named else "unnamed"), last
    return ("killed" if status < 0 else "traceback"), text[-1500:]


def _state(folder: Path) -> dict[Path, Any]:
    """The content of every file in a folder, and the kind of everything else."""
    others = {p: stat.S_IFMT(p.lstat().st_mode) for p in folder.rglob("*")}
    return {p: kind for p, kind in others.items() if p.name != "run.lock"} | contents_of_regular(folder)


def contents_of_regular(folder: Path) -> dict[Path, bytes]:
    return {p: c for p, c in contents(folder).items() if not p.is_symlink()}
