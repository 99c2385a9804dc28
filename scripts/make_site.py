"""Build the site: documents, claims and results as pages for a browser.

python scripts/make_site.py [--out-dir site]
"""

import argparse
from pathlib import Path

from hydra.errors import HydraException

from bnrnn.config import ROOT
from bnrnn.errors import report_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-dir", type=Path, default=ROOT / "site", metavar="DIR")
    args = parser.parse_args()
    from bnrnn.report.evidence import Evidence
    from bnrnn.report.site.build import build

    build(Evidence(ROOT / "results"), args.out_dir.resolve())
    print(f"Open {args.out_dir / 'index.html'}")


if __name__ == "__main__":
    report_errors(main, HydraException)
