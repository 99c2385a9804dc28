"""Fetch data sets that are missing or damaged: python scripts/prepare_data.py [mnist ptb text8] [data_dir=DIR]."""

import os
import sys
from pathlib import Path

from bnrnn.data.mnist import prepare_mnist
from bnrnn.data.ptb import prepare_ptb
from bnrnn.data.text8 import prepare_text8
from bnrnn.errors import BnrnnError, report_errors

PREPARE = {"mnist": prepare_mnist, "ptb": prepare_ptb, "text8": prepare_text8}


def main(args: list[str]) -> None:
    options = dict(arg.split("=", 1) for arg in args if "=" in arg)
    names = [arg for arg in args if "=" not in arg] or list(PREPARE)
    unknown = [name for name in names if name not in PREPARE] + [key for key in options if key != "data_dir"]
    if unknown:
        raise BnrnnError(f"unknown: {', '.join(unknown)}. Data sets: {', '.join(PREPARE)}; option: data_dir=DIR")
    data_dir = Path(options.get("data_dir", os.environ.get("BNRNN_DATA", "data")))
    for name in names:
        PREPARE[name](data_dir)


if __name__ == "__main__":
    report_errors(lambda: main(sys.argv[1:]))
