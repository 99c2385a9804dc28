"""Running statistics: averaged in training, as torch.nn.BatchNorm1d averages them, but per time step."""

import pytest
import torch
from torch import nn

import bnrnn
from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import batch_statistics, estimate_population_statistics
from tests.helpers import assert_near

T, B, I, H = 4, 6, 3, 5
LAYERS = [BNLSTM, InputBNLSTM, BNRNN, BNRHN]


def running(**options) -> SequenceBatchNorm:
    return SequenceBatchNorm(3, statistics="running", **options).double()


def test_they_are_those_of_batchnorm1d_at_each_time_step():
    """torch starts with 0 and 1 and divides by B - 1; from the same start the averages are the same."""
    norm, batches = running(t_max=T, momentum=0.25), torch.randn(20, T, B, 3, dtype=torch.float64)
    torchs = [nn.BatchNorm1d(3, momentum=None).double() for _ in range(T)]
    for n, x in enumerate(batches):
        norm(x)
        for t, of_step in enumerate(torchs):
            of_step.momentum = None if n < 4 else 0.25  # 1 / 0.25 batches with equal weights
            of_step(x[t])
    assert_near("mean", torch.stack([m.running_mean for m in torchs]), norm.pop_mean)
    assert_near("variance", torch.stack([m.running_var for m in torchs]) * (B - 1) / B, norm.pop_var)
    x, m = batches[0], norm.eval()
    for t, of_step in enumerate(torchs):
        expected = (x[t] - of_step.running_mean) / (of_step.running_var * (B - 1) / B + m.eps).sqrt()
        assert_near("y", m.gamma * expected, m(x)[t])


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_can_be_evaluated_at_any_time_without_a_pass(layer):
    model, x = layer(I, H, T, statistics="running"), torch.randn(T, B, I)
    with torch.no_grad():
        assert model.eval()(x)[0].isfinite().all()  # also before the first update
        for _ in range(30):
            model.train()(x)
        y = model.eval()(x)[0]
        with batch_statistics(model):
            assert_near("of the one batch that it has seen", model(x)[0], y, 1e-4)
        kept = {k: v.clone() for k, v in model.state_dict().items()}
        model(x + 1)
        with batch_statistics(model):
            model(x + 1)
    assert all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())  # evaluation moves nothing


def test_with_fixed_weights_they_approach_the_exact_estimate():
    exact = bnrnn.LSTM(I, H, norm="batch", t_max=T)
    average = bnrnn.LSTM(I, H, norm="batch", t_max=T, statistics="running", momentum=0.005)
    average.load_state_dict(exact.state_dict(), strict=False)
    batches = torch.randn(200, T, 20, I)
    with torch.no_grad():
        for x in batches:
            average.train()(x)
        estimate_population_statistics(exact, batches)
        assert_near("y", exact.eval()(batches[0])[0], average.eval()(batches[0])[0], 1e-5)


def test_the_exact_estimate_can_follow():
    lstm, x = bnrnn.LSTM(I, H, norm="batch", t_max=T, statistics="running"), torch.randn(T, B, I)
    for _ in range(3):
        lstm(x + torch.rand(()))
    estimate_population_statistics(lstm, [x])
    with batch_statistics(lstm):
        expected = lstm.eval()(x)[0]
    assert_near("y", expected, lstm(x)[0])


def test_an_exact_estimate_before_any_training_counts_as_one_batch():
    norm, batches = running(t_max=T), torch.randn(2, T, B, 3, dtype=torch.float64)
    estimate_population_statistics(norm, batches[:1])
    norm.train()(batches[1])
    assert_near("mean", batches.mean((0, 2)), norm.pop_mean)
    assert norm.num_batches_tracked.tolist() == [2] * T


def test_steps_that_no_batch_has_reached_repeat_the_last_one_that_was():
    norm, x = running(t_max=5), torch.randn(5, B, 3, dtype=torch.float64)
    norm(x[:2])
    assert torch.equal(norm.pop_mean[2:], norm.pop_mean[1].expand(3, 3))
    norm(x, batch_sizes=[6, 6, 4, 1, 1])  # a variance of one sequence does not count
    assert_near("mean", x[2, :4].mean(0), norm.pop_mean[2])
    assert torch.equal(norm.pop_var[3:], norm.pop_var[2].expand(2, 3))
    norm(x[:2] + 1)
    assert_near("kept", x[2, :4].mean(0), norm.pop_mean[4])
    assert norm.num_batches_tracked.tolist() == [3, 3, 1, 0, 0]


def test_over_time_there_is_one_average():
    norm, x = running(t_max=None), torch.randn(5, B, 3, dtype=torch.float64)
    norm(x)
    assert_near("mean", x.mean((0, 1))[None], norm.pop_mean)
    assert_near("var", x.var((0, 1), correction=0)[None], norm.pop_var)


def test_they_are_part_of_the_state_dict_and_their_absence_changes_none():
    lstm = bnrnn.LSTM(I, H, norm="batch", t_max=T, statistics="running")
    lstm(torch.randn(T, B, I))
    other = bnrnn.LSTM(I, H, norm="batch", t_max=T, statistics="running")
    other.load_state_dict(lstm.state_dict())
    x = torch.randn(T, B, I)
    assert torch.equal(lstm.eval()(x)[0], other.eval()(x)[0])
    assert not any("num_batches" in k for k in bnrnn.LSTM(I, H, norm="batch", t_max=T).state_dict())


@pytest.mark.parametrize("options", [{"statistics": "moving"}, {"statistics": "running", "momentum": 2.0}])
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(
        BnrnnError, match=r"statistics='moving' is unknown|momentum must be .* from 0.0 to 1.0, got 2.0"
    ):
        bnrnn.LSTM(I, H, norm="batch", t_max=T, **options)
    with pytest.raises(BnrnnError, match="set norm, or leave them out"):
        bnrnn.LSTM(I, H, statistics="running")
