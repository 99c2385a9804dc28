"""Measures how long the runs of a sweep would take on this machine, without starting them.

bnrnn-plan experiment=cooijmans2016/table2 budget=paper out_dir=results seed=0
"""

import resource
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from bnrnn.bench.timing import elapsed
from bnrnn.config import MENDABLE
from bnrnn.data.base import SHUFFLED, SequenceData
from bnrnn.errors import report_errors
from bnrnn.inputs import Batch
from bnrnn.layers.population import batch_statistics, estimated_together, has_batch_norm, has_step_statistics
from bnrnn.report.markdown import NONE, markdown
from bnrnn.training import checkpoint
from bnrnn.training.build import build, optimizer_of
from bnrnn.training.cells import Cell, expand
from bnrnn.training.checkpoint import CHECKPOINT
from bnrnn.training.evaluation import outputs
from bnrnn.training.log import RunLog
from bnrnn.training.loop import Trainer
from bnrnn.training.options import check_options, naming_nearest_key
from bnrnn.training.results import FILE, Result, check_same_config, config_record
from bnrnn.training.state import TrainState
from bnrnn.training.stop import Stop

NUM_UPDATES = 4  # updates to measure; the first is a warm-up


@dataclass
class Cost:
    """The cost of a run on this machine: time of an update, time of all evaluations, and peak memory."""

    updates: int
    seconds_per_update: float
    evaluation_seconds: float  # time of all evaluations of a whole run, including the final ones
    gib: float

    def seconds(self, done: int) -> float:
        left = (self.updates - done) / self.updates
        return (self.updates - done) * self.seconds_per_update + left * self.evaluation_seconds


def cells(arguments: list[str]) -> list[Cell]:
    """All cells that `python -m bnrnn.train` would run with these overrides, in hydra's order, with their progress.

    Raises BnrnnError for a result of another configuration.
    """
    found = expand(arguments)
    for cell in found:
        if (cell.folder / FILE).exists():
            result = Result.read(cell.folder / FILE)
            check_same_config(result.config, config_record(cell.cfg), cell.folder / FILE)
            cell.done, cell.state = result.updates, result.status
        elif (saved := checkpoint.load(cell.folder / CHECKPOINT)) is not None:
            cell.done, cell.state = saved["state"]["update"], "begun"
    return found


def measure(record: dict[str, Any]) -> Cost:
    """Measure a few real updates and one batch of every kind of evaluation. Nothing is saved.

    The time to generate captions is not included.
    """
    recipe = OmegaConf.create(record)
    check_options(recipe)
    cfg, device, data, model = build(recipe)
    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder)) as log:
        state, optimizer = TrainState("", []), optimizer_of(cfg, model)
        trainer = Trainer(cfg, model, data, device, log, Stop(), SHUFFLED, optimizer, state, lambda snapshot: None)
        batches = trainer.training_batches()
        times = [elapsed(lambda: trainer.update(next(batches)), device) for _ in range(NUM_UPDATES)]
    evaluation = evaluation_seconds(cfg, device, data, model)
    if device.type == "cuda":
        held = torch.cuda.max_memory_allocated(device)
    else:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Cost(cfg.budget.updates, median(times[1:]), evaluation, held / 2**30)


def evaluation_seconds(cfg: DictConfig, device: torch.device, data: SequenceData, model: nn.Module) -> float:
    """The time of all evaluations of a whole run, from that of the first batch of each kind."""

    def of_kind(given: Iterable[Batch], num_batches: int, most: int | None) -> float:
        batch = next(iter(given)).to(device)
        with torch.no_grad(), batch_statistics(model):
            seconds = elapsed(lambda: list(outputs(model.eval(), [batch._replace(carried=False)])), device)
        return seconds * (num_batches if most is None else min(num_batches, most))

    budget, total = cfg.budget, 0.0
    of_training = cfg.population_batch_size, budget.population_batches
    for split, count in passes(cfg, model).items():
        batch_size, most = of_training if split == "train" else (cfg.batch_size, budget.eval_batches)
        if count:
            given, num_batches = data.batches(split, batch_size), data.num_batches(split, batch_size)
            total += count * of_kind(given, num_batches, most)
    for num_batches, extra in data.extra_tests().values():
        # A batch of one sequence has no batch statistics, so time two copies of it, which take about as long.
        pair = (b._replace(inputs=b.inputs.repeat(1, 2), targets=b.targets.repeat(1, 2)) for b in islice(extra, 1))
        total += of_kind(pair, num_batches, budget.eval_batches)
    return total


def passes(cfg: DictConfig, model: nn.Module) -> dict[str, int]:
    """The number of passes through each split that the evaluations of a whole run and its population statistics need.

    Those through `train` estimate population statistics, or evaluate the training set. `Trainer` and `training.measure`
    decide which there are. The last model is counted as if another one will be selected.
    """
    normalized, shared, budget = has_batch_norm(model), has_step_statistics(model), cfg.budget
    every = cfg.population_every if normalized else None
    chosen = 0 if every is None else -(-budget.updates // (every * budget.eval_every))
    evaluations = -(-budget.updates // budget.eval_every)
    last = evaluations > 1  # whether the last model may be measured beside the selected one
    estimates = (normalized + chosen + last) * len(estimated_together(model)) if normalized else 0
    return {
        "valid": evaluations + chosen + normalized + shared + last,
        "test": 1 + normalized + shared + (chosen > 0) + last,
        "train": estimates + (evaluations if cfg.evaluate_train else 0),
    }


def costs(planned: list[Cell]) -> dict[str, Cost]:
    """The cost of every kind of cell that is not done. Each kind is measured in its own process.

    Cells of one kind differ only in their seeds.
    """
    found = {}
    for cell in planned:
        if cell.state in ("to do", "begun") and _kind(cell) not in found:
            print(f"measuring {_kind(cell)} ...", file=sys.stderr, flush=True)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                record: Any = OmegaConf.to_container(cell.cfg, resolve=True)
                found[_kind(cell)] = pool.submit(measure, record).result()
    return found


def _kind(cell: Cell) -> str:
    """The options that determine the cost of a cell: budget, overrides without seed and trial, and batch size."""
    named = {k: v for k, v in cell.overrides.items() if k not in ("seed", "search.trial")}
    kind = {"experiment": cell.experiment, "budget": cell.budget, **named, "batch_size": cell.cfg.batch_size}
    return " ".join(f"{k}={v}" for k, v in kind.items())


def duration(seconds: float | int) -> str:
    """A duration in days, hours, minutes or seconds."""
    for size, unit in ((172_800, 86_400), (7_200, 3_600), (120, 60)):
        if seconds >= size:
            return f"{seconds / unit:.1f} {({86_400: 'days', 3_600: 'hours', 60: 'minutes'})[unit]}"
    return f"{seconds:.1f} seconds"


def render(planned: list[Cell], measured: dict[str, Cost]) -> str:
    """A table with one row per cell, and the total time left."""
    rows, total, memory = [], 0.0, 0.0
    for cell in planned:
        cost = measured.get(_kind(cell)) if cell.state in ("to do", "begun") else None
        name = " ".join(f"{k}={v}" for k, v in cell.overrides.items())
        if cost is None:
            rows.append([name, cell.state, f"{cell.done:,}", NONE, NONE, NONE, NONE])
            continue
        left = cost.seconds(cell.done)
        total, memory = total + left, max(memory, cost.gib)
        progress = f"{cell.done:,} of {cost.updates:,}"
        per_update = f"{cost.seconds_per_update:.3g}"
        rows.append([name, cell.state, progress, per_update, duration(cost.evaluation_seconds), duration(left),
                     f"{cost.gib:.1f}"])  # fmt: skip
    header = ["run", "state", "updates", "s / update", "evaluation, whole run", "time left", "GiB"]
    left = sum(cell.state in ("to do", "begun") for cell in planned)
    device = planned[0].cfg.device
    return (
        f"{markdown(header, rows)}\n{len(planned) - left} of {len(planned)} runs are done. The other {left} take "
        f"{duration(total)} one after the other on this machine (device={device}, "
        f"{planned[0].cfg.num_threads} thread), and at most {memory:.1f} GiB each.\n"
    )


def main() -> None:
    arguments = sys.argv[1:]
    with naming_nearest_key():
        planned = cells(arguments)
        check_options(planned[0].cfg, planned[0].overrides)
    print(render(planned, costs(planned)))


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    report_errors(main, *MENDABLE, usage=__doc__)


if __name__ == "__main__":
    cli()
