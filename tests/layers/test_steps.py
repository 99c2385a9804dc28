"""Layers with statistics per time step that are called in pieces: each step has its own statistics, or a warning."""

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import bnrnn
from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.bn_rhn import BNRHN
from tests.helpers import assert_near

T, B, I, H = 6, 8, 3, 5
CONTINUES = "continues an earlier one without t_start"
NORMS = [{"norm": "batch"}, {"norm": "batch", "input_statistics": "sequence"}, {"norm": "input_batch"}]


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.named_buffers() if "pop" in name}


class Decoder(nn.Module):
    """An encoder, and a decoder that is called one step at a time, or on whole sequences."""

    def __init__(self, counts: bool, by_step: bool = True, **options) -> None:
        super().__init__()
        self.encoder = bnrnn.LSTM(I, H, norm="batch", t_max=T, **options)
        self.decoder = bnrnn.LSTM(I, H, norm="batch", t_max=T, **options)
        self.counts, self.by_step = counts, by_step

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.encoder(x)
        if not self.by_step:
            return self.decoder(x.flip(0), state)[0]
        ys = []
        for t, step in enumerate(x.flip(0)):
            y, state = self.decoder(step[None], state, t_start=t) if self.counts else self.decoder(step[None], state)
            ys.append(y)
        return torch.cat(ys)


class Windows(nn.Module):
    """A model of a text in windows. Each begins with the state that the last one returned, detached."""

    def __init__(self, t_max: int, **options) -> None:
        super().__init__()
        self.lstm, self.size = bnrnn.LSTM(I, H, norm="batch", t_max=t_max, **options), 3

    def forward(self, x: Tensor, counts: bool = False, size: int = 0) -> Tensor:
        state, ys, t = None, [], 0
        for piece in x.split(size or self.size):
            y, state = self.lstm(piece, state, t) if counts else self.lstm(piece, state)
            state, t = tuple(s.detach() for s in state), t + len(piece)
            ys.append(y)
        return torch.cat(ys)


@pytest.mark.parametrize("statistics_are", ["exact", "running"])
def test_a_decoder_that_counts_its_steps_computes_what_the_whole_pass_does(statistics_are):
    model, x = Decoder(counts=True, statistics=statistics_are), torch.randn(T, B, I)
    whole = copy.deepcopy(model)
    whole.by_step = False
    for one in (model, whole):
        one.train()(x)
        if statistics_are == "exact":
            bnrnn.estimate_population_statistics(one, [x])
    for (name, ref), (_, value) in zip(statistics(whole).items(), statistics(model).items(), strict=True):
        assert_near(name, ref, value, 1e-5)
    assert_near("y", whole.eval()(x), model.eval()(x), 1e-5)


def test_a_decoder_that_does_not_count_its_steps_warns_once_in_evaluation():
    model, x = Decoder(counts=False, by_step=False), torch.randn(T, B, I)
    model(x)
    bnrnn.estimate_population_statistics(model, [x])
    model.eval()(x)  # the state of an encoder is no sign of pieces
    model.by_step = True
    with pytest.warns(UserWarning, match=CONTINUES) as caught:
        model(x)
    model(x)  # a second warning would be an error
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "pass t_start, the number of steps before the call; or t_start=0" in str(caught[0].message)


def test_a_decoder_that_does_not_count_its_steps_warns_in_the_estimate_and_when_running_statistics_are_trained():
    x = torch.randn(T, B, I)
    model = Decoder(counts=False)
    model(x)  # batch statistics alone do not depend on the step
    with pytest.warns(UserWarning, match=f"{CONTINUES}.*counted as"):
        bnrnn.estimate_population_statistics(model, [x])
    with pytest.warns(UserWarning, match=f"{CONTINUES}.*counted as"):
        Decoder(counts=False, statistics="running")(x)


@pytest.mark.parametrize("change", [torch.clone, lambda s: s[:, torch.arange(B - 1, -1, -1)]])
def test_steps_with_copied_or_reordered_states_are_noticed(change):
    lstm, x = bnrnn.LSTM(I, H, norm="batch", t_max=T), torch.randn(T, B, I)
    bnrnn.estimate_population_statistics(lstm, [x])
    _, state = lstm.eval()(x[:1])
    _, state = lstm(x[1:2], tuple(map(change, state)))
    with pytest.warns(UserWarning, match=CONTINUES):
        lstm(x[2:3], tuple(map(change, state)))


@pytest.mark.parametrize("statistics_are", ["exact", "running"])
def test_windows_of_a_text_evaluate_as_they_are_trained_without_a_warning(statistics_are):
    model, x = Windows(t_max=3, statistics=statistics_are), torch.randn(4 * 3, B, I)
    model(x)
    if statistics_are == "exact":
        bnrnn.estimate_population_statistics(model, [x])
    model.eval()(x)
    model(x[:-1])  # the last one is shorter
    model(x)
    with pytest.warns(UserWarning, match=CONTINUES):
        model(x, size=1)


def test_segments_that_count_their_steps_compute_what_the_whole_pass_does_and_others_warn():
    model, x = Windows(t_max=12), torch.randn(12, B, I)
    bnrnn.estimate_population_statistics(model, [x], lambda x: (x, True))
    segments = statistics(model)
    bnrnn.estimate_population_statistics(model.lstm, [x])
    for (name, ref), (_, value) in zip(statistics(model).items(), segments.items(), strict=True):
        assert_near(name, ref, value, 1e-5)
    assert_near("y", model.lstm.eval()(x)[0], model(x, True), 1e-5)
    with pytest.warns(UserWarning, match=CONTINUES):
        model(x)


def test_pieces_beyond_t_max_warn_if_training_has_seen_none():
    model, x = Windows(t_max=3), torch.randn(3, B, I)
    bnrnn.estimate_population_statistics(model, [x])
    model.eval()(x)
    with pytest.warns(UserWarning, match=CONTINUES):
        model(torch.randn(6, B, I))


@pytest.mark.parametrize("norm", NORMS)
def test_an_ordinary_loop_over_epochs_does_not_warn(norm):
    lstm, x = bnrnn.LSTM(I, H, t_max=T, statistics="running", **norm), torch.randn(T, B, I)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(3):
            _, state = lstm.train()(x)
            lstm(x, tuple(torch.randn_like(s) for s in state))  # an initial state with noise
            lstm.eval()(x)
            lstm(x[:1])
            lstm(x[:1])
    assert not found


def test_a_layer_with_one_mean_for_all_steps_or_none_may_be_called_in_any_pieces():
    for options in ({}, {"norm": "input_batch", "input_statistics": "sequence"}):
        lstm, x, state, pieces = bnrnn.LSTM(I, H, **options), torch.randn(T, B, I), None, []
        bnrnn.estimate_population_statistics(lstm, [torch.randn(T, B, I)])
        for step in x:
            y, state = lstm.eval()(step[None], state)
            pieces.append(y)
        assert_near("y", lstm(x)[0], torch.cat(pieces), 1e-5)


def test_packed_sequences_and_other_layers_that_continue_warn_too():
    lstm, x = bnrnn.LSTM(I, H, norm="batch", t_max=T, statistics="running"), list(torch.randn(B, 2, I))
    _, state = lstm(pack_sequence(x))
    with pytest.warns(UserWarning, match=CONTINUES):
        lstm(pack_sequence(x), state)
    stack = bnrnn.Stack(BNRHN, I, H, 2, t_max=T).eval()
    with bnrnn.batch_statistics(stack):  # the statistics of a batch do not depend on the step
        _, state = stack(torch.randn(2, B, I))
        stack(torch.randn(2, B, I), state)
    with pytest.warns(UserWarning, match=CONTINUES), pytest.raises(BnrnnError, match="none were estimated"):
        stack(torch.randn(2, B, I), state)


def test_a_single_layer_that_continues_warns_too():
    layer, x = BNLSTM(I, H, T), torch.randn(T, B, I)
    bnrnn.estimate_population_statistics(layer, [x])
    y, _ = layer.eval()(x)
    first, state = layer(x[:2])
    assert_near("y", y, torch.cat([first, layer(x[2:], state, t_start=2)[0]]), 1e-5)
    with pytest.warns(UserWarning, match=CONTINUES):
        layer(x[2:], state)


def test_explicit_steps_and_copies_of_a_model_do_not_warn():
    lstm, x = bnrnn.LSTM(I, H, norm="batch", t_max=T), torch.randn(T, B, I)
    bnrnn.estimate_population_statistics(lstm, [x])
    _, state = lstm.eval()(x[:2])
    lstm(x[:2], state, t_start=0)
    file = io.BytesIO()
    torch.save(lstm, file)
    file.seek(0)
    for copied in (copy.deepcopy(lstm), torch.load(file, weights_only=False)):
        assert not copied.first_step.returned
        copied(x)


def test_a_state_that_was_returned_is_freed():
    lstm = bnrnn.LSTM(I, H, norm="batch", t_max=T)
    _, state = lstm(torch.randn(2, B, I))
    assert not any(ref.expired() for ref, _ in lstm.first_step.returned)
    del state
    assert all(ref.expired() for ref, _ in lstm.first_step.returned)
