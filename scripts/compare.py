"""Plot the curves of experiments in the terminal, and print the command that sends their runs to wandb.

python scripts/compare.py KEY [KEY ...] [--results DIR] [--metric valid/accuracy]
"""

import argparse
import sys
from pathlib import Path

from bnrnn.errors import report_errors
from bnrnn.report.terminal import default_metric, plot, read_curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "keys", nargs="+", metavar="KEY", help="<paper>/<table or figure>, such as cooijmans2016/table1"
    )
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="DIR")
    parser.add_argument("--metric", help="a name in metrics.jsonl; default: the metric of the figure")
    args = parser.parse_args()
    metric = args.metric or default_metric(args.keys[0])
    for title, curves in read_curves(args.keys, args.results, metric).items():
        print(plot(curves, metric, title, sys.stdout.isatty()))
    for folder in (args.results / key for key in args.keys):
        sent = sorted({path.parent for path in folder.rglob("wandb/offline-run-*")})
        for path in sent:
            print(f"wandb sync {path}/offline-run-*")
        if not sent:
            print(f"{folder} has no offline runs of wandb: they are not part of the repository, only of your own runs")


if __name__ == "__main__":
    report_errors(main)
