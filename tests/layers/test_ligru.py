"""bnrnn.LiGRU compared with its equations, and with SpeechBrain's LiGRU and SLiGRU."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import bnrnn
from bnrnn import estimate_population_statistics, scan
from bnrnn.errors import BnrnnError
from bnrnn.layers import ligru
from tests.helpers import assert_near

T, B, I, H = 6, 5, 3, 4
LENGTHS = [4, 6, 2, 6, 3]
NORMS = [None, "input_batch", "layer"]


@pytest.fixture(autouse=True)
def _engine():
    yield
    scan.set_backend("auto")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def random_ligru(**options) -> bnrnn.LiGRU:
    """A module in float64 whose parameters are all random, so that a forgotten parameter changes the result."""
    model = bnrnn.LiGRU(I, H, **options, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return model


def standardized(v: Tensor, axes: tuple[int, ...]) -> Tensor:
    return (v - v.mean(axes, keepdim=True)) / (v.var(axes, correction=0, keepdim=True) + 1e-5).sqrt()


def by_equations(model: bnrnn.LiGRU, x: Tensor, h: Tensor, nonlinearity: str, mask: Tensor | float = 1.0) -> Tensor:
    """One layer and direction without padding, with the statistics of the batch."""
    layer, ys = model.layers[0], []
    act = {"relu": lambda a: a * (a > 0), "tanh": torch.tanh}[nonlinearity]
    of_x = x @ layer.weight_ih.T
    if model.norm is not None:
        of_x = layer.bn_ih.gamma * standardized(of_x, (0, 1))
    for x_t in of_x + (0 if layer.bias is None else layer.bias):
        u = h @ layer.weight_hh.T
        a_z, a_n = (x_t + (standardized(u, (1,)) if model.norm == "layer" else u)).chunk(2, 1)
        z = a_z.sigmoid()
        h = z * h + (1 - z) * act(a_n) * mask
        ys.append(h)
    return torch.stack(ys)


@pytest.mark.parametrize("engine", ["reference", "fused", "cpu"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_its_equations_in_outputs_and_gradients(engine, norm, nonlinearity, bias):
    scan.set_backend(engine)
    model = random_ligru(norm=norm, nonlinearity=nonlinearity, bias=bias)
    x, h, weight = randn(T, B, I).requires_grad_(), randn(1, B, H).requires_grad_(), randn(T, B, H)
    leaves = [x, h, *model.parameters()]
    assert len(leaves) == 4 + bias + (norm is not None)
    expected = by_equations(model, x, h[0], nonlinearity)
    grads = torch.autograd.grad((expected * weight).sum(), leaves)
    dtype = torch.float32 if engine == "cpu" else torch.float64
    own, given = model.to(dtype), [v.detach().to(dtype).requires_grad_() for v in (x, h)]
    y, last = own(*given)
    assert torch.equal(last[0], y[-1])
    assert_near("y", expected, y, 1e-5 if engine == "cpu" else None)
    found = torch.autograd.grad((y * weight.to(dtype)).sum(), [*given, *own.parameters()])
    for n, (ref, out) in enumerate(zip(grads, found, strict=True)):
        assert_near(f"gradient {n}", ref, out, 1e-4 if engine == "cpu" else None)


def test_recurrent_dropout_has_one_mask_a_call_in_training_alone():
    model, x = random_ligru(norm=None, recurrent_dropout=0.4), randn(T, B, I)
    torch.manual_seed(3)
    mask = nn.functional.dropout(torch.ones(B, H).double(), 0.4)
    assert set(mask.flatten().tolist()) == {0.0, 1 / 0.6}
    torch.manual_seed(3)
    assert_near("in training", by_equations(model, x, torch.zeros(B, H).double(), "relu", mask), model(x)[0])
    assert not torch.equal(model(x)[0], model(x)[0])
    assert_near("in evaluation", by_equations(model, x, torch.zeros(B, H).double(), "relu"), model.eval()(x)[0])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_both_directions_are_one_layer_with_the_statistics_of_both(norm, batch_first):
    """It is the same in both directions, so a reversed input gives reversed outputs with the halves exchanged."""
    model = random_ligru(norm=norm, bidirectional=True, num_layers=2, batch_first=batch_first)
    axis = 1 if batch_first else 0
    x = randn(B, T, I) if batch_first else randn(T, B, I)
    first = model.layers[0]
    one = bnrnn.LiGRU(I, H, norm=norm, dtype=torch.float64)
    one.layers[0].load_state_dict(first.state_dict())
    single = bnrnn.LiGRU(I, H, norm=norm, bidirectional=True, dtype=torch.float64)
    single.load_state_dict(one.state_dict())
    x_t, h = randn(T, B, I), randn(2, B, H)
    y, last = single(x_t, h)
    assert_near("forward", one(x_t, h[:1])[0], y[..., :H])
    assert_near("backward", one(x_t.flip(0), h[1:])[0].flip(0), y[..., H:])
    assert_near("last", torch.stack([y[-1, :, :H], y[0, :, H:]]), last)
    assert len(list(model.parameters())) == 2 * len(list(one.parameters()))
    y, last = model(x)
    assert y.shape[2] == 2 * H and last.shape == (4, B, H)
    assert_near("last of the second layer", y.select(axis, -1)[:, :H], last[2])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("statistics", ["running", "exact"])
@torch.no_grad()
def test_a_padded_batch_in_evaluation_is_its_sequences_alone(norm, bidirectional, statistics):
    model = random_ligru(num_layers=2, bidirectional=bidirectional, norm=norm, statistics=statistics)
    sequences = [randn(n, I) for n in LENGTHS]
    packed = pack_sequence(sequences, enforce_sorted=False)
    model(packed)
    if statistics == "exact":
        estimate_population_statistics(model, [packed])
    h = randn(2 * (1 + bidirectional), B, H)
    y, last = model.eval()(packed, h)
    padded, _ = pad_packed_sequence(y, total_length=T)
    other, other_last = model(pad_packed_sequence(packed)[0] + 0, h, lengths=torch.tensor(LENGTHS))
    assert_near("lengths", padded, other)
    assert_near("last of lengths", last, other_last)
    for n, sequence in enumerate(sequences):
        alone, end = model(sequence, h[:, n])
        assert_near("y", alone, padded[: len(sequence), n])
        assert_near("last", end, last[:, n])


def test_statistics_are_those_of_all_steps_without_padding():
    model = random_ligru()
    sequences = [randn(n, I) for n in LENGTHS]
    model(pack_sequence(sequences, enforce_sorted=False))
    norm, product = model.layers[0].bn_ih, torch.cat(sequences) @ model.layers[0].weight_ih.T
    assert (norm.momentum, norm.pop_mean.shape) == (0.05, (1, 2 * H))
    assert_near("mean", product.mean(0, keepdim=True), norm.pop_mean)
    assert_near("variance", product.var(0, correction=0, keepdim=True), norm.pop_var)


@torch.no_grad()
def test_a_sequence_in_pieces_gives_what_it_gives_whole():
    for norm in NORMS:
        model, x = random_ligru(norm=norm, num_layers=2), randn(T, B, I)
        model(x)
        whole, last = model.eval()(x)
        first, state = model(x[:2])
        second, end = model(x[2:], state)
        assert_near("y", whole, torch.cat([first, second]))
        assert_near("last", last, end)


def test_at_first_recurrent_weights_are_orthogonal():
    layer = bnrnn.LiGRU(50, 30).layers[0]
    assert_near("identity", torch.eye(30), layer.weight_hh.T @ layer.weight_hh, 1e-5)
    assert (layer.bias == 0).all() and (layer.bn_ih.gamma == 1).all()
    bound = (6 / 110) ** 0.5
    assert 0.98 * bound < layer.weight_ih.abs().max() <= bound


def test_bad_arguments_are_errors():
    for options, message in (
        ({"norm": "batch"}, "norm='batch' is unknown: use 'input_batch', 'layer' or None"),
        ({"nonlinearity": "sin"}, "nonlinearity='sin' is unknown: use 'relu' or 'tanh'"),
        ({"recurrent_dropout": 1.5}, "recurrent_dropout"),
    ):
        with pytest.raises(BnrnnError, match=message):
            bnrnn.LiGRU(I, H, **options)
    with pytest.raises(BnrnnError, match=r"LiGRU expects \(T, B, I\) or \(T, I\) with I = 3, got shape \(6, 5, 2\)"):
        bnrnn.LiGRU(I, H)(torch.randn(T, B, 2))


def as_in_speechbrain(model: bnrnn.LiGRU) -> dict[str, Tensor]:
    """A state_dict with SpeechBrain's names, whose rows are those of n and then of z."""
    found = {}
    for n, layer in enumerate(model.layers):
        norm = layer.bn_ih
        values = {"w.weight": layer.weight_ih, "u.weight": layer.weight_hh, "norm.weight": norm.gamma,
                  "norm.bias": layer.bias, "norm.running_mean": norm.pop_mean[0],
                  "norm.running_var": norm.pop_var[0]}  # fmt: skip
        for name, value in values.items():
            found[f"model.rnn.{n}.{name}"] = torch.cat([value[H:], value[:H]]).detach()
        found[f"model.rnn.{n}.norm.num_batches_tracked"] = norm.num_batches_tracked[0]
        found |= {f"model.rnn.{n}.{name}": torch.zeros(1) for name in ("h_init", "drop_masks", "drop_mask_te")}
    return found


@pytest.mark.parametrize("norm", ["input_batch", "layer"])
def test_names_of_speechbrain_are_loaded_also_in_a_larger_model(norm):
    given = random_ligru(norm=norm, num_layers=2, bidirectional=True)
    given(randn(T, B, I))
    for statistics in ("running", "exact"):
        model = nn.ModuleDict(
            {"model": random_ligru(norm=norm, num_layers=2, bidirectional=True, statistics=statistics)}
        )
        model.load_state_dict(as_in_speechbrain(given))
        x = randn(T, B, I)
        assert torch.equal(given.eval()(x)[0], model.eval()["model"](x)[0])
    wrong = as_in_speechbrain(given) | {"model.rnn.0.layer_norm.weight": torch.ones(2 * H)}
    with pytest.raises(RuntimeError, match=r"layer_norm\.weight"):
        model.load_state_dict(wrong)


def speechbrain() -> ModuleType:
    """SpeechBrain's module of recurrent layers alone: the package imports audio libraries."""
    found = importlib.util.find_spec("speechbrain")
    if found is None or found.origin is None:
        pytest.skip("needs SpeechBrain: nox -s speechbrain")
    for name, content in (
        ("speechbrain.nnet.attention", ("ContentBasedAttention", "KeyValueAttention", "LocationAwareAttention")),
        ("speechbrain.utils.logger", ("get_logger",)),
    ):
        parent = name.rpartition(".")[0]
        for missing in (parent.rpartition(".")[0], parent, name):
            sys.modules.setdefault(missing, ModuleType(missing))
        sys.modules[name].__dict__.update(dict.fromkeys(content, lambda *_: None))
    spec = importlib.util.spec_from_file_location("speechbrain_rnn", Path(found.origin).parent / "nnet/RNN.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = {"w.weight": "weight_ih", "u.weight": "weight_hh", "norm.weight": "bn_ih.gamma", "norm.bias": "bias"}


@pytest.mark.parametrize("kind", ["LiGRU", "SLiGRU"])
@pytest.mark.parametrize("nonlinearity", ["relu", "tanh"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_speechbrains_in_training_and_evaluation(monkeypatch, kind, nonlinearity, bidirectional, bias):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    options = {"nonlinearity": nonlinearity, "bidirectional": bidirectional, "bias": bias, "num_layers": 2}
    theirs = getattr(speechbrain(), kind)(H, (B, T, I), **options)
    ours = bnrnn.LiGRU(I, H, norm="layer" if kind == "SLiGRU" else "input_batch", batch_first=True, **options)
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.5)
    for _ in range(20):  # at first, our running statistics give all batches equal weights
        theirs(torch.randn(B, T, I))
    ours.load_state_dict(theirs.state_dict())
    compare(ours, theirs)
    for k, layer in enumerate(ours.layers):  # after one more batch
        of_torch = theirs.rnn[k].norm
        assert_near("mean", of_torch.running_mean, swapped(layer.bn_ih.pop_mean[0]), 1e-4)
        error = (of_torch.running_var - swapped(layer.bn_ih.pop_var[0])).abs() / of_torch.running_var
        assert error.max() < 0.01  # theirs is the unbiased variance
    ours.load_state_dict(theirs.state_dict())
    ours.eval(), theirs.eval()
    compare(ours, theirs)


def test_its_dropout_is_speechbrains(monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    theirs = speechbrain().LiGRU(H, (B, T, I), dropout=0.5)
    ours = bnrnn.LiGRU(I, H, batch_first=True, recurrent_dropout=0.5)
    ours.load_state_dict(theirs.state_dict())
    mask = theirs.rnn[0].drop_masks[:B]
    assert set(mask.flatten().tolist()) == {0.0, 2.0}
    monkeypatch.setattr(ligru.F, "dropout", lambda ones, p: ones * mask)
    compare(ours, theirs)
    ours.eval(), theirs.eval()
    ours.load_state_dict(theirs.state_dict())
    compare(ours, theirs)


def swapped(v: Tensor) -> Tensor:
    """With the two gates exchanged."""
    return torch.cat(v.chunk(2)[::-1])


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    """Outputs and all gradients."""
    x = torch.randn(B, T, I)
    found = []
    for model in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y, _ = model(leaf)
        names = {n: p for n, p in model.named_parameters() if p.requires_grad}
        grads = torch.autograd.grad(y.square().sum(), [leaf, *names.values()])
        found.append({"y": y, **dict(zip(("x", *names), grads, strict=True))})
    assert len(found[0]) == len(found[1])
    for name, ref in found[1].items():
        _, n, *rest = name.split(".", 2) if "." in name else ("", "", name)
        ours_name = f"layers.{n}.{NAMES[rest[0]]}" if n else name
        assert_near(name, swapped(ref) if n else ref, found[0][ours_name], 1e-4)
