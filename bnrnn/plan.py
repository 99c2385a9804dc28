"""What a sweep would take on this machine, before anything is started.

python -m bnrnn.plan experiment=cooijmans2016/table2 budget=paper out_dir=results seed=0
"""

import itertools
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bnrnn import checkpoint
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.evidence import ROOT, compose_config, grid_of, sweep
from bnrnn.log import RunLog
from bnrnn.loop import Stop, Trainer, TrainState, outputs
from bnrnn.norm import batch_statistics, estimated_together, has_batch_norm
from bnrnn.results import FILE, Result, check_same_config, config_record
from bnrnn.search import apply_trial
from bnrnn.tables import NONE, markdown
from bnrnn.train import CHECKPOINT, build

NUM_UPDATES = 4  # the first of which is not counted


@dataclass
class Cell:
    """One cell of a sweep.

    Args:
        choices: all of its overrides, from which its configuration is composed.
        overrides: those of them that name its folder and stand in its result.
        folder: where its run is or will be.
        done: updates made so far, where `cells` has looked.
        state: finished, diverged, begun or to do, where `cells` has looked.
    """

    choices: list[str]
    overrides: dict[str, str]
    folder: Path
    done: int = 0
    state: str = "to do"

    @cached_property
    def cfg(self) -> DictConfig:
        """Its configuration, composed when it is first needed: that takes a good part of a second."""
        return apply_trial(compose_config(*self.choices))

    @property
    def title(self) -> str:
        """What people call it: its experiment and its overrides."""
        experiment = next(c.split("=", 1)[1] for c in self.choices if c.startswith("experiment="))
        return " ".join([experiment, *(f"{k}={v}" for k, v in self.overrides.items())])


@dataclass
class Cost:
    """Measured on this machine: seconds of an update and of everything else, and the most memory held."""

    updates: int
    seconds_per_update: float
    evaluation_seconds: float  # of all evaluations of a whole run, the final ones included
    gib: float

    def seconds(self, done: int) -> float:
        left = (self.updates - done) / self.updates
        return (self.updates - done) * self.seconds_per_update + left * self.evaluation_seconds


def cells(arguments: list[str]) -> list[Cell]:
    """Every cell that these overrides of `python -m bnrnn.train` would run, in hydra's order, and how far each is."""
    found = expand(arguments)
    for cell in found:
        if (cell.folder / FILE).exists():
            result = Result.read(cell.folder / FILE)
            check_same_config(result.config, config_record(cell.cfg), cell.folder / FILE)
            cell.done, cell.state = result.updates, result.status
        elif (saved := checkpoint.load(cell.folder / CHECKPOINT)) is not None:
            cell.done, cell.state = saved["state"]["update"], "begun"
    return found


def expand(arguments: list[str]) -> list[Cell]:
    """Every cell that these overrides of `python -m bnrnn.train` would run, in hydra's order.

    No configuration is composed, so that a long list of sweeps takes no time.
    """
    key = next((a.split("=", 1)[1] for a in arguments if a.startswith("experiment=")), None)
    if key is None:
        raise BnrnnError("a plan needs experiment=<paper>/<table>")
    grid = grid_of([f"{k}={','.join(values)}" for k, values in sweep(key).items()] + arguments)
    overrides = [o for o in OverridesParser.create().parse_overrides(arguments) if not o.is_hydra_override()]

    root = yaml.safe_load((ROOT / "conf" / "train.yaml").read_text())
    unnamed = root["hydra"]["job"]["config"]["override_dirname"]["exclude_keys"]
    given = {"out_dir": root["out_dir"], "budget": next(d["budget"] for d in root["defaults"] if "budget" in d)}
    given |= {o.key_or_group: str(o.value()) for o in overrides}
    parent = Path(given["out_dir"], key, given["budget"])
    return [
        _cell(dict(zip(grid, values, strict=True)), parent, unnamed) for values in itertools.product(*grid.values())
    ]


def _cell(chosen: dict[str, str], parent: Path, unnamed: list[str]) -> Cell:
    named = {k: v for k, v in chosen.items() if k.lstrip("+") not in unnamed}
    name = ",".join(sorted(f"{k}={v}" for k, v in named.items()))  # hydra sorts the overrides, not their keys
    overrides = dict(sorted((k.lstrip("+"), v) for k, v in named.items()))
    return Cell([f"{k}={v}" for k, v in chosen.items()], overrides, parent / name)


def measure(record: dict[str, Any]) -> Cost:
    """Make a few real updates, and one batch of every kind of evaluation. Nothing is written."""
    cfg, device, data, model = build(OmegaConf.create(record))
    cuda = device.type == "cuda"

    def seconds(action: Any) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        action()
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - started

    optimizer = instantiate(cfg.optim)(model.parameters())
    with tempfile.TemporaryDirectory() as folder, RunLog(Path(folder)) as log:
        state = TrainState("", [])
        trainer = Trainer(cfg, model, data, optimizer, device, state, log, Stop(), lambda snapshot: None)
        batches = trainer.training_batches()
        times = [seconds(lambda: trainer.update(next(batches))) for _ in range(NUM_UPDATES)]

    def first_batch(given: Any) -> float:
        batch = next(iter(given)).to(device)
        with torch.no_grad(), batch_statistics(model):
            return seconds(lambda: list(outputs(model.eval(), [batch._replace(carried=False)])))

    def limited(total: int, most: int | None) -> int:
        return total if most is None else min(total, most)

    def one_pass(split: str, batch_size: int, most: int | None) -> float:
        num_batches = limited(data.num_batches(split, batch_size), most)
        return num_batches * first_batch(data.batches(split, batch_size))

    budget, passes = cfg.budget, 3 if has_batch_norm(model) else 1
    total = -(-budget.updates // budget.eval_every) * one_pass("valid", cfg.batch_size, budget.eval_batches)
    total += passes * one_pass("test", cfg.batch_size, budget.eval_batches)
    if has_batch_norm(model):
        estimates = one_pass("train", cfg.population_batch_size, budget.population_batches)
        total += len(estimated_together(model)) * estimates
    for count, extra in data.extra_tests().values():
        # One sequence has a batch of one, of which batch statistics cannot be had: two of them take about as long.
        pair = (b._replace(inputs=b.inputs.repeat(1, 2), targets=b.targets.repeat(1, 2)) for b in islice(extra, 1))
        total += limited(count, budget.eval_batches) * first_batch(pair)
    held = (
        torch.cuda.max_memory_allocated(device) if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return Cost(budget.updates, median(times[1:]), total, held / 2**30)


def costs(planned: list[Cell]) -> dict[str, Cost]:
    """The cost of every kind of cell that is not done, seeds apart, each measured in a process of its own."""
    found = {}
    for cell in planned:
        if cell.state in ("to do", "begun") and _kind(cell) not in found:
            print(f"measuring {_kind(cell)} ...", file=sys.stderr, flush=True)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                record: Any = OmegaConf.to_container(cell.cfg, resolve=True)
                found[_kind(cell)] = pool.submit(measure, record).result()
    return found


def _kind(cell: Cell) -> str:
    """What decides a cell's cost: all but its seed, and of a random search's trial the size of its batches."""
    named = {k: v for k, v in cell.overrides.items() if k not in ("seed", "search.trial")}
    return " ".join(f"{k}={v}" for k, v in {**named, "batch_size": cell.cfg.batch_size}.items())


def duration(seconds: float | int) -> str:
    """Seconds in the unit that people would use."""
    for size, unit in ((172_800, 86_400), (7_200, 3_600), (120, 60)):
        if seconds >= size:
            return f"{seconds / unit:.1f} {({86_400: 'days', 3_600: 'hours', 60: 'minutes'})[unit]}"
    return f"{seconds:.1f} seconds"


def render(planned: list[Cell], measured: dict[str, Cost]) -> str:
    """A line a cell, and what remains in all."""
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
    header = ["cell", "state", "updates", "s / update", "evaluation, whole run", "time left", "GiB"]
    left = sum(cell.state in ("to do", "begun") for cell in planned)
    device = planned[0].cfg.device
    return (
        f"{markdown(header, rows)}\n{len(planned) - left} of {len(planned)} cells are done. The other {left} take "
        f"{duration(total)} one after the other on this machine (device={device}, "
        f"{planned[0].cfg.num_threads} thread), and at most {memory:.1f} GiB each.\n"
    )


def main() -> None:
    arguments = sys.argv[1:]
    planned = cells(arguments)
    print(render(planned, costs(planned)))


if __name__ == "__main__":
    report_errors(main, HydraException, OmegaConfBaseException)
