"""The curves of a sweep in the terminal, also of runs that are still being trained."""

from collections import defaultdict
from statistics import mean

import plotext

from bnrnn.errors import BnrnnError
from bnrnn.report.claims import has_entry, table_of
from bnrnn.report.evidence import Evidence

SIZE = (100, 22)  # characters of a plot
COLORS = ["blue", "orange", "green", "magenta", "cyan", "red", "gray"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # points of a curve where there are no colors
Values = dict[int, float]  # of a curve, by update


def default_metric(key: str) -> str:
    """The metric of the first figure of a table, or the validation accuracy for an experiment without a paper."""
    curves = table_of(key).curves if has_entry(key) else ()
    return curves[0].metric if curves else "valid/accuracy"


def read_curves(key: str, evidence: Evidence, metric: str) -> dict[str, dict[str, list[Values]]]:
    """By budget and dataset, and within these by the overrides in which runs differ, one curve for each seed.

    Raises BnrnnError if no run of the experiment has recorded the metric.
    """
    found, recorded, folder = [], set[str](), evidence.folder / key
    for run_dir, records in evidence.records(key).items():
        recorded |= {name for record in records for name in record}
        curve = {int(r["update"]): float(r[metric]) for r in records if r.get(metric) is not None}
        if curve:
            budget, *names = run_dir.relative_to(folder).parts
            parts = "/".join(names).split(",")
            panel = ", ".join([budget, *(part for part in parts if part.startswith("data="))])
            found.append((panel, [p for p in parts if not p.startswith(("data=", "seed="))], curve))
    if not found:
        known = ", ".join(sorted(name for name in recorded if "/" in name)) or "none: train first"
        raise BnrnnError(f"{folder} has no curve of {metric}: its metrics are {known}")
    shared = set.intersection(*(set(parts) for _, parts, _ in found))
    panels: dict[str, dict[str, list[Values]]] = defaultdict(lambda: defaultdict(list))
    for panel, parts, curve in found:
        panels[panel][", ".join(part for part in parts if part not in shared) or "all"].append(curve)
    return panels


def plot(curves: dict[str, list[Values]], metric: str, title: str, colored: bool) -> str:
    """A plot of the means over seeds, at the updates that all seeds have, with a line for each curve below it."""
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(*SIZE)
    plotext.title(f"{title}: {metric}")
    names = []
    for k, (name, of_seeds) in enumerate(sorted(curves.items())):
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
