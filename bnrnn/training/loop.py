"""The training loop for all papers. A run can be interrupted after any update and resumes with identical results."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bnrnn.inputs import Batch
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import batch_statistics, has_batch_norm
from bnrnn.metrics import cross_entropy, error, scored_steps, sign
from bnrnn.training.checkpoint import random_state, set_random_state
from bnrnn.training.evaluation import Evaluator
from bnrnn.training.optim import check_optimizer, learning_rate
from bnrnn.training.state import Clock, TrainState
from bnrnn.training.stop import Interrupted


def has_diverged(loss: float, num_classes: int) -> bool:
    """Whether a cross-entropy (nats) is not finite or is more than 100 times that of guessing among the classes."""
    return not math.isfinite(loss) or loss > 100 * math.log(num_classes)


@dataclass
class Trainer(Evaluator):
    """One run: `fit` trains to the end of the budget.

    Args:
        save: writes a checkpoint with the given content.
    """

    optimizer: torch.optim.Optimizer
    state: TrainState
    save: Callable[[dict[str, Any]], None]
    recorded_at: float = field(default=0.0, init=False)  # seconds of the run at the last record

    def snapshot(self) -> dict[str, Any]:
        """The content of a checkpoint, which `restore` loads."""
        return {
            "state": dict(vars(self.state)),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": random_state(self.device),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Continue from a snapshot. Raises ValueError or an error of torch if it belongs to another model."""
        self.model.load_state_dict(snapshot["model"])
        shapes = {name: value.shape for name, value in snapshot["model"].items()}
        for best in (self.state.best, self.state.best_population):
            if best is not None and {name: value.shape for name, value in best["model"].items()} != shapes:
                raise ValueError("its best model has other weights than its last")
        self.optimizer.load_state_dict(snapshot["optimizer"])
        check_optimizer(self.optimizer)
        set_random_state(snapshot["random"], self.device)

    def fit(self) -> None:
        """Train to the end of the budget. Afterwards `state.best` is the best evaluation, unless `state.diverged`.

        Raises Interrupted after SIGTERM or SIGINT, after a checkpoint was saved.
        """
        cfg, state, last_saved = self.cfg, self.state, time.monotonic()
        state.window = state.window.to(self.device)  # reading it at every update would stall a GPU
        state.largest_norm = state.largest_norm.to(self.device)
        state.carried = tuple(s.to(self.device) for s in state.carried)
        self.recorded_at = state.seconds
        batches = self.training_batches()
        self.model.train()
        with self.log.bar(cfg.budget.updates, initial=state.update) as bar:
            while not state.diverged:
                try:
                    self._evaluate_if_due()
                    if state.diverged or state.update == cfg.budget.updates:
                        break
                    clock = Clock(self.stop)
                    sums = self.update(next(batches))
                    state.window += sums
                    state.largest_norm = state.largest_norm.maximum(sums[2])
                    state.update += 1
                    due = self._is_due(cfg.log_every)
                    if due and self.device.type == "cuda":
                        torch.cuda.synchronize(self.device)  # otherwise only the launches would be timed
                    clock.add_to(state)
                    if due:
                        self._record_window()
                        bar.set_postfix_str(self.summary(), refresh=False)
                    bar.update()
                    self.stop.check()
                except Interrupted:
                    self.save(self.snapshot())
                    raise
                if time.monotonic() - last_saved > cfg.checkpoint_seconds:
                    self.save(self.snapshot())
                    last_saved = time.monotonic()
        self.save(self.snapshot())

    def training_batches(self) -> Iterator[Batch]:
        """The batches from the current update on. Their order depends only on the seed and the epoch."""
        per_epoch = self.data.num_batches("train", self.cfg.batch_size)
        epoch, start = divmod(self.state.update, per_epoch)
        while True:
            generator = torch.Generator().manual_seed(self.cfg.seed * 1_000_003 + epoch)
            yield from self.data.batches("train", self.cfg.batch_size, generator, start)
            epoch, start = epoch + 1, 0

    def update(self, batch: Batch) -> Tensor:
        """Make one optimizer step. Returns (loss in nats, error rate, gradient norm before clipping, 1) for sums."""
        cfg, state, batch = self.cfg, self.state, batch.to(self.device)
        if cfg.lr_decay is not None:
            epoch = state.update // self.data.num_batches("train", cfg.batch_size)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(cfg.optim.lr, epoch, **cfg.lr_decay)
        self.optimizer.zero_grad()
        with self._precision():
            logits, carried = self.model(batch.inputs, state.carried if batch.carried else None, batch.t_start)
            loss = cross_entropy(logits, batch.targets)
        (loss * scored_steps(batch.targets) if cfg.sum_over_time else loss).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), cfg.grad_clip or math.inf)
        self.optimizer.step()
        state.carried = tuple(s.detach() for s in carried)
        wrong = error(logits, batch.targets) if self.data.metric == "error" else torch.zeros_like(norm)
        return torch.stack([loss.detach(), wrong, norm, torch.ones_like(norm)]).double()

    def _record_window(self) -> None:
        state = self.state
        loss, wrong, norm, count = state.window.tolist()
        state.window.zero_()
        state.loss = loss / count
        state.diverged = has_diverged(state.loss, self.data.output_size)
        errors = {"train/error": wrong / count} if self.data.metric == "error" else {}
        norms = {"train/grad_norm": norm / count, "train/grad_norm_max": state.largest_norm.item()}
        state.largest_norm.zero_()
        self._record({"train/loss": state.loss, **errors, **norms})
        self.log.watch(state.update, lambda: self._watched(count))

    def _watched(self, updates: float) -> dict[str, float]:
        """What people watch: updates a second since the last record, and the mean gamma of each normalization."""
        elapsed, self.recorded_at = self.state.seconds - self.recorded_at, self.state.seconds
        norms = {n: m for n, m in self.model.named_modules() if isinstance(m, SequenceBatchNorm)}
        gammas = {f"gamma/{name}": norm.gamma.mean().item() for name, norm in norms.items()}
        return {"updates_per_second": updates / elapsed if elapsed else math.nan, **gammas}

    def _record(self, values: dict[str, float]) -> None:
        self.log.record(self.state.update, {"seconds": round(self.state.seconds, 3), **values})
        self.state.num_records += 1

    def _evaluate_if_due(self) -> None:
        """Validate with batch statistics, as the authors did to select a model (D7), and keep the best model.

        With `population_every`, also validate with population statistics, and keep the model that is best by these. A
        loss that is not finite is a divergence: such a model has no population statistics, and is never the best.
        """
        state = self.state
        if not self._is_due(self.cfg.budget.eval_every) or state.evaluated == state.update:
            return
        with batch_statistics(self.model):
            metrics = self.evaluate("valid")
            of_training = self.evaluate("train") if self.cfg.evaluate_train else {}
        state.diverged = not math.isfinite(metrics["valid/loss"])
        population: dict[str, float] = {}
        if self._population_is_due() and not state.diverged:
            self.estimate_population_statistics()
            population = self.evaluate("valid")
        shown = {f"{name}_population_statistics": value for name, value in population.items()}
        shown |= {name.replace("train/", "train_set/"): value for name, value in of_training.items()}
        self._record(metrics | shown)
        state.evaluated = state.update
        if not state.diverged:
            state.best = self._better_of(state.best, metrics)
        if population:
            state.best_population = self._better_of(state.best_population, population)
        self.log.say(f"update {state.update}: {self.summary()}, now {metrics[f'valid/{self.data.metric}']:.4f}")

    def _population_is_due(self) -> bool:
        """Whether this is a `population_every`-th evaluation, or the last, of a model with batch normalization."""
        every = self.cfg.population_every
        return every is not None and has_batch_norm(self.model) and self._is_due(every * self.cfg.budget.eval_every)

    def _better_of(self, best: dict[str, Any] | None, metrics: dict[str, float]) -> dict[str, Any]:
        """`best`, or the current model with its metrics if these are better."""
        if best is not None and not self._better(metrics, best["metrics"]):
            return best
        weights = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
        return {"update": self.state.update, "metrics": metrics, "model": weights}

    def _is_due(self, every: int) -> bool:
        """Whether the number of updates is a multiple of `every`, or the last."""
        return self.state.update % every == 0 or self.state.update == self.cfg.budget.updates

    def _better(self, metrics: dict[str, float], best: dict[str, float]) -> bool:
        key = f"valid/{self.data.selects_by}"
        return sign(key) * metrics[key] > sign(key) * best[key]

    def summary(self) -> str:
        """The last training loss, and the best validation so far."""
        state, metric = self.state, self.data.metric
        parts = [f"loss {state.loss:.3f}"] if math.isfinite(state.loss) else []
        if state.best is not None:
            parts.append(f"best valid {metric} {state.best['metrics'][f'valid/{metric}']:.4f} @ {state.best['update']}")
        return ", ".join(parts)
