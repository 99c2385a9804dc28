from functools import partial

import pytest
import torch
from torch import nn

from bnrnn.errors import BnrnnError
from bnrnn.layers import base
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import (
    batch_statistics,
    collecting_statistics,
    estimate_population_statistics,
    estimated_together,
)
from tests.helpers import assert_near, without_shape_checks

T, B, I, H = 6, 8, 3, 4


def random_layer(kind=BNLSTM, t_max: int = T) -> nn.Module:
    """A layer in float64 whose parameters are all random, so that a forgotten parameter changes the result."""
    layer = kind(I, H, t_max).double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return layer


def switch_off(norm: SequenceBatchNorm) -> None:
    """Set population statistics and gamma so that normalization changes nothing."""
    norm.pop_mean.zero_()
    norm.pop_var.fill_(1 - norm.eps)
    nn.init.ones_(norm.gamma)


@pytest.mark.parametrize("kind", [BNLSTM, InputBNLSTM])
def test_without_norm_it_is_nn_lstm(kind):
    layer, torchs = random_layer(kind).eval(), nn.LSTM(I, H).double()
    for norm in layer.modules():
        if isinstance(norm, SequenceBatchNorm):
            switch_off(norm)
    if kind is BNLSTM:
        nn.init.zeros_(layer.bn_c.beta)
    torchs.load_state_dict(
        {"weight_ih_l0": layer.weight_ih, "weight_hh_l0": layer.weight_hh, "bias_ih_l0": layer.bias,
         "bias_hh_l0": torch.zeros(4 * H)}
    )  # fmt: skip
    x = torch.randn(T, B, I, dtype=torch.float64)
    h, c = torch.randn(2, B, H, dtype=torch.float64)
    y, (h_n, c_n) = layer(x, (h, c))
    ref, (h_ref, c_ref) = torchs(x, (h[None], c[None]))
    for name, r, out in (("y", ref, y), ("h", h_ref[0], h_n), ("c", c_ref[0], c_n)):
        assert_near(name, r, out)


def by_hand(layer: BNLSTM, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Eqs. 6-8 with torch.nn.BatchNorm1d at every step."""

    def bn(norm: SequenceBatchNorm, v: torch.Tensor) -> torch.Tensor:
        module = nn.BatchNorm1d(v.shape[1], eps=norm.eps).to(v.dtype)
        module.weight = norm.gamma
        if norm.beta is not None:
            module.bias = norm.beta
        return module(v)

    ys = []
    for x_t in x:
        a = bn(layer.bn_hh, h @ layer.weight_hh.T) + bn(layer.bn_ih, x_t @ layer.weight_ih.T) + layer.bias
        i, f, g, o = a[:, :H], a[:, H : 2 * H], a[:, 2 * H : 3 * H], a[:, 3 * H :]
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(bn(layer.bn_c, c))
        ys.append(h)
    return torch.stack(ys)


def test_training_is_equations_6_to_8_with_batchnorm1d_at_every_step():
    layer = random_layer()
    x, weight = torch.randn(T, B, I, dtype=torch.float64), torch.randn(T, B, H, dtype=torch.float64)
    h, c = torch.randn(2, B, H, dtype=torch.float64)
    y, _ = layer(x, (h, c))
    grads = torch.autograd.grad((y * weight).sum(), list(layer.parameters()))
    ref = by_hand(layer, x, h, c)
    expected = torch.autograd.grad((ref * weight).sum(), list(layer.parameters()))
    assert_near("y", ref, y)
    for (name, _), out, r in zip(layer.named_parameters(), grads, expected, strict=True):
        assert_near(f"gradient of {name}", r, out)


@pytest.mark.parametrize("kind", [BNLSTM, InputBNLSTM])
def test_gradcheck(kind):
    layer = random_layer(lambda *_: kind(2, 2, 3))
    names = [name for name, _ in layer.named_parameters()]
    x, h, c = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 3, 2), (3, 2), (3, 2)))

    def run(x, h, c, *parameters):
        y, state = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, (h, c)))
        return y, *state

    run(x, h, c, *layer.parameters())
    with without_shape_checks():
        assert torch.autograd.gradcheck(run, (x, h, c, *layer.parameters()))


def test_the_scale_of_the_weights_does_not_matter():
    layer = random_layer()
    x = torch.randn(T, B, I, dtype=torch.float64)
    state = tuple(torch.randn(2, B, H, dtype=torch.float64))
    layer.bn_ih.eps = layer.bn_hh.eps = 1e-20
    y, _ = layer(x, state)
    layer.weight_hh.data *= 10
    layer.weight_ih.data *= 0.1
    assert_near("y", y, layer(x, state)[0])


def test_at_the_start_both_terms_have_standard_deviation_gamma():
    layer = BNLSTM(1, 100, 20)
    x = 100 * torch.rand(20, 50, 1)  # large, so that eps is negligible
    assert_near("input term", torch.tensor(0.1), layer.bn_ih(x @ layer.weight_ih.T).std(1, correction=0).mean(), 0.01)
    h = 100 * torch.randn(50, 100)
    recurrent = layer.bn_hh((h @ layer.weight_hh.T)[None])
    assert_near("recurrent term", torch.tensor(0.1), recurrent.std(1, correction=0).mean(), 0.01)


def test_evaluation_before_the_estimate_is_an_error():
    layer = BNLSTM(I, H, T).eval()
    with pytest.raises(BnrnnError, match=r"estimate_population_statistics.*batch_statistics"):
        layer(torch.randn(T, B, I))


def test_training_after_the_estimate_makes_it_void():
    layer, x = random_layer(), torch.randn(T, B, I, dtype=torch.float64)
    estimate_population_statistics(layer, [x])
    layer.eval()(x)
    layer.train()(x)
    with pytest.raises(BnrnnError, match="a forward pass in training mode has discarded them: call"):
        layer.eval()(x)


def test_population_is_batch_when_the_batch_is_the_whole_set():
    layer, x = random_layer(), torch.randn(T, B, I, dtype=torch.float64)
    y, _ = layer(x)
    estimate_population_statistics(layer, [x])
    assert_near("y", y, layer.eval()(x)[0])


def test_population_statistics_are_the_equal_weight_average_of_biased_batch_estimates():
    layer = random_layer()
    batches = [torch.randn(T, n, I, dtype=torch.float64) for n in (4, 10)]
    estimate_population_statistics(layer, batches)
    products = [x @ layer.weight_ih.T for x in batches]
    assert_near("mean", sum(p.mean(1) for p in products) / 2, layer.bn_ih.pop_mean)
    assert_near("var", sum(p.var(1, correction=0) for p in products) / 2, layer.bn_ih.pop_var)
    assert layer.training


def test_the_estimate_differs_by_time_step_and_the_state_dict_carries_it():
    layer, x = random_layer(), torch.randn(T, B, I, dtype=torch.float64)
    estimate_population_statistics(layer, [x])
    assert (layer.bn_c.pop_var[1:] != layer.bn_c.pop_var[:-1]).all()
    other = random_layer()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.eval()(x)[0], layer.eval()(x)[0])


def test_evaluation_never_reads_the_batch():
    layer, x = random_layer(), torch.randn(T, B, I, dtype=torch.float64)
    estimate_population_statistics(layer, [torch.randn(T, 20, I, dtype=torch.float64)])
    y, _ = layer.eval()(x)
    assert_near("one by one", y, torch.cat([layer(x[:, b : b + 1])[0] for b in range(B)], dim=1))


def test_batch_statistics_in_evaluation_are_those_of_training_and_end_with_the_block():
    layer, x = random_layer(), torch.randn(T, B, I, dtype=torch.float64)
    trained, _ = layer(x)
    layer.eval()
    with batch_statistics(layer):
        assert torch.equal(layer(x)[0], trained)
    with pytest.raises(BnrnnError, match="population statistics"):
        layer(x)


def test_steps_beyond_t_max_use_the_last_statistics():
    layer, x = random_layer(t_max=3), torch.randn(T, B, I, dtype=torch.float64)
    estimate_population_statistics(layer, [x])
    longer = random_layer(t_max=T)
    weights = layer.state_dict()
    for name in [n for n in weights if "pop_" in n]:
        weights[name] = weights[name][[0, 1, 2, 2, 2, 2]]
    longer.load_state_dict(weights)
    assert torch.equal(layer.eval()(x)[0], longer.eval()(x)[0])


def test_steps_that_no_sequence_reached_repeat_the_last_reached_step():
    layer = random_layer()
    estimate_population_statistics(layer, [torch.randn(n, B, I, dtype=torch.float64) for n in (2, 4)])
    assert torch.equal(layer.bn_hh.pop_mean[3], layer.bn_hh.pop_mean[5])
    assert not torch.equal(layer.bn_hh.pop_mean[2], layer.bn_hh.pop_mean[3])
    with pytest.raises(BnrnnError, match="at least one batch of training inputs, got none"):
        estimate_population_statistics(layer, [])


def test_differences_between_batches_are_not_amplified_where_all_sequences_are_equal():
    """Sequence-wise statistics shift a first word that is equal in all sequences differently in each batch."""
    layer = random_layer(partial(BNLSTM, input_statistics="sequence"))
    x = torch.randn(20, T, B, I, dtype=torch.float64) + torch.randn(20, 1, 1, I, dtype=torch.float64)
    x[:, 0] = 1.0
    estimate_population_statistics(layer, list(x))
    with torch.no_grad():
        layer.bn_c.beta.zero_()
        y, _ = layer.eval()(x[0])
    assert y[1].abs().mean() > 0.1
    assert y[0].abs().max() < 1e-6
    with pytest.raises(BnrnnError, match="need two passes: pass a list of batches, not an iterator"):
        estimate_population_statistics(layer, iter(x))


def test_long_sequences_in_bounded_memory_give_the_same(monkeypatch):
    layer, x = random_layer(), torch.randn(T, B, I, dtype=torch.float64)
    with torch.no_grad():
        estimate_population_statistics(layer, [x])
        whole, _ = layer.eval()(x)
        monkeypatch.setattr(base, "MAX_PRODUCT_SIZE", 2 * B * 4 * H)  # two steps at once
        assert_near("in pieces", whole, layer(x)[0])
        means = layer.bn_hh.pop_mean.clone()
        estimate_population_statistics(layer, [x])
        assert_near("estimated in pieces", means, layer.bn_hh.pop_mean)
        pieces, scan = [], layer.scan
        monkeypatch.setattr(layer, "scan", lambda piece, *rest: pieces.append(len(piece)) or scan(piece, *rest))
        estimate_population_statistics(layer, [x])
        assert pieces == [2, 2, 2]


@pytest.mark.parametrize("kind", [BNLSTM, InputBNLSTM])
def test_a_batch_of_one_cannot_train(kind):
    with pytest.raises(BnrnnError, match="at least 2 sequences, got a batch of 1"):
        kind(I, H, T)(torch.randn(T, 1, I))


def test_t_max_must_be_positive():
    with pytest.raises(BnrnnError, match="t_max must be at least 1"):
        BNLSTM(I, H, 0)


def test_constant_input_makes_the_state_gradient_explode_and_noise_prevents_it():
    """If the batch has no variance, BN multiplies gradients by gamma / sqrt(eps) = 31.6 per step (recipe of D5)."""
    torch.manual_seed(0)
    layer, x = BNLSTM(1, 50, 10).double(), torch.zeros(4, 20, 1, dtype=torch.float64)
    norms = []
    for noise in (1e-9, 0.1):
        h = (noise * torch.randn(20, 50, dtype=torch.float64)).requires_grad_()
        y, _ = layer(x, (h, torch.zeros(20, 50, dtype=torch.float64)))
        norms.append(torch.autograd.grad(y[-1].square().sum() + y[-1][0].sum(), h)[0].norm())
    assert norms[0] > 30 * norms[1]


def test_a_step_with_a_single_sequence_counts_in_none_of_the_norms():
    layer, x = random_layer(), torch.randn(T, B, I, dtype=torch.float64)
    with collecting_statistics(layer, estimated_together(layer)[0]):
        layer(x, batch_sizes=[B, 5, 3, 2, 1, 1])
    for norm in (layer.bn_ih, layer.bn_hh, layer.bn_c):
        assert (norm.pop_var[3:] > 0).all()
        assert torch.equal(norm.pop_mean[4:], norm.pop_mean[3].expand_as(norm.pop_mean[4:]))


def test_the_input_product_can_have_its_own_eps():
    layer = random_layer(partial(BNLSTM, input_statistics="sequence", input_eps=1.0, eps=1e-3))
    assert (layer.bn_ih.eps, layer.bn_hh.eps, layer.bn_c.eps) == (1.0, 1e-3, 1e-3)
    plain = random_layer(partial(BNLSTM, input_statistics="sequence", eps=1e-3))
    assert (plain.bn_ih.eps, plain.bn_hh.eps, plain.bn_c.eps) == (1e-3, 1e-3, 1e-3)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(T, B, I, dtype=torch.float64)
    product = (x @ layer.weight_ih.T).flatten(0, 1)
    scale = ((product.var(0, correction=0) + 1e-3) / (product.var(0, correction=0) + 1.0)).sqrt()
    plain.bn_ih.gamma.data *= scale
    assert_near("y", plain(x)[0], layer(x)[0])
    with pytest.raises(BnrnnError, match=r"input_eps=1\.0 needs input_statistics='sequence': use eps"):
        BNLSTM(I, H, T, input_eps=1.0)


@pytest.mark.parametrize("sizes", [[8, 5, 3, 2, 1], [9, 5, 3, 2, 1, 1], [8, 3, 5, 2, 1, 1], [8, 5, 3, 2, 1, 0]])
def test_wrong_batch_sizes_are_named(sizes):
    with pytest.raises(BnrnnError, match="running sequences for each of the 6 steps, between 8 and 1"):
        BNLSTM(I, H, T)(torch.randn(T, B, I), batch_sizes=sizes)


@pytest.mark.parametrize("ended_count", [False, True])
def test_finished_sequences_count_in_the_statistics_with_ended_count(ended_count):
    layer, x = random_layer(partial(BNLSTM, ended_count=ended_count)), torch.randn(T, B, I, dtype=torch.float64)
    sizes = [B, 5, 3, 3, 2, 2]
    with collecting_statistics(layer, estimated_together(layer)[0]):
        layer(x, batch_sizes=sizes)
    for t, n in enumerate(sizes):
        product = x[t, : B if ended_count else n] @ layer.weight_ih.T
        assert_near(f"mean at step {t}", product.mean(0), layer.bn_ih.pop_mean[t])
