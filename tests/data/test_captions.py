"""Captioned images: the contents of batches, and the files from which they are read."""

import csv
import io
import json
import os
import zipfile

import numpy as np
import pytest
import torch

from bnrnn.data.base import SequenceData
from bnrnn.data.captions import UNK, CaptionData, Image, words_of
from bnrnn.data.coco_mini import CocoMini
from bnrnn.data.flickr8k import Flickr8k
from bnrnn.errors import BnrnnError
from bnrnn.inputs import END, IGNORE, START
from tests.toy_captions import ToyCaptions

CAPTIONS = ["A dog runs.", "A brown dog's run", "Two dogs, running fast"]


def test_a_pass_has_every_caption_once_and_targets_are_the_next_words():
    data = ToyCaptions()
    assert isinstance(data, SequenceData)
    for generator in (None, torch.Generator().manual_seed(0)):
        seen = []
        batches = list(data.batches("train", 7, generator))
        assert len(batches) == data.num_batches("train", 7) == 7
        for batch in batches:
            x = batch.inputs
            assert (x.words[0] == START).all() and x.words.shape == batch.targets.shape
            for b, n in enumerate(x.lengths):
                assert torch.equal(x.words[1:n, b], batch.targets[: n - 1, b])
                assert batch.targets[n - 1, b] == END and (batch.targets[n:, b] == IGNORE).all()
                seen.append((data.spell(batch.targets[:n, b].tolist()), tuple(x.features[b].tolist())))
        expected = [
            (" ".join(words_of(c)), tuple(data.features[image.row].astype(np.float32).tolist()))
            for image in data.images["train"]
            for c in image.captions
        ]
        assert sorted(seen) == sorted(expected)
    assert torch.equal(next(data.batches("train", 7, start=3)).targets, list(data.batches("train", 7))[3].targets)


def test_rare_words_are_unknown_and_the_vocabulary_ends_at_its_size():
    images = {s: [Image("a.jpg", 0, ["x x x y y", "x y z"])] for s in ("train", "valid", "test")}
    data = CaptionData(images, np.zeros((1, 2), np.float16), "", least_count=2)
    assert data.vocabulary == ["<start>", "<end>", "<unk>", "x", "y"]
    assert next(data.batches("test", 2)).inputs.words.T.tolist() == [
        [START, 3, 3, 3, 4, 4],
        [START, 3, 4, UNK, END, END],
    ]
    assert CaptionData(images, np.zeros((1, 2)), "", 2, 4).vocabulary == ["<start>", "<end>", "<unk>", "x"]
    assert data.t_max == 6


def test_an_image_without_a_caption_is_named():
    images = {s: [Image("a.jpg", 0, [] if s == "valid" else ["x"])] for s in ("train", "valid", "test")}
    with pytest.raises(BnrnnError, match=r"valid: image a.jpg has no caption, expected at least one"):
        CaptionData(images, np.zeros((1, 2)), "toy")


@pytest.fixture
def flickr(tmp_path):
    """Twenty images in the format of Flickr8k."""
    folder = tmp_path / "flickr8k"
    folder.mkdir()
    with (folder / "captions_20.txt").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "caption"])
        for n in range(20):
            writer.writerows([[f"{n}.jpg", c] for c in CAPTIONS])
    write_features(folder / "features.npz", [f"{n}.jpg" for n in range(20)])
    return tmp_path


def write_features(path, names, features=None):
    features = np.arange(len(names) * 3).reshape(-1, 3).astype(np.float16) if features is None else features
    np.savez(path, file_name=np.array(names), features=features)


def claim(path, rows: int) -> None:
    """Write features whose header claims so many rows, without the rows."""
    content = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, 4)}
    np.lib.format.write_array_header_1_0(content, header)
    write_features(path, ["0.jpg"])
    with zipfile.ZipFile(path) as archive:
        names = archive.read("file_name.npy")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("file_name.npy", names)
        archive.writestr("features.npy", content.getvalue())


def test_flickr8k_is_divided_by_image_whatever_the_order_of_the_file(flickr):
    data = Flickr8k(str(flickr), least_count=1)
    assert {s: len(images) for s, images in data.images.items()} == {"train": 16, "valid": 2, "test": 2}
    names = [image.name for images in data.images.values() for image in images]
    assert len(set(names)) == 20
    for images in data.images.values():
        for image in images:
            assert data.features[image.row, 0] == 3 * int(image.name[:-4]) and image.captions == CAPTIONS
    write_features(flickr / "flickr8k/features.npz", [f"{n}.jpg" for n in reversed(range(20))])
    again = Flickr8k(str(flickr), least_count=1)
    assert [[i.name for i in images] for images in again.images.values()] == [
        [i.name for i in images] for images in data.images.values()
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: write_features(f / "features.npz", ["0.jpg"]),
            r"19 images have no features in .*features.npz; the first is 1.jpg",
        ),
        (
            lambda f: write_features(f / "features.npz", [f"{n}.jpg" for n in range(21)]),
            r"1 images have no captions in .*captions_20.txt; the first is 20.jpg",
        ),
        (
            lambda f: write_features(f / "features.npz", ["0.jpg"], np.zeros((2, 3))),
            r"features of shape \(2, 3\) for 1 names",
        ),
        (
            lambda f: write_features(f / "features.npz", ["0.jpg"], np.full((1, 3), np.nan)),
            r"the features of 0.jpg are not finite",
        ),
        (lambda f: (f / "features.npz").write_bytes(b"PK no"), r"features.npz is not a feature file"),
        (lambda f: np.savez(f / "features.npz", x=np.zeros(3)), r"features.npz is not a feature file .*file_name"),
        (
            lambda f: write_features(f / "features.npz", ["0.jpg"], np.array([["a"]])),
            r"features.npz is not a feature file \(names are <U5, features <U1\)",
        ),
        (lambda f: claim(f / "features.npz", 1 << 28), r"features.npz is not a feature file"),
        (lambda f: claim(f / "features.npz", 1 << 50), r"features.npz is not a feature file"),
        (
            lambda f: (f / "captions_20.txt").write_text("image,caption\n0.jpg,\n"),
            r"captions_20.txt, line 2: expected image,caption, found '0.jpg,'",
        ),
        (lambda f: (f / "captions_20.txt").unlink(), r"flickr8k has 0 files captions\*.txt, expected 1"),
    ],
)
def test_what_is_wrong_with_files_is_named(flickr, change, message):
    change(flickr / "flickr8k")
    with pytest.raises(BnrnnError, match=message):
        Flickr8k(str(flickr))


def annotations(names: list[str]) -> str:
    """Annotations in COCO's format, with two captions per image."""
    images = [{"id": 100 + n, "file_name": name} for n, name in enumerate(names)]
    captions = [{"image_id": image["id"], "caption": f"{c} "} for image in images for c in CAPTIONS[:2]]
    return json.dumps({"images": images, "annotations": captions})


def test_coco_mini_reads_every_file_of_features(tmp_path):
    folder = tmp_path / "coco"
    folder.mkdir()
    for n, split in enumerate(("train", "val")):
        names = [f"{n}{k}.jpg" for k in range(10)]
        (folder / f"captions_{split}2017.json").write_text(annotations([*names, "without_features.jpg"]))
        write_features(folder / f"{split}.npz", names)
    data = CocoMini(str(tmp_path), least_count=1)
    assert {s: len(images) for s, images in data.images.items()} == {"train": 16, "valid": 2, "test": 2}
    assert data.features.shape == (20, 3)
    (folder / "captions_val2017.json").write_text("{}")
    with pytest.raises(BnrnnError, match=r"captions_val2017.json is not a COCO caption file \(KeyError"):
        CocoMini(str(tmp_path))


DATA = os.environ.get("BNRNN_DATA")


@pytest.mark.skipif(DATA is None, reason="needs Flickr8k and COCO in BNRNN_DATA")
def test_the_real_images_at_hand():
    for cls, sizes in ((Flickr8k, [800, 100, 100]), (CocoMini, [191, 24, 24])):
        data = cls(DATA)
        assert [len(images) for images in data.images.values()] == sizes
        assert data.feature_size == 1280 and all(len(i.captions) >= 5 for s in data.images.values() for i in s)
