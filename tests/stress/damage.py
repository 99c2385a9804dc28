"""Damaged files as hypothesis strategies, and what a reader makes of them."""

import os
import pickle
import resource
import signal
import stat
import tarfile
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from bnrnn.errors import BnrnnError
from tests.stress.corpora import packed, written
from tests.stress.inputs import REASONS, Input, contents, fingerprint, make_inputs
from tests.stress.processes import run

CPU_SECONDS, SECONDS = 120, 1800.0  # a reader that takes longer hangs; on a busy machine, seconds alone say little
MEMORY = 4 << 30  # bytes that a reader may use, beside those of the imported libraries
COMMAND = "touch PWNED"
OTHER_TYPES = (  # contents of files of other types
    b"",
    b"\x1f\x8b\x08\0",
    b"PK\3\4",
    b"[1, 2]",
    b"null",
    b"5\n",
    b"<html>not found</html>\n",
    b"\x80\2}q\0.",
)
ABSURD = (b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", np.float32("nan").tobytes(), b"-1", b"1e999", b"nan", b"9" * 30)
NO_FILE = ("folder", "dangling link", "endless file", "pipe")  # in the place of a file


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, (COMMAND,)


COMMANDS = (  # run a command if a reader is careless
    pickle.dumps(_Evil()),
    written(partial(torch.save, {"model": _Evil(), "config": {}})),
    written(lambda file: np.save(file, np.array([_Evil()], dtype=object), allow_pickle=True)),
    f"!!python/object/apply:os.system ['{COMMAND}']\n".encode(),
    f"a {COMMAND} |\n".encode(),
    f"zoe ;{COMMAND};cat x |[0:1]\n".encode(),
)


def damaged(good: bytes) -> st.SearchStrategy[tuple[str, bytes]]:
    """A kind of damage, and the content of a file after it, which differs from the good one."""
    place = st.integers(0, len(good) - 1)

    def replace(at: int, part: bytes) -> bytes:
        return good[:at] + part + good[at + len(part) :]

    kinds: dict[str, st.SearchStrategy[bytes]] = {
        "truncated": place.map(lambda at: good[:at]),
        "flipped bit": st.builds(lambda at, bit: replace(at, bytes([good[at] ^ 1 << bit])), place, st.integers(0, 7)),
        "swapped parts": st.lists(place, min_size=3, max_size=3, unique=True).map(sorted).map(
            lambda cuts: good[: cuts[0]] + good[cuts[1] : cuts[2]] + good[cuts[0] : cuts[1]] + good[cuts[2] :]
        ),
        "absurd number": st.builds(replace, place, st.sampled_from(ABSURD)),
        "not UTF-8": place.map(lambda at: good[:at] + b"\xff\xfe" + good[at:]),
        "doubled": st.just(good + good),
        "zeros at the end": st.just(good + bytes(100)),
        "another type": st.sampled_from(OTHER_TYPES),
        "command": st.sampled_from(COMMANDS),
        "links": st.just(_links(good)),
    }  # fmt: skip
    files = st.one_of(*(st.tuples(st.just(kind), strategy) for kind, strategy in kinds.items()))
    return st.one_of(files.filter(lambda found: found[1] != good), st.sampled_from(NO_FILE).map(lambda k: (k, b"")))


def _links(good: bytes) -> bytes:
    """An archive of links with the names of its files; nothing in the place of another file."""
    path = Path("archive")
    path.write_bytes(good)
    if not tarfile.is_tarfile(path):
        return b""
    with tarfile.open(path) as archive:
        return packed(dict.fromkeys(archive.getnames(), b""), links=True)


def place(path: Path, kind: str, content: bytes) -> None:
    """Put something damaged in the place of a file."""
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in NO_FILE:
        path.symlink_to("nowhere" if kind == "dangling link" else "/dev/zero")
    else:
        path.write_bytes(content)


def damage_inputs(folder: Path, count: int, number: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Damage inputs about `count` times, one file at a time; `number` selects the examples.

    Returns how often each outcome occurred for each kind of input, and the failures. Outcomes are `named`, `unnamed`,
    `traceback`, `hang`, `killed`, `altered`, `ran a command`, `accepted, reads the same` and `accepted, differs`.
    Hypothesis looks for the simplest damage that fails.
    """
    here, found, failures = Path.cwd(), Counter[tuple[str, str]](), []
    os.chdir(folder)  # where a command would leave its file
    try:
        inputs = make_inputs(folder)
        for n, one in enumerate(inputs):
            examples = (count + n) // len(inputs)
            try:
                if examples > 0:
                    damage_input(one, folder, examples, number, found)
            except AssertionError as error:
                failures.append(str(error))
    finally:
        os.chdir(here)
    return found, failures


def damage_input(one: Input, folder: Path, examples: int, number: int, found: Counter[tuple[str, str]]) -> None:
    """Damage one kind of input so many times. Raises AssertionError for an outcome that must not be."""
    expected = _undamaged(one, folder / "output")
    files = st.sampled_from(one.files).flatmap(lambda path: st.tuples(st.just(path), damaged(one.good[path])))

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(files)
    def read(damage: tuple[Path, tuple[str, bytes]]) -> None:
        path, (kind, content) = damage
        one.restore()
        place(path, kind, content)
        outcome, message = _read(one, path, folder, expected)
        found[one.name, outcome] += 1
        accepted = outcome == "accepted, reads the same" or (outcome == "accepted, differs" and one.name in REASONS)
        assert outcome == "named" or accepted, f"{one.name}: {path.name}, {kind}: {outcome}. {message}"

    read()


def _undamaged(one: Input, output: Path) -> str:
    """The fingerprint of the good input. Also imports in this process what its reader needs, except for training."""
    one.restore()
    if "resumed" not in one.name and "options" not in one.name:
        one.read()
    if run(lambda: print("\n" + fingerprint(one.read())), output, SECONDS) != 0:
        raise BnrnnError(f"{one.name}: the undamaged files cannot be read: {output.read_text()}")
    return output.read_text().splitlines()[-1]


def _read(one: Input, path: Path, folder: Path, expected: str) -> tuple[str, str]:
    """The outcome of reading a damaged input, and the last line that its reader printed."""
    before, output = _state(one.folder), folder / "output"

    def read() -> None:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        print("\n" + fingerprint(one.read()))

    status = run(read, output, SECONDS)
    text = output.read_text(errors="replace")
    last = (text.splitlines() or [""])[-1]
    if (folder / "PWNED").exists():
        (folder / "PWNED").unlink()
        return "ran a command", last
    if status == 0:
        return "accepted, reads the same" if last == expected else "accepted, differs", last
    if status in (None, -signal.SIGXCPU):
        return "hang", last
    if _state(one.folder) != before:
        return "altered", last
    if status == 1:
        # A prepared folder and the file in it may stand apart in the message. Hydra says 'model/lstm'.
        is_named = (
            path.name in text and str(one.folder) in text
        ) or f"'{path.relative_to(one.folder).with_suffix('')}'" in text
        is_named = is_named or any(f"{name}{end}" in text for name in one.names for end in " ='?\n")
        is_named = is_named or (len(one.names) > 0 and " is no option" in text)  # damage has made a key of its own
        return ("named" if is_named else "unnamed"), last
    return ("killed" if status < 0 else "traceback"), text[-1500:]


def _state(folder: Path) -> dict[Path, Any]:
    """The content of every file in a folder, and the kind of everything else."""
    kinds = {p: stat.S_IFMT(p.lstat().st_mode) for p in folder.rglob("*") if p.name != "run.lock"}
    return kinds | {p: content for p, content in contents(folder).items() if not p.is_symlink()}
