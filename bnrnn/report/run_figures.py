"""Figures of a single run, which wandb shows as images: its curves, and the captions that its model generates."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bnrnn.metrics import metric_of
from bnrnn.report import plots
from bnrnn.report.style import ACROSS, LOOKS, PANEL, legend_below

COUNT = 6  # images with captions


def curves(records: list[dict[str, Any]]) -> Figure:
    """A panel for each metric against updates, with training and validation in the same panel.

    Args:
        records: the lines of metrics.jsonl.
    """
    names = sorted({name for record in records for name in record if "/" in name})
    by_metric: dict[str, list[str]] = {}
    for name in names:
        by_metric.setdefault(name.partition("/")[2].removesuffix("_max"), []).append(name)
    rows = -(-len(by_metric) // ACROSS)
    across = min(ACROSS, len(by_metric))
    fig, axes = plt.subplots(rows, across, figsize=(across * PANEL[0], rows * PANEL[1]), squeeze=False)
    for ax in list(axes.flat)[len(by_metric) :]:
        ax.remove()
    for ax, of_metric in zip(axes.flat, by_metric.values(), strict=False):
        for look, name in zip(LOOKS, of_metric, strict=False):
            points = [(r["update"], r[name]) for r in records if r.get(name) is not None]
            x, y = zip(*points, strict=True) if points else ([], [])
            marker = look.marker if len(x) <= plots.FEW else None
            ax.plot(x, y, color=look.color, linestyle=look.line, marker=marker, label=name)
        metric = metric_of(of_metric[0])
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.set(xlabel="updates", ylabel=metric.title if metric else of_metric[0])
        if of_metric[0].endswith("grad_norm"):
            ax.set_yscale("log")
        legend_below(ax)
    plt.close(fig)  # pyplot would keep it
    return fig


def captions(data: Any, generated: dict[str, list[str]]) -> Figure:
    """The first test images with the captions of each kind of search, and one that a person wrote."""
    shown = [
        {
            "reference": image.captions[0],
            "captions": {kind.strip("_") or "greedy": found[n] for kind, found in generated.items()},
        }
        for n, image in enumerate(data.images["test"][:COUNT])
    ]
    fig = plots.gallery(shown, data.thumbnails("test", COUNT))
    plt.close(fig)
    return fig
