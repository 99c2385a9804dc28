"""The training loop of every paper: explicit, resumable at any update, and the same whether it was killed or not."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from bnrnn.checkpoint import random_state, set_random_state
from bnrnn.data.base import Batch, SequenceData
from bnrnn.log import RunLog
from bnrnn.metrics import Scores, cross_entropy
from bnrnn.norm import batch_statistics, estimate_population_statistics


class Interrupted(SystemExit):
    """SIGTERM or SIGINT arrived and the run was saved. Unlike an Exception, it also ends a sweep."""


class Stop:
    """Turns SIGTERM and SIGINT into a flag while used as a context manager; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> "Stop":
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            self.previous = {n: signal.signal(n, self._receive) for n in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived."""
        if self.received is not None:
            raise Interrupted(f"{signal.Signals(self.received).name}: saved; the same command goes on from here")


@dataclass
class TrainState:
    """Where a run stands, beside its model, optimizer and random generators."""

    run_id: str
    commits: list[str]  # of the code of each piece of the run
    update: int = 0
    evaluated: int = 0  # update of the last evaluation
    num_records: int = 0  # in metrics.jsonl
    seconds: float = 0.0  # spent in updates
    window: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))  # sums since the last record
    loss: float = math.nan  # in the last record
    best: dict[str, Any] | None = None  # update, metrics and weights of the best evaluation
    diverged: bool = False


@dataclass
class Trainer:
    """One run: `fit` trains to the end of the budget, `evaluate` measures.

    Args:
        cfg: the run's configuration, of which the loop reads what stands at its root and under `budget`.
        save: writes a checkpoint of the given content.
    """

    cfg: DictConfig
    model: nn.Module
    data: SequenceData
    optimizer: torch.optim.Optimizer
    device: torch.device
    state: TrainState
    log: RunLog
    stop: Stop
    save: Callable[[dict[str, Any]], None]

    def snapshot(self) -> dict[str, Any]:
        """What a checkpoint holds; `restore` takes it back."""
        return {
            "state": dict(vars(self.state)),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        set_random_state(snapshot["random"])

    def fit(self) -> None:
        """Train; afterwards `state.best` is the best evaluation, unless `state.diverged`.

        Raises Interrupted after a signal, with everything saved.
        """
        cfg, state, last_saved = self.cfg, self.state, time.monotonic()
        state.window = state.window.to(self.device)  # stays there: reading it at every update would stall a GPU
        batches = self._training_batches()
        self.model.train()
        with self.log.bar(cfg.budget.updates, initial=state.update) as bar:
            while not state.diverged:
                try:
                    self._evaluate_if_due()
                    if state.update == cfg.budget.updates:
                        break
                    started = time.monotonic()
                    state.window += self._update(next(batches))
                    state.update += 1
                    due = state.update % cfg.log_every == 0 or state.update == cfg.budget.updates
                    if due and self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)  # or the time would be that of launching alone
                    state.seconds += time.monotonic() - started
                    if due:
                        self._record_window()
                        bar.set_postfix_str(self._summary(), refresh=False)
                    bar.update()
                    self.stop.check()
                except Interrupted:
                    self.save(self.snapshot())
                    raise
                if time.monotonic() - last_saved > cfg.checkpoint_seconds:
                    self.save(self.snapshot())
                    last_saved = time.monotonic()
        self.save(self.snapshot())

    def _training_batches(self) -> Iterator[Batch]:
        """Batches from the present update on; the order is a function of seed and epoch alone."""
        per_epoch = self.data.num_batches("train", self.cfg.batch_size)
        epoch, start = divmod(self.state.update, per_epoch)
        while True:
            generator = torch.Generator().manual_seed(self.cfg.seed * 1_000_003 + epoch)
            yield from self.data.batches("train", self.cfg.batch_size, generator, start)
            epoch, start = epoch + 1, 0

    def _update(self, batch: Batch) -> Tensor:
        """One optimizer step; returns (loss, gradient norm, 1) to be summed."""
        batch = batch.to(self.device)
        self.optimizer.zero_grad()
        with self._precision():
            loss = cross_entropy(self.model(batch.inputs), batch.targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip)
        self.optimizer.step()
        return torch.stack([loss.detach(), norm, torch.ones_like(norm)]).double()

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cfg.precision == "bfloat16")

    def _record_window(self) -> None:
        state = self.state
        loss, norm, count = state.window.tolist()
        state.window.zero_()
        state.loss = loss / count
        state.diverged = not math.isfinite(loss)
        self._record({"train/loss": state.loss, "train/grad_norm": norm / count})

    def _record(self, values: dict[str, float]) -> None:
        self.log.record(self.state.update, {"seconds": round(self.state.seconds, 3), **values})
        self.state.num_records += 1

    def _evaluate_if_due(self) -> None:
        """Validate with batch statistics, as the authors' model selection did (D7), and keep the best model."""
        state = self.state
        budget = self.cfg.budget
        due = state.update % budget.eval_every == 0 or state.update == budget.updates
        if not due or state.evaluated == state.update:
            return
        with batch_statistics(self.model):
            metrics = self.evaluate("valid")
        self._record(metrics)
        state.evaluated = state.update
        if state.best is None or metrics["valid/accuracy"] > state.best["metrics"]["valid/accuracy"]:
            weights = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
            state.best = {"update": state.update, "metrics": metrics, "model": weights}
        self.log.say(f"update {state.update}: {self._summary()}, now {metrics['valid/accuracy']:.4f}")

    def _summary(self) -> str:
        state = self.state
        parts = [f"loss {state.loss:.3f}"] if math.isfinite(state.loss) else []
        if state.best is not None:
            parts.append(f"best valid accuracy {state.best['metrics']['valid/accuracy']:.4f} @ {state.best['update']}")
        return ", ".join(parts)

    def evaluate(self, split: str) -> dict[str, float]:
        """`<split>/loss` and `<split>/accuracy` in evaluation mode, without touching the random generators."""
        scores = Scores()
        with self._measuring():
            for batch in self._pass(split, self.cfg.batch_size, self.cfg.budget.eval_batches, split):
                scores.add(self.model(batch.inputs), batch.targets)
        return {f"{split}/{name}": value for name, value in scores.means().items()}

    def estimate_population_statistics(self) -> None:
        """One exact pass over the shuffled training set."""
        with self._measuring():
            most, what = self.cfg.budget.population_batches, "population statistics"
            passes = self._pass("train", self.cfg.population_batch_size, most, what)
            estimate_population_statistics(self.model, (batch.inputs for batch in passes))

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        devices = [self.device] if self.device.type == "cuda" else []
        was_training = self.model.training
        with torch.no_grad(), torch.random.fork_rng(devices), self._precision():
            torch.manual_seed(self.cfg.seed)
            self.model.eval()
            try:
                yield
            finally:
                self.model.train(was_training)

    def _pass(self, split: str, batch_size: int, most: int | None, what: str) -> Iterator[Batch]:
        total = self.data.num_batches(split, batch_size)
        total = total if most is None else min(most, total)
        shuffled = torch.Generator().manual_seed(self.cfg.seed) if split == "train" else None
        batches = zip(range(total), self.data.batches(split, batch_size, shuffled), strict=False)
        for _, batch in self.log.track(batches, total, what):
            self.stop.check()
            yield batch.to(self.device)
