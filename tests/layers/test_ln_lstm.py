"""LN-LSTM against the equations of the paper, and what follows from the absence of statistics."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import bnrnn
from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.layers.ln_lstm import LNLSTM
from tests.helpers import assert_near, without_shape_checks

T, B, I, H = 6, 5, 3, 4
GATES = ("i", "f", "g", "o")
ENGINES = ["reference", "fused", "auto"]


@pytest.fixture(autouse=True, params=ENGINES)
def _engine(request):
    scan.set_backend(request.param)
    yield
    scan.set_backend("auto")


def randomized(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return layer


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def equations(layer: LNLSTM, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eqs. 20 to 22 of Ba et al. 2016 with the mean and deviation of eq. 4 written out, one sequence after another."""

    def ln(v: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        mean = v.sum() / len(v)
        deviation = (((v - mean) ** 2).sum() / len(v) + layer.eps).sqrt()
        return gain * (v - mean) / deviation + bias

    def of_gates(v: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        if not layer.per_gate:
            return ln(v, gain, bias)
        return torch.cat([ln(v[k::4], gain[k::4], bias[k::4]) for k in range(4)])

    # The units of a gate need not be adjacent: here they are four apart.
    order = torch.arange(4 * H).view(4, H).T.flatten()
    back = torch.cat([torch.arange(k, 4 * H, 4) for k in range(4)]) if layer.per_gate else None
    ys, ends = [], []
    for b in range(x.shape[1]):
        h_b, c_b, y = h[b], c[b], []
        for x_t in x[:, b]:
            of_h = of_gates((layer.weight_hh @ h_b)[order], layer.gamma_hh[order], layer.beta_hh[order])
            of_x = of_gates((layer.weight_ih @ x_t)[order], layer.gamma_ih[order], layer.beta_ih[order])
            a = of_h + of_x
            a = torch.stack([a[k * H : (k + 1) * H] if back is not None else a[k::4] for k in range(4)])
            i, f, g, o = a if layer.bias is None else a + layer.bias.view(4, H)
            c_b = torch.sigmoid(f) * c_b + torch.sigmoid(i) * torch.tanh(g)
            h_b = torch.sigmoid(o) * torch.tanh(ln(c_b, layer.gamma_c, layer.beta_c))
            y.append(h_b)
        ys.append(torch.stack(y))
        ends.append(c_b)
    y = torch.stack(ys, 1)
    return y, y[-1], torch.stack(ends)


@pytest.mark.parametrize("per_gate", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_eqs_20_to_22_in_outputs_and_gradients(per_gate, bias, dtype):
    layer = randomized(LNLSTM(I, H, eps=1e-2, per_gate=per_gate, bias=bias).double())
    given = [randn(T, B, I), randn(B, H), randn(B, H)]
    weights = [randn(T, B, H), randn(B, H), randn(B, H)]

    def results(run, dtype: torch.dtype) -> list[Tensor]:
        layer.to(dtype)
        leaves = [v.to(dtype, copy=True).requires_grad_() for v in given]
        outputs = run(*leaves)
        loss = sum((v * w.to(dtype)).sum() for v, w in zip(outputs, weights, strict=True))
        return [*outputs, *torch.autograd.grad(loss, [*leaves, *layer.parameters()])]

    def ours(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = layer(x, (h, c))
        return y, h, c

    expected = results(lambda x, h, c: equations(layer, x, h, c), torch.float64)
    names = ["y", "h", "c", "dx", "dh", "dc", *(name for name, _ in layer.named_parameters())]
    for name, ref, out in zip(names, expected, results(ours, dtype), strict=True):
        assert_near(name, ref, out)


@pytest.mark.parametrize("per_gate", [False, True])
def test_gradients_are_those_of_finite_differences(per_gate):
    scan.set_backend("reference")  # the others run backward only once
    layer = randomized(LNLSTM(2, 3, per_gate=per_gate).double())
    leaves = [randn(3, 2, 2), randn(2, 3), randn(2, 3)]

    def run(x: Tensor, h: Tensor, c: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        y, state = layer(x, (h, c))
        return y, *state

    given = [*(v.requires_grad_() for v in leaves), *layer.parameters()]
    assert torch.autograd.gradcheck(run, given, check_batched_grad=False)


def test_a_sequence_does_not_depend_on_others_nor_on_pieces_nor_on_the_mode():
    lstm = randomized(bnrnn.LSTM(I, H, 2, norm="layer").double())
    x, hx = randn(T, B, I), (randn(2, B, H), randn(2, B, H))
    y, state = lstm(x, hx)
    assert_near("in evaluation", y, lstm.eval()(x, hx)[0])
    for b in range(B):
        single, last = lstm(x[:, b : b + 1], tuple(s[:, b : b + 1] for s in hx))
        assert_near("alone", y[:, b : b + 1], single)
        assert_near("c alone", state[1][:, b : b + 1], last[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no call has to say where it begins
        first, middle = lstm(x[:2], hx)
        second, last = lstm(x[2:], middle)
    assert_near("in pieces", y, torch.cat([first, second]))
    assert_near("c after pieces", state[1], last[1])


def test_a_padded_batch_is_its_sequences():
    lstm = randomized(bnrnn.LSTM(I, H, bidirectional=True, norm="layer").double())
    x, lengths = randn(T, B, I), [4, 6, 2, 6, 3]
    y, (h, c) = lstm(x, lengths=lengths)
    for b, n in enumerate(lengths):
        single, last = lstm(x[:n, b : b + 1])
        assert_near("y", single[:, 0], y[:n, b])
        assert (y[n:, b] == 0).all()
        for name, ref, out in zip("hc", last, (h, c), strict=True):
            assert_near(name, ref[:, 0], out[:, b])


def test_the_gates_are_normalized_alone_only_with_per_gate():
    """Scaling the rows of one gate of W_hh changes nothing then, up to eps, and does so otherwise."""
    x, hx = randn(T, B, I), (randn(1, B, H), randn(1, B, H))
    for per_gate in (False, True):
        lstm = randomized(bnrnn.LSTM(I, H, norm="layer", per_gate=per_gate, eps=0.0).double())
        y = lstm(x, hx)[0]
        lstm.layers[0].weight_hh.data[H : 2 * H] *= 3
        assert torch.allclose(y, lstm(x, hx)[0], atol=1e-9) == per_gate


@pytest.mark.parametrize("zoneout", [None, (0.3, 0.2)])
def test_under_autocast_only_the_products_lose_precision(zoneout):
    lstm, x = randomized(bnrnn.LSTM(I, 32, norm="layer", zoneout=zoneout)), torch.randn(T, B, I)
    torch.manual_seed(1)
    expected, (_, c) = lstm(x)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        y, (_, last) = lstm(x)
    assert y.dtype == torch.bfloat16 and last.dtype == torch.float32
    assert_near("y", expected, y.float(), 2e-2)
    assert_near("c", c, last, 2e-2)
    grads = torch.autograd.grad(y.float().square().sum(), list(lstm.parameters()))
    assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)


def test_initial_values_are_those_given():
    layer = LNLSTM(I, H, gamma_init=0.3, cell_gamma_init=0.5)
    for _ in range(2):
        assert (layer.gamma_ih == torch.tensor(0.3)).all() and (layer.gamma_hh == torch.tensor(0.3)).all()
        assert (layer.gamma_c == 0.5).all()
        assert all((beta == 0).all() for beta in (layer.beta_ih, layer.beta_hh, layer.beta_c))
        randomized(layer).reset_parameters()
    assert (LNLSTM(I, H, gamma_init=0.3).gamma_c == torch.tensor(0.3)).all()
    assert (bnrnn.LSTM(I, H, norm="layer", gamma_init=0.7).layers[0].gamma_c == torch.tensor(0.7)).all()
    assert (LNLSTM(I, H).gamma_hh == 1).all()


def test_weights_of_nn_lstm_are_loaded_beside_initial_scales():
    theirs, ours = nn.LSTM(I, H), bnrnn.LSTM(I, H, norm="layer")
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert all(".gamma_" in name or ".beta_" in name for name in missing) and len(missing) == 6 and not unexpected
    assert torch.equal(ours.layers[0].bias, theirs.bias_ih_l0 + theirs.bias_hh_l0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -1.0}, "eps must be a finite number from 0"),
        ({"gamma_init": float("nan")}, "gamma_init must be a finite number"),
        ({"cell_gamma_init": "a"}, "cell_gamma_init must be a finite number"),
    ],
)
def test_wrong_options_are_named(options, message):
    with without_shape_checks(), pytest.raises(BnrnnError, match=message):
        LNLSTM(I, H, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layer", "statistics": "running"}, "norm='layer' keeps no statistics"),
        ({"norm": "layer", "input_statistics": "sequence"}, "norm='layer' keeps no statistics"),
        ({"norm": "batch", "t_max": T, "per_gate": True}, "per_gate=True is for norm='layer'"),
        ({"per_gate": True}, "per_gate=True is for norm='layer', and norm is None"),
    ],
)
def test_contradicting_arguments_of_the_stack_are_named(options, message):
    with pytest.raises(BnrnnError, match=message):
        bnrnn.LSTM(I, H, **options)
