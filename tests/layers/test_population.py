"""The estimate of population statistics and blocks of batch statistics leave a model as it was."""

import pytest
import torch
from torch import nn

import bnrnn
from bnrnn.errors import BnrnnError
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import batch_statistics, collecting_statistics, estimate_population_statistics
from tests.helpers import assert_near

T, B, I, H = 4, 6, 3, 5


class Partly(nn.Module):
    """A model of which a part is in another mode than the rest."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.backbone, self.lstm = nn.Dropout(), bnrnn.LSTM(I, H, norm="batch", t_max=T)
        self.train(training).backbone.train(not training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not any(module.training for module in self.modules())
        return self.lstm(self.backbone(x))[0]


@pytest.mark.parametrize("training", [True, False])
def test_after_the_estimate_each_module_is_in_its_own_mode(training):
    model = Partly(training)
    before = [module.training for module in model.modules()]
    estimate_population_statistics(model, [torch.randn(T, B, I)])
    assert [module.training for module in model.modules()] == before
    with pytest.raises(RuntimeError):  # an error in the model too
        estimate_population_statistics(model, [torch.randn(T, B, I)], lambda _: torch.zeros(2, 2) @ torch.zeros(3))
    assert [module.training for module in model.modules()] == before


def test_a_block_of_batch_statistics_within_another_does_not_end_it():
    lstm, x = bnrnn.LSTM(I, H, norm="batch", t_max=T).eval(), torch.randn(T, B, I)
    with batch_statistics(lstm):
        expected = lstm(x)[0]
        with batch_statistics(lstm):
            pass
        assert torch.equal(lstm(x)[0], expected)
    assert not lstm.layers[0].bn_hh.uses_batch


def test_a_model_without_norms_is_not_run():
    batches = iter([torch.zeros(3, 2, I)])
    estimate_population_statistics(bnrnn.LSTM(I, H), batches)
    assert len(list(batches)) == 1


def test_a_batch_of_one_sequence_counts_in_no_norm():
    lstm = bnrnn.LSTM(I, H, num_layers=2, norm="batch", t_max=T, input_statistics="sequence")
    batches = [torch.randn(T, B, I), torch.randn(T, B, I)]
    estimate_population_statistics(lstm, batches)
    expected = {name: value.clone() for name, value in lstm.state_dict().items()}
    with pytest.warns(UserWarning, match="1 of the batches had a single sequence"):
        estimate_population_statistics(lstm, [batches[0], 9 * torch.randn(T, 1, I), batches[1]])
    assert lstm.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in lstm.state_dict().items())


def test_statistics_that_a_norm_added_before_another_refused_the_batch_are_taken_back():
    first, second = SequenceBatchNorm(I, t_max=None), SequenceBatchNorm(I, t_max=T)
    batch = torch.randn(T, B, I)
    with pytest.warns(UserWarning, match="1 of the batches had a single sequence"):
        estimate_population_statistics(nn.Sequential(first, second), [batch, 9 * torch.randn(T, 1, I)])
    assert_near("mean", batch.mean((0, 1))[None], first.pop_mean)


def test_an_estimate_that_begins_after_the_first_step_is_refused_and_a_gap_repeats_the_step_before():
    norm, x = SequenceBatchNorm(I, t_max=8), torch.randn(2, B, I)
    message = r"no batch of the estimate reached the time steps before 5, .*: pass sequences from t_start=0 on"
    with pytest.raises(BnrnnError, match=message), collecting_statistics(norm, [norm]):
        norm(x, t_start=5)
    with collecting_statistics(norm, [norm]):
        norm(x, t_start=0)
        norm(x + 1, t_start=5)
    assert norm.pop_mean.isfinite().all() and norm.pop_var.isfinite().all()
    assert torch.equal(norm.pop_mean[1:5], norm.pop_mean[1].expand(4, I))
    assert_near("mean of the later steps", x.mean(1) + 1, norm.pop_mean[5:7])
    assert torch.equal(norm.pop_mean[7], norm.pop_mean[6])


def test_a_model_made_in_inference_mode_can_be_evaluated_step_by_step():
    with torch.inference_mode():
        lstm, x = bnrnn.LSTM(I, H, norm="batch", t_max=T).eval(), torch.randn(T, B, I)
        with pytest.raises(BnrnnError, match="none were estimated"):
            lstm(x)
        estimate_population_statistics(lstm, [x])
        whole, state, steps = lstm(x)[0], None, []
        for t in range(T):
            y, state = lstm(x[t : t + 1], state, t_start=t)
            steps.append(y)
    assert_near("y", whole, torch.cat(steps))
