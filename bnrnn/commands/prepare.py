"""Download data sets that are missing or damaged, or prepare those that you have downloaded.

bnrnn-prepare [mnist ptb text8] [--data-dir DIR]
bnrnn-prepare cnn_qa --from DIR [--data-dir DIR] [--most-skipped N] [--num-proc N]
bnrnn-prepare coco_captions --weights FILE [--year 2017] [--data-dir DIR] [--num-proc N]
"""

import os
from argparse import ArgumentParser
from pathlib import Path

from bnrnn.data.cnn_qa_prepare import MAX_SKIPPED, prepare_cnn_qa
from bnrnn.data.coco_captions import prepare_coco_captions
from bnrnn.data.mnist import prepare_mnist
from bnrnn.data.prepared import NUM_PROC
from bnrnn.data.ptb import prepare_ptb
from bnrnn.data.text8 import prepare_text8
from bnrnn.errors import BnrnnError, report_errors

PREPARE = {"mnist": prepare_mnist, "ptb": prepare_ptb, "text8": prepare_text8, "cnn_qa": prepare_cnn_qa,
           "coco_captions": prepare_coco_captions}  # fmt: skip


def main() -> None:
    parser = ArgumentParser("bnrnn-prepare", description="Download or prepare data sets.")
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(PREPARE))
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("BNRNN_DATA", "data")))
    parser.add_argument("--from", dest="source", type=Path, help="cnn_qa: the folder that contains questions/training")
    parser.add_argument(
        "--most-skipped", type=int, default=MAX_SKIPPED, help="cnn_qa: number of malformed files to allow"
    )
    parser.add_argument("--weights", type=Path, help="coco_captions: torchvision's Inception_v3 file")
    parser.add_argument("--year", type=int, default=2014, help="coco_captions: year of the annotations; default 2014")
    parser.add_argument(
        "--num-proc", type=int, default=NUM_PROC, help=f"cnn_qa, coco_captions: processes; default {NUM_PROC}"
    )
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in PREPARE]
    if unknown:
        raise BnrnnError(f"data set {', '.join(unknown)} is unknown: use {', '.join(PREPARE)}")
    for name in args.names or ["mnist", "ptb", "text8"]:
        if name == "cnn_qa":
            prepare_cnn_qa(args.data_dir, args.source, args.most_skipped, args.num_proc)
        elif name == "coco_captions":
            prepare_coco_captions(args.data_dir, args.weights, args.year, num_proc=args.num_proc)
        else:
            PREPARE[name](args.data_dir)


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    report_errors(main)


if __name__ == "__main__":
    cli()
