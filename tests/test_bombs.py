"""Small files that claim or unpack to gigabytes end in one message, with little memory, within seconds."""

import gzip
import io
import os
import re
import resource
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bnrnn.data.babi import BAbI
from bnrnn.data.captions import load_annotations
from bnrnn.data.coco_mini import CocoMini
from bnrnn.data.flickr8k import Flickr8k, load_captions, thumbnails
from bnrnn.data.ieer import IEERCloze
from bnrnn.data.kaldi_files import load_alignments
from bnrnn.data.mnist import SequentialMNIST
from bnrnn.data.ptb import PTBChar
from bnrnn.data.text8 import Text8
from bnrnn.data.timit import TimitSample
from bnrnn.training import checkpoint
from bnrnn.training.checkpoint import CHECKPOINT
from bnrnn.training.log import read_jsonl
from bnrnn.training.results import FILE, METRICS, Result
from tests.stress.processes import run as forked

GIGABYTE = 1 << 30
PIECE = 1 << 26


def measured(read: Callable[[], object], output: Path) -> tuple[str, int, float]:
    """What a forked process prints that reads something, the bytes of memory that it adds, and the seconds it takes."""

    def action() -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
        held, resident = (int(n) * resource.getpagesize() for n in Path("/proc/self/statm").read_text().split()[:2])
        resource.setrlimit(resource.RLIMIT_AS, (held + 4 * GIGABYTE,) * 2)  # so that a bomb does not fill the machine
        try:
            read()
        finally:
            peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
            print("peak", peak - resident)

    started = time.process_time() + os.times().children_user
    status = forked(action, output, 60)
    seconds = time.process_time() + os.times().children_user - started
    text = output.read_text()
    assert status == 1, text
    return text, int(re.search(r"peak (-?\d+)", text)[1]), seconds


def unpacking(size: int) -> bytes:
    """A file of gzip, of a thousandth of the size, that unpacks to zeros."""
    return gzip.compress(bytes(PIECE), 6) * (size // PIECE)


def zipped(path: Path, name: str, size: int, before: bytes = b"") -> None:
    """A zip archive with a file that unpacks to zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w", force_zip64=True) as file:
        file.write(before)
        for _ in range(size // PIECE):
            file.write(bytes(PIECE))


def sparse(path: Path, size: int, content: bytes = b"") -> None:
    """A file of which only the beginning is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.truncate(size)


def member(name: str, size: int) -> bytes:
    """The header of a tar archive's member."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf()


def make(folder: Path, name: str) -> Callable[[], object]:
    """A folder with one bomb, and what reads it."""
    path = folder / name.partition(": ")[2]
    path.parent.mkdir(parents=True, exist_ok=True)
    data = str(folder)
    match name.partition(": ")[0]:
        case "compressed checkpoint":
            path.write_bytes(unpacking(4 * GIGABYTE))
            return lambda: checkpoint.load(folder / CHECKPOINT)
        case "deflated checkpoint":
            content = io.BytesIO()
            torch.save({"model": {"w": torch.zeros(4)}, "config": {}}, content)
            with zipfile.ZipFile(content) as good:
                zipped(path, "archive/data/0", 2 * GIGABYTE)
                with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
                    for item in good.infolist():
                        if not item.filename.endswith("data/0"):
                            archive.writestr(item.filename, good.read(item))
            return lambda: checkpoint.load(path)
        case "sparse checkpoint":
            sparse(path, 3 * GIGABYTE)
            return lambda: checkpoint.load(path)
        case "sealed checkpoint":
            sparse(path, 2 * GIGABYTE)
            with path.open("ab") as file:
                file.write(b"bnrnn 1 sha256 " + b"0" * 64)
            return lambda: checkpoint.load(path)
        case "result" | "metrics":
            sparse(path, 3 * GIGABYTE)
            return lambda: Result.read(path) if path.name == FILE else read_jsonl(path)
        case "babi":
            path.write_bytes(unpacking(4 * GIGABYTE))
            return lambda: BAbI(data, 1)
        case "long babi":
            path.write_bytes(gzip.compress(member("en/qa1_a_train.txt", PIECE) + b"\n" * PIECE))
            return lambda: BAbI(data, 1)
        case "ieer":
            zipped(path, "ieer/APW_19980314", 2 * GIGABYTE)
            return lambda: IEERCloze(data)
        case "timit":
            path.write_bytes(unpacking(4 * GIGABYTE))
            return lambda: TimitSample(data)
        case "members":
            path.write_bytes(gzip.compress(member("a", 0) * 500_000, 1))
            return lambda: TimitSample(data)
        case "mnist":
            path.write_bytes(unpacking(4 * GIGABYTE))
            return lambda: SequentialMNIST(data)
        case "ptb":
            sparse(path, 3 * GIGABYTE)
            return lambda: PTBChar(data)
        case "text8":
            path.write_bytes(unpacking(4 * GIGABYTE))
            return lambda: Text8(data, prefix=True)
        case "zipped text8":
            zipped(path, "text8", 2 * GIGABYTE)
            return lambda: Text8(data)
        case "features":
            (folder / "flickr8k/captions.txt").write_text("a,b\n")
            zipped(path, "features.npy", 2 * GIGABYTE)
            return lambda: Flickr8k(data)
        case "features of COCO":
            zipped(path, "features.npy", 2 * GIGABYTE)
            return lambda: CocoMini(data)
        case "annotations":
            path.write_bytes(b'{"images": [' + b"0," * (2 * PIECE) + b'0], "annotations": []}')
            return lambda: load_annotations(path)
        case "dense annotations":
            path.write_bytes(b"[" + b"[],[],{},[]," * 8_000_000 + b"0]")
            return lambda: load_annotations(path)
        case "captions":
            sparse(path, 3 * GIGABYTE, b"image,caption\n")
            return lambda: load_captions(path)
        case "images":
            sparse(path, 3 * GIGABYTE, member("a.jpg", 2 * GIGABYTE))
            return lambda: thumbnails(["a.jpg"], path.parent)
        case "alignments":
            path.write_bytes(gzip.compress(b"a " + b"1 " * (PIECE // 2) + b"\n", 1))
            return lambda: load_alignments(folder)
    raise AssertionError(name)


BOMBS = [
    f"compressed checkpoint: {CHECKPOINT}.gz", f"deflated checkpoint: {checkpoint.MODEL}",
    f"sparse checkpoint: {CHECKPOINT}", f"sealed checkpoint: {CHECKPOINT}", f"result: {FILE}", f"metrics: {METRICS}",
    "babi: babi/tasks.tar.gz", "long babi: babi/tasks.tar.gz", "ieer: ieer/ieer.zip", "timit: speech/timit.tar.gz",
    "members: speech/timit.tar.gz", "mnist: mnist/train-images-idx3-ubyte.gz", "ptb: ptb/ptb.train.txt",
    "text8: text8/text8-prefix.gz", "zipped text8: text8/text8.zip", "features: flickr8k/features.npz",
    "features of COCO: coco/features.npz", "captions: captions.txt", "images: flickr8k/images.tar",
    "alignments: ali.gz", "annotations: captions.json", "dense annotations: captions.json",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_stands_for_gigabytes_is_one_message_with_little_memory(tmp_path, name):
    read = make(tmp_path, name)
    text, peak, seconds = measured(read, tmp_path / "output.txt")
    lines = [line for line in text.splitlines() if not line.startswith("peak ")]
    assert len(lines) == 1 and Path(name.partition(": ")[2]).name in lines[0], text
    assert peak < GIGABYTE, f"{peak / GIGABYTE:.1f} GB"
    assert seconds < 20, f"{seconds:.0f} seconds"
    print(f"{name}: {peak >> 20} MB, {seconds:.1f} s")
