"""bnrnn.GRU compared with torch.nn.GRU, and its norms with their equations."""

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import bnrnn
from bnrnn import batch_statistics, estimate_population_statistics, scan
from bnrnn.errors import BnrnnError
from bnrnn.layers.gru import GRU
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.scan.native import build
from tests.helpers import assert_near

T, B, I, H = 6, 5, 3, 4
LENGTHS = [4, 6, 2, 6, 3]
NORMS = [
    {"norm": None},
    {"norm": "input_batch", "t_max": T},
    {"norm": "input_batch", "input_statistics": "sequence"},
    {"norm": "layer"},
]


@pytest.fixture(autouse=True)
def _engine():
    yield
    scan.set_backend("auto")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def paired(dtype: torch.dtype = torch.float64, **options) -> tuple[bnrnn.GRU, nn.GRU]:
    """bnrnn.GRU and torch.nn.GRU with the same weights."""
    torchs, ours = nn.GRU(I, H, **options, dtype=dtype), bnrnn.GRU(I, H, **options, dtype=dtype)
    ours.load_state_dict(torchs.state_dict())
    return ours, torchs


def random_gru(**options) -> bnrnn.GRU:
    """A module in float64 whose parameters are all random, so that a forgotten parameter changes the result."""
    gru = bnrnn.GRU(I, H, **options, dtype=torch.float64)
    for parameter in gru.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return gru


def results(gru: nn.Module, x: Tensor | PackedSequence, h: Tensor | None) -> dict[str, Tensor]:
    """Outputs, last states and all gradients, by torch's names."""
    torch.manual_seed(1)
    packed = isinstance(x, PackedSequence)
    leaf = (x.data if packed else x).clone().requires_grad_()
    h = None if h is None else h.clone().requires_grad_()
    y, last = gru(x._replace(data=leaf) if packed else leaf, h)
    values = {"y": y.data if packed else y, "last": last}
    loss = sum((v * torch.randn(v.shape, dtype=torch.float64).to(v.dtype)).sum() for v in values.values())
    weights = {name: getattr(gru, name) for name, _ in shape_of(gru).named_parameters()}
    inputs = {"x": leaf, **({} if h is None else {"h": h}), **weights}
    return values | dict(zip(inputs, torch.autograd.grad(loss, list(inputs.values())), strict=True))


def shape_of(gru: nn.Module) -> nn.GRU:
    return nn.GRU(I, H, gru.num_layers, gru.bias, bidirectional=gru.bidirectional)


def assert_same(ours: nn.Module, torchs: nn.Module, x: Tensor | PackedSequence, h: Tensor | None) -> None:
    expected, found = results(torchs, x, h), results(ours, x, h)
    for name, ref in expected.items():
        assert found[name].shape == ref.shape
        assert_near(name, ref, found[name])


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_state", [False, True])
def test_without_norm_it_is_nn_gru_in_outputs_and_gradients(num_layers, bidirectional, bias, with_state):
    ours, torchs = paired(num_layers=num_layers, bidirectional=bidirectional, bias=bias)
    size = num_layers * (1 + bidirectional)
    packed = [pack_sequence([randn(n, I) for n in lengths], False) for lengths in (LENGTHS, [4, 4, 4], [5])]
    for x, batch in [(randn(T, B, I), (B,)), (randn(T, I), ()), *zip(packed, ((B,), (3,), (1,)), strict=True)]:
        assert_same(ours, torchs, x, randn(size, *batch, H) if with_state else None)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_batch_first_is_that_of_nn_gru(bidirectional):
    ours, torchs = paired(num_layers=2, bidirectional=bidirectional, batch_first=True)
    for x, batch in ((randn(B, T, I), (B,)), (randn(T, I), ())):
        assert_same(ours, torchs, x, randn(2 * (1 + bidirectional), *batch, H))


@pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
def test_the_compiled_engine_is_nn_gru_in_float32():
    scan.set_backend("cpu")
    ours, torchs = paired(torch.float32, num_layers=2, bidirectional=True)
    for x in (torch.randn(T, B, I), pack_sequence([torch.randn(n, I) for n in LENGTHS], False)):
        assert_same(ours, torchs, x, torch.randn(4, B, H))


def test_the_state_dict_goes_both_ways_also_in_a_larger_model():
    for options in ({}, {"num_layers": 2, "bidirectional": True}, {"bias": False}):
        theirs, ours = nn.Sequential(nn.GRU(I, H, **options)), nn.Sequential(bnrnn.GRU(I, H, **options))
        assert list(ours.state_dict()) == list(theirs.state_dict())
        ours.load_state_dict(theirs.state_dict())
        ours.load_state_dict(copy.deepcopy(ours.state_dict()))
        theirs.load_state_dict(ours.state_dict())
        for name, value in theirs[0].named_parameters():
            assert torch.equal(getattr(ours[0], name), value)
        for of_theirs, of_ours in zip(theirs[0].all_weights, ours[0].all_weights, strict=True):
            assert all(torch.equal(*pair) for pair in zip(of_theirs, of_ours, strict=True))
    with pytest.raises(BnrnnError, match=r"bias_hh_l0 cannot be set: set layers\[0\].bias_hh to an nn.Parameter"):
        bnrnn.GRU(I, H).bias_hh_l0 = nn.Parameter(torch.zeros(3 * H))


def test_a_norm_keeps_the_weights_of_nn_gru_and_names_what_is_missing():
    theirs = nn.GRU(I, H)
    for options, missing in (({"norm": "layer"}, "gamma_hh"), ({"norm": "input_batch", "t_max": T}, "bn_ih.gamma")):
        ours = bnrnn.GRU(I, H, **options)
        with pytest.raises(RuntimeError, match=missing):
            ours.load_state_dict(theirs.state_dict())
        ours.load_state_dict(theirs.state_dict(), strict=False)
        assert torch.equal(ours.layers[0].bias_hh, theirs.bias_hh_l0)


def by_equations(gru: bnrnn.GRU, x: Tensor, h: Tensor) -> Tensor:
    """One layer without padding, written with the equations of the docstring, gate by gate."""
    layer, ys = gru.layers[0], []

    def ln(v: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        mean, var = v.mean(-1, keepdim=True), v.var(-1, correction=0, keepdim=True)
        return (v - mean) / (var + 1e-5).sqrt() * gamma + beta

    def ln_of_parts(v: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        rz, n = slice(0, 2 * H), slice(2 * H, 3 * H)
        return *ln(v[..., rz], gamma[rz], beta[rz]).chunk(2, -1), ln(v[..., n], gamma[n], beta[n])

    of_x = x @ layer.weight_ih.T
    if gru.norm == "input_batch":
        axes = (0, 1) if layer.bn_ih.over_time else 1
        mean, var = of_x.mean(axes, keepdim=True), of_x.var(axes, correction=0, keepdim=True)
        of_x = layer.bn_ih.gamma * (of_x - mean) / (var + 1e-5).sqrt()
    if gru.norm == "layer":
        x_r, x_z, x_n = ln_of_parts(of_x, layer.gamma_ih, layer.bias_ih)
    else:
        x_r, x_z, x_n = (of_x + layer.bias_ih).chunk(3, -1)
    for t in range(len(x)):
        u = h @ layer.weight_hh.T
        if gru.norm == "layer":
            u_r, u_z, u_n = ln_of_parts(u, layer.gamma_hh, layer.bias_hh)
        else:
            u_r, u_z, u_n = (u + layer.bias_hh).chunk(3, -1)
        r, z = (x_r[t] + u_r).sigmoid(), (x_z[t] + u_z).sigmoid()
        n = (x_n[t] + r * u_n).tanh()
        h = (1 - z) * n + z * h
        ys.append(h)
    return torch.stack(ys)


@pytest.mark.parametrize("engine", ["reference", "fused", "cpu"])
@pytest.mark.parametrize("options", NORMS)
def test_every_norm_is_its_equations_in_outputs_and_gradients(engine, options):
    scan.set_backend(engine)
    gru, x, h = random_gru(**options), randn(T, B, I).requires_grad_(), randn(1, B, H).requires_grad_()
    weight, leaves = randn(T, B, H), [x, h, *gru.parameters()]
    expected = by_equations(gru, x, h[0])
    grads = torch.autograd.grad((expected * weight).sum(), leaves)
    dtype = torch.float32 if engine == "cpu" else torch.float64
    own = gru.to(dtype)
    given = [v.detach().to(dtype).requires_grad_() for v in (x, h)]
    y, last = own(*given)
    assert torch.equal(last[0], y[-1])
    assert_near("y", expected, y, 1e-5 if engine == "cpu" else None)
    found = torch.autograd.grad((y * weight.to(dtype)).sum(), [*given, *own.parameters()])
    for n, (ref, out) in enumerate(zip(grads, found, strict=True)):
        assert_near(f"gradient {n}", ref, out, 1e-4 if engine == "cpu" else None)


@pytest.mark.parametrize("options", NORMS)
@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_a_padded_batch_in_evaluation_is_its_sequences_alone(options, bidirectional):
    gru = random_gru(num_layers=2, bidirectional=bidirectional, **options)
    sequences = [randn(n, I) for n in LENGTHS]
    packed = pack_sequence(sequences, enforce_sorted=False)
    estimate_population_statistics(gru, [packed])
    gru.eval()
    y, last = gru(packed)
    padded, _ = pad_packed_sequence(y, total_length=T)
    other, other_last = gru(pad_packed_sequence(packed)[0] + 0, lengths=torch.tensor(LENGTHS))
    assert_near("lengths", padded, other)
    assert_near("last of lengths", last, other_last)
    for n, sequence in enumerate(sequences):
        alone, end = gru(sequence)
        assert_near("y", alone, padded[: len(sequence), n])
        assert_near("last", end, last[:, n])


@pytest.mark.parametrize("options", NORMS)
@torch.no_grad()
def test_a_sequence_in_pieces_gives_what_it_gives_whole(options):
    gru = random_gru(num_layers=2, **options)
    x = randn(T, B, I)
    estimate_population_statistics(gru, [x])
    with batch_statistics(gru.eval()):
        expected = gru(x)[0]
    whole, last = gru(x)
    assert_near("population statistics of one batch", expected, whole)
    first, state = gru(x[:2])
    second, end = gru(x[2:], state, t_start=2)
    assert_near("y", whole, torch.cat([first, second]))
    assert_near("last", last, end)


def test_layer_norm_has_no_statistics_and_takes_a_batch_of_one():
    gru = random_gru(norm="layer")
    assert not any(isinstance(module, SequenceBatchNorm) for module in gru.modules())
    x = randn(T, B, I)
    y, _ = gru(x)
    assert_near("alone", y[:, 1:2], gru(x[:, 1:2])[0])


def test_initial_values_are_those_of_nn_gru_and_scales_are_1():
    gru = bnrnn.GRU(I, 400, norm="layer")
    layer = gru.layers[0]
    assert (layer.gamma_ih == 1).all() and (layer.gamma_hh == 1).all()
    for parameter in (layer.weight_hh, layer.weight_ih, layer.bias_ih, layer.bias_hh):
        assert 0.045 < parameter.abs().max() <= 0.05


def test_under_autocast_the_state_stays_in_float32():
    for options in NORMS:
        gru, x = bnrnn.GRU(I, H, **options), torch.randn(T, B, I)
        expected, _ = gru(x)
        with torch.autocast("cpu", torch.bfloat16):
            y, h = gru(x)
        assert h.dtype == torch.float32 and y.dtype == torch.bfloat16
        assert_near("y", expected, y.float(), 0.05)


def test_bad_arguments_are_errors():
    for options, message in (
        ({"norm": "batch"}, "norm='batch' is unknown: use None, 'input_batch' or 'layer'"),
        ({"norm": "layer", "bias": False}, "norm='layer' needs bias=True"),
        ({"norm": "input_batch"}, "norm='input_batch' keeps population statistics for every time step: set t_max"),
        ({"statistics": "running"}, "input_statistics and statistics need norm='input_batch'"),
        ({"norm": "layer", "input_statistics": "sequence"}, "need norm='input_batch'"),
        ({"norm": "input_batch", "t_max": 3, "input_statistics": "all"}, "input_statistics='all' is unknown"),
    ):
        with pytest.raises(BnrnnError, match=message):
            bnrnn.GRU(I, H, **options)
    gru, x = bnrnn.GRU(I, H), torch.randn(T, B, I)
    with pytest.raises(BnrnnError, match="the state of a GRU is one tensor, got tuple"):
        gru(x, (torch.zeros(1, B, H),))
    with pytest.raises(BnrnnError, match=r"the state must be a tuple of h, each of shape \(1, 5, 4\)"):
        gru(x, torch.zeros(2, B, H))
    with pytest.raises(BnrnnError, match=r"GRU expects \(T, B, I\) or \(T, I\) with I = 3, got shape \(6, 5, 2\)"):
        gru(x[..., 1:])
    with pytest.raises(BnrnnError, match="at least 2 sequences"):
        bnrnn.GRU(I, H, norm="input_batch", t_max=T)(x[:, :1])
    with pytest.raises(BnrnnError, match="t_max"):
        GRU(I, H, norm="input_batch")


def test_random_arguments_give_what_nn_gru_gives():
    draw = random.Random(0)
    for _ in range(15):
        options = {
            "num_layers": draw.randint(1, 3),
            "bidirectional": draw.random() < 0.5,
            "bias": draw.random() < 0.7,
            "batch_first": draw.random() < 0.5,
        }
        ours, torchs = paired(**options)
        assert_same(ours, torchs, randn(draw.randint(1, 9), draw.randint(1, 7), I), None)
