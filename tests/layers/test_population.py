"""The estimate of population statistics and blocks of batch statistics leave a model as it was."""

import pytest
import torch
from torch import nn

import bnrnn
from bnrnn.layers.population import batch_statistics, estimate_population_statistics

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
