"""COCO captions (Lin et al. 2014, Chen et al. 2015) with Inception_v3 features, split as in Zhang et al. 2017."""

import shutil
from pathlib import Path
from typing import Any

from torch import nn

from bnrnn.data.base import sha256
from bnrnn.data.captions import ArrowFeatures, CaptionData, Image, divide, load_annotations
from bnrnn.data.image_features import extract, inception_v3
from bnrnn.data.prepared import load_prepared, save_prepared
from bnrnn.errors import BnrnnError, MissingData
from bnrnn.system.files import read_bytes

COMMAND = "`bnrnn-prepare coco_captions --weights FILE --year YEAR --data-dir DIR`"
SPLITS = ("train", "val")  # the names of COCO
VERSION = "COCO captions 1"


class CocoCaptions(CaptionData):
    """`train` has COCO's training images and 85 % of its validation images; `valid` has 5 % of them, `test` 10 % (Z10).

    Reads `<data_dir>/coco/prepared/`, an Arrow dataset with a row for each image, and checks that it was prepared from
    `<data_dir>/coco/annotations/captions_{train,val}<year>.json`.
    """

    def __init__(self, data_dir: str, year: int = 2014, least_count: int = 4, vocabulary_size: int = 12_000) -> None:
        from datasets import concatenate_datasets  # slow to import

        splits = load_images(Path(data_dir, "coco"), year)
        rows = concatenate_datasets([splits[split] for split in SPLITS])
        columns = rows["name"][:], range(len(rows)), rows["captions"][:]
        images = [Image(*image) for image in zip(*columns, strict=True)]
        num_train = len(splits["train"])
        parts = divide(images[num_train:], (0.85, 0.05, 0.10))
        parts["train"] = [*images[:num_train], *parts["train"]]
        name = splits["train"].info.description
        super().__init__(parts, ArrowFeatures(rows), name, least_count, vocabulary_size)


def load_images(folder: Path, year: int) -> Any:
    """The prepared images as a `datasets.DatasetDict`. Raises BnrnnError if other annotations were used."""
    annotations = _annotations(folder, year)
    given = " and ".join(map(str, annotations))
    return load_prepared(folder / "prepared", VERSION, COMMAND, _digest(annotations), given)


def prepare_coco_captions(
    data_dir: Path, weights: Path | None, year: int = 2014, network: nn.Module | None = None, num_proc: int = 1
) -> None:
    """Store the captions and features of all images that have captions in `<data_dir>/coco/prepared/`.

    Reads the images in `<data_dir>/coco/{train,val}<year>/`. An interrupted preparation resumes where it stopped, with
    any number of processes. Raises BnrnnError if an image or the weights are missing.

    Args:
        network: used instead of Inception_v3 with the given weights, for tests.
        num_proc: number of processes that compute features.
    """
    folder = data_dir / "coco"
    if (folder / "prepared").exists():
        load_images(folder, year)
        print(f"{folder / 'prepared'}: complete")
        return
    if weights is None and network is None:
        raise BnrnnError(f"Inception_v3's weights are needed: run {COMMAND}")
    from datasets import Dataset, concatenate_datasets

    captions = {
        f"{split}{year}/{name}": of_image
        for split, path in zip(SPLITS, _annotations(folder, year), strict=True)
        for name, of_image in sorted(load_annotations(path).items())
    }
    missing = next((name for name in captions if not (folder / name).exists()), None)
    if missing is not None:
        raise MissingData(f"{folder / missing} is missing: unpack COCO's images there")
    made_by = "Inception_v3" if network is None else type(network).__name__
    network = inception_v3(weights) if network is None else network
    features = extract([folder / name for name in captions], network, folder / "parts", made_by, num_proc)
    names = Dataset.from_dict({"name": list(captions), "captions": list(captions.values())})
    rows = concatenate_datasets([names, features], axis=1)
    rows.info.description = f"COCO {year}, {made_by} features"
    num_train = sum(name.startswith("train") for name in captions)
    splits = {"train": rows.select(range(num_train)), "val": rows.select(range(num_train, len(rows)))}
    save_prepared(folder / "prepared", splits, VERSION, _digest(_annotations(folder, year)))
    shutil.rmtree(folder / "parts")
    print(f"{folder / 'prepared'}: complete")


def _annotations(folder: Path, year: int) -> list[Path]:
    paths = [folder / "annotations" / f"captions_{split}{year}.json" for split in SPLITS]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise MissingData(f"{missing} is missing: unpack COCO's annotations there, or set BNRNN_DATA")
    return paths


def _digest(annotations: list[Path]) -> str:
    return sha256("".join(sha256(read_bytes(path, "fetch COCO's annotations again")) for path in annotations).encode())
