"""Captioned images: the contents of batches, and the files from which they are read."""

import csv
import json
import os
import shutil

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage
from torch import nn

from bnrnn import metrics
from bnrnn.config import compose_config
from bnrnn.data import image_features
from bnrnn.data.base import SequenceData
from bnrnn.data.captions import UNK, CaptionData, Image, words_of
from bnrnn.data.coco_captions import CocoCaptions, prepare_coco_captions
from bnrnn.data.coco_mini import CocoMini
from bnrnn.data.flickr8k import Flickr8k
from bnrnn.errors import BnrnnError
from bnrnn.inputs import END, IGNORE, START
from bnrnn.models.decoding import decode
from bnrnn.report.trained import load_trained
from bnrnn.train import train
from scripts import caption
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


@pytest.fixture
def coco(tmp_path):
    """Parts of two real photographs: four for training and twenty for validation and test."""
    from sklearn.datasets import load_sample_images  # takes seconds

    photographs = [p for photograph in load_sample_images().images for p in np.array_split(photograph, 12, axis=1)]
    folder = tmp_path / "coco"
    (folder / "annotations").mkdir(parents=True)
    for split, part in (("train", photographs[:4]), ("val", photographs[4:])):
        names = [f"COCO_{split}2014_{n}.jpg" for n in range(len(part))]
        (folder / f"{split}2014").mkdir()
        for name, pixels in zip(names, part, strict=True):
            PillowImage.fromarray(pixels).save(folder / f"{split}2014" / name)
        (folder / "annotations" / f"captions_{split}2014.json").write_text(annotations(names))
    return tmp_path


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


class Means(nn.Module):
    """Takes the place of Inception_v3: the mean of each channel, repeated."""

    def forward(self, images):
        return images.mean((2, 3)).repeat(1, 683)[:, :2048]


@pytest.mark.slow
def test_inception_with_random_weights_has_features_of_real_images(coco):
    torch.manual_seed(0)
    inception = image_features.inception_v3(None)
    network = nn.Sequential(inception, Times(1e6))  # with random weights, all features are tiny
    prepare_coco_captions(coco, None, network=network)
    data = CocoCaptions(str(coco), least_count=1)
    features = data.features[range(24)].astype(np.float32)
    assert data.features.shape == features.shape == (24, 2048) and np.isfinite(features).all()
    assert len(np.unique(features.round(4), axis=0)) == 24
    path = coco / "coco" / data.images["train"][0].name
    with torch.no_grad():
        expected = network(image_features.load_image(path)[None])[0]
    found = torch.from_numpy(features[data.images["train"][0].row])
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3)


def test_images_of_coco_are_divided_as_in_the_paper(coco):
    prepare_coco_captions(coco, None, network=Means())
    data = CocoCaptions(str(coco), least_count=1)
    names = {s: [image.name for image in images] for s, images in data.images.items()}
    assert {s: len(n) for s, n in names.items()} == {"train": 4 + 17, "valid": 1, "test": 2}
    assert all(f"train2014/COCO_train2014_{n}.jpg" in names["train"] for n in range(4))
    assert len({name for part in names.values() for name in part}) == 24


class Doubled(Means):
    def forward(self, images):
        return 2 * super().forward(images)


def test_an_interrupted_extraction_resumes_with_the_same_network_alone(coco, monkeypatch):
    monkeypatch.setattr(image_features, "BATCH_SIZE", 3)
    monkeypatch.setattr(image_features, "PART", 3)
    seen, original = [], image_features.load_image

    def load(path):
        seen.append(path.name)
        if len(seen) == 8:
            raise KeyboardInterrupt
        return original(path)

    monkeypatch.setattr(image_features, "load_image", load)
    with pytest.raises(KeyboardInterrupt):
        prepare_coco_captions(coco, None, network=Means())
    assert not (coco / "coco/prepared").exists()
    before = list(seen)
    prepare_coco_captions(coco, None, network=Means())
    assert seen[len(before) :] == [*before[6:8], *seen[len(before) + 2 :]] and len(seen) == 8 + 18
    assert sorted(p.name for p in (coco / "coco").iterdir()) == ["annotations", "prepared", "train2014", "val2014"]
    resumed, features = (coco / "coco/prepared/checksums.json").read_text(), CocoCaptions(str(coco)).features[[3, 0]]
    shutil.rmtree(coco / "coco/prepared")
    prepare_coco_captions(coco, None, network=Means(), num_proc=2)
    assert (coco / "coco/prepared/checksums.json").read_text() == resumed

    shutil.rmtree(coco / "coco/prepared")
    del seen[:]
    with pytest.raises(KeyboardInterrupt):
        prepare_coco_captions(coco, None, network=Means())
    prepare_coco_captions(coco, None, network=Doubled())
    data = CocoCaptions(str(coco))
    assert np.array_equal(data.features[[3, 0]], 2 * features) and "Doubled features" in data.description


def test_what_is_wrong_with_coco_is_named(coco, tmp_path):
    folder = coco / "coco"
    with pytest.raises(BnrnnError, match=r"coco/prepared is missing: run `bnrnn-prepare coco_captions"):
        CocoCaptions(str(coco))
    with pytest.raises(BnrnnError, match=r"Inception_v3's weights are needed: run `bnrnn-prepare coco"):
        prepare_coco_captions(coco, None)
    with pytest.raises(BnrnnError, match=r"no.pth is missing: download it from https://download.pytorch.org"):
        prepare_coco_captions(coco, tmp_path / "no.pth")
    (tmp_path / "other.pth").write_bytes(b"other")
    with pytest.raises(BnrnnError, match=r"other.pth has SHA-256 d9298a10..., expected 0cc3c7bd"):
        prepare_coco_captions(coco, tmp_path / "other.pth")
    broken = folder / "val2014/COCO_val2014_3.jpg"
    good = broken.read_bytes()
    broken.write_bytes(good[: len(good) // 2])
    with pytest.raises(BnrnnError, match=r"COCO_val2014_3.jpg is not a readable image"):
        prepare_coco_captions(coco, None, network=Means())
    broken.unlink()
    with pytest.raises(BnrnnError, match=r"COCO_val2014_3.jpg is missing: unpack COCO's images"):
        prepare_coco_captions(coco, None, network=Means())
    broken.write_bytes(good)
    prepare_coco_captions(coco, None, network=Means())
    captions = folder / "annotations/captions_val2014.json"
    good = captions.read_text()
    captions.write_text(good.replace("A dog runs", "A cat runs"))
    for use in (lambda: CocoCaptions(str(coco)), lambda: prepare_coco_captions(coco, None)):
        with pytest.raises(BnrnnError, match=r"from other files than .+/captions_val2014.json. Delete it and"):
            use()


DATA = os.environ.get("BNRNN_DATA")


@pytest.mark.skipif(DATA is None, reason="needs Flickr8k and COCO in BNRNN_DATA")
def test_the_real_images_at_hand():
    for cls, sizes in ((Flickr8k, [800, 100, 100]), (CocoMini, [191, 24, 24])):
        data = cls(DATA)
        assert [len(images) for images in data.images.values()] == sizes
        assert data.feature_size == 1280 and all(len(i.captions) >= 5 for s in data.images.values() for i in s)


@pytest.fixture
def run(coco, monkeypatch):
    """A run that was trained on these images for a few updates."""
    monkeypatch.setattr(metrics, "has_java", lambda: False)  # METEOR takes seconds to start
    prepare_coco_captions(coco, None, network=Means())
    small = ["data.least_count=1", "model.hidden_size=8", "batch_size=6", "population_batch_size=6", "budget.epochs=1"]
    where = ["setting=bn_rhn_captioner", f"data_dir={coco}", "device=cpu", "wandb.mode=disabled"]
    cfg = compose_config("experiment=zhang2017/table1", *where, *small)
    train(cfg, coco / "run")
    return coco / "run"


def test_images_of_a_folder_are_captioned_by_a_trained_run(coco, run, monkeypatch, capsys):
    monkeypatch.setattr(caption, "inception_v3", lambda weights: Means())
    folder = coco / "coco/train2014"
    (folder / "notes.txt").write_text("no image")
    common = ["--data-dir", str(coco), "--out-dir", str(coco / "out")]
    capsys.readouterr()
    caption.main([str(run), "--images", str(folder), "--weights", "any", *common])
    printed = capsys.readouterr().out.splitlines()
    model, data = load_trained(run, str(coco))
    assert not model.training
    rows = [image.row for image in data.images["train"] if image.name.startswith("train2014/")]
    expected = decode(model, torch.from_numpy(data.features[rows].astype(np.float32)), 3)
    assert printed == [f"COCO_train2014_{n}.jpg: {data.spell(found.ids)}" for n, found in enumerate(expected)]
    written = json.loads((coco / "out/captions.json").read_text())["captions"]
    assert [c["log_probability"] for c in written] == pytest.approx([c.log_probability for c in expected], abs=1e-4)
    with PillowImage.open(coco / "out/captions.png") as image:
        assert min(image.size) > 100

    write_features(coco / "own.npz", ["a.jpg", "b.jpg"])
    for options, message in [
        ([], "expected either --images or --features"),
        (["--images", str(folder)], "--images needs --weights, the file of torchvision's Inception_v3"),
        (["--images", str(run), "--weights", "any"], r"run has no image: expected files that end in .jpg"),
        (
            ["--features", str(coco / "own.npz")],
            r"trained on 2,048 features per image, but these are 3, so they come from another network",
        ),
    ]:
        with pytest.raises(BnrnnError, match=message):
            caption.main([str(run), *options, *common])
    (folder / "broken.png").write_bytes(b"no image")
    with pytest.raises(BnrnnError, match=r"broken.png is not a readable image"):
        caption.main([str(run), "--images", str(folder), "--weights", "any", *common])
    with pytest.raises(BnrnnError, match=r"result.json is missing: expected the folder of a finished run"):
        caption.main([str(coco), "--features", str(coco / "own.npz")])
