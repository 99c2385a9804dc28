"""Store the selected models of the finished runs of an experiment, as small files for the repository.

python scripts/release.py cooijmans2016/table1 [--results DIR]

Only runs of the recipe's own length count. Each model becomes results/<paper>/<table>/models/<run>.safetensors;
`make tables` renders the card beside them. bnrnn.training.released loads these files.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from bnrnn.errors import BnrnnError, report_errors
from bnrnn.training.cells import expand
from bnrnn.training.checkpoint import MODEL
from bnrnn.training.released import release, released_path
from bnrnn.training.results import FILE


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("key", metavar="KEY", help="<paper>/<table>")
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    args = parser.parse_args(argv)
    quoted = str(args.results).replace("'", r"\'")
    cells = expand([f"experiment={args.key}", "budget=paper", f"out_dir='{quoted}'"])
    trained = [cell for cell in cells if (cell.folder / FILE).exists() and (cell.folder / MODEL).exists()]
    if not trained:
        raise BnrnnError(f"{args.results / args.key} has no finished run with its model: train {args.key} first")
    for cell in trained:
        path = released_path(args.results / args.key, cell.overrides)
        release(cell.folder, path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    report_errors(main)
