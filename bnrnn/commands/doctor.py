"""What works on this machine, in about a minute: versions, engines, data, programs, disk and locks.

bnrnn-doctor [--device auto|cpu|cuda] [--data-dir DIR] [--out-dir results]

A line begins with `ok`, with `missing` for what is optional, or with `WRONG` for what must be fixed. The exit status is
1 if anything is wrong.
"""

import os
import platform
import shutil
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from hydra.utils import instantiate

from bnrnn.bench.engines import engine_checks
from bnrnn.config import CONF, compose_config
from bnrnn.errors import BnrnnError, MissingData, mendable, report_errors
from bnrnn.metrics import has_java
from bnrnn.scan import set_backend
from bnrnn.scan.native.build import cache_folder, compiler, library
from bnrnn.system.locks import check_locks
from bnrnn.system.memory import keep_heap
from bnrnn.training.device import choose_device

OK, MISSING, WRONG = "ok", "missing", "WRONG"
PACKAGES = ("torch", "triton", "numpy", "hydra-core", "omegaconf", "datasets", "torchvision", "wandb", "pycocoevalcap")
FREE = 5.0  # GiB that a disk should have free
Finding = tuple[str, str]  # the state, and what was found


def packages() -> Iterator[Finding]:
    """Python and the packages that the experiments use."""
    yield OK, f"Python {platform.python_version()}"
    for name in PACKAGES:
        try:
            yield OK, f"{name} {version(name)}"
        except PackageNotFoundError:
            yield (WRONG if name in ("torch", "numpy") else MISSING), f"{name}: pip install 'bnrnn[train]' brings most"


def kernels() -> Iterator[Finding]:
    """The compiler of the CPU engine, and whether its kernels can be built and loaded."""
    start = time.monotonic()
    try:
        library()
        yield OK, f"kernels of the CPU engine, built by {compiler()} ({time.monotonic() - start:.1f} s)"
    except BnrnnError as error:
        yield MISSING, f"kernels of the CPU engine: {error}"


def gpu() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield MISSING, "a GPU that this torch can use"
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield OK, f"{about.name}, {about.total_memory / 2**30:.0f} GiB, compute capability {about.major}.{about.minor}"
    yield shared_by_processes()


def shared_by_processes() -> Finding:
    """Whether NVIDIA's Multi-Process Service runs, with which the kernels of several processes run at the same time."""
    if Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists():
        return OK, "NVIDIA MPS: the runs of JOBS=8 share the GPU"
    return MISSING, "NVIDIA MPS, without which the runs of JOBS=8 take turns on the GPU: see docs/cluster.md"


def engines(device: torch.device) -> Iterator[Finding]:
    torch.set_num_threads(1)
    keep_heap()  # as in training
    for is_right, text in engine_checks(device):
        yield (OK if is_right else WRONG), text


def datasets(data_dir: str) -> Iterator[Finding]:
    """Every dataset, read as training reads it, which compares its checksums."""
    for path in sorted((CONF / "data").glob("*.yaml")):
        if path.stem.startswith("_"):
            continue
        try:
            data = instantiate(compose_config(f"data={path.stem}", f"data_dir={data_dir}").data)
            yield OK, f"data={path.stem}: {data.description}"
        except Exception as error:
            cause = mendable(error) or error
            text = " ".join(str(cause).split())
            yield (MISSING if isinstance(cause, MissingData) else WRONG), f"data={path.stem}: {text}"


def programs() -> Iterator[Finding]:
    """Programs beside Python."""
    yield (OK, "Java") if has_java() else (MISSING, "Java: METEOR scores of captions need it")
    yield (OK, "git") if shutil.which("git") else (MISSING, "git: results then do not name the commit")
    yield (OK, "Slurm") if shutil.which("sbatch") else (MISSING, "Slurm: LAUNCHER=slurm needs it")


def folders(data_dir: str, out_dir: str) -> Iterator[Finding]:
    """Free space, and the locks of the file system on which runs are stored."""
    for what, path in {"data": data_dir, "results": out_dir, "compiled kernels": cache_folder()}.items():
        folder = next(parent for parent in (Path(path).absolute(), *Path(path).absolute().parents) if parent.exists())
        free = shutil.disk_usage(folder).free / 2**30
        yield (OK if free >= FREE else WRONG), f"{free:.0f} GiB free for {what} ({path})"
        if not os.access(folder, os.W_OK) and what != "data":
            yield WRONG, f"{folder} cannot be written to: {what} are stored there"
        elif what == "results":
            try:
                check_locks(folder)
                yield OK, f"locks of the file system of {path}"
            except BnrnnError as error:
                yield WRONG, str(error)


def examine(sections: dict[str, Callable[[], Iterator[Finding]]]) -> int:
    """Print all findings, as they come. Returns how many are wrong."""
    wrong = 0
    for title, find in sections.items():
        print(f"\n{title}", flush=True)
        for state, text in find():
            wrong += state == WRONG
            print(f"  {state:8}{text}", flush=True)
    print(f"\n{f'{wrong} wrong: see above' if wrong else 'Nothing is wrong.'}")
    return wrong


def main() -> None:
    parser = ArgumentParser("bnrnn-doctor", description="What works on this machine.")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--data-dir", default=os.environ.get("BNRNN_DATA", "data"))
    parser.add_argument("--out-dir", default="results")
    args = parser.parse_args()
    device = choose_device(args.device)
    sections: dict[str, Callable[[], Iterator[Finding]]] = {
        "Packages": packages,
        "Processor": kernels,
        "GPU": gpu,
        f"Engines on {device.type}: errors against float64, largest of outputs and gradients": lambda: engines(device),
        "Data": lambda: datasets(args.data_dir),
        "Programs": programs,
        "Folders": lambda: folders(args.data_dir, args.out_dir),
    }
    wrong = examine(sections)
    set_backend("auto")
    sys.exit(int(wrong > 0))


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    report_errors(main)


if __name__ == "__main__":
    cli()
