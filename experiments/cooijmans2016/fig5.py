"""Cooijmans et al. 2016, Fig. 5: population statistics of the recurrent term and of the cell over time steps.

    python experiments/cooijmans2016/fig5.py [--out-dir DIR]

Reads the longest finished BN-LSTMs of Table 2 in --out-dir: 30 random units of each model over the first 50 steps. The
figure shows the model of the first seed. What was measured before, on other seeds or on runs of other lengths, stays in
the result.
"""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from bnrnn.errors import report_errors
from bnrnn.report import style
from bnrnn.report.analyses import command_line, measured_before, others_in_words, provenance_with, publish
from bnrnn.report.claims import analysis_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.markdown import markdown
from bnrnn.report.run import Run
from bnrnn.report.site.curves import Line, Plot
from bnrnn.report.trained import trained_runs
from bnrnn.training import checkpoint

KEY = "cooijmans2016/fig5"
NUM_UNITS, NUM_STEPS = 30, 50
PANELS = {"mean_hh": "bn_hh.pop_mean", "var_hh": "bn_hh.pop_var", "mean_c": "bn_c.pop_mean", "var_c": "bn_c.pop_var"}
TITLES = {"mean_hh": "mean of W_hh h", "var_hh": "variance of W_hh h", "mean_c": "mean of c", "var_c": "variance of c"}
SHOWN = [0, 2, 5, 10, 20, 30, 40]


def measure(results_dir: Path) -> dict[str, Any]:
    runs = trained_runs(analysis_of(KEY).models, Evidence(results_dir), model="bn_lstm")
    about = {"updates": runs[0].result.updates, "data": runs[0].result.data}
    before, others = measured_before(KEY, results_dir, **about)
    selected = {**before.get("selected", {}), **{run.seed: run.result.best_update for run in runs}}
    statistics = {**before.get("statistics", {}), **{run.seed: _statistics(run) for run in runs}}
    about |= {"selected": selected, "statistics": dict(sorted(statistics.items()))}  # seed -> panel -> unit -> t
    return {"name": KEY, **provenance_with(before), **about, "others": others}


def _statistics(run: Run) -> dict[str, list[list[float]]]:
    saved = checkpoint.load(run.folder / checkpoint.MODEL)
    assert saved is not None
    units, statistics = torch.Generator().manual_seed(0), {}
    for name, entry in PANELS.items():
        values: Tensor = saved["model"][f"layer.layers.0.{entry}"][:NUM_STEPS]  # (T, F)
        chosen = torch.randperm(values.shape[1], generator=units)[:NUM_UNITS]
        statistics[name] = [[float(f"{v:.4g}") for v in unit] for unit in values[:, chosen].T.tolist()]
    return statistics


def distances(values: Tensor) -> Tensor:
    """For each t, the median over units of the distance to the last value, in standard deviations over units."""
    return (values - values[:, -1:]).abs().median(0).values / values[:, -1].std()


def settles(result: dict[str, Any], by: int, within: float) -> list[bool]:
    """For each model, whether the distances of all four panels stay within a bound from step `by` on."""
    return [
        all(bool((distances(torch.tensor(units))[by:] <= within).all()) for units in statistics.values())
        for statistics in result["statistics"].values()
    ]


def _first(result: dict[str, Any]) -> dict[str, Any]:
    """The statistics of the model of the first seed, by panel."""
    return next(iter(result["statistics"].values()))


def plot(result: dict[str, Any]) -> Plot:
    """The interactive plot: one line for each unit."""
    lines = [
        Line("units", {"time step": list(range(len(values)))}, values, TITLES[name], str(unit))
        for name, units in _first(result).items()
        for unit, values in enumerate(units)
    ]
    return Plot(["time step"], {"": "statistic"}, lines, members="unit")


def render(result: dict[str, Any]) -> str:
    analysis, rows = analysis_of(KEY), []
    for seed, statistics in result["statistics"].items():
        for name, units in statistics.items():
            values = torch.tensor(units)
            low, high = analysis.numbers["axes"][name]
            inside = ((values >= low) & (values <= high)).float().mean()
            shown = [f"{d:.2f}" for d in distances(values)[SHOWN]]
            rows.append([TITLES[name], seed, *shown, f"{low} to {high}", f"{100 * inside:.0f} %"])
    header = ["", "seed", *(f"t={t}" for t in SHOWN), "paper's axis", "ours within it"]
    caption = (
        f"Distance of the statistics at step t from those at step {NUM_STEPS - 1}: the median over {NUM_UNITS} random "
        "units, in standard deviations over units. The paper shows a transient and gives no number. A model is a "
        f"BN-LSTM, selected by validation from a run of {result['updates']:,} updates. {result['data']}.\n"
    )
    return f"# {analysis.title}\n\n{caption}\n{markdown(header, rows)}\n![Fig. 5](fig5.png)\n{others_in_words(result)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot one line per unit over time steps. Dashed lines mark the range of the paper's axis."""
    axes = analysis_of(KEY).numbers["axes"]
    fig, panels = plt.subplots(2, 2, figsize=(11, 7.5))
    for ax, (name, units) in zip(panels.flat, _first(result).items(), strict=True):
        colors = plt.get_cmap("viridis")
        order = sorted(range(len(units)), key=lambda k: units[k][-1])
        for rank, k in enumerate(order):
            ax.plot(units[k], color=colors(rank / len(units)), linewidth=0.8, label=None if rank else "one unit")
        for k, limit in enumerate(axes[name]):
            shown = None if k else "ends of the paper's axis"
            ax.axhline(limit, color="black", linestyle="--", linewidth=0.8, label=shown)
        ax.set(xlabel="time step", title=TITLES[name])
        style.legend_below(ax)
    style.save(fig, path)


def main() -> None:
    args = command_line(__doc__).parse_args()
    publish(KEY, measure(args.out_dir), args.out_dir, render, draw)


if __name__ == "__main__":
    report_errors(main)
