import pytest
import torch
from torch import Tensor, nn

from bnrnn import scan
from bnrnn.layers import base
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.population import estimate_population_statistics
from bnrnn.layers.rnn import RNN
from tests.helpers import assert_near, without_shape_checks

T, B, I, H = 5, 6, 2, 3


def test_rnn_is_nn_rnn():
    ours, torchs = RNN(I, H).double(), nn.RNN(I, H).double()
    torchs.load_state_dict(
        {"weight_ih_l0": ours.weight_ih, "weight_hh_l0": ours.weight_hh, "bias_ih_l0": ours.bias,
         "bias_hh_l0": torch.zeros(H)}
    )  # fmt: skip
    x, h = torch.randn(T, B, I, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    y, (h_n,) = ours(x, (h,))
    ref, h_ref = torchs(x, h[None])
    assert_near("y", ref, y)
    assert_near("h", h_ref[0], h_n)


def test_bn_rnn_normalizes_the_sum_of_both_terms():
    layer, norm = BNRNN(I, H, T, gamma_init=0.5).double(), nn.BatchNorm1d(H).double()
    nn.init.constant_(norm.weight, 0.5)
    x, h = torch.randn(T, B, I, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)
    y, _ = layer(x, (h,))
    for t in range(T):
        h = torch.tanh(norm(h @ layer.weight_hh.T + x[t] @ layer.weight_ih.T))
        assert_near(f"h at step {t}", h, y[t])


def test_bn_rnn_gradcheck():
    layer = BNRNN(I, H, 3).double()
    names = [name for name, _ in layer.named_parameters()]
    x, h = torch.randn(3, 4, I, dtype=torch.float64), torch.randn(4, H, dtype=torch.float64)

    def run(x, h, *parameters):
        y, _ = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, (h,)))
        return y

    run(x, h, *layer.parameters())
    with without_shape_checks():
        assert torch.autograd.gradcheck(run, (x.requires_grad_(), h.requires_grad_(), *layer.parameters()))


def test_bn_rnn_population_is_batch_when_the_batch_is_the_whole_set():
    layer, x = BNRNN(I, H, T).double(), torch.randn(T, B, I, dtype=torch.float64)
    y, _ = layer(x)
    estimate_population_statistics(layer, [x])
    assert_near("y", y, layer.eval()(x)[0])


@torch.no_grad()
def test_bn_rnn_estimates_long_sequences_in_pieces(monkeypatch):
    layer, x = BNRNN(I, H, T).double(), torch.randn(T, B, I, dtype=torch.float64)
    estimate_population_statistics(layer, [x])
    mean, var = layer.bn.pop_mean.clone(), layer.bn.pop_var.clone()
    monkeypatch.setattr(base, "MAX_PRODUCT_SIZE", 2 * B * H)  # two steps at once
    estimate_population_statistics(layer, [x])
    assert_near("mean", mean, layer.bn.pop_mean)
    assert_near("var", var, layer.bn.pop_var)


def test_finished_sequences_keep_their_state_and_do_not_count():
    sizes, x = [6, 6, 4, 3, 1], torch.randn(T, B, I, dtype=torch.float64)
    layers = RNN(I, H).double(), BNRNN(I, H, T, gamma_init=0.5).double()
    nn.init.uniform_(layers[1].bn.beta, 0.1, 0.5)
    for layer in layers:
        y, (last,) = layer(x, None, 0, sizes)
        h = torch.zeros(B, H, dtype=torch.float64)
        for t, n in enumerate(sizes):  # one step at a time with the sequences that run; a single one normalizes to beta
            single = (
                layer(x[t : t + 1, :n], (h[:n],))[1][0] if n > 1 or isinstance(layer, RNN) else layer.bn.beta.tanh()
            )
            h = torch.cat([single.expand(n, H), h[n:]])
            assert_near(f"h at step {t}", h[:n], y[t, :n])
        assert_near("last", h, last)
    layers[1].eval()
    nn.init.uniform_(layers[1].bn.pop_mean)
    nn.init.uniform_(layers[1].bn.pop_var, 0.5, 1)
    whole, (last,) = layers[1](x, None, 0, sizes)
    alone, (of_last,) = layers[1](x[:4, 2:3])
    assert_near("population", alone[:3, 0], whole[:3, 2])
    assert_near("its last", of_last[0], last[2])


@pytest.mark.parametrize("padded", [None, [6, 4]])
@pytest.mark.parametrize("make", [RNN, BNRNN])
@pytest.mark.parametrize("evaluating", [False, True])
def test_the_triton_engine_gives_the_same(make, evaluating, padded):
    layer = make(I, 17, 2).double()
    if make is BNRNN:
        nn.init.uniform_(layer.bn.gamma, 0.2, 0.4)
        nn.init.uniform_(layer.bn.pop_mean)
        nn.init.uniform_(layer.bn.pop_var, 0.5, 1)
    layer.train(not evaluating)
    x, h = torch.randn(2, B, I, dtype=torch.float64), torch.randn(B, 17, dtype=torch.float64)

    def everything(dtype: torch.dtype) -> list[Tensor]:
        given = [v.to(dtype).requires_grad_() for v in (x, h)]
        y, (last,) = layer.to(dtype)(given[0], (given[1],), 0, padded)
        y = y if padded is None else torch.cat([y[t, :n] for t, n in enumerate(padded)])
        gradients = torch.autograd.grad((y.square().sum() + last.sum()), [*given, *layer.parameters()])
        return [y, last, *gradients]

    expected = everything(torch.float64)
    scan.set_backend("triton")
    try:
        found = everything(torch.float32)
    finally:
        scan.set_backend("auto")
    for n, (ref, out) in enumerate(zip(expected, found, strict=True)):
        assert_near(str(n), ref, out)
