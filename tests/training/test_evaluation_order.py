"""The order of sequences in evaluations: shuffled, the same every time, and without effect on training."""

from collections import Counter

import pytest
import torch

from bnrnn import train as training
from bnrnn.data.base import FILE, SHUFFLED, evaluation_generator
from bnrnn.data.cloze import Cloze
from bnrnn.data.digits import Digits
from bnrnn.errors import BnrnnError
from bnrnn.layers.population import batch_statistics
from bnrnn.train import train
from bnrnn.training.log import read_jsonl
from bnrnn.training.loop import Trainer
from bnrnn.training.pieces import file_order_until
from bnrnn.training.results import FILE as RESULT
from bnrnn.training.results import Result
from tests.test_train import interrupt_at, losses, short, without_time
from tests.training.test_language import words

WHOLE = ("budget.eval_batches=null", "batch_size=50")


def labels(order: str, split: str, seed: int = 0) -> list[int]:
    """The labels of a pass over a split of the digits, in the order in which they are evaluated."""
    batches = Digits().batches(split, 50, evaluation_generator(order, split, seed))
    return torch.cat([batch.targets[0] for batch in batches]).tolist()


def begin_in_file_order(cfg, folder) -> None:
    """Train five updates as before the order was recorded, and stop."""
    with pytest.MonkeyPatch.context() as before:
        before.setattr("bnrnn.training.build.evaluation_order", lambda cfg, data: FILE)
        with pytest.raises(SystemExit):
            interrupt_at(5, cfg, folder)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_an_evaluation_reads_every_sequence_once_and_always_in_the_same_order(split):
    in_file, shuffled = labels(FILE, split), labels(SHUFFLED, split)
    assert Counter(in_file) == Counter(shuffled) and in_file != shuffled
    torch.rand(3)
    assert labels(SHUFFLED, split) == shuffled
    assert labels(SHUFFLED, split, seed=1) != shuffled
    assert labels(FILE, split, seed=1) == in_file


def test_the_splits_have_orders_of_their_own():
    first = {split: evaluation_generator(SHUFFLED, split, 5).initial_seed() for split in ("train", "valid", "test")}
    assert len(set(first.values())) == 3
    assert first["train"] == 5, "the order of passes for population statistics has never changed"


def test_the_order_changes_numbers_with_batch_statistics_and_nothing_that_is_trained(tmp_path):
    found = {order: train(short(*WHOLE, f"evaluation_order={order}"), tmp_path / order) for order in (SHUFFLED, FILE)}
    assert losses(tmp_path / SHUFFLED) == losses(tmp_path / FILE)
    assert found[SHUFFLED].metrics["valid/loss"] != found[FILE].metrics["valid/loss"]
    usual = train(short(*WHOLE), tmp_path / "usual")
    assert usual.metrics == found[SHUFFLED].metrics, "the digits are shuffled by default"
    assert {order: result.evaluation_order for order, result in found.items()} == {SHUFFLED: SHUFFLED, FILE: FILE}
    assert Result.read(tmp_path / "usual" / RESULT).evaluation_order == SHUFFLED
    # With population statistics, a prediction does not depend on the other sequences of its batch.
    of = "test/loss_chosen_by_population"
    a, b = (
        train(short(*WHOLE, "population_every=1", f"evaluation_order={order}"), tmp_path / f"{order}-2").metrics[of]
        for order in (SHUFFLED, FILE)
    )
    assert a == pytest.approx(b, rel=1e-6)


def test_a_run_from_before_the_order_was_recorded_goes_on_in_the_new_order(tmp_path):
    cfg = short(*WHOLE, "budget.updates=9")
    whole = train(cfg, tmp_path / "whole")
    begin_in_file_order(cfg, tmp_path / "older")
    result = train(cfg, tmp_path / "older")
    assert losses(tmp_path / "older") == losses(tmp_path / "whole")
    older, new = (
        {r["update"]: r for r in without_time(tmp_path / name) if "valid/loss" in r} for name in ("older", "whole")
    )
    assert older[3] != new[3] and [older[u] for u in (6, 9)] == [new[u] for u in (6, 9)]
    assert result.metrics == whole.metrics and result.best_update == whole.best_update
    assert [piece["evaluation_order"] for piece in result.pieces] == [FILE, SHUFFLED]
    assert file_order_until(result.pieces) == 6 and file_order_until(whole.pieces) == 0


def test_the_best_model_of_the_earlier_part_is_measured_again_in_the_new_order(tmp_path, monkeypatch):
    cfg = short(*WHOLE, "budget.updates=9", "optim.lr=1e-9")  # the first evaluation is the best
    monkeypatch.setattr(Trainer, "_better", lambda self, metrics, best: False)
    whole = train(cfg, tmp_path / "whole")
    begin_in_file_order(cfg, tmp_path / "older")
    result = train(cfg, tmp_path / "older")
    assert result.best_update == whole.best_update == 3
    assert result.metrics["valid/loss"] == whole.metrics["valid/loss"]


def test_pieces_without_an_order_are_from_before_it_was_recorded():
    assert file_order_until([]) == file_order_until([{"update": 0}]) == float("inf")
    assert file_order_until([{"update": 0}, {"update": 7, "evaluation_order": SHUFFLED}]) == 7


def test_text_that_carries_states_keeps_its_order_and_readers_follow_their_released_code(tmp_path):
    assert Cloze.evaluation_orders[0] == FILE
    assert train(words("budget.eval_every=1000"), tmp_path / "a").evaluation_order == FILE
    with pytest.raises(BnrnnError, match="evaluation_order=shuffled: this text is read in its own order"):
        train(words("evaluation_order=shuffled"), tmp_path / "b")


def test_the_training_set_is_measured_like_the_validation_set_on_request(tmp_path):
    measured = {}

    class Watched(Trainer):
        def _evaluate_if_due(self):
            super()._evaluate_if_due()
            with batch_statistics(self.model):
                measured[self.state.update] = self.evaluate("train")["train/loss"]

    cfg = short("evaluate_train=true")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "Trainer", Watched)
        train(cfg, tmp_path / "a")
    records = {r["update"]: r for r in read_jsonl(tmp_path / "a/metrics.jsonl") if "valid/loss" in r}
    assert {u: r["train_set/loss"] for u, r in records.items()} == {u: measured[u] for u in (3, 6)}
    plain = train(short(), tmp_path / "b")
    assert plain.config_hash == Result.read(tmp_path / "a" / RESULT).config_hash
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_the_last_model_is_measured_beside_the_selected_one(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_better", lambda self, metrics, best: False)  # the first evaluation is the best
    metrics = train(short(*WHOLE), tmp_path / "a").metrics
    monkeypatch.undo()
    monkeypatch.setattr(Trainer, "_better", lambda self, metrics, best: True)  # the last one is
    last = train(short(*WHOLE), tmp_path / "b").metrics
    for split in ("valid", "test"):
        of_last = last[f"{split}/loss_population_statistics" if split == "valid" else "test/loss"]
        assert metrics[f"{split}/loss_last"] == of_last != metrics[f"{split}/loss"]
    assert not any(name.endswith("_last") for name in last)
