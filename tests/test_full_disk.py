"""The disk is full at one write or sync of a short run after the other: always one message, and nothing is lost.

A small library, loaded before the C library, fails these calls for files in one folder. The program below trains in a
forked process for each of them.
"""

import ctypes
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bnrnn.config import ROOT
from bnrnn.scan.native.build import compiler
from bnrnn.train import train
from tests.stress.processes import run as forked
from tests.test_train import short, without_time

LIBRARY = r"""
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <unistd.h>

extern "C" {
char folder[PATH_MAX];           // "" for no folder
int calls = 0, first = 0, once;  // number of calls so far, the first that fails, whether it is the only one

static bool fails(int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = folder[0] ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0) return false;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder))) return false;
    errno = ENOSPC;
    return once ? ++calls == first : ++calls >= first;
}
ssize_t write(int file, const void* content, size_t size) {
    static auto original = (ssize_t (*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write");
    return fails(file) ? -1 : original(file, content, size);
}
int fsync(int file) {
    static auto original = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return fails(file) ? -1 : original(file);
}
}
"""
MESSAGE = r"error: \S+ cannot be written \(No space left on device\): make room or make it writable, then start again"


def fill(folder: Path, first: int, once: bool) -> ctypes.c_int:
    """Let the calls for files in a folder fail from one on. Returns the number of calls so far."""
    library = ctypes.CDLL(None)
    (ctypes.c_char * 4096).in_dll(library, "folder").value = str(folder).encode()
    ctypes.c_int.in_dll(library, "first").value, ctypes.c_int.in_dll(library, "once").value = first, once
    return ctypes.c_int.in_dll(library, "calls")


def main(folder: Path, once: bool) -> None:
    """Train with a disk that is full at each call, and then again with room. Prints a line of JSON for each call."""
    cfg = short("budget.updates=2", "budget.eval_every=1", "log_every=1", "checkpoint_seconds=0")
    whole = train(cfg, folder / "whole")
    for first in itertools.count(1):
        run, output = folder / f"{first}.run", folder / f"{first}.txt"

        def attempt(run=run, first=first) -> None:
            calls = fill(run, first, once)
            train(cfg, run)
            os._exit(7 if calls.value < first else 8)  # whether the run made so many calls

        status = forked(attempt, output, 60)
        if status == 7:
            return
        forked(lambda run=run: train(cfg, run), folder / "again.txt", 60)
        again = train(cfg, run)
        same = again.metrics == whole.metrics and without_time(run) == without_time(folder / "whole")
        left = sorted(path.name for path in run.iterdir())
        print(json.dumps({"status": status, "text": output.read_text(), "same": same, "left": left}))


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("once", [False, True], ids=["from then on", "once"])
def test_a_disk_that_is_full_at_any_write_or_sync_is_one_message_and_nothing_is_lost(tmp_path, once):
    source, library = tmp_path / "full.cpp", tmp_path / "full.so"
    source.write_text(LIBRARY)
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    command = [sys.executable, "-m", "tests.test_full_disk", str(tmp_path), "once" if once else ""]
    environment = os.environ | {"LD_PRELOAD": str(library), "WANDB_MODE": "disabled"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) > 30
    for n, attempt in enumerate(found, 1):
        errors = [line for line in attempt["text"].splitlines() if not line.startswith("/") or "cannot" in line]
        assert attempt["status"] == 1, f"call {n}: {attempt}"
        assert "Traceback" not in attempt["text"] and re.search(MESSAGE, attempt["text"]), f"call {n}: {attempt}"
        assert sum("error: " in line for line in errors) == 1, f"call {n}: {attempt}"
        assert attempt["same"] and not any(".partial" in name for name in attempt["left"]), f"call {n}: {attempt}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "once")
