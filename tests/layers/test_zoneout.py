"""Zoneout and recurrent dropout in every LSTM, against their equations with the masks written out."""

import pytest
import torch
from torch import Tensor, nn

import bnrnn
from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.lstm import LSTM
from tests.helpers import assert_near, without_shape_checks

T, B, I, H = 6, 5, 3, 4
NORMS = [None, "input_batch", "batch", "layer"]
LEVELS = {"zoneout": (0.4, 0.3), "recurrent_dropout": 0.25}


@pytest.fixture(autouse=True, params=["reference", "fused", "auto"])
def _engine(request):
    scan.set_backend(request.param)
    yield
    scan.set_backend("auto")


def lstm(norm: str | None, **options) -> bnrnn.LSTM:
    model = bnrnn.LSTM(I, H, norm=norm, t_max=T, **options).double()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return model


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def masks(layer: nn.Module) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Those that the next call of the layer draws, for every step."""
    before = torch.get_rng_state()
    noise = layer.noise()
    torch.set_rng_state(before)
    assert noise is not None
    return [noise.factors(t, torch.zeros(B, H, dtype=torch.float64)) for t in range(T)]


def equations(layer: nn.Module, norms: list, x: Tensor, h: Tensor, c: Tensor, drawn: list) -> tuple[Tensor, ...]:
    """Eqs. 2 to 5 of Krueger et al. 2017, with a choice for each unit, and the candidate of Semeniuta et al. 2016."""
    of_x, of_h, of_c = norms
    ys = []
    for x_t, (d_c, d_h, d_g) in zip(x, drawn, strict=True):
        i, f, g, o = (of_h(h @ layer.weight_hh.T) + of_x(x_t @ layer.weight_ih.T)).chunk(4, dim=1)
        new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * (torch.tanh(g) * d_g)
        new_h = torch.sigmoid(o) * torch.tanh(of_c(new_c))
        c = d_c * c + (1 - d_c) * new_c
        h = d_h * h + (1 - d_h) * new_h
        ys.append(h)
    return torch.stack(ys), h, c


def norms_of(layer: nn.Module, norm: str | None) -> list:
    """The normalizations of the input product, the recurrent product and the cell, by torch.nn.functional."""

    def batch(gamma: Tensor, beta: Tensor | None):
        return lambda v: torch.nn.functional.batch_norm(v, None, None, gamma, beta, training=True)

    def units(gamma: Tensor, beta: Tensor):
        return lambda v: torch.nn.functional.layer_norm(v, v.shape[1:], gamma, beta)

    if norm == "batch":
        return [batch(layer.bn_ih.gamma, layer.bias), batch(layer.bn_hh.gamma, None),
                batch(layer.bn_c.gamma, layer.bn_c.beta)]  # fmt: skip
    if norm == "layer":
        return [units(layer.gamma_ih, layer.beta_ih + layer.bias), units(layer.gamma_hh, layer.beta_hh),
                units(layer.gamma_c, layer.beta_c)]  # fmt: skip
    of_x = batch(layer.bn_ih.gamma, layer.bias) if norm else lambda v: v + layer.bias
    return [of_x, lambda v: v, lambda v: v]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "levels", [LEVELS, {"zoneout": (0.0, 0.5)}, {"zoneout": (0.5, 0.0)}, {"recurrent_dropout": 0.5}]
)
def test_in_training_they_are_the_equations_with_the_drawn_masks(norm, levels):
    model = lstm(norm, **levels)
    (layer,) = model.layers
    given = [randn(T, B, I), randn(B, H), randn(B, H)]
    drawn = masks(layer)

    def results(run) -> list[Tensor]:
        leaves = [v.clone().requires_grad_() for v in given]
        outputs = run(*leaves)
        torch.manual_seed(2)
        loss = sum((v * randn(*v.shape)).sum() for v in outputs)
        return [*outputs, *torch.autograd.grad(loss, [*leaves, *model.parameters()])]

    def ours(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        y, (h, c) = model(x, (h[None], c[None]))
        return y, h[0], c[0]

    found = results(ours)
    expected = results(lambda *v: equations(layer, norms_of(layer, norm), *v, drawn))
    names = ["y", "h", "c", "dx", "dh", "dc", *(name for name, _ in model.named_parameters())]
    for name, ref, out in zip(names, expected, found, strict=True):
        assert_near(name, ref, out, 1e-8)


@pytest.mark.parametrize("norm", [None, "layer"])
def test_in_evaluation_they_are_the_equations_with_expected_values(norm):
    model = lstm(norm, **LEVELS).eval()
    (layer,) = model.layers
    x, h, c = randn(T, B, I), randn(B, H), randn(B, H)
    expected = [(0.4, 0.3, 0.75)] * T
    before = torch.get_rng_state()
    y, (_, last) = model(x, (h[None], c[None]))
    assert torch.equal(torch.get_rng_state(), before)
    ref, _, ref_c = equations(layer, norms_of(layer, norm), x, h, c, expected)
    assert_near("y", ref, y)
    assert_near("c", ref_c, last[0])


@pytest.mark.parametrize("norm", NORMS)
def test_a_padded_batch_has_the_masks_of_the_longest_first(norm):
    """The mask of a sequence depends on its place, not on which others have ended."""
    model, lengths = lstm(norm, **LEVELS), [6, 5, 5, 3, 3]
    if norm in ("batch", "input_batch"):
        model.eval()
        bnrnn.estimate_population_statistics(model, [randn(T, B, I)])
        for module in model.modules():
            module.training = not hasattr(module, "pop_var")  # zoneout draws, and the norms use the population
    x = randn(T, B, I)
    torch.manual_seed(3)
    y, state = model(x, lengths=lengths)
    torch.manual_seed(3)
    whole = model(x)[0]
    for b, n in enumerate(lengths):
        assert_near("y", whole[:n, b], y[:n, b])
        assert_near("h", whole[n - 1, b], state[0][0, b])


def test_each_call_layer_and_direction_has_other_masks_and_a_seed_repeats_them():
    model, x = lstm(None, num_layers=2, bidirectional=True, **LEVELS), randn(T, B, I)
    first, second = model(x)[0], model(x)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    keys = [layer.noise().key.item() for layer in model.layers]
    assert len(set(keys)) == 4
    torch.manual_seed(4)
    first = model(x)[0]
    torch.manual_seed(4)
    assert torch.equal(first, model(x)[0])


def test_a_unit_that_always_keeps_its_state_never_changes():
    x, h, c = randn(T, B, I), randn(1, B, H), randn(1, B, H)
    y, (_, last) = lstm(None, zoneout=(1.0, 1.0))(x, (h, c))
    assert torch.equal(last, c) and all(torch.equal(y_t, h[0]) for y_t in y)
    y, (_, last) = lstm(None, zoneout=(1.0, 0.0))(x, (h, c))
    assert torch.equal(last, c) and not torch.equal(y[0], y[1])


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ({"zoneout": (0.1, 1.1)}, r"zoneout\[1\] must be a finite number from 0"),
        ({"zoneout": (-0.1, 0.1)}, r"zoneout\[0\] must be a finite number from 0"),
        ({"zoneout": 0.1}, "zoneout must be a pair of probabilities"),
        ({"zoneout": (0.1, 0.1, 0.1)}, "zoneout must be a pair of probabilities"),
        ({"recurrent_dropout": 2.0}, "recurrent_dropout must be a finite number from 0"),
    ],
)
def test_wrong_probabilities_are_named(levels, message):
    with without_shape_checks(), pytest.raises(BnrnnError, match=message):
        bnrnn.LSTM(I, H, **levels)


def test_without_them_nothing_is_drawn_and_the_description_is_unchanged():
    before = torch.get_rng_state()
    layer = LSTM(I, H)
    layer.reset_parameters()
    drawn = torch.get_rng_state()
    layer(torch.randn(T, B, I))
    torch.set_rng_state(drawn)
    torch.randn(T, B, I)
    assert layer.noise() is None and str(layer) == "LSTM(3, 4)"
    assert str(BNLSTM(I, H, T, zoneout=[0.1, 0.2])).startswith("BNLSTM(\n  3, 4, zoneout=(0.1, 0.2)")
    torch.set_rng_state(before)
