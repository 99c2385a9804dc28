"""Cooijmans et al. 2016, Fig. 1b: the derivative of tanh against the standard deviation of its Gaussian input.

    python experiments/cooijmans2016/fig1b.py [--out-dir DIR]

Computes the mean and the quartiles of 1 - tanh² from 1000 samples for each of 1000 standard deviations from 0 to 1, and
repeats this for ten draws. The figure shows the first draw. Needs no training and no data.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

from bnrnn.errors import report_errors
from bnrnn.report import style
from bnrnn.report.analyses import command_line, publish
from bnrnn.report.claims import analysis_of
from bnrnn.report.markdown import markdown
from bnrnn.report.site.curves import Line, Plot, shortened
from bnrnn.training.provenance import provenance

KEY = "cooijmans2016/fig1b"


def sample(seed: int, num: int) -> dict[str, list[float]]:
    """Mean and quartiles of the derivative at each of `num` standard deviations."""
    torch.manual_seed(seed)
    sigma = torch.linspace(0, 1, num, dtype=torch.float64)
    derivative = 1 - (sigma * torch.randn(num, num, dtype=torch.float64)).tanh().square()  # (samples, sigma)
    low, high = derivative.quantile(torch.tensor([0.25, 0.75], dtype=torch.float64), dim=0)
    columns = {"sigma": sigma, "mean": derivative.mean(0), "quartile_25": low, "quartile_75": high}
    return {name: values.tolist() for name, values in columns.items()}


def measure(num: int = 1000, num_draws: int = 10) -> dict[str, Any]:
    samples = [sample(seed, num) for seed in range(num_draws)]
    points = analysis_of(KEY).numbers["points"]
    draws = [{name: {f"{s}": at(drawn, name, s) for s in points[name]} for name in points} for drawn in samples]
    return {"name": KEY, **provenance(), **samples[0], "draws": draws}


def at(result: dict[str, Any], column: str, sigma: float) -> float:
    """The column averaged over the 21 standard deviations around `sigma` (fewer at the ends)."""
    center = round(sigma * (len(result["sigma"]) - 1))
    values = result[column][max(0, center - 10) : center + 11]
    return sum(values) / len(values)


def matches_exact_values(result: dict[str, Any], tolerance: float) -> list[bool]:
    """For each draw, whether every point is within a tolerance of exact integration."""
    points = analysis_of(KEY).numbers["points"]
    return [
        all(abs(drawn[name][f"{s}"] - exact) <= tolerance for name in points for s, exact in points[name].items())
        for drawn in result["draws"]
    ]


def falls(result: dict[str, Any]) -> list[bool]:
    """For each draw, whether the mean falls from each standard deviation of the points to the next."""
    means = [list(drawn["mean"].values()) for drawn in result["draws"]]
    return [all(a > b for a, b in pairwise(values)) for values in means]


def plot(result: dict[str, Any]) -> Plot:
    """The interactive plot: the mean and the quartiles, and the exact values."""
    axis, points = "standard deviation of the input", []
    sigma = [shortened(value) for value in result["sigma"]]
    lines = [
        Line(name, {axis: sigma}, [shortened(y) for y in result[name]]) for name in analysis_of(KEY).numbers["points"]
    ]
    for name, exact in analysis_of(KEY).numbers["points"].items():
        points.append(Line(name, {axis: list(exact)}, list(exact.values())))
    return Plot([axis], {"": "derivative of tanh"}, lines, points)


def render(result: dict[str, Any]) -> str:
    analysis = analysis_of(KEY)
    rows = []
    for column, points in analysis.numbers["points"].items():
        for sigma, exact in points.items():
            ours = at(result, column, sigma)
            rows.append([column, f"{sigma}", f"{exact:.3f}", f"{ours:.3f}", f"{ours - exact:+.3f}"])
    table = markdown(["1 - tanh²", "standard deviation", "exact", "sampled", "difference"], rows)
    return f"# {analysis.title}\n\n{table}\n![Fig. 1b](fig1b.png)\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot mean and quartiles of the derivative; open circles are exact values."""
    fig, ax = plt.subplots(figsize=(6, 4.5))
    ours, exactly = style.LOOKS[:2]
    ax.fill_between(result["sigma"], result["quartile_25"], result["quartile_75"], alpha=0.25, color=ours.color,
                    linewidth=0, label="25th to 75th percentile")  # fmt: skip
    ax.plot(result["sigma"], result["mean"], color=ours.color, label="mean of 1000 samples")
    for k, exact in enumerate(analysis_of(KEY).numbers["points"].values()):
        ax.plot(list(exact), list(exact.values()), "o", color=exactly.color, markerfacecolor="none",
                label="exact integration" if k == 0 else None)  # fmt: skip
    ax.set(xlabel="standard deviation of the input", ylabel="derivative of tanh", xlim=(0, 1.01), ylim=(0, 1.01))
    ax.legend(loc="lower left")
    style.save(fig, path)


def main() -> None:
    args = command_line(__doc__).parse_args()
    publish(KEY, measure(), args.out_dir, render, draw)


if __name__ == "__main__":
    report_errors(main)
