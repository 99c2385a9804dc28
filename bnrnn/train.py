"""The training command: builds the objects of a configuration, trains, and writes result.json.

python -m bnrnn.train experiment=cooijmans2016/table1 budget=cpu seed=0,1,2
"""

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from bnrnn.config import CONF, MENDABLE, checking_files, compose_config, without_labels
from bnrnn.errors import BnrnnError, mendable, report_errors
from bnrnn.metrics import has_java
from bnrnn.scan.backends import engine_that_ran
from bnrnn.system.files import make_folder, reading
from bnrnn.system.locks import LOCK, locked
from bnrnn.training import checkpoint, mirror
from bnrnn.training.build import build, environment_of, optimizer_of
from bnrnn.training.cells import check_named, sweep_folder
from bnrnn.training.checkpoint import CHECKPOINT, REMEDY, existing, load, remove
from bnrnn.training.help import text
from bnrnn.training.log import RunLog, read_jsonl, say, write_log
from bnrnn.training.loop import Trainer
from bnrnn.training.measure import last_lines, measure, measure_best_again
from bnrnn.training.options import check_options, keys_of, with_nearest_key
from bnrnn.training.pairs import check_pair
from bnrnn.training.pieces import digest, joined, note_engine, order_of
from bnrnn.training.provenance import git_commit, today
from bnrnn.training.results import FILE, METRICS, Result, check_same_config, config_record
from bnrnn.training.search import apply_trial
from bnrnn.training.state import TrainState
from bnrnn.training.stop import Interrupted, Stop


def train(cfg: DictConfig, run_dir: Path, overrides: dict[str, str] | None = None, title: str = "") -> Result:
    """Train one cell in `run_dir`, resume it from its checkpoint, or return the result if it is finished.

    Raises BnrnnError for bad input, Locked if another process is training the cell, and Interrupted
    (bnrnn.training.stop) after SIGTERM or SIGINT, after a checkpoint was saved.
    """
    cfg = apply_trial(cfg)
    check_options(cfg, overrides)
    check_pair(cfg, (overrides or {}).get("model"), (overrides or {}).get("data"))
    record = config_record(cfg)
    if not (run_dir / FILE).exists() or existing(run_dir / CHECKPOINT):
        make_folder(run_dir)
        with locked(run_dir) as check_lock:
            if FILE not in os.listdir(run_dir):  # another may have finished it; NFS may remember that it was missing
                for name in (FILE, METRICS, CHECKPOINT, checkpoint.MODEL):
                    for leftover in run_dir.glob(f"{name}.*.partial"):  # of a process that was killed while it wrote
                        remove(leftover)
                return _train(cfg, record, run_dir, overrides or {}, title, check_lock)
            remove(run_dir / CHECKPOINT)  # the run was killed between writing its result and removing its checkpoint
    result = Result.read(run_dir / FILE)
    check_same_config(result.config, record, run_dir / FILE)
    say(f"{os.path.relpath(run_dir)}: already {result.status}", title)
    return result


def _train(
    cfg: DictConfig, record: dict[str, Any], run_dir: Path, overrides: dict[str, str], title: str,
    check_lock: Callable[[], None],
) -> Result:  # fmt: skip
    saved = load(run_dir / CHECKPOINT)
    if saved is not None:
        check_same_config(saved["config"], record, run_dir / CHECKPOINT)
    cfg, device, data, model = build(cfg)
    optimizer = optimizer_of(cfg, model)
    where = environment_of(cfg, device, data, model)
    state = begin(saved, run_dir / CHECKPOINT, cfg.budget.updates) or TrainState(mirror.new_id(cfg, overrides), [])
    order_before = order_of(state.pieces)
    state.commits = list(dict.fromkeys([*state.commits, git_commit()]))
    found = digest(data, cfg.batch_size)
    state.pieces = joined(state.pieces, state.update, state.commits[-1], where, found, cfg.resume)

    def warn(text: str) -> None:
        say(text, title)
        write_log(run_dir, text)

    wandb_run = mirror.start(cfg, record, sweep_folder(run_dir.absolute(), overrides), overrides, state.run_id, warn)
    kept = saved.get("records_sha256") if saved else None
    with Stop() as stop, RunLog(run_dir, title, state.num_records, wandb_run, kept) as log:

        def save(snapshot: dict[str, Any]) -> None:
            check_lock()
            note_engine(state.pieces[-1], engine_that_ran(where["backend"]))
            checkpoint.save(run_dir / CHECKPOINT, {**snapshot, "config": record, "records_sha256": log.sync()})

        trainer = Trainer(cfg, model, data, device, log, stop, where["evaluation_order"], optimizer, state, save)
        if saved is not None:
            with reading(existing(run_dir / CHECKPOINT) or run_dir, REMEDY, "a checkpoint of this model"):
                trainer.restore(saved)
        begun = f"resumed at update {state.update}" if saved else "from the start"
        how = f"{where['backend']} engine, {cfg.precision}"
        log.say(f"{os.path.relpath(run_dir)}: {begun}, {cfg.budget.updates:,} updates on {device}, {how}")
        log.say(data.description)
        if saved is not None and order_before != trainer.order:
            measure_best_again(trainer)
        trainer.fit()
        metrics = {} if state.diverged else measure(trainer)
        check_lock()
        if not state.diverged:
            checkpoint.save(run_dir / checkpoint.MODEL, {"model": model.state_dict(), "config": record})
        result = _result(trainer, record, overrides, metrics, where)
        result.write(run_dir)
        remove(run_dir / CHECKPOINT)
        _show(trainer, result, run_dir)
    return result


def _result(
    trainer: Trainer, record: dict[str, Any], overrides: dict[str, str], metrics: dict[str, float],
    where: dict[str, Any],
) -> Result:  # fmt: skip
    """The result of a run that has been trained to its end."""
    state, data, cfg = trainer.state, trainer.data, trainer.cfg
    where = where | {"backend": engine_that_ran(where["backend"])}
    if "test/bleu4" in metrics:
        where = where | {"java": has_java()}  # which tokenizer the scores of captions are from
    return Result(
        name=cfg.name,
        overrides=overrides,
        status="diverged" if state.diverged else "finished",
        updates=state.update,
        best_update=state.best["update"] if state.best else 0,
        metrics=metrics,
        seconds=round(state.seconds, 1),
        cpu_seconds=None if state.cpu_seconds is None else round(state.cpu_seconds, 1),
        num_parameters=sum(p.numel() for p in trainer.model.parameters()),
        commits=state.commits,
        pieces=state.pieces,
        environment=where,
        data=data.description,
        config=record,
        records_sha256=trainer.log.sync(),
        updates_per_epoch=data.num_batches("train", cfg.batch_size),
        date=today(),
    )


def _show(trainer: Trainer, result: Result, run_dir: Path) -> None:
    """Send the figures and the metrics of a finished run to wandb, and print its last lines."""
    log, update = trainer.log, result.updates
    log.show("curves", update, lambda: _figures().curves(read_jsonl(run_dir / METRICS)))
    if trainer.captions:
        log.show("captions", update, lambda: _figures().captions(trainer.data, trainer.captions))
    log.finish(result.status, result.metrics)
    for line in last_lines(result.status, update, result.best_update, result.metrics, trainer.data.metric):
        log.say(line)


def _figures() -> Any:
    from bnrnn.report import run_figures  # matplotlib is slow to import, and needed for wandb alone

    return run_figures


def begin(saved: dict[str, Any] | None, path: Path, updates: int) -> TrainState | None:
    """The progress in a checkpoint; None if there is none. Raises BnrnnError for another content.

    Args:
        updates: those of the whole run.
    """
    if saved is None:
        return None
    with reading(existing(path) or path, REMEDY, "a checkpoint"):
        if saved["state"]["update"] > updates:
            raise ValueError(f"its update is {saved['state']['update']:,}, expected at most {updates:,}")
        return TrainState(**{"cpu_seconds": None, **saved["state"]})  # checkpoints from before it was recorded


def named_overrides(overrides: Iterable[str]) -> list[tuple[str, str]]:
    """The (key, value) pairs of the overrides, sorted by key. A deletion has the key ~key and an empty value."""
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return sorted((key, value) for key, _, value in pairs)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(cfg: DictConfig) -> None:
    """Train one cell; hydra calls this function for each cell of a sweep."""
    job = HydraConfig.get()
    excluded = job.job.config.override_dirname.exclude_keys
    overrides = {key: value for key, value in named_overrides(job.overrides.task) if key not in excluded}
    total = os.environ.get("BNRNN_CELLS")
    title = f"[run {job.job.num + 1} of {total}]" if total and not OmegaConf.is_missing(job.job, "num") else ""
    run_dir = Path(job.runtime.output_dir)
    try:
        train(without_labels(cfg), run_dir, overrides, title)
    except Exception as error:
        if title:  # hydra reports only the first error of a sweep, at its end
            say(f"failed: {mendable(error, *MENDABLE) or error}", title)
        _leave_nothing(run_dir, Path(cfg.out_dir).absolute())
        raise


def _leave_nothing(run_dir: Path, out_dir: Path) -> None:
    """Remove the folder of a run that was refused before it began. Not for workers: others may wait for the lock."""
    with suppress(OSError, BnrnnError):
        if os.listdir(run_dir) == [LOCK]:
            with locked(run_dir):
                remove(run_dir / LOCK)
        for folder in (run_dir, *run_dir.parents):  # and its parents up to out_dir, as far as they are empty
            folder.rmdir()
            if folder == out_dir:
                break


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # makes hydra pass exceptions on unchanged
    try:
        report_errors(_run, *MENDABLE)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.status)


def _run() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(text())
        return
    if "hydra/launcher=slurm" in sys.argv:
        raise BnrnnError(
            "hydra/launcher=slurm submits workers, not single runs: use `bnrnn-cluster submit "
            "experiment=...`, or hydra/launcher=submitit_slurm for one job per run"
        )
    check_named([a for a in sys.argv[1:] if "=" in a and not a.startswith("-")])
    try:
        with checking_files():
            main()
    except HydraException as error:
        if (cause := mendable(error)) is not None:  # raised by a class that hydra has called
            raise cause from error
        raise BnrnnError(with_nearest_key(error, lambda: keys_of(compose_config()))) from error


if __name__ == "__main__":
    cli()
