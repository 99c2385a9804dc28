import pytest
import torch
from torch import nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.lstm import LSTM
from tests.helpers import assert_near

T, B, I, H = 7, 5, 3, 4


def paired(dtype=torch.float64) -> tuple[LSTM, nn.LSTM]:
    """Our layer and torch.nn.LSTM with the same weights."""
    ours, torchs = LSTM(I, H).to(dtype), nn.LSTM(I, H).to(dtype)
    with torch.no_grad():
        torchs.weight_ih_l0.copy_(ours.weight_ih)
        torchs.weight_hh_l0.copy_(ours.weight_hh)
        torchs.bias_ih_l0.copy_(ours.bias)
        torchs.bias_hh_l0.zero_()
    return ours, torchs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_nn_lstm_in_outputs_and_gradients(dtype):
    ours, torchs = paired(dtype)
    x = torch.randn(T, B, I, dtype=dtype)
    h, c = torch.randn(2, B, H, dtype=dtype).unbind(0)
    weight = torch.randn(T, B, H, dtype=dtype)
    results = []
    for layer, lift in ((ours, lambda s: s), (torchs, lambda s: s.unsqueeze(0))):
        inputs = [v.clone().requires_grad_() for v in (x, h, c)]
        y, (h_n, c_n) = layer(inputs[0], tuple(lift(s) for s in inputs[1:]))
        ((y * weight).sum() + h_n.sum() + c_n.square().sum()).backward()
        grads = [p.grad for p in layer.parameters()][:3]
        results.append([y, h_n.reshape(B, H), c_n.reshape(B, H), *(v.grad for v in inputs), *grads])
    names = ["y", "h", "c", "dx", "dh", "dc", "dweight_ih", "dweight_hh", "dbias"]
    for name, out, ref in zip(names, *results, strict=True):
        assert_near(name, ref, out)


@pytest.mark.parametrize("kind", [LSTM, InputBNLSTM])
def test_the_cell_bias_shifts_only_the_output(kind):
    layer = kind(I, H, 1, cell_bias=True).double()
    x = torch.randn(1, B, I, dtype=torch.float64)
    y0, (_, c0) = layer(x)
    layer.beta_c.data.fill_(0.5)
    y1, (_, c1) = layer(x)
    assert torch.equal(c0, c1)
    assert_near("h", y0 / c0.tanh() * (c0 + 0.5).tanh(), y1)


def test_a_sequence_in_pieces_gives_what_it_gives_whole():
    layer = LSTM(I, H).double()
    x = torch.randn(T, B, I, dtype=torch.float64)
    y, (h, c) = layer(x)
    y1, state = layer(x[:3])
    y2, (h2, c2) = layer(x[3:], state, t_start=3)
    for name, ref, out in (("y", y, torch.cat([y1, y2])), ("h", h, h2), ("c", c, c2)):
        assert_near(name, ref, out)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(0, B, I), "length 0"),
        (torch.zeros(T, B, I + 1), r"x of shape \(T, B, 3\), .* got shape \(7, 5, 4\)"),
        (torch.zeros(T, B, I).index_put((torch.tensor(4), torch.tensor(2)), torch.tensor(torch.nan)), "step 4 of seq"),
        (torch.full((T, B, I), torch.inf), "NaN or infinity, first at time step 0 of sequence 0"),
    ],
)
def test_bad_input_is_named(x, message):
    with pytest.raises(BnrnnError, match=message):
        LSTM(I, H)(x)


class Scaled(LSTM):
    """A new layer with parameters of its own, made without initial values."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        for name in ("gamma_c", "beta_new", "initial_h"):
            setattr(self, name, nn.Parameter(torch.full((hidden_size,), torch.nan)))
        self.reset_parameters()


def test_no_parameter_of_a_new_layer_stays_without_initial_values():
    layer = Scaled(3, 4)
    assert (layer.gamma_c == 1).all() and (layer.beta_new == 0).all()
    assert (layer.initial_h.abs() <= 0.5).all() and len(layer.initial_h.unique()) == 4
