"""Render tables and figures from the results of finished runs.

python scripts/make_tables.py                       render all pages and figures in results/, and README.md's tables
python scripts/make_tables.py --check               fail if results are not as sealed, or if a page does not match them
python scripts/make_tables.py --seal                seal the results as they are now, after a look at what has changed
python scripts/make_tables.py --show KEY --results DIR    one experiment: print its table and plot its figures
"""

import argparse
from pathlib import Path

from hydra.errors import HydraException

from bnrnn.errors import BnrnnError, report_errors
from bnrnn.report.evidence import Evidence
from bnrnn.report.pages import RESULTS, draw_all, show, texts
from bnrnn.report.seals import SEALS, check_seals, seal
from bnrnn.system.files import write_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--seal", action="store_true")
    parser.add_argument("--show", metavar="KEY")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args()
    evidence = Evidence(args.results)
    if args.seal:
        print(f"{seal(args.results)} files are sealed in {args.results / SEALS}")
        return
    if args.check:
        check_seals(args.results)
    if args.show:
        show(args.show, evidence)
        return
    expected = texts(evidence)
    if args.check:
        wrong = [str(path) for path, text in expected.items() if not path.exists() or path.read_text() != text]
        if wrong:
            raise BnrnnError(f"{', '.join(wrong)} do not match the results: run `make tables`")
        return
    for path, text in expected.items():
        write_text(path, text)
    draw_all(evidence)


if __name__ == "__main__":
    report_errors(main, HydraException)
