from functools import partial

import pytest
import torch
from torch import nn

from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import (
    collecting_statistics,
    estimate_population_statistics,
    has_batch_norm,
    has_step_statistics,
    shared_statistics,
)
from bnrnn.layers.stack import Stack
from bnrnn.scan.norm.reference import normalize
from tests.helpers import assert_near, without_shape_checks


def test_every_time_step_is_batchnorm1d():
    norm = SequenceBatchNorm(3, t_max=4, gamma_init=0.7, beta=True).double()
    nn.init.normal_(norm.beta)
    x = torch.randn(4, 6, 3, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    torchs = nn.BatchNorm1d(3).double()
    torchs.weight, torchs.bias = norm.gamma, norm.beta
    ref = torch.stack([torchs(step) for step in x])
    weight = torch.randn_like(ref)
    inputs = (x, norm.gamma, norm.beta)
    for name, out, r in zip(
        ("y", "dx", "dgamma", "dbeta"),
        (y, *torch.autograd.grad((y * weight).sum(), inputs)),
        (ref, *torch.autograd.grad((ref * weight).sum(), inputs)),
        strict=True,
    ):
        assert_near(name, r, out)


def test_statistics_are_mean_and_biased_variance_also_without_any_spread():
    x = torch.randn(50, 4) * torch.tensor([1.0, 1e-3, 1e3, 0.0]) + torch.tensor([0.0, 5.0, 1.0, 3.0])
    _, mean, var = normalize(x, torch.ones(4), None, 1e-5)
    assert_near("mean", x.double().mean(0), mean)
    assert_near("var", x.double().var(0, correction=0)[[0, 2]], var[[0, 2]])
    assert_near("var of a small spread", x.double().var(0, correction=0)[1], var[1], 1e-4)
    assert var[3] < 1e-6 * 1e-5  # negligible compared with eps


def test_a_step_with_a_single_sequence_does_not_count_in_the_population_statistics():
    """Its variance is always 0, so the step repeats the statistics of the last step with at least two sequences."""
    norm, x = SequenceBatchNorm(3, t_max=4), torch.randn(4, 5, 3)
    with collecting_statistics(norm, [norm]):
        norm(x, batch_sizes=[5, 2, 1, 1])
    assert (norm.pop_var > 0).all()
    assert torch.equal(norm.pop_mean[2:], norm.pop_mean[1].expand(2, 3))
    with collecting_statistics(norm, [norm]):
        norm(x, batch_sizes=[5, 2, 1, 1])
        norm(x + 1, batch_sizes=[5, 5, 5, 1])
    assert_near("of one batch", x[2].mean(0) + 1, norm.pop_mean[2])
    assert_near("of two", (x[1, :2].mean(0) + x[1].mean(0) + 1) / 2, norm.pop_mean[1])


def test_a_single_frame_over_batch_and_time_has_no_variance():
    norm, x = SequenceBatchNorm(3, t_max=None), torch.randn(1, 2, 3)
    with pytest.raises(BnrnnError, match="at least 2 sequences, got a batch of 1"):
        norm(x, batch_sizes=[1])
    assert norm(x, batch_sizes=[2]).isfinite().all()


def test_shared_statistics_are_the_average_over_time_and_end_with_the_block():
    norm, x = SequenceBatchNorm(3, t_max=4).eval(), torch.randn(4, 5, 3)
    estimate_population_statistics(norm, iter([x]))  # an iterator is enough for a model that needs one pass
    mean, var = norm.pop_mean.clone(), norm.pop_var.clone()
    with shared_statistics(norm):
        expected = 0.1 * (x - mean.mean(0)) / (var.mean(0) + norm.eps).sqrt()
        assert_near("y", expected, norm(x))
    assert torch.equal(norm.pop_mean, mean) and torch.equal(norm.pop_var, var)


def test_statistics_over_time_are_none_of_a_time_step():
    over_time, per_step = SequenceBatchNorm(3, t_max=None), SequenceBatchNorm(3, t_max=4)
    assert has_batch_norm(over_time) and not has_step_statistics(over_time)
    assert has_step_statistics(nn.Sequential(over_time, per_step)) and not has_batch_norm(nn.Linear(2, 2))


def test_an_estimate_that_is_lost_after_an_evaluation_is_noticed_at_once():
    norm, x = SequenceBatchNorm(3, t_max=4), torch.randn(4, 5, 3)
    estimate_population_statistics(norm, [x])
    good = norm.pop_var.clone()
    norm.eval()
    for change in (
        lambda: norm.pop_var.fill_(torch.nan),
        lambda: norm.pop_var[2].fill_(torch.nan),
        lambda: norm.load_state_dict(norm.state_dict() | {"pop_var": torch.full((4, 3), torch.nan)}),
        lambda: setattr(norm, "pop_var", torch.full((4, 3), torch.nan)),
        lambda: (norm.pop_var.fill_(torch.nan), norm.double()),
    ):
        norm.float()
        norm.pop_var.copy_(good)
        norm(x)
        change()
        with pytest.raises(BnrnnError, match="evaluation needs population statistics, and"):
            norm(x.to(norm.gamma.dtype))
    norm.float().pop_var.copy_(good)
    norm.pop_var[3] = torch.nan
    norm(x[:3])  # only the steps that are asked for need an estimate


def test_every_single_step_has_its_own_statistics_and_later_steps_have_the_last_ones():
    norm, x = SequenceBatchNorm(3, t_max=4), torch.randn(6, 5, 3)
    estimate_population_statistics(norm, [x])
    whole = norm.eval()(x)
    for t in range(6):
        assert_near(f"step {t}", whole[t], norm(x[t : t + 1], t_start=t)[0])
        mean, var = norm.population(t, 1)
        assert torch.equal(mean[0], norm.pop_mean[min(t, 3)]) and torch.equal(var[0], norm.pop_var[min(t, 3)])


@pytest.mark.parametrize("layer", [BNLSTM, partial(BNLSTM, input_statistics="sequence"), InputBNLSTM, BNRNN, BNRHN])
def test_a_layer_with_statistics_per_step_needs_t_max(layer):
    with without_shape_checks(), pytest.raises(BnrnnError, match="t_max must be an integer, got None"):
        Stack(layer, 3, 4)


def test_a_layer_without_statistics_per_step_needs_no_t_max():
    for layer in (partial(InputBNLSTM, input_statistics="sequence"), partial(BNRHN, place=None)):
        with without_shape_checks():
            assert Stack(layer, 3, 4)(torch.randn(5, 2, 3))[0].isfinite().all()


@pytest.mark.parametrize(("layer", "name"), [(BNLSTM, "bn_c"), (BNLSTM, "bn_ih"), (BNRHN, "bn_x"), (BNRHN, "bn_s")])
def test_norms_of_a_layer_in_different_modes_are_an_error(layer, name):
    model, x = layer(3, 4, 5, statistics="running"), torch.randn(5, 2, 3)
    model.eval().get_submodule(name).train()
    with pytest.raises(BnrnnError, match=r"some norms of a layer are in training .*: call layer.train\(\) or .eval"):
        model(x)
    over_time = BNLSTM(3, 4, 5, input_statistics="sequence", statistics="running").eval()
    over_time.bn_ih.train()  # it is applied before the scan, so that it may have a mode of its own
    assert over_time(x)[0].isfinite().all()


@pytest.mark.parametrize("layer", [BNLSTM, InputBNLSTM])
def test_unknown_input_statistics_of_a_layer_are_named(layer):
    with without_shape_checks(), pytest.raises(BnrnnError, match="input_statistics='frames' is unknown: use 'frame'"):
        layer(3, 4, 5, input_statistics="frames")
