"""Calls of a single step, as of policies and decoders: their outputs and gradients are those of a whole sequence."""

import pytest
import torch
from torch import Tensor, nn

import bnrnn
from bnrnn import scan
from bnrnn.scan.lstm import cpu
from bnrnn.scan.native import build
from tests.helpers import assert_near

T, I = 3, 4
ENGINES = [
    pytest.param("cpu", marks=pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")),
    "reference",
    "fused",
]
OPTIONS = [{}, {"norm": "layer"}, {"norm": "layer", "per_gate": True}, {"norm": "input_batch"}, {"norm": "batch"}]


@pytest.fixture(autouse=True)
def _engine(request):
    scan.set_backend(request.node.callspec.params.get("engine", "auto"))
    yield
    scan.set_backend("auto")


def run(layer: nn.Module, given: list[Tensor], by_step: bool) -> dict[str, Tensor]:
    """Outputs of a layer, and gradients of all that is given and of its parameters, by name."""
    x, *state = inputs = [v.clone().requires_grad_() for v in given]
    state, ys = tuple(state) if len(state) > 1 else state[0], []
    for t, piece in enumerate(x.split(1) if by_step else [x]):
        counts = {"t_start": t} if isinstance(layer, bnrnn.LSTM) else {}
        y, state = layer(piece, state, **counts)
        ys.append(y)
    y, last = torch.cat(ys), state if isinstance(state, tuple) else (state,)
    loss = y.sin().sum() + torch.stack([s.square().sum() for s in last]).sum()
    names = ["x", *(f"state {n}" for n in range(len(last))), *(name for name, _ in layer.named_parameters())]
    grads = torch.autograd.grad(loss, [*inputs, *layer.parameters()])
    outputs = {"y": y} | {f"last {n}": s for n, s in enumerate(last)}
    return outputs | {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}


def drawn(kind: type[nn.Module], B: int, H: int) -> list[Tensor]:
    return [torch.randn(T, B, I), *torch.randn(1 if "GRU" in kind.__name__ else 2, 2, B, H)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("B", [1, 5, 64])
@pytest.mark.parametrize("H", [1, 64, 100])
@pytest.mark.parametrize(("ours", "theirs"), [(bnrnn.LSTM, nn.LSTM), (bnrnn.GRU, nn.GRU)])
def test_they_are_those_of_torchs_layer(ours, theirs, B, H, engine):
    layer, torchs, given = ours(I, H, 2), theirs(I, H, 2), drawn(ours, B, H)
    layer.load_state_dict(torchs.state_dict())
    expected, found = run(torchs, given, by_step=True), run(layer, given, by_step=True)
    for name, value in found.items():
        if name.startswith("dlayers."):  # an LSTM's only bias is the sum of the two
            _, n, kind = name.split(".")
            name = f"d{'bias_ih' if kind == 'bias' else kind}_l{n}"
        assert_near(name, expected[name], value)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("input_size", [1, I])
def test_they_are_those_of_one_call(options, engine, input_size):
    B, H = 16, 19
    layer = bnrnn.LSTM(input_size, H, 2, t_max=T, **options)
    given = [torch.randn(T, B, input_size), *torch.randn(2, 2, B, H)]
    expected = run(layer, given, by_step=False)
    for name, value in run(layer, given, by_step=True).items():
        assert_near(name, expected[name], value)


@pytest.mark.parametrize("options", OPTIONS)
def test_without_gradients_they_are_the_same(options):
    layer, x = bnrnn.LSTM(I, 19, t_max=1, **options), torch.randn(1, 5, I)
    expected = layer(x)[0]
    with torch.no_grad():
        assert_near("in training", expected, layer(x)[0])
    with torch.no_grad(), bnrnn.batch_statistics(layer.eval()):
        assert_near("in evaluation", expected, layer(x)[0])


@pytest.mark.parametrize("options", OPTIONS)
def test_a_state_may_be_changed_before_the_backward_pass(options):
    """As policies do that set the state of a finished episode to 0."""
    layer, x = bnrnn.LSTM(I, 19, t_max=1, **options), torch.randn(1, 5, I, requires_grad=True)
    y, state = layer(x)
    expected = torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
    for s in state:
        s.detach_()[:, 0] = 0
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)


@pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("H", "grads", "num_packs"), [(100, True, 0), (100, False, 1), (512, False, 0)])
def test_small_weights_are_packed_once_and_only_if_no_gradients_follow(monkeypatch, H, grads, num_packs):
    packed, pack = [], cpu._pack
    monkeypatch.setattr(cpu, "_pack", lambda *given: packed.append(given) or pack(*given))
    layer, x = bnrnn.LSTM(I, H), torch.randn(1, 2, I)
    with torch.set_grad_enabled(grads):
        layer(x), layer(x)
    assert len(packed) == num_packs
