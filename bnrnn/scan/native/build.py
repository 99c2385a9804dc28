"""Builds the compiled kernels for float32 on the CPU, on first use, with the C++ compiler of the machine.

The build takes seconds and is cached by source, flags and processor. The kernels have a plain C interface, which ctypes
calls: with torch's extension builder, compiling torch's headers would take half a minute.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from bnrnn.errors import BnrnnError
from bnrnn.scan.native import threads

LOG = logging.getLogger("bnrnn")
SCAN = Path(__file__).parents[1]
KERNELS = SCAN / "native/kernels.cpp"  # includes all others
FLAGS = ["-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi"]
FLAGS += ["-shared", "-fPIC"]
FLAGS += os.environ.get("BNRNN_CXXFLAGS", "").split()  # `make sanitize` builds with others
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def sources() -> list[Path]:
    """All source files of the kernels."""
    return sorted(path for pattern in ("*.cpp", "*.h") for path in SCAN.rglob(pattern))


def compiler() -> str | None:
    """The C++ compiler to build with: $CXX, g++ or clang++; None if there is none."""
    return next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )


def _processor() -> str:
    """The features of the processor, on which -march=native depends. They keep builds on a shared disk apart."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return platform.machine() + next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def cache_folder() -> Path:
    """The folder of built libraries. As the XDG specification says, an empty or relative variable is ignored."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "bnrnn"


def _own_folder(folder: Path) -> Path:
    """The folder, made if it is missing, and closed for writing by others; for one of another user, a private one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid == os.geteuid():
        if found.st_mode & OTHERS_WRITE:
            folder.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)
        return folder
    private = Path(tempfile.mkdtemp(prefix="bnrnn-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    LOG.warning("%s belongs to another user, so the kernels are built in %s for this process alone.", folder, private)
    return private


def _is_own(path: Path) -> bool:
    """Whether a library is a file of this user that no other user can write."""
    found = path.lstat()
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE


def _intact(folder: Path, key: str) -> Path | None:
    """A library of the cache that was built from these sources and is what its name says; damaged ones are removed.

    Libraries that belong to another user, or that others can write, are left out.
    """
    for path in sorted(folder.glob(f"kernels-{key}-*.so")):
        if not _is_own(path):
            continue
        if _digest(path) == path.stem.rpartition("-")[2]:
            return path
        path.unlink(missing_ok=True)
    return None


def _build(command: str, folder: Path, key: str) -> Path:
    """The library, built. Its name ends with the hash of its content, by which `_intact` knows it again."""
    LOG.warning("Compiling the kernels for this processor, once, into %s: this takes up to a minute.", folder)
    with tempfile.TemporaryDirectory(dir=folder) as part:
        built = Path(part) / "kernels.so"
        for openmp in (["-fopenmp"], []):  # not every compiler has OpenMP; without it the kernels use one thread
            run = subprocess.run(
                [command, *FLAGS, *openmp, str(KERNELS), "-o", str(built)], capture_output=True, text=True
            )
            if not run.returncode:
                break
        else:
            raise BnrnnError(f"backend=cpu: {command} could not build its kernels: {run.stderr.strip()[:2000]}")
        built.chmod(0o755)
        path = folder / f"kernels-{key}-{_digest(built)}.so"
        os.replace(built, path)  # several processes may build at once; each result is intact
        return path


@cache
def library() -> ctypes.CDLL:
    """Build and load the kernels. Raises BnrnnError, with the compiler's message, if they cannot be built."""
    command = compiler()
    if command is None:
        raise BnrnnError("backend=cpu needs a C++ compiler (g++ or clang++): install one, or use backend=reference")
    identity = [*(path.read_text() for path in sources()), *FLAGS, command, _processor()]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    folder = cache_folder()
    try:
        folder = _own_folder(folder)
        path = _intact(folder, key) or _build(command, folder, key)
    except OSError as error:
        raise BnrnnError(f"backend=cpu: {folder} cannot be written ({error}): set XDG_CACHE_HOME") from error
    try:
        kernels = ctypes.CDLL(str(path))
    except OSError as error:
        raise BnrnnError(f"backend=cpu: {path} cannot be loaded ({error}): set XDG_CACHE_HOME") from error
    threads.remember(kernels)
    kernels.bnrnn_lstm_packed_size.restype, kernels.bnrnn_fingerprint.restype = ctypes.c_int64, ctypes.c_uint64
    kernels.bnrnn_peak.restype, kernels.bnrnn_peak.argtypes = ctypes.c_float, [ctypes.c_int64]
    return kernels


def plain(tensor: Tensor) -> Tensor:
    """The tensor as kernels read it: contiguous, and negative where a flag alone says so (parts of complex numbers)."""
    return tensor if tensor.is_contiguous() and not tensor.is_neg() else tensor.resolve_neg().contiguous()


def address(tensor: Tensor | None) -> int | None:
    """Address of a contiguous float32 tensor; null for None."""
    return None if tensor is None else tensor.data_ptr()


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor as an argument of a C function."""
    return ctypes.c_void_p(address(tensor))


def sizes_of(values: list[int] | None) -> Any:
    """A list of integers as a C array; null for None."""
    return None if values is None else (ctypes.c_int32 * len(values))(*values)
