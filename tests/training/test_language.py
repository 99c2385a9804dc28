"""Training of language models: carried state, schedules, statistics, streaming, resuming, golden losses."""

import pytest
import torch
from torch import nn

from bnrnn.config import compose_config
from bnrnn.data.language import Streams
from bnrnn.layers.population import batch_statistics, collecting_statistics, estimated_together, shared_statistics
from bnrnn.metrics import cross_entropy
from bnrnn.train import train
from bnrnn.training.checkpoint import MODEL, load
from bnrnn.training.evaluation import outputs
from bnrnn.training.log import read_jsonl
from bnrnn.training.loop import Trainer
from bnrnn.training.optim import learning_rate
from bnrnn.training.search import apply_trial
from tests.helpers import assert_near, composed
from tests.test_train import interrupt_at, losses, without_time
from tests.toy import ToyWords

CHARACTERS = ("data._target_=tests.toy.ToyCharacters", "optim=adam", "batch_size=10", "model.init.hidden=orthogonal")
WORDS = (
    "data._target_=tests.toy.ToyWords", "optim=sgd", "init@model.init=uniform", "batch_size=8", "sum_over_time=true",
    "population_batch_size=8", "model.num_layers=2", "model.learned_state=false", "model.embedding_size=12",
    "++model.layer.cell_bias=false", "lr_decay={after: 2, divisor: 2}", "optim.lr=0.2",
)  # fmt: skip
LENGTH = ("+budget.epochs=3", "budget.updates=null", "budget.eval_every=null", "log_every=5")
GOLDEN = {
    ("characters", "lstm"): [2.8774396, 2.8558617, 2.8261960, 2.7925047],
    ("characters", "bn_lstm"): [2.8853351, 2.8702384, 2.8568637, 2.8398465],
    ("words", "lstm"): [2.7048351, 2.6800261, 2.6717658, 2.6443413],
    ("words", "input_bn_lstm"): [2.6962311, 2.6511237, 2.5752302, 2.5172418],
}


def characters(*overrides: str):
    return composed(*CHARACTERS, *LENGTH, "model.hidden_size=16", *overrides)


def words(*overrides: str):
    model = [] if any(o.startswith("model=") for o in overrides) else ["model=input_bn_lstm"]
    return composed(*model, *overrides, *WORDS, *LENGTH, "model.hidden_size=16")


def losses_of_epochs(folder) -> list[float]:
    return [r["valid/loss"] for r in read_jsonl(folder / "metrics.jsonl") if "valid/loss" in r]


@pytest.mark.parametrize("model", ["lstm", "bn_lstm"])
def test_golden_losses_of_characters(model, tmp_path):
    train(characters(f"model={model}"), tmp_path)
    assert losses(tmp_path)[:4] == pytest.approx(GOLDEN["characters", model], rel=1e-4)


@pytest.mark.parametrize("model", ["lstm", "input_bn_lstm"])
def test_golden_losses_of_words(model, tmp_path):
    train(words(f"model={model}"), tmp_path)
    assert losses(tmp_path)[:4] == pytest.approx(GOLDEN["words", model], rel=1e-4)


@pytest.mark.parametrize(
    "cfg", [words(), words("model=lstm"), characters()], ids=["input_bn_lstm", "lstm", "characters"]
)
def test_a_run_stopped_within_an_epoch_resumes_bit_for_bit(cfg, tmp_path):
    whole = train(cfg, tmp_path / "whole")
    with pytest.raises(SystemExit):
        interrupt_at(13, cfg, tmp_path / "stopped")  # an epoch of words has 10 updates
    resumed = train(cfg, tmp_path / "stopped")
    assert resumed.metrics == whole.metrics
    assert without_time(tmp_path / "stopped") == without_time(tmp_path / "whole")


def test_state_is_carried_within_an_epoch_and_reset_at_the_next(tmp_path, monkeypatch):
    seen, original = [], Trainer.update

    def spy(self, batch):
        forward = self.model.forward

        def recorded(x, state=None, t_start=0):
            logits, ended = forward(x, state, t_start)
            seen.append((state, ended))
            return logits, ended

        monkeypatch.setattr(self.model, "forward", recorded)
        try:
            return original(self, batch)
        finally:
            monkeypatch.setattr(self.model, "forward", forward)

    monkeypatch.setattr(Trainer, "update", spy)
    train(words(), tmp_path)
    assert len(seen) == 30
    for k, (state, _) in enumerate(seen):
        if k % 10 == 0:
            assert state is None
        else:
            assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(state, seen[k - 1][1], strict=True))


def test_the_papers_schedules_by_epoch():
    """Laurent et al. 2015, section 4.2.2: the rate falls from epoch 7 (small, medium) or epoch 16 (large) on."""
    assert [learning_rate(1.0, epoch, 6, 2.0) for epoch in range(15)] == [1.0] * 6 + [2.0**-k for k in range(1, 10)]
    medium = [learning_rate(1.0, epoch, 6, 1.2) for epoch in range(40)]
    assert medium[5] == 1.0 and medium[6] == pytest.approx(1 / 1.2) and medium[39] == pytest.approx(1.2**-34)
    large = [learning_rate(1.0, epoch, 15, 1.15) for epoch in range(55)]
    assert large[14] == 1.0 and large[15] == pytest.approx(1 / 1.15) and large[54] == pytest.approx(1.15**-40)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("small", (20, 200, 0.0, 0.1, 10, 15, 21795)),
        ("medium", (35, 650, 0.5, 0.05, 5, 40, 33200)),
        ("large", (35, 1500, 0.65, 0.04, 5, 55, 45650)),
    ],
)
def test_the_settings_of_the_word_models_are_the_papers(setting, expected):
    cfg = compose_config("experiment=laurent2015/table2", "model=input_bn_lstm", f"setting={setting}")
    streams = ToyWords(cfg.data.window)
    streams.splits["train"] = torch.zeros(929_589)
    updates = cfg.budget.epochs * streams.num_batches("train", cfg.batch_size)
    model, found = cfg.model, (cfg.data.window, cfg.model.hidden_size, cfg.model.dropout, cfg.model.init.bound)
    assert (*found, cfg.grad_clip, cfg.budget.epochs, updates) == expected
    assert model.embedding_size == model.hidden_size and model.num_layers == 2 and model.layer.gamma_init == 1.0
    assert cfg.batch_size == 32 and cfg.optim.lr == 1.0 and cfg.optim.momentum == 0 and cfg.sum_over_time


def test_the_learning_rate_is_that_of_the_epoch(tmp_path, monkeypatch):
    seen, step = [], torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda self, *a: (seen.append(self.param_groups[0]["lr"]), step(self, *a))[1]
    )
    train(words(), tmp_path)
    assert seen == [0.2] * 20 + [0.1] * 10


def test_a_sum_over_time_is_the_windows_mean_times_its_steps(tmp_path):
    """From the same weights, one gradient step is larger by the number of steps of the window."""
    moved = {}
    for flag in ("true", "null"):
        cfg = words("model=lstm")
        cfg.sum_over_time, cfg.grad_clip = (True if flag == "true" else None), 0
        cfg.budget.epochs, cfg.optim.lr, cfg.lr_decay = None, 1e-3, None
        cfg.budget.updates, cfg.budget.eval_every = 1, 1
        train(cfg, tmp_path / flag)
        moved[flag] = load(tmp_path / flag / MODEL)["model"]["head.bias"]
    cfg.optim.lr = 1e-20
    train(cfg, tmp_path / "start")
    start = load(tmp_path / "start" / MODEL)["model"]["head.bias"]
    assert_near("step", 5 * (moved["null"] - start), moved["true"] - start, 1e-4)


def trained(cfg, tmp_path, monkeypatch) -> Trainer:
    """The trainer of a finished run."""
    kept, original = [], Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda self: (original(self), kept.append(self)))
    train(cfg, tmp_path)
    return kept[0]


def test_one_sequence_is_measured_in_pieces_as_it_would_be_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("bnrnn.data.language.PIECE", 7)
    trainer = trained(characters(), tmp_path, monkeypatch)
    text = torch.from_numpy(trainer.data.ids[trainer.data.splits["test"]])
    with torch.no_grad():
        logits, _ = trainer.model.eval()(text[:-1, None])
    in_pieces = trainer.evaluate_extra()["test/loss_one_sequence"]
    assert in_pieces == pytest.approx(cross_entropy(logits, text[1:, None]).item(), rel=1e-5)


@pytest.mark.parametrize("cfg", [characters(), words("+data.window=1000")], ids=["characters", "words"])
def test_population_statistics_of_one_batch_that_is_the_whole_set_are_its_own(cfg, tmp_path, monkeypatch):
    trainer = trained(cfg, tmp_path, monkeypatch)
    model = trainer.model.double().eval()
    (batch,) = trainer.data.batches("train", 8 if isinstance(trainer.data, Streams) else 10_000)
    with torch.no_grad():
        with collecting_statistics(model, *estimated_together(model)):
            model(batch.inputs)
        population, _ = model(batch.inputs)
        with batch_statistics(model):
            own, _ = model(batch.inputs)
    assert_near("logits", own, population, 1e-7)


def test_shared_statistics_are_the_average_over_time_for_a_while(tmp_path, monkeypatch):
    norm = trained(words(), tmp_path, monkeypatch).model.layer.layers[1].bn_ih
    before = norm.pop_mean.clone(), norm.pop_var.clone()
    assert norm.pop_mean.shape == (5, 64) and norm.pop_mean.std(0).min() > 0
    with shared_statistics(norm):
        for now, then in zip((norm.pop_mean, norm.pop_var), before, strict=True):
            assert torch.allclose(now, then.mean(0).expand_as(then))
    assert torch.equal(norm.pop_mean, before[0]) and torch.equal(norm.pop_var, before[1])


def test_a_result_has_the_main_metric(tmp_path):
    result = train(words(), tmp_path / "words")
    assert result.data == "toy text"
    for split in ("valid", "test"):
        for statistics in ("population", "shared") if split == "valid" else ("batch", "shared"):
            assert f"{split}/ppl_{statistics}_statistics" in result.metrics
    assert result.metrics["valid/ppl"] == pytest.approx(torch.tensor(result.metrics["valid/loss"]).exp().item())
    valid = losses_of_epochs(tmp_path / "words")
    assert len(valid) == 3 and result.metrics["valid/loss"] == min(valid)
    result = train(characters(), tmp_path / "characters")
    assert result.metrics["test/bpc"] == pytest.approx(result.metrics["test/loss"] / torch.tensor(2.0).log().item())
    assert {"test/bpc_one_sequence", "test/bpc_segments_20"} <= set(result.metrics)


def test_outputs_pass_the_state_on_only_where_batches_say_so():
    class Counter(nn.Module):
        def forward(self, x, state, t_start):
            return x, (state or 0) + 1

    data = ToyWords(window=3)
    assert data.num_batches("valid", 8) == 2
    counted = Counter()
    states = []
    counted.register_forward_hook(lambda _, __, out: states.append(out[1]))
    list(outputs(counted, [*data.batches("valid", 8), *data.batches("valid", 8)]))
    assert states == [1, 2, 1, 2]


def test_a_trial_draws_the_same_every_time_and_within_its_ranges():
    recipe, drawn = compose_config("experiment=laurent2015/table3_search"), []
    for trial in range(52):
        recipe.search.trial = trial
        drawn.append(apply_trial(recipe))
    again = apply_trial(compose_config("experiment=laurent2015/table3_search", "search.trial=7", "model=rnn"))
    assert (again.optim.lr, again.batch_size) == (drawn[7].optim.lr, drawn[7].batch_size)
    rates = [cfg.optim.lr for cfg in drawn]
    assert 1e-4 <= min(rates) < 3e-4 and 0.3 < max(rates) <= 1 and len(set(rates)) > 45
    assert {cfg.optim.momentum for cfg in drawn} == {0.5, 0.8, 0.9, 0.95, 0.995}
    assert {cfg.batch_size for cfg in drawn} == {32, 64, 128}


def test_divergence_of_a_model_with_embedded_words_is_a_result_and_no_error(tmp_path):
    cfg = words("model=lstm", "grad_clip=0")
    cfg.optim.lr, cfg.log_every = 1e30, 20
    result = train(cfg, tmp_path)
    assert result.status == "diverged" and result.metrics == {}
