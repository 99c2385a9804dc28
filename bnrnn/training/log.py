"""Records and progress of a run: metrics.jsonl, which programs read, and wandb, lines and progress bars for people."""

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from tqdm import tqdm

from bnrnn.errors import BnrnnError, error_text, first_line
from bnrnn.system.files import atomic_write, open_regular, read_bytes, writing
from bnrnn.training import mirror
from bnrnn.training.results import METRICS

LOG = "run.log"  # the lines of a run, for people
MOST = 1 << 26  # bytes of a file of metrics, which takes a multiple of it in memory: half a million records
REMEDY = "restore it, or remove its folder to run again"
Item = TypeVar("Item")


class CountCells(Callback):
    """Hydra callback: writes the number of cells of a sweep to the environment variable BNRNN_CELLS."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        sweeps = {str(k): f"{k}={v}" for k, v in (config.hydra.sweeper.get("params") or {}).items()}
        sweeps |= {override.split("=")[0]: override for override in config.hydra.overrides.task}
        overrides = OverridesParser.create().parse_overrides(list(sweeps.values()))
        counts = [len(list(o.sweep_iterator())) for o in overrides if o.is_sweep_override()]
        os.environ["BNRNN_CELLS"] = str(math.prod(counts))


def say(text: str, title: str = "") -> None:
    """Print one line, above the progress bar if there is one; none if nobody reads any more, as after `| head`."""
    try:
        tqdm.write(f"{title} {text}".strip(), file=sys.stdout)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@cache
def say_left_out(message: str) -> None:
    """Report once, beside the output that programs read, that a run is missing in it."""
    print(f"left out: {message}", file=sys.stderr, flush=True)


def write_log(run_dir: Path, text: str) -> None:
    """Append a line with the time to the log in the folder of a run."""
    with writing(run_dir / LOG), open_regular(run_dir / LOG, "a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


class RunLog:
    """The log of a run, a context manager.

    Args:
        run_dir: folder of metrics.jsonl.
        title: printed before every line, such as "[run 3 of 12]".
        num_records: number of existing records to keep. Later ones are discarded; the resumed run rewrites them.
        wandb_run: the return value of wandb.init, or None.
        sha256: the checksum of the records to keep (see `sync`); None if the checkpoint is too old to have one.

    Raises BnrnnError if there are fewer records, or others, than the checkpoint counted.
    """

    def __init__(
        self, run_dir: Path, title: str = "", num_records: int = 0, wandb_run: Any = None, sha256: str | None = None
    ) -> None:
        self.path, self.title, self.wandb_run = run_dir / METRICS, title, wandb_run
        lines = record_lines(self.path)[:num_records]
        kept = b"".join(lines)
        self.digest = hashlib.sha256(kept)
        if len(lines) < num_records or sha256 not in (None, self.digest.hexdigest()):
            found = f"{len(lines)} records" if len(lines) < num_records else "other records"
            raise BnrnnError(
                f"{self.path} is damaged: it has {found}, expected the {num_records} to which the checkpoint belongs: "
                "restore both files together, or remove their folder to start the run again"
            )
        with atomic_write(self.path) as file:
            file.write(kept)
        with writing(self.path):
            self.file = open_regular(self.path, "ab")

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: object) -> None:
        unwritten = None
        try:
            with writing(self.path):
                self.file.close()  # which writes what is left
        except BnrnnError as problem:
            unwritten = problem if error[1] is None else None
        reason = error[1] or unwritten
        if isinstance(reason, Exception):
            with suppress(BnrnnError):  # the disk may be full
                write_log(self.path.parent, f"ended by an error: {error_text(reason)}")
        self._to_wandb(lambda run: run.finish(exit_code=0 if reason is None else 1))
        if unwritten is not None:
            raise unwritten

    def _to_wandb(self, send: Callable[[Any], object]) -> None:
        """Send something to wandb, if it is on. Its first error, such as a killed process, turns it off."""
        if self.wandb_run is None:
            return
        try:
            send(self.wandb_run)
        except Exception as error:
            self.wandb_run = None
            mirror.forget()
            reason = f"{type(error).__name__}: {first_line(error)}"
            self.say(f"warning: wandb has ended ({reason}); the run continues without it")

    def record(self, update: int, values: dict[str, float]) -> None:
        """Append one record to metrics.jsonl, and send the same values to wandb, where `valid/` is `Valid/`."""
        finite = {k: v if math.isfinite(v) else None for k, v in values.items()}  # JSON has no NaN
        line = (json.dumps({"update": update, **finite}) + "\n").encode()
        with writing(self.path):
            self.file.write(line)
            self.file.flush()  # records must survive if the process is killed
        self.digest.update(line)
        self._to_wandb(lambda run: run.log({"update": update, **mirror.in_wandb(values)}, step=update))

    def watch(self, update: int, values: Callable[[], dict[str, float]]) -> None:
        """Send values to wandb that people watch and that are no part of the record; they are computed only then."""
        self._to_wandb(lambda run: run.log(values(), step=update))

    def show(self, name: str, update: int, draw: Callable[[], Any]) -> None:
        """Send a figure of matplotlib to wandb as an image; it is drawn only then. An error of drawing is a warning."""
        if self.wandb_run is not None:
            try:
                figure = draw()
            except Exception as error:
                self.say(f"warning: the figure {name} is missing in wandb ({type(error).__name__}: {error})")
                return
            self._to_wandb(lambda run: mirror.show(run, name, update, figure))

    def sync(self) -> str:
        """Write all records to disk, and return their SHA-256, which the checkpoint holds that counts them."""
        with writing(self.path):
            os.fsync(self.file.fileno())
        return self.digest.hexdigest()

    def finish(self, status: str, metrics: dict[str, float]) -> None:
        """Send the status and the final metrics to wandb, for its table of runs."""
        self._to_wandb(lambda run: run.summary.update({"status": status, **mirror.in_wandb(metrics)}))

    def say(self, text: str) -> None:
        """Print one line, with the title before it, and append it to the log in the run's folder."""
        say(text, self.title)
        write_log(self.path.parent, text)

    def bar(self, total: int, initial: int = 0, what: str = "updates") -> tqdm:
        """A progress bar. It is hidden outside a terminal and if the variable TQDM_DISABLE is set."""
        hidden = True if os.environ.get("TQDM_DISABLE") else None  # None: outside a terminal
        return tqdm(total=total, initial=initial, desc=f"{self.title} {what}".strip(), disable=hidden, leave=False,
                    unit=f" {what if what == 'updates' else 'batches'}", dynamic_ncols=True)  # fmt: skip

    def track(self, items: Iterable[Item], total: int, what: str) -> Iterator[Item]:
        """Yield the items, and show a progress bar."""
        with self.bar(total, what=what) as bar:
            for item in items:
                yield item
                bar.update()


def record_lines(path: Path) -> list[bytes]:
    """The lines of a metrics file, [] if there is none. An incomplete last line of a killed process is left out.

    Raises BnrnnError, with the number of the line, for one that is no record.
    """
    if not path.exists() and not path.is_symlink():
        return []
    lines = read_bytes(path, REMEDY, "a file of metrics", MOST).splitlines(keepends=True)
    lines = lines[: len(lines) - (len(lines) > 0 and not lines[-1].endswith(b"\n"))]
    for n, line in enumerate(lines, 1):
        if not _is_record(line):
            raise BnrnnError(f"{path}, line {n}: expected a record with its update and numbers: {REMEDY}")
    return lines


def _is_record(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    numbers = (int, float)
    return (
        isinstance(record, dict)
        and type(record.get("update")) is int
        and all(value is None or type(value) in numbers for value in record.values())
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file (see `record_lines`)."""
    return [json.loads(line) for line in record_lines(path)]
