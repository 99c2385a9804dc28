"""A few images of COCO (Lin et al. 2014), for machines without the full data: captions and precomputed features."""

from pathlib import Path

import numpy as np

from bnrnn.data.captions import CaptionData, divide, load_annotations, load_features, pair
from bnrnn.errors import MissingData


class CocoMini(CaptionData):
    """The images that have features, split 80 / 10 / 10 % into train / valid / test.

    Reads the annotations `<data_dir>/coco/captions_*.json`, in COCO's format, and `<data_dir>/coco/*.npz` with the
    arrays `file_name` (N,) and `features` (N, F). Raises BnrnnError if a file is missing or damaged.
    """

    def __init__(self, data_dir: str, least_count: int = 4, vocabulary_size: int = 12_000) -> None:
        folder = Path(data_dir, "coco")
        files = sorted(folder.glob("*.npz"))
        if not files:
            raise MissingData(f"{folder} has no .npz with features: set BNRNN_DATA to the folder that holds coco/")
        loaded = [load_features(path) for path in files]
        names = [name for of_file, _ in loaded for name in of_file]
        captions = {k: v for path in sorted(folder.glob("captions_*.json")) for k, v in load_annotations(path).items()}
        known = {name: captions[name] for name in names if name in captions}
        images = pair(known, names, str(folder / "captions_*.json"), str(folder))
        features = np.concatenate([values for _, values in loaded])
        name = f"COCO, {len(images):,} of its images, {features.shape[1]} features"
        super().__init__(divide(images, (0.8, 0.1, 0.1)), features, name, least_count, vocabulary_size)
