"""COCO captions (Lin et al. 2014, Chen et al. 2015) with Inception_v3 features, split as in Zhang et al. 2017."""

from pathlib import Path
from typing import Any

import torch

from bnrnn.data.captions import CaptionData, Image, divide, load_annotations
from bnrnn.data.image_features import extract, inception_v3, load_extracted
from bnrnn.errors import BnrnnError

COMMAND = "`python -m bnrnn.prepare coco_captions --weights FILE --data-dir DIR`"


class CocoCaptions(CaptionData):
    """`train` has COCO's training images and 85 % of its validation images; `valid` has 5 % of them, `test` 10 % (Z10).

    Reads `<data_dir>/coco/annotations/captions_{train,val}<year>.json` and the features in `<data_dir>/coco/prepared/`.
    """

    def __init__(self, data_dir: str, year: int = 2014, least_count: int = 4, vocabulary_size: int = 12_000) -> None:
        folder = Path(data_dir, "coco")
        features, about = load_extracted(folder / "prepared", f"run {COMMAND}")
        images = images_of(folder, year)
        if about["images"] != [image.name for part in images for image in part]:
            raise BnrnnError(
                f"{folder / 'prepared'} has the features of other images than {folder / 'annotations'} names: "
                f"run {COMMAND}"
            )
        train, val = images
        parts = divide(val, (0.85, 0.05, 0.10))
        name = f"COCO {year}, {about['network']} features"
        super().__init__({**parts, "train": [*train, *parts["train"]]}, features, name, least_count, vocabulary_size)


def images_of(folder: Path, year: int) -> tuple[list[Image], list[Image]]:
    """COCO's training and validation images, sorted by name; the feature rows of the second list follow the first's."""
    found: list[list[Image]] = []
    for split in ("train", "val"):
        path = folder / "annotations" / f"captions_{split}{year}.json"
        if not path.exists():
            raise BnrnnError(f"{path} is missing: unpack COCO's annotations there, or set BNRNN_DATA")
        start = sum(map(len, found))
        captions = sorted(load_annotations(path).items())
        found.append([Image(f"{split}{year}/{name}", start + n, c) for n, (name, c) in enumerate(captions)])
    return found[0], found[1]


def prepare_coco_captions(data_dir: Path, weights: Path | None, year: int = 2014, network: Any = None) -> None:
    """Compute the features of every image that has captions. An interrupted preparation resumes where it stopped.

    Reads the images in `<data_dir>/coco/{train,val}<year>/`. Tests pass another `network` in place of Inception_v3.
    Raises BnrnnError if an image or the weights are missing.
    """
    folder = data_dir / "coco"
    if (folder / "prepared/index.json").exists():
        load_extracted(folder / "prepared", f"run {COMMAND}")
        print(f"{folder / 'prepared'}: complete")
        return
    if weights is None and network is None:
        raise BnrnnError(f"Inception_v3's weights are needed: {COMMAND}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [image.name for part in images_of(folder, year) for image in part]
    missing = next((name for name in names if not (folder / name).exists()), None)
    if missing is not None:
        raise BnrnnError(f"{folder / missing} is missing: unpack COCO's images there")
    made_by = "Inception_v3" if network is None else type(network).__name__
    network = (inception_v3(weights) if network is None else network).to(device)
    about = {"images": names, "network": made_by}
    extract([folder / name for name in names], network, folder / "prepared", about, device)
    print(f"{folder / 'prepared'}: complete")
