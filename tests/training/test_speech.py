"""The deep bidirectional models of speech frames: padding, sequence-wise statistics, nn.LSTM, and training."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bnrnn.config import compose_config
from bnrnn.data.timit import TimitSample
from bnrnn.inputs import IGNORE, Padded
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.lstm import LSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import batch_statistics, estimate_population_statistics
from bnrnn.metrics import cross_entropy, error, scored_steps
from bnrnn.models.sequence_model import SequenceModel, init_glorot
from bnrnn.train import train
from bnrnn.training.log import read_jsonl
from tests.data.test_timit import sample  # noqa: F401
from tests.helpers import assert_near

F, H, V = 7, 6, 5
LENGTHS = [4, 9, 6, 9, 2]
LAYERS = {"lstm": LSTM, "input_bn_lstm": partial(InputBNLSTM, input_statistics="sequence")}
each_model = pytest.mark.parametrize("name", LAYERS)


def model_of(name: str, num_layers: int = 5) -> SequenceModel:
    sizes = {"hidden_size": H, "input_size": F, "output_size": V, "t_max": 9}
    model = SequenceModel(
        LAYERS[name], **sizes, num_layers=num_layers, bidirectional=True, learned_state=False, init=init_glorot
    ).double()
    for parameter in model.parameters():  # so that a forgotten bias or gamma changes the result
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.0)
    return model


def batch(steps: int = 9, fill: float = 0.0) -> tuple[Padded, torch.Tensor]:
    """The same sequences in the given number of steps, with this value in the padding."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(9, len(LENGTHS), F, generator=draw, dtype=torch.float64)
    targets = torch.randint(V, (9, len(LENGTHS)), generator=draw)
    padding = torch.arange(9)[:, None] >= torch.tensor(LENGTHS)
    x, targets = x.masked_fill(padding[..., None], fill), targets.masked_fill(padding, IGNORE)
    more = steps - 9
    x = torch.cat([x, torch.full((more, len(LENGTHS), F), fill, dtype=torch.float64)])
    return Padded(x, LENGTHS), torch.cat([targets, torch.full((more, len(LENGTHS)), IGNORE)])


def everything(model: SequenceModel, steps: int, fill: float) -> dict[str, torch.Tensor]:
    """Logits, loss, error, gradients and population statistics."""
    inputs, targets = batch(steps, fill)
    model.train()
    logits, _ = model(inputs)
    loss = cross_entropy(logits, targets) * scored_steps(targets)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    estimate_population_statistics(model, [inputs])
    norms = {name: norm for name, norm in model.named_modules() if isinstance(norm, SequenceBatchNorm)}
    statistics = {f"{name} {k}": v.clone() for name, norm in norms.items() for k, v in norm.named_buffers()}
    real = (torch.arange(steps)[:, None] < torch.tensor(LENGTHS))[..., None]
    scores = {"loss": loss, "error": error(logits, targets).double()}
    named = {f"d{name}": g for (name, _), g in zip(model.named_parameters(), grads, strict=True)}
    return {"logits": logits.masked_fill(~real, 0)[:9], **scores, **statistics, **named}


@each_model
def test_padding_changes_nothing(name):
    model = model_of(name)
    expected = everything(model, 9, 0.0)
    assert len([key for key in expected if "pop_mean" in key]) == (10 if name == "input_bn_lstm" else 0)
    for steps, fill in ((9, 1e3), (14, 0.0), (14, torch.nan)):
        for key, found in everything(model, steps, fill).items():
            assert_near(f"{key}, {steps} steps, {fill} in the padding", expected[key], found)


def test_statistics_are_those_of_all_frames_that_are_no_padding():
    model, (inputs, _) = model_of("input_bn_lstm"), batch()
    seen = {}
    for k, layer in enumerate(model.layer.layers):
        layer.register_forward_pre_hook(lambda _, args, k=k: seen.update({k: args[0]}))
    estimate_population_statistics(model, [inputs])
    order = torch.tensor(LENGTHS).argsort(descending=True, stable=True)
    runs = torch.arange(9)[:, None] < torch.tensor(LENGTHS)[order]
    for k, layer in enumerate(model.layer.layers):
        frames = seen[k][runs] @ layer.weight_ih.T  # (N, 4H), flat
        assert len(frames) == sum(LENGTHS)
        assert_near(f"mean, layer {k}", frames.mean(0), layer.bn_ih.pop_mean[0])
        assert_near(f"variance, layer {k}", frames.var(0, correction=0), layer.bn_ih.pop_var[0])


@each_model
def test_sequences_one_by_one_give_the_same_in_evaluation(name):
    model, (inputs, _) = model_of(name), batch()
    estimate_population_statistics(model, [inputs])
    with torch.no_grad():
        together = model.eval()(inputs)[0]
        for b, n in enumerate(LENGTHS):
            alone = model(Padded(inputs.x[:n, b : b + 1], [n]))[0]
            assert_near(f"sequence {b}", together[:n, b], alone[:, 0])
        with batch_statistics(model):
            assert_near("of the batch", together, model(inputs)[0])


def test_without_normalization_it_is_torchs_lstm_on_packed_sequences():
    model, (inputs, targets) = model_of("lstm"), batch()
    theirs = nn.LSTM(F, H, 5, bidirectional=True).double()
    for k, layer in enumerate(model.layer.layers):
        suffix = f"_l{k // 2}{'_reverse' * (k % 2)}"
        for own, name in (("weight_ih", "weight_ih"), ("weight_hh", "weight_hh"), ("bias", "bias_ih")):
            getattr(theirs, name + suffix).data.copy_(getattr(layer, own))
        getattr(theirs, "bias_hh" + suffix).data.zero_()
    packed = pack_padded_sequence(inputs.x, torch.tensor(LENGTHS), enforce_sorted=False)
    logits = model.head(pad_packed_sequence(theirs(packed)[0])[0])
    expected = torch.autograd.grad(cross_entropy(logits, targets), list(theirs.parameters()))
    found = model(inputs)[0]
    assert_near("logits", logits, found)
    grads = torch.autograd.grad(cross_entropy(found, targets), list(model.parameters()))
    ours = dict(zip((name for name, _ in model.named_parameters()), grads, strict=True))
    for (name, _), grad in zip(theirs.named_parameters(), expected, strict=True):
        kind, _, suffix = name.rpartition("_l")
        layer = 2 * int(suffix[0]) + suffix.endswith("reverse")
        assert_near(name, grad, ours[f"layer.layers.{layer}.{'bias' if 'bias' in kind else kind}"])


def test_the_gradient_is_of_the_sum_over_frames_and_the_record_has_the_errors(sample, tmp_path):  # noqa: F811
    small = ["model.hidden_size=8", "model.num_layers=2", "batch_size=6", "population_batch_size=6", "budget.epochs=2"]
    where = [f"data_dir={sample}", "device=cpu", "wandb.mode=disabled", "log_every=1"]
    key = "experiment=laurent2015/timit"
    first_batch = next(TimitSample(str(sample)).batches("train", 6, torch.Generator().manual_seed(0)))
    frames = sum(first_batch.inputs.lengths) / 6
    runs = {}
    for name in ("lstm", "input_bn_lstm_sequence"):
        for summed in ("true", "false"):
            cfg = compose_config(key, f"model={name}", f"sum_over_time={summed}", *where, *small)
            result = train(cfg, tmp_path / name / summed)
            runs[name, summed] = read_jsonl(tmp_path / name / summed / "metrics.jsonl")
            assert result.updates == 6 and 0 < result.metrics["valid/error"] <= 1
        first, second = (next(r for r in runs[name, s] if "train/error" in r) for s in ("true", "false"))
        assert first["train/loss"] == second["train/loss"] and first["train/error"] == second["train/error"]
        assert first["train/grad_norm"] / second["train/grad_norm"] == pytest.approx(frames)
