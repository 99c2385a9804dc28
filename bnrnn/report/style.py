"""One style for all figures: colors, lines and markers that differ also in grey and for the color-blind."""

import re
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from bnrnn.config import key_label, label
from bnrnn.system.files import atomic_write


class Look(NamedTuple):
    """How one row of a table is drawn."""

    color: str
    line: Any
    marker: str


# The colors of Okabe and Ito, without yellow, which is too light for lines.
LOOKS = [
    Look("#0072B2", "-", "o"), Look("#D55E00", (0, (6, 1.5)), "s"), Look("#009E73", (0, (6, 1.5, 1.5, 1.5)), "^"),
    Look("#CC79A7", (0, (3, 1)), "D"), Look("#E69F00", "-", "v"), Look("#56B4E9", (0, (1.5, 1)), "P"),
    Look("#000000", (0, (6, 1, 1, 1, 1, 1)), "*"),
]  # fmt: skip


def named(key: str, value: str) -> str:
    """The label of an option, such as model=bn_lstm, or the name of a key and its value, such as a learning rate."""
    if "." in key:
        return f"{key_label(key)} {value}"
    return label(key, value)


def looks_of(rows: Iterable[str]) -> list[Look]:
    """The looks of the rows of a table: those of LOOKS or, if all rows are numbers, colors in the order of the rows."""
    rows = list(rows)
    if len(rows) < 4 or not all(NUMBER.fullmatch(row) for row in rows):
        return LOOKS
    colors = plt.get_cmap("viridis")(np.linspace(0.0, 0.92, len(rows)))
    return [Look(to_hex(color), look.line, look.marker) for color, look in zip(colors, cycle(LOOKS), strict=False)]


NUMBER = re.compile(r"[0-9.e+-]+")
PANEL = (5.4, 4.3)  # inches
ACROSS = 3  # panels beside each other
EXPLODED = 1000.0  # a loss above so many times the lowest one does not determine the range of an axis

plt.rcParams.update({
    "font.size": 10, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.25, "legend.frameon": False, "legend.fontsize": 8.5, "figure.constrained_layout.use": True,
    "savefig.dpi": 120, "svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "bnrnn",
})  # fmt: skip


def legend_below(ax: Axes, columns: int = 2) -> None:
    """The legend below the panel, where it covers no line."""
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15 - 0.06 * ax.get_xlabel().count("\n")), ncols=columns)


def save(figure: Any, path: Path) -> None:
    """Write the figure as .png, and beside it as .svg and .pdf."""
    path.parent.mkdir(parents=True, exist_ok=True)
    undated: dict[str, dict[str, None]] = {
        "png": {"Software": None}, "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }  # fmt: skip
    for suffix, metadata in undated.items():
        with atomic_write(path.with_suffix(f".{suffix}")) as file:
            figure.savefig(file, format=suffix, metadata=metadata)
    plt.close(figure)
