"""Records and progress of a run: metrics.jsonl (the record), wandb (for people), one line or bar on the screen."""

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from tqdm import tqdm

from bnrnn.files import atomic_write

Item = TypeVar("Item")


class CountCells(Callback):
    """Hydra callback: tells every cell of a sweep how many there are, in BNRNN_CELLS."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        sweeps = {str(k): f"{k}={v}" for k, v in (config.hydra.sweeper.get("params") or {}).items()}
        sweeps |= {override.split("=")[0]: override for override in config.hydra.overrides.task}
        overrides = OverridesParser.create().parse_overrides(list(sweeps.values()))
        counts = [len(list(o.sweep_iterator())) for o in overrides if o.is_sweep_override()]
        os.environ["BNRNN_CELLS"] = str(math.prod(counts))


def say(text: str, title: str = "") -> None:
    """One line for people, above a progress bar if there is one."""
    tqdm.write(f"{title} {text}".strip(), file=sys.stdout)
    sys.stdout.flush()


class RunLog:
    """Where a run writes what happens; use as a context manager.

    Args:
        run_dir: folder of metrics.jsonl and of wandb's files.
        title: shown before every line, such as "cell 3 of 12".
        num_records: records to keep; later ones are discarded; the resumed run rewrites them.
        wandb_run: what wandb.init gave, or None.
    """

    def __init__(self, run_dir: Path, title: str = "", num_records: int = 0, wandb_run: Any = None) -> None:
        self.path, self.title, self.wandb_run = run_dir / "metrics.jsonl", title, wandb_run
        kept = read_jsonl(self.path)[:num_records]
        with atomic_write(self.path) as file:
            file.writelines(json.dumps(record).encode() + b"\n" for record in kept)
        self.file = self.path.open("a")

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
        if self.wandb_run is not None:
            self.wandb_run.finish(exit_code=0 if error[0] is None else 1)

    def record(self, update: int, values: dict[str, float]) -> None:
        """Append one record; wandb gets the same values at the same step."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}  # JSON has no NaN
        self.file.write(json.dumps({"update": update, **finite}) + "\n")
        self.file.flush()  # a killed process loses nothing that it has recorded
        if self.wandb_run is not None:
            self.wandb_run.log(values, step=update)

    def finish(self, status: str, metrics: dict[str, float]) -> None:
        """Tell wandb what the run came to, for its table of runs."""
        if self.wandb_run is not None:
            self.wandb_run.summary.update({"status": status, **metrics})

    def say(self, text: str) -> None:
        """One line for people, with the title before it."""
        say(text, self.title)

    def bar(self, total: int, initial: int = 0, what: str = "updates") -> tqdm:
        """A progress bar on a terminal; nothing elsewhere, or if the variable TQDM_DISABLE is set."""
        hidden = True if os.environ.get("TQDM_DISABLE") else None  # None: unless it is a terminal
        return tqdm(total=total, initial=initial, desc=f"{self.title} {what}".strip(), disable=hidden, leave=False,
                    unit=f" {what if what == 'updates' else 'batches'}", dynamic_ncols=True)  # fmt: skip

    def track(self, items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
        """Pass items on, with a bar."""
        with self.bar(total, what=what) as bar:
            for item in items:
                yield item
                bar.update()


def start_wandb(cfg: DictConfig, config: dict[str, Any], folder: Path, run_name: str, run_id: str) -> Any:
    """A wandb run in `folder`, quiet and without looking around on the machine; None if it is disabled.

    The runs of a sweep share a folder, so that wandb's own viewer shows their curves side by side.
    A resumed run is a second piece with the same id: wandb joins the pieces when they are synced.
    """
    if cfg.wandb.mode == "disabled":
        return None
    import wandb  # slow to import

    settings = wandb.Settings(
        silent=True,
        console="off",
        x_disable_stats=True,
        x_disable_machine_info=True,
        disable_git=True,
        disable_code=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=1,  # seconds; what a kill may lose
    )
    return wandb.init(
        mode=cfg.wandb.mode,
        project=cfg.wandb.project,
        group=cfg.name,
        name=run_name or cfg.name,
        id=run_id,
        resume="allow" if cfg.wandb.mode == "online" else None,
        config=config,
        dir=folder,
        settings=settings,
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, [] if there is none. A last line cut off by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records
