"""Cooijmans et al. 2016, Fig. 3b: test bits per character of Table 2's models for segments of several lengths.

    python experiments/cooijmans2016/fig3b.py [--data-dir DIR] [--out-dir DIR] [--lengths 100 1000] [--num-batches N]
        [--device cuda]

Reads the finished runs of Table 2 in --out-dir, of the greatest length that all models have, and cuts the test text
into segments of each length. BN-LSTM is evaluated with population statistics and with batch statistics, in batches of
100 as in the authors' code. What was measured before, on other seeds or on runs of other lengths, stays in the result.
"""

from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import torch
from hydra.utils import instantiate
from torch import nn
from tqdm import tqdm

from bnrnn.config import label, sweep
from bnrnn.data.base import SHUFFLED, evaluation_generator
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.layers.population import batch_statistics, has_batch_norm
from bnrnn.metrics import Scores
from bnrnn.report import style
from bnrnn.report.analyses import command_line, measured_before, others_in_words, provenance_with, publish
from bnrnn.report.claims import analysis_of, table_of
from bnrnn.report.evidence import Evidence
from bnrnn.report.markdown import markdown, spread
from bnrnn.report.run import Run
from bnrnn.report.site.curves import Line, Plot, shortened
from bnrnn.report.trained import load_trained, trained_runs
from bnrnn.system.memory import keep_heap
from bnrnn.training.device import choose_device
from bnrnn.training.evaluation import outputs
from bnrnn.training.provenance import CPU

KEY = "cooijmans2016/fig3b"
BATCH_SIZE = 100


def bits_per_character(model: nn.Module, data: Any, seed: int, most: int | None, bar: tqdm) -> float:
    scores, shuffled = Scores(), evaluation_generator(SHUFFLED, "test", seed)
    device = next(model.parameters()).device
    batches = (batch.to(device) for batch in islice(data.batches("test", BATCH_SIZE, shuffled), most))
    for logits, targets in outputs(model, batches):
        scores.add(logits, targets)
        bar.update(len(logits))
    return scores.means("bpc")["bpc"]


def curves(
    run: Run, data_dir: str, lengths: list[int], most: int | None, device: torch.device = CPU
) -> dict[str, list[float]]:
    """The bits per character for each length, by model and kind of statistics."""
    model, _ = load_trained(run.folder, data_dir)
    model.to(device)
    cut = {n: instantiate({**run.result.config["data"], "length": n}, data_dir=data_dir) for n in lengths}
    statistics = (
        {"population": nullcontext, "batch": lambda: batch_statistics(model)}
        if has_batch_norm(model)
        else {"": nullcontext}
    )
    steps = sum((n - 1) * min(most or 10**9, data.num_batches("test", BATCH_SIZE)) for n, data in cut.items()) * len(
        statistics
    )
    name, measured = run.overrides["model"], {}
    with tqdm(total=steps, desc=f"{name}, seed {run.seed}", unit=" steps", disable=None) as bar, torch.no_grad():
        for kind, context in statistics.items():
            with context():
                values = [bits_per_character(model, cut[n], int(run.seed), most, bar) for n in lengths]
            measured[f"{name}, {kind}" if kind else name] = values
    return measured


def measure(
    data_dir: str, results_dir: Path, lengths: list[int], most: int | None, device: torch.device = CPU
) -> dict[str, Any]:
    key = analysis_of(KEY).models
    runs = trained_runs(key, Evidence(results_dir))
    if lacking := [name for name in sweep(key)["model"] if name not in {run.overrides["model"] for run in runs}]:
        raise BnrnnError(f"{results_dir / key} has no finished run of {lacking[0]} with its model: train {key} first")
    if runs[0].budget == "smoke":  # its numbers mean nothing, so one batch of two short lengths is enough
        lengths, most = lengths[:2], 1
    about = {"updates": runs[0].result.updates, "budget": runs[0].budget, "data": runs[0].result.data}
    about |= {"evaluation_order": SHUFFLED}
    before, others = measured_before(KEY, results_dir, **about, lengths=lengths)
    by_curve: dict[str, dict[str, list[float]]] = before.get("bpc", {})
    for run in runs:
        for name, values in curves(run, data_dir, lengths, most, device).items():
            by_curve.setdefault(name, {})[run.seed] = values
    by_curve = {name: dict(sorted(by_seed.items())) for name, by_seed in by_curve.items()}
    about |= {"lengths": lengths, "bpc": by_curve}  # curve -> seed -> by length
    return {"name": KEY, **provenance_with(before, device), **about, "others": others}


def longer_is_no_worse(result: dict[str, Any]) -> list[bool]:
    """For each model, whether with population statistics no longer segments cost more than the shortest ones."""
    return [max(values[1:]) <= values[0] for values in result["bpc"]["bn_lstm, population"].values()]


def population_beats_batch(result: dict[str, Any]) -> list[bool]:
    """For each model, whether population statistics cost fewer bits than batch statistics at every length."""
    population, batch = (result["bpc"][f"bn_lstm, {kind}"] for kind in ("population", "batch"))
    return [all(p < b for p, b in zip(population[seed], batch[seed], strict=True)) for seed in population]


def plot(result: dict[str, Any]) -> Plot:
    """The interactive plot: one line for each model, kind of statistics and seed."""
    analysis, axis = analysis_of(KEY), "length of the segments"
    lines = [
        Line(name, {axis: result["lengths"]}, [shortened(value) for value in values], member=seed)
        for name, by_seed in result["bpc"].items()
        for seed, values in by_seed.items()
    ]
    points = [
        Line(name, {axis: analysis.numbers["lengths"]}, values) for name, values in analysis.numbers["points"].items()
    ]
    return Plot([axis], {"": "test bits per character"}, lines, points)


def render(result: dict[str, Any]) -> str:
    analysis, rows = analysis_of(KEY), []
    paper = {
        name: dict(zip(analysis.numbers["lengths"], points, strict=True))
        for name, points in analysis.numbers["points"].items()
    }
    for name, by_seed in result["bpc"].items():
        rows.append(
            [f"`{name}`", "paper, selected of 50 epochs", *(f"{paper[name][n]:.3f}" for n in result["lengths"])]
        )
        seeds = zip(*by_seed.values(), strict=True)
        rows.append(["", f"ours, {result['updates']:,} updates", *(spread(list(values), 3) for values in seeds)])
    ours = {name: [mean(v) for v in zip(*by_seed.values(), strict=True)] for name, by_seed in result["bpc"].items()}
    for a, b in (("lstm", "bn_lstm, population"), ("bn_lstm, batch", "bn_lstm, population")):
        if a in ours and b in ours:
            theirs = [f"{paper[a][n] - paper[b][n]:+.3f}" for n in result["lengths"]]
            rows.append([f"`{a}` minus `{b}`", "paper", *theirs])
            rows.append(["", "ours", *(f"{x - y:+.3f}" for x, y in zip(ours[a], ours[b], strict=True))])
    table = markdown(["", "", *(f"{n}" for n in result["lengths"])], rows)
    if "evaluation_order" not in result:
        table += (
            "\nOurs with batch statistics are of batches in the order of the file, the paper's of shuffled ones (D7).\n"
        )
    enough = table_of(analysis.models).enough_updates
    caption = (
        f"Our models were trained for {result['updates']:,} updates. Their numbers are comparable with the paper's if "
        f"these are at least {enough:,}; differences between the curves may be comparable earlier. {result['data']}.\n"
    )
    return f"# {analysis.title}\n\n{caption}\n{table}\n![Fig. 3b](fig3b.png)\n{others_in_words(result)}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot bits per character against the length of segments; open circles are the paper's values."""
    paper = analysis_of(KEY).numbers
    fig, ax = plt.subplots(figsize=(7, 5))
    for look, (row, by_seed) in zip(style.LOOKS, result["bpc"].items(), strict=False):
        model, _, statistics = row.partition(", ")
        name = label("model", model) + (f", {statistics} statistics" if statistics else "")
        for values in by_seed.values():
            ax.plot(result["lengths"], values, color=look.color, alpha=0.35, linewidth=0.8)
        means = [mean(values) for values in zip(*by_seed.values(), strict=True)]
        ax.plot(result["lengths"], means, color=look.color, linestyle=look.line, marker=look.marker, markersize=5,
                linewidth=2, label=f"{name}, ours (n={len(by_seed)})")  # fmt: skip
        ax.plot(paper["lengths"], paper["points"][row], "o", color=look.color, markerfacecolor="none", markersize=8,
                label=f"{name}, paper")  # fmt: skip
    ax.set(xlabel="symbols of a segment", ylabel="test bits per character")
    ax.set_title(f"Ours after {result['updates']:,} updates, the paper's selected from 39,550")
    style.legend_below(ax)
    style.save(fig, path)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=analysis_of(KEY).numbers["lengths"])
    parser.add_argument("--num-batches", type=int, help="batches of each length; default all")
    parser.add_argument("--device", default="cpu", help="auto, cpu or cuda")
    args = parser.parse_args()
    device = choose_device(args.device)
    torch.set_num_threads(1)
    keep_heap()
    result = measure(args.data_dir, args.out_dir, args.lengths, 1 if args.smoke else args.num_batches, device)
    publish(KEY, result, args.out_dir, render, draw)


if __name__ == "__main__":
    report_errors(main)
