"""The curves of a sweep in the terminal, also of runs that are still being trained."""

import re
from collections import defaultdict
from statistics import mean
from string import ascii_lowercase
from typing import Any

import plotext

from bnrnn.errors import BnrnnError
from bnrnn.report.claims import has_entry, table_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.run import longest

SIZE = (100, 22)  # characters of a plot
COLORS = ["blue", "orange", "green", "magenta", "cyan", "red", "gray"]
Values = dict[int, float]  # of a curve, by update
Named = tuple[str, list[str], Values]  # the panel of a curve, the overrides of its run, and its values


def default_metric(key: str) -> str:
    """The metric of the first figure of a table, or the validation accuracy for an experiment without a paper."""
    curves = table_of(key).curves if has_entry(key) else ()
    return curves[0].metric if curves else "valid/accuracy"


def read_curves(keys: list[str], evidence: Evidence, metric: str) -> dict[str, dict[str, list[Values]]]:
    """By budget and dataset, and within these by what runs differ in, one curve for each seed.

    Of several experiments, a run also has the part `experiment=<key>`. Rows that an experiment borrows from another
    (`borrows` of its claim) are in all its panels of that dataset. Raises BnrnnError if no run of an experiment has
    recorded the metric.
    """
    found: list[Named] = []
    for key in keys:
        own = _own_curves(key, evidence, metric)
        of_key = [f"experiment={key}"] if len(keys) > 1 else []
        found += [(at, [*of_key, *parts], curve) for at, parts, curve in [*own, *_borrowed(key, evidence, metric, own)]]
    shared = set.intersection(*(set(parts) for _, parts, _ in found))
    panels: dict[str, dict[str, list[Values]]] = defaultdict(lambda: defaultdict(list))
    for panel, parts, curve in found:
        panels[panel][", ".join(part for part in parts if part not in shared) or "all"].append(curve)
    return {panel: {name: curves[name] for name in sorted(curves, key=_by_value)} for panel, curves in panels.items()}


def _own_curves(key: str, evidence: Evidence, metric: str) -> list[Named]:
    """The curve of each run of an experiment, also of those that are being trained."""
    found, recorded, folder = [], set[str](), evidence.folder / key
    for run_dir, records in evidence.records(key).items():
        recorded |= {name for record in records for name in record}
        curve = _curve(records, metric)
        if curve:
            budget, *names = run_dir.relative_to(folder).parts
            parts = "/".join(names).split(",")
            panel = ", ".join([budget, *(part for part in parts if part.startswith("data="))])
            found.append((panel, [p for p in parts if not p.startswith(("data=", "seed="))], curve))
    if not found:
        known = ", ".join(sorted(name for name in recorded if "/" in name)) or "none: train first"
        raise BnrnnError(f"{folder} has no curve of {metric}: its metrics are {known}")
    return found


def _borrowed(key: str, evidence: Evidence, metric: str, own: list[Named]) -> list[Named]:
    """The curves of borrowed rows, in every panel of their dataset, up to the last update of the panel's own runs."""
    if not has_entry(key):
        return []
    table, found = table_of(key), list[Named]()
    for run in longest(evidence.shown(key)[len(evidence.runs(key)) :]):  # a seed that was trained twice counts once
        row, data = f"{table.rows}={run.overrides[table.rows]}", f"data={run.overrides.get('data')}"
        for panel in sorted({panel for panel, parts, _ in own if panel.endswith(data) and row not in parts}):
            like = next(parts for at, parts, _ in own if at == panel)
            last = max(max(curve) for at, _, curve in own if at == panel)
            curve = {u: value for u, value in _curve(run.records, metric).items() if u <= last}
            if curve:
                found.append((panel, [row if p.startswith(f"{table.rows}=") else p for p in like], curve))
    return found


def _curve(records: list[dict[str, Any]], metric: str) -> Values:
    return {int(r["update"]): float(r[metric]) for r in records if r.get(metric) is not None}


def _by_value(name: str) -> list[tuple[bool, float, str]]:
    """A key that sorts the numbers in a name by value: 0.3 before 10."""
    pieces = re.split(r"(\d+(?:\.\d+)?(?:e-?\d+)?)", name)
    return [(k % 2 == 0, float(piece) if k % 2 else 0.0, piece) for k, piece in enumerate(pieces)]


def plot(curves: dict[str, list[Values]], metric: str, title: str, colored: bool) -> str:
    """A plot of the means over seeds, at the updates that all seeds have, with a line for each curve below it."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(*SIZE)
    plotext.title(f"{title}: {metric}")
    names = []
    for k, (name, of_seeds) in enumerate(curves.items()):
        updates = sorted(set.intersection(*(set(curve) for curve in of_seeds)))
        means = [mean(curve[u] for curve in of_seeds) for u in updates]
        color, letter = COLORS[k % len(COLORS)], ascii_lowercase[k % 26]
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
