"""Run a notebook, and store what its cells print and plot.

python scripts/notebook.py examples/gamma.ipynb [--check]     --check runs it, and stores nothing
"""

import argparse
import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bnrnn.system.files import write_text


def run(cells: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Run the code of the cells in order, with common names, and return the outputs of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    found = []
    for number, cell in enumerate(cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        outputs: list[dict[str, Any]] = []
        if text := printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)})
        outputs += [figure(each) for each in plt.get_fignums()]
        plt.close("all")
        found.append(outputs)
    return found


def figure(number: int) -> dict[str, Any]:
    """A figure as the output of a cell."""
    file = io.BytesIO()
    plt.figure(number).savefig(file, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
    png = base64.b64encode(file.getvalue()).decode()
    return {"output_type": "display_data", "metadata": {}, "data": {"image/png": png, "text/plain": ["figure"]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    notebook = json.loads(args.notebook.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, outputs) in enumerate(zip(code, run(code), strict=True), 1):
        cell |= {"execution_count": number, "outputs": outputs}
    if not args.check:
        write_text(args.notebook, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
