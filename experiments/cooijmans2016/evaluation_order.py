"""What the order of sequences changes in evaluations with batch statistics (D7, D29): a measurement of ours.

    python experiments/cooijmans2016/evaluation_order.py --models DIR [--data-dir DIR] [--out-dir DIR]

Evaluates every model with batch normalization below DIR, of finished and of unfinished runs of any paper, in the order
of the file and in three shuffled orders. What was measured before on other models stays in the result.
"""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from bnrnn.config import label
from bnrnn.data.base import FILE, SHUFFLED, evaluation_generator
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.layers.population import batch_statistics, has_batch_norm
from bnrnn.metrics import METRICS, Scores
from bnrnn.report.analyses import command_line, measured_before, provenance_with, publish
from bnrnn.report.claims import analysis_of
from bnrnn.report.markdown import NONE, markdown
from bnrnn.report.trained import built
from bnrnn.system.memory import keep_heap
from bnrnn.training import checkpoint
from bnrnn.training.evaluation import outputs
from bnrnn.training.log import read_jsonl
from bnrnn.training.results import METRICS as RECORDS

KEY = "cooijmans2016/evaluation_order"
ORDERS = 3  # shuffled orders


def stored_models(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folders below this one with a model or a checkpoint, and their content."""
    found = {path.parent for name in (checkpoint.MODEL, checkpoint.CHECKPOINT) for path in folder.rglob(f"{name}*")}
    for run_dir in sorted(found):
        for name in (checkpoint.MODEL, checkpoint.CHECKPOINT):
            saved = checkpoint.load(run_dir / name)
            if saved is not None:
                yield run_dir, saved
                break


def score(model: nn.Module, data: Any, split: str, batch_size: int, order: str, seed: int, most: int | None) -> float:
    """The main metric of a split; `seed` chooses the shuffled order. Noise on the initial state is always the same."""
    scores, generator = Scores(), evaluation_generator(order, split, seed)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for logits, targets in outputs(model, islice(data.batches(split, batch_size, generator), most)):
            scores.add(logits, targets)
    return scores.means(data.metric)[data.metric]


def measured(run_dir: Path, saved: dict[str, Any], data_dir: str, most: int | None) -> dict[str, Any] | None:
    """The scores of one model in each order; None without batch normalization."""
    config = saved["config"]
    model, data = built(config, saved["model"], data_dir)
    if not has_batch_norm(model):
        return None
    chosen = dict(re.findall(r"(data|model|setting)=([^,/]+)", str(run_dir)))
    group = "setting" if "setting" in chosen and "model" not in chosen else "model"
    about: dict[str, Any] = {
        "experiment": config["name"],
        "data": label("data", chosen.get("data", type(data).__name__)),
    }
    about |= {"model": label(group, chosen[group]), "metric": data.metric}
    about["updates"] = int(read_jsonl(run_dir / RECORDS)[-1]["update"])
    size, seeds = config["batch_size"], range(ORDERS if SHUFFLED in data.evaluation_orders else 0)
    with batch_statistics(model):
        for split in ("valid", "test"):
            about[split] = {FILE: score(model, data, split, size, FILE, 0, most)}
            about[split][SHUFFLED] = [score(model, data, split, size, SHUFFLED, n, most) for n in seeds]
    if "state" not in saved:  # a model of a finished run has its population statistics
        about["population"] = {s: score(model, data, s, size, FILE, 0, most) for s in ("valid", "test")}
    return about


def measure(models: Path, data_dir: str, results_dir: Path, most: int | None) -> dict[str, Any]:
    before, _ = measured_before(KEY, results_dir)
    tasks = {f"{t['data']}, {t['model']}, {t['updates']}": t for t in before.get("tasks", [])}
    found = list(stored_models(models))
    for run_dir, saved in tqdm(found, unit=" models", disable=None):
        task = measured(run_dir, saved, data_dir, most)
        if task is not None:
            tasks[f"{task['data']}, {task['model']}, {task['updates']}"] = task
    if not tasks:
        raise BnrnnError(f"{models} has no model or checkpoint of a run with batch normalization: train one first")
    return {"name": KEY, **provenance_with(before), "tasks": list(tasks.values())}


def shown(task: dict[str, Any], split: str) -> list[str]:
    """[order of the file, shuffled, difference, population statistics] of a split, in the unit of the table."""
    metric = METRICS[task["metric"]]
    digits = max(metric.digits, 2 if metric.scale == 100 else 3)

    def number(value: float, sign: str = "") -> str:
        return f"{metric.scale * value:{sign}.{digits}f}"

    in_file, shuffled = task[split][FILE], task[split][SHUFFLED]
    population = number(task["population"][split]) if "population" in task else NONE
    if not shuffled:
        return [number(in_file), NONE, NONE, population]
    spread = f"{number(mean(shuffled))} ± {number(stdev(shuffled))}"
    return [number(in_file), spread, number(mean(shuffled) - in_file, "+"), population]


def render(result: dict[str, Any]) -> str:
    return f"# {analysis_of(KEY).title}\n\n{about()}\n{table(result)}"


def about() -> str:
    return (
        "Every row is one model, evaluated with the statistics of batches of the training size: in the order of the "
        f"file, and in {ORDERS} shuffled orders (mean ± standard deviation over the orders). Accuracies and errors are "
        "in %. With population statistics the order has no effect. Words of Penn Treebank (Laurent et al.) are not in "
        "the table: states are carried from batch to batch, so they have only the order of the text.\n"
    )


def table(result: dict[str, Any]) -> str:
    """The table, which the notes show too."""
    rows = []
    for task in result["tasks"]:
        for split in ("valid", "test"):
            name = [task["data"], task["model"], f"{task['updates']:,}"] if split == "valid" else ["", "", ""]
            rows.append([*name, f"{split}, {METRICS[task['metric']].title}", *shown(task, split)])
    header = ["data", "model", "updates", "", "order of the file", "shuffled", "difference", "population statistics"]
    return markdown(header, rows)


def draw(result: dict[str, Any], path: Path) -> None:
    """There is no figure: the table is short."""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="a folder with runs and their models")
    parser.add_argument("--num-batches", type=int, help="batches of each split; default all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_heap()
    result = measure(args.models, args.data_dir, args.out_dir, 1 if args.smoke else args.num_batches)
    publish(KEY, result, args.out_dir, render, draw)


if __name__ == "__main__":
    report_errors(main)
