"""Caption images of your own with a trained run.

python scripts/caption.py RUN --images FOLDER --weights inception_v3_google-0cc3c7bd.pth
python scripts/caption.py RUN --features FILE.npz

RUN is the folder of a finished run, with its model.pt; the captions that it was trained on are needed too, because they
hold its vocabulary. Features must be those of the network that the run had: Inception_v3 computes them here, those of
another network are read from arrays `file_name` (N) and `features` (N, F).
"""

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bnrnn.data.captions import CaptionData, load_features
from bnrnn.data.image_features import batches, inception_v3, thumbnail
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.files import write_json
from bnrnn.models.decoding import BEAM_SIZE, decode
from bnrnn.report import plots
from bnrnn.report.runs import load_trained

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


def features_of(folder: Path, weights: Path | None) -> tuple[list[Path], Float[Tensor, "N F"]]:
    """The images of a folder, by name, and their features by Inception_v3. Raises BnrnnError for one that is none."""
    if weights is None:
        raise BnrnnError("--images needs --weights, the file of torchvision's Inception_v3; or give --features")
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() in ENDINGS)
    if not paths:
        raise BnrnnError(f"{folder} has no image: expected files that end in {', '.join(ENDINGS)}")
    network = inception_v3(weights)
    with torch.no_grad():
        return paths, torch.cat([network(images).half().float() for images in batches(paths)])  # as they are stored


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--images", type=Path, metavar="FOLDER")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="torchvision's of Inception_v3")
    parser.add_argument("--features", type=Path, metavar="FILE", help="instead of images")
    parser.add_argument(
        "--beam", type=int, default=BEAM_SIZE, help=f"captions kept in the search; {BEAM_SIZE} by default"
    )
    parser.add_argument("--out-dir", type=Path, metavar="DIR", help="write captions.json there, and captions.png")
    parser.add_argument("--data-dir", default=os.environ.get("BNRNN_DATA", "data"))
    args = parser.parse_args(argv)
    if (args.images is None) == (args.features is None):
        raise BnrnnError("give either --images or --features")
    model, data = load_trained(args.run, args.data_dir)
    if not isinstance(data, CaptionData):
        raise BnrnnError(f"{args.run} is not a captioner: it was trained on {data.description}")
    if args.images is not None:
        paths, features = features_of(args.images, args.weights)
        names = [path.name for path in paths]
    else:
        names, values = load_features(args.features)
        paths, features = [], torch.from_numpy(values.astype(np.float32))
    if features.shape[1] != data.feature_size:
        raise BnrnnError(
            f"{args.run} was trained on {data.feature_size:,} features an image, from another network than these "
            f"{features.shape[1]:,}: give --features of that network"
        )
    found = decode(model, features, args.beam)
    captions = [
        {"name": name, "caption": data.spell(caption.ids), "log_probability": round(caption.log_probability, 4)}
        for name, caption in zip(names, found, strict=True)
    ]
    for caption in captions:
        print(f"{caption['name']}: {caption['caption']}")
    if args.out_dir is not None:
        write_json(args.out_dir / "captions.json", {"run": str(args.run), "captions": captions})
        if paths:
            shown = [{"captions": {args.run.name: caption["caption"]}} for caption in captions]
            plots.draw_gallery(shown, [thumbnail(path) for path in paths], args.out_dir / "captions.png")


if __name__ == "__main__":
    report_errors(main)
