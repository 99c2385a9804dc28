"""Four norms with and without zoneout on five tasks: what the runs of beyond/norms_* reached, and what a step costs.

    python experiments/beyond/norms.py [--data-dir DIR] [--out-dir DIR]

Reads the finished runs in --out-dir, and measures the time of a training step of each model on a batch of its data, one
after the other in turn, with one thread.
"""

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from omegaconf import DictConfig

from bnrnn.bench.timing import time_in_turn
from bnrnn.config import compose_config, label
from bnrnn.errors import report_errors
from bnrnn.metrics import METRICS, Metric, cross_entropy
from bnrnn.report.analyses import command_line, publish
from bnrnn.report.claims import analysis_of
from bnrnn.report.evidence import Evidence, in_figures
from bnrnn.report.markdown import NONE, markdown, spread
from bnrnn.report.outcome import LEAST_PAIRS, student_interval
from bnrnn.report.style import LOOKS, save
from bnrnn.training.build import build
from bnrnn.training.evaluation import outputs
from bnrnn.training.provenance import provenance

KEY = "beyond/norms"
NORMS = {"lstm": "none", "input_bn_lstm": "input_batch", "bn_lstm": "batch", "ln_lstm": "layer"}  # by model
ZONEOUT = {"": "no", "_zoneout": "yes"}  # by the ending of the recipe
ROWS = list(product(NORMS, ZONEOUT))  # of the table
SECONDS = 60.0  # for the steps of one recipe


class Task(NamedTuple):
    """A column of the table: the recipe without its ending, the data, and the number of a run."""

    recipe: str
    data: str
    number: str

    @property
    def metric(self) -> Metric:
        return METRICS[self.number.removeprefix("test/").removesuffix("_one_sequence")]

    @property
    def title(self) -> str:
        unit = f"{self.metric.title} in %" if self.metric.scale == 100 else self.metric.title
        return f"{label('data', self.data)}, {unit} {'↑' if self.metric.better > 0 else '↓'}"


TASKS = [
    *(Task("beyond/norms_pixels", data, "test/accuracy") for data in ("pmnist", "pmnist_permutation", "smnist")),
    Task("beyond/norms_characters", "ptb_char", "test/bpc_one_sequence"),
    Task("beyond/norms_words", "ptb_word", "test/ppl"),
]
TIMED = list({task.recipe: task for task in reversed(TASKS)}.values())[::-1]  # one task of each recipe


def scores(task: Task, model: str, ending: str, evidence: Evidence) -> dict[str, float | None]:
    """The score of each seed, None for a run that diverged. Only runs of the recipe's length count."""
    key = f"{task.recipe}{ending}"
    cell = {"model": model, "data": task.data}
    found = in_figures(key, evidence.runs(key))
    runs = [run for run in found if run.is_whole() and cell.items() <= run.overrides.items()]
    return {run.seed: None if run.diverged() else run.measured(task.number) for run in runs}


def training_step(cfg: DictConfig) -> Callable[[], None]:
    """A function that computes the gradients of a configuration's model for one batch of its data."""
    cfg, device, data, model = build(cfg)
    batch = next(data.batches("train", cfg.batch_size)).to(device)

    def step() -> None:
        model.zero_grad()
        ((logits, targets),) = outputs(model, [batch])
        cross_entropy(logits, targets).backward()

    return step


def milliseconds(task: Task, data_dir: str, seconds: float) -> dict[str, float]:
    """The median time of a training step of each row."""
    steps = {}
    for model, ending in ROWS:
        given = [f"model={model}", f"data={task.data}", f"data_dir={data_dir}", "device=cpu"]
        steps[f"{model}{ending}"] = training_step(compose_config(f"experiment={task.recipe}{ending}", *given))
    return {name: median(times) for name, times in time_in_turn(steps, torch.device("cpu"), seconds).items()}


def measure(results_dir: Path, data_dir: str, seconds: float = SECONDS) -> dict[str, Any]:
    evidence = Evidence(results_dir)
    found = {task.data: {f"{model}{ending}": scores(task, model, ending, evidence) for model, ending in ROWS}
             for task in TASKS}  # fmt: skip
    cost = {task.recipe: milliseconds(task, data_dir, seconds) for task in TIMED}
    return {"name": KEY, **provenance(), "scores": found, "milliseconds": cost}


def reached(result: dict[str, Any], task: Task, row: str) -> list[float]:
    """The scores of the seeds that did not diverge."""
    return [score for score in result["scores"][task.data][row].values() if score is not None]


def factor(result: dict[str, Any], task: Task, row: str) -> float:
    """The time of a training step as a multiple of that without norm and zoneout."""
    times = result["milliseconds"][task.recipe]
    return times[row] / times["lstm"]


def shown(result: dict[str, Any], task: Task, row: str) -> str:
    """A cell of the table: mean ± standard deviation, and the number of runs that diverged."""
    found = result["scores"][task.data][row]
    values = [task.metric.scale * score for score in reached(result, task, row)]
    lost = len(found) - len(values)
    parts = [spread(values, task.metric.digits)] * bool(values) + [f"{lost} diverged"] * bool(lost)
    return ", ".join(parts) or NONE


def table(result: dict[str, Any]) -> str:
    """The scores and the cost of all rows."""
    header = [
        "norm",
        "zoneout",
        *(task.title for task in TASKS),
        *(f"step, {label('data', task.data)}" for task in TIMED),
    ]
    rows = []
    for model, ending in ROWS:
        row = f"{model}{ending}"
        cost = [f"{factor(result, task, row):.2f}" for task in TIMED]
        rows.append([f"`{NORMS[model]}`", ZONEOUT[ending], *(shown(result, task, row) for task in TASKS), *cost])
    about = (
        "Mean ± standard deviation over seeds, with population statistics, after 2,500 updates (pixels) or two epochs "
        "(Penn Treebank). *Step* is the time of a training step as a multiple of that without norm and zoneout, on one "
        "thread. An arrow up means that more is better, an arrow down that less is better.\n"
    )
    return f"{markdown(header, rows)}\n{about}"


def best(result: dict[str, Any]) -> str:
    """For each task, the best row of which no run diverged, and its difference to no norm without zoneout."""
    rows = []
    for task in TASKS:
        seeds = {row: list(of_row.values()) for row, of_row in result["scores"][task.data].items()}
        complete = [row for row, values in seeds.items() if len(values) >= LEAST_PAIRS]
        if len(complete) < len(ROWS):
            rows.append([task.title, NONE, f"{len(complete)} of {len(ROWS)} rows have {LEAST_PAIRS} seeds"])
            continue
        means = {row: mean(values) for row, values in seeds.items() if None not in values}
        winner = max(means, key=lambda row: task.metric.better * means[row])
        rows.append([task.title, in_words(winner), lead(result, task, winner)])
    return markdown(["task", "best mean", "better than no norm, without zoneout, by [95 %]"], rows)


def in_words(row: str) -> str:
    """The name of a row: its norm, and whether it has zoneout."""
    model = row.removesuffix("_zoneout")
    return f"`{NORMS[model]}`{', with zoneout' if model != row else ''}"


def lead(result: dict[str, Any], task: Task, row: str) -> str:
    """The mean difference between a row and no norm over the seeds that both have, with its interval (Student's t)."""
    if row == "lstm":
        return NONE
    metric, of_task = task.metric, result["scores"][task.data]
    pairs = [(score, of_task["lstm"].get(seed)) for seed, score in of_task[row].items()]
    differences = [metric.scale * metric.better * (of - than) for of, than in pairs if than is not None]
    if len(differences) < LEAST_PAIRS:
        return f"{len(differences)} pairs of seeds"
    low, high = student_interval(differences)
    digits = metric.digits
    return f"{mean(differences):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}] {metric.unit}".rstrip()


def render(result: dict[str, Any]) -> str:
    heading = analysis_of(KEY).title
    return (
        f"# {heading}\n\n{table(result)}\n![{heading}](norms.png)\n\n## What was best\n\n{best(result)}\n"
        "Training is short, and no learning rate was searched: "
        "[the notes](../../experiments/beyond/notes.md) say what these runs cannot show.\n"
    )


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot a panel for each task that has runs, and one of the cost.

    Seeds are small marks, means large ones. Marks of zoneout are hollow.
    """
    tasks = [task for task in TASKS if any(result["scores"][task.data].values())]
    width = 3 if len(tasks) > 3 else 2
    fig, axes = plt.subplots(2, width, figsize=(6 + 2 * width, 7), sharey=True)
    panels = list(axes.flat)
    of_cost = panels[len(tasks)]
    for unused in panels[len(tasks) + 1 :]:
        unused.remove()
    for ax, task in zip(panels, tasks, strict=False):
        for place, (model, ending) in enumerate(ROWS):
            values = [task.metric.scale * value for value in reached(result, task, f"{model}{ending}")]
            style: dict[str, Any] = {"color": look(model).color, "markerfacecolor": "none" if ending else None}
            ax.plot(values, [place] * len(values), look(model).marker, markersize=4, alpha=0.5, **style)
            if values:
                ax.plot(mean(values), place, look(model).marker, markersize=9, **style)
        ax.set_xlabel(task.title.replace(", ", "\n", 1))
    for task, marker in zip(TIMED, ("o", "s", "^"), strict=True):
        cost = [factor(result, task, f"{model}{ending}") for model, ending in ROWS]
        of_cost.plot(cost, range(len(ROWS)), marker, color="black", markerfacecolor="none",
                     label=label("data", task.data))  # fmt: skip
    of_cost.set_xlabel("time of a training step\nwithout norm and zoneout = 1")
    of_cost.legend(loc="upper center", bbox_to_anchor=(0.5, -0.27))
    names = [f"{NORMS[model]}{', zoneout' if ending else ''}" for model, ending in ROWS]
    panels[0].set_yticks(range(len(ROWS)), names)
    panels[0].invert_yaxis()
    save(fig, path)


def look(model: str) -> Any:
    """The color and the marker of a norm."""
    return LOOKS[list(NORMS).index(model)]


def main() -> None:
    args = command_line(__doc__).parse_args()
    torch.set_num_threads(1)
    result = measure(args.out_dir, os.path.abspath(args.data_dir), 0.0 if args.smoke else SECONDS)
    publish(KEY, result, args.out_dir, render, draw)


if __name__ == "__main__":
    report_errors(main)
