"""The curves of a sweep in the terminal, also of runs that are still being trained."""

import re
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import plotext

from bnrnn.errors import BnrnnError
from bnrnn.report.claims import load_claim
from bnrnn.report.runs import load_borrowed
from bnrnn.training.log import METRICS, read_jsonl

SIZE = (100, 22)  # characters of a plot
COLORS = ["blue", "orange", "green", "magenta", "cyan", "red", "gray"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # points of a curve where there are no colors
Curve = dict[int, float]  # value by update


def default_metric(key: str) -> str:
    """The metric of the first figure of a table, or the validation accuracy for an experiment without a paper."""
    figures = load_claim(key).get("curves") if load_claim(key) else None
    return figures[0]["metric"] if figures else "valid/accuracy"


def read_curves(keys: list[str], results_dir: Path, metric: str) -> dict[str, dict[str, list[Curve]]]:
    """By budget and dataset, and within these by what runs differ in, one curve for each seed.

    Of several experiments, a run also has the part `experiment=<key>`. Rows that an experiment borrows from another
    (`borrows` of its claim) are in all its panels of that dataset. Raises BnrnnError if no run of an experiment has
    recorded the metric.
    """
    found: list[tuple[str, list[str], Curve]] = []
    for key in keys:
        own = _own_curves(results_dir / key, metric)
        of_key = [f"experiment={key}"] if len(keys) > 1 else []
        found += [
            (panel, [*of_key, *parts], curve)
            for panel, parts, curve in [*own, *_borrowed(key, results_dir, metric, own)]
        ]
    shared = set.intersection(*(set(parts) for _, parts, _ in found))
    panels: dict[str, dict[str, list[Curve]]] = defaultdict(lambda: defaultdict(list))
    for panel, parts, curve in found:
        panels[panel][", ".join(part for part in parts if part not in shared) or "all"].append(curve)
    return {
        panel: dict(sorted(curves.items(), key=lambda item: _by_value(item[0]))) for panel, curves in panels.items()
    }


def _own_curves(folder: Path, metric: str) -> list[tuple[str, list[str], Curve]]:
    """The panel, the overrides and the curve of each run below the folder, also of those that are being trained."""
    found, recorded = [], set[str]()
    for path in sorted(folder.rglob(METRICS)):
        records = read_jsonl(path)
        recorded |= {name for record in records for name in record}
        curve = _curve(records, metric)
        if curve:
            budget, *names = path.parent.relative_to(folder).parts
            parts = "/".join(names).split(",")
            panel = ", ".join([budget, *(part for part in parts if part.startswith("data="))])
            found.append((panel, [p for p in parts if not p.startswith(("data=", "seed="))], curve))
    if not found:
        known = ", ".join(sorted(name for name in recorded if "/" in name)) or "none: train first"
        raise BnrnnError(f"{folder} has no curve of {metric}: its metrics are {known}")
    return found


def _borrowed(
    key: str, results_dir: Path, metric: str, own: list[tuple[str, list[str], Curve]]
) -> list[tuple[str, list[str], Curve]]:
    """The curves of borrowed rows, in every panel of their dataset, up to the last update of the panel's own runs."""
    claim, found = load_claim(key), []
    for run in load_borrowed(key, results_dir) if claim else []:
        row, data = f"{claim['rows']}={run.overrides[claim['rows']]}", f"data={run.overrides.get('data')}"
        for panel in sorted({panel for panel, parts, _ in own if panel.endswith(data) and row not in parts}):
            like = next(parts for at, parts, _ in own if at == panel)
            last = max(max(curve) for at, _, curve in own if at == panel)
            curve = {u: value for u, value in _curve(run.records, metric).items() if u <= last}
            if curve:
                found.append((panel, [row if p.startswith(f"{claim['rows']}=") else p for p in like], curve))
    return found


def _curve(records: list[dict[str, Any]], metric: str) -> Curve:
    return {int(r["update"]): float(r[metric]) for r in records if r.get(metric) is not None}


def _by_value(name: str) -> list[tuple[bool, float, str]]:
    """A key that sorts the numbers in a name by value: 0.3 before 10."""
    pieces = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", name)
    return [(k % 2 == 0, float(piece) if k % 2 else 0.0, piece) for k, piece in enumerate(pieces)]


def plot(curves: dict[str, list[Curve]], metric: str, title: str, colored: bool) -> str:
    """A plot of the means over seeds, at the updates that all seeds have, with a line for each curve below it."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(*SIZE)
    plotext.title(f"{title}: {metric}")
    names = []
    for k, (name, of_seeds) in enumerate(curves.items()):
        updates = sorted(set.intersection(*(set(curve) for curve in of_seeds)))
        means = [mean(curve[u] for curve in of_seeds) for u in updates]
        color, letter = COLORS[k % len(COLORS)], LETTERS[k % len(LETTERS)]
        if colored:
            plotext.plot(updates, means, color=color)
        else:
            plotext.scatter(updates, means, marker=letter)
        last = f"{means[-1]:.4g} at update {updates[-1]:,}" if means else "no update that all seeds have"
        mark = plotext.colorize("●", color) if colored else letter
        names.append(f"  {mark} {name} (n={len(of_seeds)}): {last}")
    plotext.xlabel("updates")
    drawn = plotext.build()
    return "\n".join([drawn if colored else plotext.uncolorize(drawn), *names, ""])
