"""The images of COCO: preparing their features, and captions of images by a trained run."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage
from torch import nn

from bnrnn import metrics
from bnrnn.config import compose_config
from bnrnn.data import image_features
from bnrnn.data.coco_captions import CocoCaptions, prepare_coco_captions
from bnrnn.errors import BnrnnError
from bnrnn.models.decoding import decode
from bnrnn.report.trained import load_trained
from bnrnn.train import train
from scripts import caption
from tests.data.test_captions import annotations, write_features


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
