"""Evaluation of a model on the splits of its data: it draws the same noise every time and does not affect training."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from bnrnn.data.base import SHUFFLED, SequenceData, evaluation_generator
from bnrnn.inputs import Batch
from bnrnn.layers.population import collecting_statistics, estimated_together
from bnrnn.metrics import Scores, score
from bnrnn.training.log import RunLog
from bnrnn.training.stop import Stop

IMAGES = 100  # that are captioned at once: more would need much memory, and a stop would wait for all of them


def outputs(model: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the logits and targets of each batch. A batch with `carried` starts from the last state of the previous."""
    state = None
    for batch in batches:
        logits, state = model(batch.inputs, state if batch.carried else None, batch.t_start)
        yield logits, batch.targets


@dataclass
class Evaluator:
    """Evaluates the model of a run.

    Args:
        cfg: the configuration of the run, of which its top-level options and `budget` are read.
        order: the order of sequences in evaluations, SHUFFLED or FILE (bnrnn.data.base).
    """

    cfg: DictConfig
    model: nn.Module
    data: SequenceData
    device: torch.device
    log: RunLog
    stop: Stop
    order: str
    captions: dict[str, list[str]] = field(default_factory=dict, init=False)  # of the test images, by kind of search

    def evaluate(self, split: str) -> dict[str, float]:
        """`<split>/loss` in nats, `<split>/accuracy` in 0-1 and the metric of the data, in evaluation mode."""
        means = self._score(*self._pass(split, self.cfg.batch_size), split)
        return {f"{split}/{name}": value for name, value in means.items()}

    def evaluate_extra(self) -> dict[str, float]:
        """The results of the data's further tests (`extra_tests`): `test/<metric>_<name>`."""
        extra = {name: self._score(*test, name) for name, test in self.data.extra_tests().items()}
        return {f"test/{key}_{name}": value for name, means in extra.items() for key, value in means.items()}

    def evaluate_generated(self) -> dict[str, float]:
        """The scores of generated captions: `test/<score>`; {} if the task generates none."""
        references = self.data.references("test")
        if references is None:
            return {}
        model: Any = self.model
        self.captions = {}
        parts = references.features.split(IMAGES)
        with self._measuring():
            for features in self.log.track(parts, len(parts), "generating captions"):
                self.stop.check()
                for suffix, found in model.generate(features.to(self.device)).items():
                    self.captions.setdefault(suffix, []).extend(references.spell(ids) for ids in found)
        return {
            f"test/{name}{suffix}": value
            for suffix, captions in self.captions.items()
            for name, value in score(captions, references.captions).items()
        }

    def _score(self, total: int, batches: Iterator[Batch], what: str) -> dict[str, float]:
        scores = Scores()
        with self._measuring():
            limited = self._limited(total, batches, self.cfg.budget.eval_batches, what)
            for logits, targets in outputs(self.model, limited):
                scores.add(logits, targets)
        return scores.means(self.data.metric)

    def estimate_population_statistics(self) -> None:
        """Estimate them from passes over the training set, in the order of a shuffled epoch.

        Norms with running statistics keep these.
        """
        for group in estimated_together(self.model):
            norms = [norm for norm in group if not norm.running]
            if not norms:
                continue
            batches = self._pass("train", self.cfg.population_batch_size)
            with self._measuring(), collecting_statistics(self.model, norms):
                limited = self._limited(*batches, self.cfg.budget.population_batches, "population statistics")
                for _ in outputs(self.model, limited):
                    pass

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Context manager: evaluation mode, with the random generators seeded, and restored afterwards."""
        devices = [self.device] if self.device.type == "cuda" else []
        was_training = self.model.training
        with torch.no_grad(), torch.random.fork_rng(devices), self._precision():
            torch.manual_seed(self.cfg.seed)
            self.model.eval()
            try:
                yield
            finally:
                self.model.train(was_training)

    def _pass(self, split: str, batch_size: int) -> tuple[int, Iterator[Batch]]:
        generator = evaluation_generator(SHUFFLED if split == "train" else self.order, split, self.cfg.seed)
        return self.data.num_batches(split, batch_size), self.data.batches(split, batch_size, generator)

    def _limited(self, total: int, batches: Iterator[Batch], most: int | None, what: str) -> Iterator[Batch]:
        """The first `most` batches, moved to the device, with a progress bar. None means all batches."""
        total = total if most is None else min(most, total)
        for _, batch in self.log.track(zip(range(total), batches, strict=False), total, what):
            self.stop.check()
            yield batch.to(self.device)

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cfg.precision == "bfloat16")
