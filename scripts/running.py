"""Compares running, exact and batch statistics during short trainings, for docs/layer.md.

python scripts/running.py [--data-dir DIR]    writes results/layer/running.json; minutes on one core

`make tables` renders it. The corpora are the digits of scikit-learn and the characters of Penn Treebank.
"""

import copy
import os
from argparse import ArgumentParser
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn

from bnrnn.config import compose_config
from bnrnn.data.base import SequenceData
from bnrnn.errors import report_errors
from bnrnn.inputs import Batch
from bnrnn.layers.population import batch_statistics, collecting_statistics, estimated_together
from bnrnn.metrics import Scores, cross_entropy
from bnrnn.report.running_page import FILE
from bnrnn.system.files import write_record
from bnrnn.training.build import build
from bnrnn.training.evaluation import outputs
from bnrnn.training.provenance import provenance


class Case(NamedTuple):
    """A training: the options, the learning rate of Adam, and after which updates it is validated."""

    overrides: tuple[str, ...]
    lr: float
    updates: tuple[int, ...]
    valid_batches: int  # batches of validation; a number of batches makes the numbers of all three kinds comparable
    population_batches: int  # batches of the exact estimate


CASES = {
    "ptb_char": Case(("model.hidden_size=128", "batch_size=32"), 0.002, (50, 100, 200, 400), 50, 50),
    "digits": Case(("model.hidden_size=100", "batch_size=100"), 0.002, (50, 100, 200, 400, 600), 3, 12),
}


def measure(name: str, case: Case, data_dir: str = "data") -> dict[str, Any]:
    """Train with running statistics, and validate with each kind. The training does not depend on the validations."""
    cfg = compose_config("model=bn_lstm", f"data={name}", f"data_dir={data_dir}", "device=cpu", *case.overrides,
                         "model.layer.statistics=running")  # fmt: skip
    cfg, _, data, model = build(cfg)
    optimizer, rows, update = torch.optim.Adam(model.parameters(), lr=case.lr), [], 0
    while update < case.updates[-1]:
        for batch in data.batches("train", cfg.batch_size, torch.Generator().manual_seed(update)):
            optimizer.zero_grad()
            cross_entropy(model(batch.inputs)[0], batch.targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            update += 1
            if update in case.updates:
                rows.append({"update": update, **validate(model, data, cfg.batch_size, case)})
                print(f"{name}: {rows[-1]}", flush=True)
            if update == case.updates[-1]:
                break
    return {"data": data.description, "metric": data.metric, "overrides": list(case.overrides), "lr": case.lr,
            "seed": cfg.seed, "rows": rows}  # fmt: skip


@torch.no_grad()
def validate(model: nn.Module, data: SequenceData, batch_size: int, case: Case) -> dict[str, float]:
    """The validation metric with each kind of statistics. The model and its running averages remain as they are."""
    model = copy.deepcopy(model).eval()

    def scored() -> float:
        scores = Scores()
        batches = islice(data.batches("valid", batch_size), case.valid_batches)
        for logits, targets in outputs(model, batches):
            scores.add(logits, targets)
        return round(scores.means(data.metric)[data.metric], 4)

    found = {"running": scored()}
    with batch_statistics(model):
        found["batch"] = scored()
    for norms in estimated_together(model):
        shuffled = data.batches("train", batch_size, torch.Generator().manual_seed(0))
        with collecting_statistics(model, norms):
            run(model, islice(shuffled, case.population_batches))
    return found | {"exact": scored()}


def run(model: nn.Module, batches: Iterable[Batch]) -> None:
    for _ in outputs(model, batches):
        pass


def main() -> None:
    parser = ArgumentParser(description="Compare running, exact and batch statistics")
    parser.add_argument("--data-dir", default=os.environ.get("BNRNN_DATA", "data"))
    args = parser.parse_args()
    cases = {name: measure(name, case, args.data_dir) for name, case in CASES.items()}
    write_record(FILE, {**provenance(), "cases": cases})


if __name__ == "__main__":
    report_errors(main)
