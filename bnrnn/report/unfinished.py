"""Reads the runs of an experiment that can be continued. Pages show their curves; claims and tables do not use them."""

import json
from pathlib import Path

from bnrnn.data.base import sha256
from bnrnn.errors import BnrnnError
from bnrnn.metrics import METRICS, READ
from bnrnn.report.markdown import NONE, markdown
from bnrnn.report.run import Run
from bnrnn.training import checkpoint
from bnrnn.training.cells import Cell, expand
from bnrnn.training.log import METRICS as RECORDS
from bnrnn.training.log import REMEDY, record_lines, say_left_out
from bnrnn.training.results import FILE, Result
from bnrnn.training.states import is_stale

BUDGET = "paper"  # shorter runs finish soon


def load_unfinished(key: str, results_dir: Path) -> list[Run]:
    """The runs of an experiment's grid with the paper's length that have a checkpoint and no result, in its order.

    The status of such a run is "unfinished". It has no metrics, and the records to which its checkpoint belongs.
    Damaged ones are reported and left out.
    """
    runs = []
    quoted = str(results_dir).replace("'", r"\'")
    for cell in expand([f"experiment={key}", f"budget={BUDGET}", f"out_dir='{quoted}'"]):
        try:
            if not (cell.folder / FILE).exists() and (run := _load(key, cell)):
                runs.append(run)
        except BnrnnError as error:
            say_left_out(str(error))
    return runs


def _load(key: str, cell: Cell) -> Run | None:
    saved = checkpoint.load(cell.folder / checkpoint.CHECKPOINT)
    if saved is None:
        return None
    state = saved["state"]
    lines = record_lines(cell.folder / RECORDS)[: state["num_records"]]
    if len(lines) < state["num_records"] or saved.get("records_sha256") not in (None, sha256(b"".join(lines))):
        raise BnrnnError(f"{cell.folder / RECORDS} has other records than those of {checkpoint.CHECKPOINT}: {REMEDY}")
    environment = state["pieces"][-1] if state["pieces"] else {"device": "unknown"}
    best = state["best"]["update"] if state["best"] else 0
    result = Result(
        key, cell.overrides, "unfinished", state["update"], best, {}, state["seconds"], 0, state["commits"],
        environment, saved["config"], pieces=state["pieces"],
    )  # fmt: skip
    records = [json.loads(line) for line in lines]
    return Run(cell.folder, cell.overrides, BUDGET, result, records, is_stale(key, BUDGET, result))


def render_unfinished(runs: list[Run]) -> str:
    """A table of unfinished runs: how far they are, their last validation, and their time."""
    rows = []
    for run in runs:
        metric = next((m for m in READ if run.series(f"valid/{m}")), None)
        last = NONE
        if metric is not None:
            update, value = list(run.series(f"valid/{metric}").items())[-1]
            shown = METRICS[metric]
            last = f"{shown.title} {shown.scale * value:.{shown.digits}f} at update {update:,}"
        name = " ".join(f"{k.split('.')[-1]}={v}" for k, v in run.overrides.items())
        state = "stale" if run.stale else ""
        rows.append([name, f"{run.result.updates:,}", last, f"{run.seconds_per_update:.3f}", run.engine, state])
    about = "Their curves are in the comparisons and figures above. Tables of results and claims do not use them.\n"
    return f"{about}\n{markdown(['run', 'updates', 'last validation, batch', 's / update', 'engine', ''], rows)}"
