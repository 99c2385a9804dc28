"""`reset`: episodes that begin within a sequence give what each episode gives alone."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import bnrnn
from bnrnn import scan
from bnrnn.errors import BnrnnError
from bnrnn.scan.native import build
from tests.helpers import assert_near, without_shape_checks

T, B, I, H = 9, 5, 3, 7
RESET = torch.zeros(T, B, dtype=torch.bool)
RESET[[0, 4, 4, 5, 8], [1, 0, 2, 2, 4]] = True  # at the beginning and the end, twice in a row, and never in row 3
ENGINES = [
    pytest.param("cpu", marks=pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")),
    "reference",
    "fused",
]


@pytest.fixture(autouse=True)
def _engine_of_before():
    yield
    scan.set_backend("auto")


def drawn(num_layers: int = 2) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    h, c = torch.randn(2, num_layers, B, H).requires_grad_().unbind(0)
    return torch.randn(T, B, I, requires_grad=True), (h, c)


def by_rows(layer: nn.Module, x: Tensor, state: tuple[Tensor, ...] | Tensor, **options):
    """Each episode of each row alone, from the state zero if it begins within the sequence."""
    rows = []
    for b in range(B):
        steps = [0, *(t for t in range(1, T) if RESET[t, b]), T]
        given = [s[:, b : b + 1] * (not RESET[0, b]) for s in (state if isinstance(state, tuple) else (state,))]
        ys, last = [], ()
        for begin, end in pairwise(steps):
            before = [torch.zeros_like(s) for s in given] if begin else given
            more = {"t_start": begin} if options.get("counts") else {}
            y, last = layer(x[begin:end, b : b + 1], tuple(before) if len(before) > 1 else before[0], **more)
            ys.append(y)
        rows.append((torch.cat(ys), *(last if isinstance(last, tuple) else (last,))))
    return [torch.cat(values, dim=1) for values in zip(*rows, strict=True)]


def assert_same(ours: list[Tensor], expected: list[Tensor], pairs: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    """Outputs agree, and so do the gradients of a loss of all of them: each pair has tensors of either side."""
    mine, theirs = (
        torch.autograd.grad(
            torch.stack([v.sin().sum() for v in outputs]).sum(), [p for pair in pairs for p in pair[side]]
        )
        for side, outputs in enumerate((ours, expected))
    )
    for n, (out, ref) in enumerate(zip([*ours, *mine], [*expected, *theirs], strict=True)):
        assert_near(str(n), ref, out)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int64])
def test_an_lstm_is_nn_lstm_on_each_episode_alone(engine, kind):
    scan.set_backend(engine)
    theirs, ours = nn.LSTM(I, H, 2), bnrnn.LSTM(I, H, 2)
    ours.load_state_dict(theirs.state_dict())
    x, state = drawn()
    y, last = ours(x, state, reset=RESET.to(kind))
    names = [f"{name}_l{n}" for n in (0, 1) for name in ("weight_ih", "weight_hh", "bias_ih")]
    weights = [getattr(ours, name) for name in names], [getattr(theirs, name) for name in names]
    assert_same([y, *last], by_rows(theirs, x, state), [([x, *state], [x, *state]), weights])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gru_is_nn_gru_on_each_episode_alone(engine):
    scan.set_backend(engine)
    theirs, ours = nn.GRU(I, H, 2), bnrnn.GRU(I, H, 2)
    ours.load_state_dict(theirs.state_dict())
    x, (h, _) = drawn()
    y, last = ours(x, h, reset=RESET)
    assert_same([y, last], by_rows(theirs, x, h), [([x, h], [x, h])])


@pytest.mark.parametrize("options", [{"norm": "layer"}, {"norm": "layer", "zoneout": (0.3, 0.2)}])
def test_a_normalized_layer_computes_each_episode_alone(options):
    layer = bnrnn.LSTM(I, H, 2, **options).eval()
    x, state = drawn()
    y, last = layer(x, state, reset=RESET)
    given = [x, *state, *layer.parameters()]
    assert_same([y, *last], by_rows(layer, x, state), [(given, given)])


@pytest.mark.parametrize("norm", ["batch", "input_batch"])
def test_statistics_per_time_step_are_those_of_the_steps_of_the_call(norm):
    def make() -> bnrnn.LSTM:
        torch.manual_seed(3)
        return bnrnn.LSTM(I, H, 2, norm=norm, t_max=T + 2, statistics="running")

    x, state = drawn()
    whole, looped = make(), make()
    y, last = whole(x, state, t_start=2, reset=RESET)
    ys, now = [], state
    for t in range(T):
        kept = ~RESET[t][:, None]
        step, now = looped(x[t : t + 1], tuple(s * kept for s in now), t_start=2 + t)
        ys.append(step)
    given = [[x, *state, *layer.parameters()] for layer in (whole, looped)]
    assert_same([y, *last], [torch.cat(ys), *now], [(given[0], given[1])])
    for name, value in looped.named_buffers():
        assert_near(name, value.float(), whole.get_buffer(name).float())
    y, last = whole.eval()(x, state, t_start=0, reset=RESET)
    for ref, out in zip(by_rows(whole, x, state, counts=True), [y, *last], strict=True):
        assert_near("evaluation", ref, out)


def test_a_state_that_is_not_given_is_zero_and_no_reset_changes_nothing():
    layer, (x, _) = bnrnn.LSTM(I, H), drawn()
    zeros = torch.zeros(1, B, H)
    assert torch.equal(layer(x, reset=RESET)[0], layer(x, (zeros, zeros), reset=RESET)[0])
    assert torch.equal(layer(x, reset=torch.zeros(T, B))[0], layer(x)[0])


def test_a_reset_row_forgets_even_what_is_not_a_number():
    layer, (x, _) = bnrnn.LSTM(I, H), drawn()
    lost = torch.full((1, B, H), torch.nan)
    assert layer(x, (lost, lost), reset=torch.ones(T, B))[0].isfinite().all()


def test_other_forms_of_the_input_have_the_same_form_of_reset():
    layer, (x, _) = bnrnn.LSTM(I, H, batch_first=True), drawn()
    expected = bnrnn.LSTM(I, H)
    expected.load_state_dict(layer.state_dict())
    y, (h, c) = expected(x, reset=RESET)
    first, (h_n, c_n) = layer(x.transpose(0, 1), reset=RESET.t())
    assert torch.equal(first.transpose(0, 1), y) and torch.equal(h_n, h) and torch.equal(c_n, c)
    single, (h_n, _) = layer(x[:, 2], reset=RESET[:, 2])
    assert_near("y", y[:, 2], single)
    assert_near("h", h[:, 2], h_n)


def test_a_recorded_program_takes_any_reset():
    layer, (x, state) = bnrnn.LSTM(I, H, 2), drawn()
    program = torch.export.export(layer, (x.detach(), None), {"reset": RESET}).module()
    for reset in (RESET, RESET.flip(0)):
        assert_near("y", layer(x, reset=reset)[0], program(x.detach(), None, reset=reset)[0])
    compiled = torch.func.functional_call(layer, dict(layer.named_parameters()), (x, state), {"reset": RESET})[0]
    assert torch.equal(compiled, layer(x, state, reset=RESET)[0])


@pytest.mark.parametrize(
    ("reset", "message"),
    [
        (torch.zeros(B, T), r"a tensor of shape \(9, 5\), of bool or of 0 and 1: got \(5, 9\) of torch.float32"),
        (torch.zeros(T), r"a tensor of shape \(9, 5\), of bool or of 0 and 1: got \(9,\) of torch.float32"),
        ([[True] * B] * T, "a tensor of shape .* got list"),
        (torch.full((T, B), 2), r"reset must be bool, or 0 and 1: got other values in \(9, 5\) of torch.int64"),
        (torch.full((T, B), torch.nan), "reset must be bool, or 0 and 1: got other values"),
    ],
)
def test_a_wrong_reset_is_named(reset, message):
    with without_shape_checks(), pytest.raises(BnrnnError, match=message):
        bnrnn.LSTM(I, H)(torch.randn(T, B, I), reset=reset)


def test_what_reset_excludes_is_named():
    x = torch.randn(T, B, I)
    with pytest.raises(BnrnnError, match="a bidirectional stack needs the whole sequence at once"):
        bnrnn.LSTM(I, H, bidirectional=True)(x, reset=RESET)
    with pytest.raises(BnrnnError, match="reset and lengths exclude each other"):
        bnrnn.LSTM(I, H)(x, lengths=[T] * B, reset=RESET)
    with pytest.raises(BnrnnError, match="t_start and reset do not apply to a PackedSequence"):
        bnrnn.LSTM(I, H)(pack_sequence([x[:, 0]]), reset=RESET[:, :1])
    over_time = bnrnn.LSTM(I, H, norm="input_batch", input_statistics="sequence", statistics="running")
    with pytest.raises(BnrnnError, match="statistics over time need the whole sequence at once"):
        over_time(x, reset=RESET)
    over_time.eval()(x, reset=RESET)
