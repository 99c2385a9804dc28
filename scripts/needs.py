"""Print the recipes to train for a table or figure, or the analyses to run afterwards, one per line.

python scripts/needs.py recipes cooijmans2016/fig3
python scripts/needs.py analyses cooijmans2016/fig3
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter

from bnrnn.errors import report_errors
from bnrnn.report.claims import needed


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["recipes", "analyses"])
    parser.add_argument("key", help="<paper>/<table or figure>")
    args = parser.parse_args()
    recipes, analyses = needed(args.key)
    for line in recipes if args.kind == "recipes" else analyses:
        print(line)


if __name__ == "__main__":
    report_errors(main)
