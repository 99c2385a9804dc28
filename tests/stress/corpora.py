"""Tiny corpora in the format of every reader of data, for the stress test.

The readers of published corpora compare checksums or counts: here they expect those of the tiny ones. Corpora without a
published checksum have a file SHA256SUMS, as docs/data.md recommends.
"""

import gzip
import hashlib
import io
import os
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from bnrnn.data import babi, cnn_qa, cnn_qa_prepare, coco_captions, ieer, image_features, mnist, prepared, ptb, text8
from bnrnn.data.base import sha256
from bnrnn.data.coco_mini import CocoMini
from bnrnn.data.flickr8k import Flickr8k
from bnrnn.data.kaldi import KaldiFrames
from bnrnn.data.timit import TimitSample
from bnrnn.system.files import SUMS
from tests.data.cnn_corpus import make as make_question_files
from tests.data.test_captions import annotations
from tests.data.test_mnist import idx
from tests.data.test_timit import sound, wav

Reader = Callable[[Path], Any]  # reads a corpus from the folder of the data sets
NAMES = [f"{n}.jpg" for n in range(20)]
DRAW = np.random.default_rng(0)


def expect(module: Any, **values: Any) -> None:
    """Replace constants of a module in this process: the sizes and checksums of a published corpus."""
    for name, value in values.items():
        setattr(module, name, value)


def list_sums(folder: Path) -> None:
    """Write the SHA256SUMS of a folder."""
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines))


def write(folder: Path, files: Mapping[str, bytes | str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def written(write_to: Callable[[io.BytesIO], object]) -> bytes:
    """What a function writes to an open file."""
    content = io.BytesIO()
    write_to(content)
    return content.getvalue()


def packed(files: Mapping[str, bytes], links: bool = False) -> bytes:
    """A .tar.gz with these files, or with links of their names to a file of the system."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            if links:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            else:
                member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def zipped(files: Mapping[str, bytes | str]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def make_mnist(folder: Path) -> Reader:
    images, labels = DRAW.integers(0, 250, (20, 28, 28), "u1"), np.arange(20, dtype="u1") % 10
    files = {name: idx(images if "images" in name else labels) for name in mnist.CHECKSUMS}
    expect(mnist, NUM_VALID=5, CHECKSUMS={name: sha256(content) for name, content in files.items()})
    squeezed = {f"{name}.gz": gzip.compress(content) for name, content in files.items() if "images" in name}
    write(folder / "mnist", squeezed | {name: content for name, content in files.items() if "labels" in name})
    return lambda data: mnist.SequentialMNIST(str(data))


def make_ptb(folder: Path, words: bool = False) -> Reader:
    files = {name: b" the old cat sat \n a dog ran far \n the cat saw a dog \n" * 4 for name in ptb.CHECKSUMS}
    expect(ptb, CHECKSUMS={name: sha256(content) for name, content in files.items()})
    write(folder / "ptb", files)
    return lambda data: ptb.PTBWord(str(data), window=5) if words else ptb.PTBChar(str(data), length=9)


def make_text8(folder: Path, name: str = "text8") -> Reader:
    content = text8.BEGINNING + b" and so on" * 40
    expect(text8, SIZE=len(content), CRC32=zlib.crc32(content))
    stored = {"text8": content, "text8.zip": zipped({"text8": content}), "text8-begin.gz": gzip.compress(content[:-20])}
    write(folder / "text8", {name: stored[name]})
    return lambda data: text8.Text8(str(data), name.endswith(".gz"), length=9, test_lengths=())


def make_babi(folder: Path) -> Reader:
    expect(babi, NUM_QUESTIONS=20)
    stories = "".join(f"1 Zoe went to room{n % 3}.\n2 Where is Zoe? \troom{n % 3}\t1\n" for n in range(20)).encode()
    files = {f"en/qa1_one_{split}.txt": stories for split in ("train", "test")}
    write(folder / "babi", {"tasks.tar.gz": packed(files)})
    return lambda data: babi.BAbI(str(data), task=1)


def make_ieer(folder: Path) -> Reader:
    expect(ieer, NUM_DOCUMENTS=16)
    place = '<b_enamex type="LOCATION">Rome<e_enamex>'
    text = f"The people of {place} were glad on that day. It rained in {place} at last."
    documents = f"<BODY><HEADLINE>What was seen in {place} today</HEADLINE><TEXT>{text}</TEXT></BODY>\n" * 16
    write(folder / "ieer", {"ieer.zip": zipped({"ieer/APW_19980314": documents})})
    return lambda data: ieer.IEERCloze(str(data))


def make_timit(folder: Path) -> Reader:
    files = {}
    for speaker in ("dr1-fa0", "dr1-fb0", "dr1-fc0", "dr1-ma0", "dr1-mb0", "dr1-mc0"):
        for sentence in ("si1", "sx2"):
            files[f"timit/{speaker}/{sentence}.wav"] = wav(sound(800))
            files[f"timit/{speaker}/{sentence}.phn"] = b"0 300 h#\n300 700 aa\n"
    write(folder / "speech", {"timit.tar.gz": packed(files)})
    return lambda data: TimitSample(str(data))


def make_kaldi(folder: Path) -> Reader:
    import kaldi_native_io

    here = Path.cwd()
    integers = b"".join(b"\4" + bytes([n, 0, 0, 0]) for n in (6, 0, 1, 2, 0, 1, 2))
    alignments = b"".join(name + b" \0B" + integers for name in (b"a", b"b"))
    files = {"train": {"ali.1.gz": gzip.compress(alignments)}, "valid": {"ali.ark": alignments},
             "test": {"ali.txt": "a 0 1 2 0 1 2\nb 2 1 0 2 1 0\n"}}  # fmt: skip
    for split, states in files.items():
        write(folder / "wsj" / split, {**states, "utt2spk": "a zoe\nb zoe\n"})
        os.chdir(folder / "wsj" / split)  # so that the paths in the .scp are relative to it
        features = {name: DRAW.standard_normal((6, 3)).astype("f4") for name in "ab"}
        with kaldi_native_io.FloatMatrixWriter("ark,scp:feats.ark,feats.scp") as writer:
            for name, values in features.items():
                writer.write(name, values)
        both = np.concatenate(list(features.values())).astype("f8")
        sums = np.stack([np.append(both.sum(0), len(both)), np.append((both**2).sum(0), 0)])
        with kaldi_native_io.DoubleMatrixWriter("ark,scp:cmvn.ark,cmvn.scp") as writer:
            writer.write("zoe", sums)
        list_sums(folder / "wsj" / split)
    os.chdir(here)
    return lambda data: KaldiFrames(str(data), "wsj", 3, 3)


def make_cnn(folder: Path) -> Reader:
    make_question_files(folder, {"training": 6, "validation": 2, "test": 2})
    cnn_qa_prepare.prepare_cnn_qa(folder, folder)
    shutil.rmtree(folder / "questions")  # from which the prepared ones were made: they are not read again
    (folder / "cnn_qa/skipped.txt").unlink(missing_ok=True)
    return lambda data: cnn_qa.CNNQA(str(data))


def make_questions(folder: Path) -> Reader:
    """The published files of questions, from which a corpus is prepared."""
    make_question_files(folder, {"training": 6, "validation": 2, "test": 2})
    for split in (folder / "questions").iterdir():
        list_sums(split)

    def read(data: Path) -> Any:
        with TemporaryDirectory() as made:
            cnn_qa_prepare.prepare_cnn_qa(Path(made), data, most_skipped=0)
            return cnn_qa.CNNQA(made)

    return read


def features(names: list[str]) -> bytes:
    values = DRAW.standard_normal((len(names), 4)).astype(np.float16)
    return written(lambda file: np.savez(file, file_name=np.array(names), features=values))


def make_coco(folder: Path) -> Reader:
    from datasets import Dataset, Features, List, Value

    texts = {f"captions_{split}2014.json": annotations(NAMES) for split in coco_captions.SPLITS}
    write(folder / "coco/annotations", texts)
    columns = Features(name=Value("string"), captions=List(Value("string")), features=List(Value("float16"), length=4))
    values = [np.ones(4, np.float16)] * len(NAMES)
    rows = {"name": NAMES, "captions": [["a dog", "two cats"]] * len(NAMES), "features": values}
    splits = {split: Dataset.from_dict(rows, features=columns) for split in coco_captions.SPLITS}
    sources = coco_captions._digest(coco_captions._annotations(folder / "coco", 2014))
    prepared.save_prepared(folder / "coco/prepared", splits, coco_captions.VERSION, sources)
    return lambda data: coco_captions.CocoCaptions(str(data), least_count=1)


def make_coco_mini(folder: Path) -> Reader:
    write(folder / "coco", {"captions_a.json": annotations(NAMES), "a.npz": features(NAMES)})
    list_sums(folder / "coco")
    return lambda data: CocoMini(str(data), least_count=1)


def make_flickr8k(folder: Path) -> Reader:
    captions = "image,caption\n" + "".join(f"{name},a dog sees {n} cats\n" for n, name in enumerate(NAMES))
    write(folder / "flickr8k", {"captions.txt": captions, "a.npz": features(NAMES)})
    list_sums(folder / "flickr8k")
    return lambda data: Flickr8k(str(data), least_count=1)


def make_inception(folder: Path) -> Reader:
    content = written(partial(torch.save, {"weight": torch.arange(9.0)}))
    expect(image_features, SHA256=sha256(content)[:8])
    write(folder, {"inception.pth": content})
    return lambda data: image_features.load_weights(data / "inception.pth")


def make_images(folder: Path) -> Reader:
    """Two images, as the networks read them that compute features."""
    from PIL import Image

    image = Image.fromarray(DRAW.integers(0, 256, (40, 50, 3), dtype=np.uint8))
    names = {"a.jpg": "JPEG", "b.png": "PNG"}
    write(folder / "images", {name: written(lambda file, of=of: image.save(file, of)) for name, of in names.items()})
    list_sums(folder / "images")
    return lambda data: [image_features.load_image(data / "images" / name).sum((1, 2)) for name in names]


CORPORA: dict[str, Callable[[Path], Reader]] = {
    "MNIST": make_mnist, "Penn Treebank, characters": make_ptb,
    "Penn Treebank, words": partial(make_ptb, words=True), "text8": make_text8,
    "text8.zip": partial(make_text8, name="text8.zip"), "text8, beginning": partial(make_text8, name="text8-begin.gz"),
    "bAbI": make_babi, "IE-ER": make_ieer, "TIMIT": make_timit, "Kaldi": make_kaldi, "images": make_images,
    "CNN questions, published": make_questions, "CNN questions, prepared": make_cnn,
    "COCO captions, prepared": make_coco, "COCO mini": make_coco_mini, "Flickr8k": make_flickr8k,
    "Inception weights": make_inception,
}  # fmt: skip
