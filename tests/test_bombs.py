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
from functools import partial
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


def unpacking(path: Path, size: int = 4 * GIGABYTE) -> None:
    """A file of gzip, of a thousandth of the size, that unpacks to zeros."""
    path.write_bytes(gzip.compress(bytes(PIECE), 6) * (size // PIECE))


def zipped(path: Path, name: str = "features.npy") -> None:
    """A zip archive with a file that unpacks to zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(name, "w", force_zip64=True) as file:
        for _ in range(2 * GIGABYTE // PIECE):
            file.write(bytes(PIECE))


def sparse(path: Path, content: bytes = b"", end: bytes = b"") -> None:
    """A file of which only the beginning and the end are on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.seek(3 * GIGABYTE)
        file.write(end or b"\0")


def member(name: str, size: int) -> bytes:
    """The header of a tar archive's member."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf()


def deflated_checkpoint(path: Path) -> None:
    """A file of torch whose only tensor unpacks to zeros."""
    content = io.BytesIO()
    torch.save({"model": {"w": torch.zeros(4)}, "config": {}}, content)
    zipped(path, "archive/data/0")
    with zipfile.ZipFile(content) as good, zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        for item in good.infolist():
            if not item.filename.endswith("data/0"):
                archive.writestr(item.filename, good.read(item))


def flickr8k(path: Path) -> None:
    path.with_name("captions.txt").write_text("a,b\n")
    zipped(path)


def annotations(path: Path) -> None:
    path.write_bytes(b'{"images": [' + b"0," * (2 * PIECE) + b'0], "annotations": []}')


BABI, TIMIT, TEXT8 = "babi/tasks.tar.gz", "speech/timit.tar.gz", "text8/text8-prefix.gz"
QUESTIONS = member("en/qa1_a_train.txt", PIECE) + b"\n" * PIECE
SEAL = b"bnrnn 1 sha256 " + b"0" * 64
# The path of a bomb, what makes it, and what reads it from that path or from the folder of the data.
BOMBS: dict[str, tuple[str, Callable[[Path], object], Callable[[Path, str], object]]] = {
    "compressed checkpoint": (f"{CHECKPOINT}.gz", unpacking, lambda path, data: checkpoint.load(path.with_suffix(""))),
    "deflated checkpoint": (checkpoint.MODEL, deflated_checkpoint, lambda path, data: checkpoint.load(path)),
    "sparse checkpoint": (CHECKPOINT, sparse, lambda path, data: checkpoint.load(path)),
    "sealed checkpoint": (CHECKPOINT, partial(sparse, end=SEAL), lambda path, data: checkpoint.load(path)),
    "result": (FILE, sparse, lambda path, data: Result.read(path)),
    "metrics": (METRICS, sparse, lambda path, data: read_jsonl(path)),
    "babi": (BABI, unpacking, lambda path, data: BAbI(data, 1)),
    "long babi": (BABI, lambda path: path.write_bytes(gzip.compress(QUESTIONS)), lambda path, data: BAbI(data, 1)),
    "ieer": ("ieer/ieer.zip", partial(zipped, name="ieer/APW_19980314"), lambda path, data: IEERCloze(data)),
    "timit": (TIMIT, unpacking, lambda path, data: TimitSample(data)),
    "members": (TIMIT, lambda path: path.write_bytes(gzip.compress(member("a", 0) * 500_000, 1)),
                lambda path, data: TimitSample(data)),
    "mnist": ("mnist/train-images-idx3-ubyte.gz", unpacking, lambda path, data: SequentialMNIST(data)),
    "ptb": ("ptb/ptb.train.txt", sparse, lambda path, data: PTBChar(data)),
    "text8": (TEXT8, unpacking, lambda path, data: Text8(data, prefix=True)),
    "zipped text8": ("text8/text8.zip", partial(zipped, name="text8"), lambda path, data: Text8(data)),
    "features": ("flickr8k/features.npz", flickr8k, lambda path, data: Flickr8k(data)),
    "features of COCO": ("coco/features.npz", zipped, lambda path, data: CocoMini(data)),
    "captions": ("captions.txt", partial(sparse, content=b"image,caption\n"), lambda path, data: load_captions(path)),
    "images": ("flickr8k/images.tar", partial(sparse, content=member("a.jpg", 2 * GIGABYTE)),
               lambda path, data: thumbnails(["a.jpg"], path.parent)),
    "alignments": ("ali.gz", lambda path: path.write_bytes(gzip.compress(b"a " + b"1 " * (PIECE // 2) + b"\n", 1)),
                   lambda path, data: load_alignments(path.parent)),
    "annotations": ("captions.json", annotations, lambda path, data: load_annotations(path)),
    "dense annotations": ("captions.json", lambda path: path.write_bytes(b"[" + b"[],[],{},[]," * 8_000_000 + b"0]"),
                          lambda path, data: load_annotations(path)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_stands_for_gigabytes_is_one_message_with_little_memory(tmp_path, name):
    file, make, read = BOMBS[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    make(path)
    text, peak, seconds = measured(lambda: read(path, str(tmp_path)), tmp_path / "output.txt")
    lines = [line for line in text.splitlines() if not line.startswith("peak ")]
    assert len(lines) == 1 and path.name in lines[0], text
    assert peak < GIGABYTE, f"{peak / GIGABYTE:.1f} GB"
    assert seconds < 20, f"{seconds:.0f} seconds"
    print(f"{name}: {peak >> 20} MB, {seconds:.1f} s")
