"""Caption your own images with a trained run.

python scripts/caption.py RUN --images FOLDER --weights inception_v3_google-0cc3c7bd.pth
python scripts/caption.py RUN --features FILE.npz

RUN is the folder of a finished run with its model.pt. The captions on which it was trained are needed too, because they
determine its vocabulary. Features must come from the network that the run was trained with. This program computes those
of Inception_v3; those of another network are read from the arrays `file_name` (N,) and `features` (N, F).
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
from bnrnn.models.decoding import BEAM_SIZE, decode
from bnrnn.report import plots, style
from bnrnn.report.trained import load_trained
from bnrnn.system.files import write_json

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")


def features_of(folder: Path, weights: Path | None) -> tuple[list[Path], Float[Tensor, "N F"]]:
    """The images of a folder, sorted by name, and their Inception_v3 features (N, F).

    Raises BnrnnError without weights or images, and for a file that is not an image.
    """
    if weights is None:
        raise BnrnnError("--images needs --weights, the file of torchvision's Inception_v3; or use --features")
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() in ENDINGS)
    if not paths:
        raise BnrnnError(f"{folder} has no image: expected files that end in {', '.join(ENDINGS)}")
    network = inception_v3(weights)
    with torch.no_grad():
        return paths, torch.cat([network(images).half().float() for images in batches(paths)])  # rounded as stored


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--images", type=Path, metavar="FOLDER")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="torchvision's Inception_v3 file")
    parser.add_argument("--features", type=Path, metavar="FILE", help="read features instead of images")
    parser.add_argument("--beam", type=int, default=BEAM_SIZE, help=f"size of the beam; default {BEAM_SIZE}")
    parser.add_argument("--out-dir", type=Path, metavar="DIR", help="write captions.json and captions.png here")
    parser.add_argument("--data-dir", default=os.environ.get("BNRNN_DATA", "data"))
    args = parser.parse_args(argv)
    if (args.images is None) == (args.features is None):
        raise BnrnnError("expected either --images or --features: use one of them")
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
            f"{args.run} was trained on {data.feature_size:,} features per image, but these are {features.shape[1]:,}, "
            "so they come from another network: use --features of the network of the run"
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
            style.save(plots.gallery(shown, [thumbnail(path) for path in paths]), args.out_dir / "captions.png")


if __name__ == "__main__":
    report_errors(main)
