"""Whether finished runs agree with the stored ones: `make verify OUT=outputs`.

bnrnn-verify [outputs] [--results DIR]

Prints a line for each cell (runs that differ only in their seed): consistent, differs or nothing to compare with. The
exit status is 1 if a cell differs or a result is damaged, and 2 for bad input.
"""

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bnrnn.config import MENDABLE
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.report.agreement import CONSISTENT, DIFFERS, ITSELF, NOTHING, Finding, judge_cell
from bnrnn.report.run import Run, group
from bnrnn.report.stored import Stored, load_new

DAMAGED = "damaged"
WIDTH = len(NOTHING)  # of the first column


def findings(runs: list[Run], stored: Stored) -> Iterator[tuple[str, Finding]]:
    """The name and the finding of each cell, in order."""
    for key in sorted({run.result.name for run in runs}):
        for (budget, overrides), cell in group(run for run in runs if run.result.name == key).items():
            named = " ".join([key, budget, *(f"{k}={v}" for k, v in overrides)])
            yield named, judge_cell(cell, stored)


def counted(states: Counter[str]) -> str:
    """The last line: how many cells there are, and how many of them have each state."""
    total = sum(states.values()) - states[DAMAGED]
    parts = [f"{states[CONSISTENT]} {CONSISTENT}", f"{states[DIFFERS]} differ", f"{states[NOTHING]} {NOTHING}"]
    parts += [f"{states[ITSELF]} the stored run itself"] if states[ITSELF] else []
    parts += [f"{states[DAMAGED]} damaged"] if states[DAMAGED] else []
    return f"{total} cell{'' if total == 1 else 's'}: {', '.join(parts)}"


def verify(folder: Path, stored: Stored) -> Counter[str]:
    """Print the finding of every cell of a folder. Returns how many have each state.

    Raises BnrnnError for a folder without finished runs.
    """
    runs, damaged = load_new(folder)
    if not runs and not damaged:
        raise BnrnnError(
            f"{folder} has no finished runs: train some, for example with `make quickstart`, or give the folder in "
            "which they are, such as OUT=outputs"
        )
    states = Counter({DAMAGED: len(damaged)})
    for named, finding in findings(runs, stored):
        states[finding.state] += 1
        print(f"{finding.state:{WIDTH}}  {named}: {finding.why}", flush=True)
    for message in damaged:
        print(f"{DAMAGED:{WIDTH}}  {message}")
    print(counted(states))
    return states


def main() -> None:
    """Read the arguments, and end with the exit status of the comparison."""
    parser = ArgumentParser("bnrnn-verify", description="Whether finished runs agree with the stored ones.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs"), help="of the finished runs")
    parser.add_argument("--results", type=Path, metavar="DIR", help="of the stored runs; default: those of bnrnn")
    args = parser.parse_args()
    states = verify(args.folder, Stored(args.results))
    sys.exit(int(states[DIFFERS] + states[DAMAGED] > 0))


def cli() -> None:
    """Run main. Errors that the user can correct end it with one message and the exit status 2."""
    try:
        report_errors(main, *MENDABLE)
    except SystemExit as ended:
        if not isinstance(ended.code, str):
            raise
        print(ended.code, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    cli()
