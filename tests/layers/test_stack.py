"""bnrnn.LSTM compared with torch.nn.LSTM, and padded batches compared with single sequences."""

import copy
import io
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import bnrnn
from bnrnn import batch_statistics, estimate_population_statistics, scan
from bnrnn.errors import BnrnnError
from bnrnn.layers import base
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.lstm import LSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.rnn import RNN
from bnrnn.layers.stack import Stack, reverse
from bnrnn.scan.native import build
from tests.helpers import assert_near, without_shape_checks

T, B, I, H = 6, 5, 3, 4
LENGTHS = [4, 6, 2, 6, 3]
NORMS = [
    {"norm": "batch"},
    {"norm": "batch", "input_statistics": "sequence"},
    {"norm": "input_batch"},
    {"norm": "input_batch", "input_statistics": "sequence"},
]


@pytest.fixture
def _cpu_engine():
    scan.set_backend("cpu")
    yield
    scan.set_backend("auto")


def paired(dtype: torch.dtype = torch.float64, **options) -> tuple[bnrnn.LSTM, nn.LSTM]:
    """bnrnn.LSTM and torch.nn.LSTM with the same weights."""
    torchs = nn.LSTM(I, H, **options, dtype=dtype)
    ours = bnrnn.LSTM(I, H, **options, dtype=dtype)
    ours.load_state_dict(torchs.state_dict())
    return ours, torchs


def random_lstm(num_layers: int = 1, bidirectional: bool = False, **options) -> bnrnn.LSTM:
    """A module in float64 whose parameters are all random, so that a forgotten parameter changes the result."""
    lstm = bnrnn.LSTM(I, H, num_layers, bidirectional=bidirectional, t_max=T, dtype=torch.float64, **options)
    for parameter in lstm.parameters():
        nn.init.uniform_(parameter, -1, 1)
    return lstm


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def data(value: Tensor | PackedSequence) -> Tensor:
    return value.data if isinstance(value, PackedSequence) else value


def results(lstm: nn.Module, x: Tensor | PackedSequence, hx: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """Outputs, last states and all gradients, by name. The equal gradients of nn.LSTM's two biases are listed once."""
    torch.manual_seed(1)
    leaf = data(x).clone().requires_grad_()
    leaves = {"x": leaf}
    if hx is not None:
        hx = tuple(s.clone().requires_grad_() for s in hx)
        leaves |= {"h_0": hx[0], "c_0": hx[1]}
    y, (h, c) = lstm(x._replace(data=leaf) if isinstance(x, PackedSequence) else leaf, hx)
    values = {"y": data(y), "h_n": h, "c_n": c}
    loss = sum((v * torch.randn(v.shape, dtype=torch.float64).to(v.dtype)).sum() for v in values.values())
    of_torch = isinstance(lstm, nn.LSTM)
    parameters = {n: p for n, p in lstm.named_parameters() if not n.startswith("bias_hh")}
    inputs = leaves | {
        f"{'weight' if 'weight' in n else 'bias'} {i}": p
        for i, (n, p) in enumerate(parameters.items() if of_torch else in_torchs_order(parameters))
    }
    grads = torch.autograd.grad(loss, list(inputs.values()))
    return values | {f"gradient of {n}": g for n, g in zip(inputs, grads, strict=True)}


def in_torchs_order(parameters: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    order = ("weight_ih", "weight_hh", "bias")
    return sorted(parameters.items(), key=lambda item: (int(item[0].split(".")[1]), order.index(item[0].split(".")[2])))


def assert_same(ours: bnrnn.LSTM, torchs: nn.LSTM, x: Tensor | PackedSequence, hx: tuple | None) -> None:
    expected, found = results(torchs, x, hx), results(ours, x, hx)
    assert found.keys() == expected.keys()
    for name, ref in expected.items():
        assert found[name].shape == ref.shape
        assert_near(name, ref, found[name])


def states(lstm: bnrnn.LSTM, *batch_size: int) -> tuple[Tensor, Tensor]:
    shape = (lstm.num_layers * lstm.num_directions, *batch_size, H)
    return randn(*shape), randn(*shape)


def packed(lengths: list[int], enforce_sorted: bool = False) -> PackedSequence:
    return pack_sequence([randn(n, I) for n in lengths], enforce_sorted)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_state", [False, True])
def test_without_norm_it_is_nn_lstm_in_outputs_and_gradients(num_layers, bidirectional, bias, with_state):
    ours, torchs = paired(num_layers=num_layers, bidirectional=bidirectional, bias=bias)
    inputs = [
        (randn(T, B, I), (B,)),
        (randn(T, I), ()),
        (packed(LENGTHS), (B,)),
        (packed([6, 6, 4, 3, 2], enforce_sorted=True), (B,)),
        (packed([4, 4, 4]), (3,)),
        (packed([5]), (1,)),
    ]
    for x, batch_size in inputs:
        assert_same(ours, torchs, x, states(ours, *batch_size) if with_state else None)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_batch_first_is_that_of_nn_lstm(bidirectional):
    ours, torchs = paired(num_layers=2, bidirectional=bidirectional, batch_first=True)
    for x, batch_size in ((randn(B, T, I), (B,)), (randn(T, I), ()), (packed(LENGTHS), (B,))):
        assert_same(ours, torchs, x, states(ours, *batch_size))


@pytest.mark.skipif(build.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.usefixtures("_cpu_engine")
def test_the_compiled_engine_is_nn_lstm_in_float32():
    ours, torchs = paired(torch.float32, num_layers=2, bidirectional=True)
    for x in (randn(T, B, I).float(), packed(LENGTHS).to(torch.float32)):
        assert_same(ours, torchs, x, tuple(s.float() for s in states(ours, B)))


def test_at_random_shapes_it_is_nn_lstm():
    draw = random.Random(0)
    for _ in range(25):
        options = {
            "num_layers": draw.randint(1, 3),
            "bidirectional": draw.random() < 0.5,
            "bias": draw.random() < 0.7,
            "batch_first": draw.random() < 0.5,
        }
        sizes = draw.randint(1, 5), draw.randint(1, 6)
        torchs = nn.LSTM(*sizes, **options, dtype=torch.float64)
        ours = bnrnn.LSTM(*sizes, **options, dtype=torch.float64)
        ours.load_state_dict(torchs.state_dict())
        x = pack_sequence([randn(draw.randint(1, 9), sizes[0]) for _ in range(draw.randint(1, 7))], False)
        num_sequences = len(x.unsorted_indices)
        shape = (len(ours.layers), num_sequences, sizes[1])
        assert_same(ours, torchs, x, (randn(*shape), randn(*shape)))
        padded, lengths = pad_packed_sequence(x, batch_first=options["batch_first"])
        y, last = ours(padded, lengths=lengths)
        expected, expected_last = torchs(x)
        assert_near("y", pad_packed_sequence(expected, batch_first=options["batch_first"])[0], y)
        for name, ref, out in zip("hc", expected_last, last, strict=True):
            assert_near(name, ref, out)


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_output_is_interchangeable_with_that_of_nn_lstm(enforce_sorted):
    ours, torchs = paired(bidirectional=True)
    x = packed([6, 5, 5, 1] if enforce_sorted else [5, 1, 6, 5], enforce_sorted)
    (out, _), (ref, _) = ours(x), torchs(x)
    for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
        a, b = getattr(out, name), getattr(ref, name)
        assert a is b is None or torch.equal(a, b)
    (y, lengths), (expected, expected_lengths) = (pad_packed_sequence(value) for value in (out, ref))
    assert_near("unpacked", expected, y)
    assert torch.equal(lengths, expected_lengths)


# The state_dict


def test_the_state_dict_of_nn_lstm_within_a_larger_model_can_be_loaded():
    def model(lstm: nn.Module) -> nn.Module:
        return nn.ModuleDict({"encoder": nn.ModuleDict({"rnn": lstm}), "head": nn.Linear(8, 2)}).double()

    theirs = model(nn.LSTM(I, H, 2, bidirectional=True))
    ours = model(bnrnn.LSTM(I, H, 2, bidirectional=True))
    given = theirs.state_dict()
    names = list(given)
    ours.load_state_dict(given)
    assert list(given) == names
    x = randn(T, B, I)
    assert_near("y", theirs["encoder"]["rnn"](x)[0], ours["encoder"]["rnn"](x)[0])


def test_its_own_state_dict_is_restored_exactly():
    lstm, x = random_lstm(2, True, norm="batch"), randn(T, B, I)
    estimate_population_statistics(lstm, [x])
    stored = lstm.state_dict()
    assert set(stored) >= {"layers.0.weight_ih", "layers.3.bn_c.pop_var"}
    other = random_lstm(2, True, norm="batch")
    other.load_state_dict(stored)
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), stored.values(), strict=True))
    assert torch.equal(other.eval()(x)[0], lstm.eval()(x)[0])


def test_with_a_norm_strict_loading_names_what_nn_lstm_has_not_and_the_rest_is_loaded_without():
    theirs = nn.LSTM(I, H)
    ours = bnrnn.LSTM(I, H, norm="batch", t_max=T, gamma_init=0.3)
    with pytest.raises(RuntimeError, match=r"Missing key.*layers.0.bn_ih.gamma"):
        ours.load_state_dict(theirs.state_dict())
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert all("bn_" in name for name in missing) and not unexpected
    (layer,) = ours.layers
    assert torch.equal(layer.weight_hh, theirs.weight_hh_l0)
    assert torch.equal(layer.bias, theirs.bias_ih_l0 + theirs.bias_hh_l0)
    assert (layer.bn_hh.gamma == torch.tensor(0.3)).all()


@pytest.mark.parametrize(
    ("theirs", "ours", "key"),
    [
        ({"num_layers": 2}, {}, "weight_ih_l1"),
        ({"bidirectional": True}, {}, "weight_ih_l0_reverse"),
        ({}, {"bias": False}, "bias_ih_l0"),
        ({"proj_size": 2}, {}, "weight_hr_l0"),
        ({"bias": False}, {}, "layers.0.bias"),
        ({}, {"num_layers": 2}, "layers.1.weight_ih"),
    ],
)
def test_strict_loading_names_what_does_not_fit(theirs, ours, key):
    with pytest.raises(RuntimeError, match=f'key.*"{key}"'):
        bnrnn.LSTM(I, H, **ours).load_state_dict(nn.LSTM(I, H, **theirs).state_dict())


def test_a_copy_and_a_pickled_one_still_load_and_run():
    lstm, theirs, x = bnrnn.LSTM(I, H), nn.LSTM(I, H), torch.randn(T, B, I)
    torch.save(lstm, file := io.BytesIO())
    file.seek(0)
    for other in (copy.deepcopy(lstm), torch.load(file, weights_only=False)):
        assert torch.equal(other(x)[0], lstm(x)[0])
        other.load_state_dict(theirs.state_dict())
        assert_near("y", theirs(x)[0], other(x)[0])


def test_it_can_be_made_on_another_device_and_in_another_dtype():
    lstm = bnrnn.LSTM(I, H, norm="batch", t_max=T, device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in lstm.parameters()} == {("meta", torch.float64)}


# Sequences of different lengths, with statistics of the batch


def with_padding(x: Tensor, fill: float) -> Tensor:
    """x (T, B, I) with other values in the padding of LENGTHS."""
    padding = torch.arange(len(x))[:, None] >= torch.tensor(LENGTHS)
    return x.masked_fill(padding[..., None], fill)


def padded_results(lstm: bnrnn.LSTM, x: Tensor, hx: tuple[Tensor, Tensor], lengths: list[int]) -> dict[str, Tensor]:
    """y, states and all gradients of a loss that weights all sequences equally."""
    torch.manual_seed(1)
    x, *hx = (v.clone().requires_grad_() for v in (x, *hx))
    y, (h, c) = lstm(x, tuple(hx), lengths=lengths)
    weights = [torch.randn(len(v), 1, v.shape[2], dtype=torch.float64) for v in (y, h, c)]
    loss = sum((v * w).sin().sum() for v, w in zip((y, h, c), weights, strict=True))
    names, leaves = zip(*lstm.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, (x, *hx, *leaves))
    return {"y": y, "h_n": h, "c_n": c, **dict(zip(("dx", "dh_0", "dc_0", *names), grads, strict=True))}


def statistics(lstm: nn.Module) -> dict[str, Tensor]:
    return {n: v for n, v in lstm.named_buffers() if "pop_" in n}


@pytest.mark.parametrize("norm", NORMS)
def test_values_in_the_padding_do_not_matter(norm):
    lstm, x = random_lstm(2, True, **norm), randn(T, B, I)
    hx = states(lstm, B)
    expected = padded_results(lstm, with_padding(x, 0), hx, LENGTHS)
    seen = []
    for fill in (0.0, 100.0, torch.nan, torch.inf):
        found = padded_results(lstm, with_padding(x, fill), hx, LENGTHS)
        assert all(torch.equal(found[name], ref) for name, ref in expected.items())
        estimate_population_statistics(partial_module(lstm, lengths=LENGTHS), [with_padding(x, fill)])
        seen.append(copy.deepcopy(statistics(lstm)))
    for other in seen[1:]:
        assert all(torch.equal(other[name], ref) for name, ref in seen[0].items())
    padding = torch.arange(T)[:, None] >= torch.tensor(LENGTHS)
    assert (expected["y"][padding] == 0).all()
    assert (expected["dx"][padding] == 0).all()


def partial_module(lstm: nn.Module, **arguments) -> nn.Module:
    """The module with further arguments of forward."""

    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = lstm

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x, **arguments)[0]

    return Partial()


@pytest.mark.parametrize("norm", [{}, *NORMS])
def test_the_order_of_the_sequences_does_not_matter(norm):
    lstm = random_lstm(2, True, **norm)
    x, hx = with_padding(randn(T, B, I), 0), states(lstm, B)
    expected = padded_results(lstm, x, hx, LENGTHS)
    for _ in range(3):
        order = torch.randperm(B)
        found = padded_results(lstm, x[:, order], tuple(s[:, order] for s in hx), [LENGTHS[b] for b in order])
        for name, ref in expected.items():
            in_order = ref[:, order] if name in ("y", "h_n", "c_n", "dx", "dh_0", "dc_0") else ref
            assert_near(name, in_order, found[name], 1e-8)


@pytest.mark.parametrize("norm", NORMS)
def test_a_packed_sequence_is_a_padded_batch(norm):
    lstm, x, hx = random_lstm(2, True, **norm), randn(T, B, I), (randn(4, B, H), randn(4, B, H))
    y, last = lstm(x, hx, lengths=LENGTHS)
    out, last_packed = lstm(pack_padded_sequence(x, LENGTHS, enforce_sorted=False), hx)
    unpacked, lengths = pad_packed_sequence(out)
    assert lengths.tolist() == LENGTHS
    for name, ref, value in zip("yhc", (y, *last), (unpacked, *last_packed), strict=True):
        assert_near(name, ref, value)


@pytest.mark.parametrize("norm", [{}, *NORMS])
def test_equal_lengths_are_no_lengths_and_steps_beyond_all_of_them_are_zero(norm):
    lstm, x = random_lstm(2, True, **norm), randn(T, B, I)
    y, last = lstm(x[:4])
    assert torch.equal(lstm(x[:4], lengths=[4] * B)[0], y)
    for lengths in ([4] * B, torch.full((B,), 4), torch.full((B,), 4, dtype=torch.int32)):
        padded, padded_last = lstm(x, lengths=lengths)
        assert torch.equal(padded[:4], y) and (padded[4:] == 0).all()
        assert all(torch.equal(a, b) for a, b in zip(padded_last, last, strict=True))


def test_reversing_twice_gives_back_the_unpadded_part_and_the_padding_stays():
    lengths, x = torch.tensor(LENGTHS), torch.randn(T, B, I)
    once = reverse(x, lengths)
    assert torch.equal(reverse(once, lengths), x)
    for b, n in enumerate(LENGTHS):
        assert torch.equal(once[:n, b], x[:n, b].flip(0))
        assert torch.equal(once[n:, b], x[n:, b])
    assert torch.equal(reverse(x), reverse(x, torch.full((B,), T)))


def test_the_backward_direction_reads_each_unpadded_part_from_its_end():
    lstm, x = random_lstm(bidirectional=True), randn(T, B, I)
    y, (h, c) = lstm(x, lengths=LENGTHS)
    for b, n in enumerate(LENGTHS):
        for d, layer in enumerate(lstm.layers):
            own = x[:n, b : b + 1]
            y_b, (h_b, c_b) = layer(own.flip(0) if d else own)
            assert_near("y", (y_b.flip(0) if d else y_b)[:, 0], y[:n, b, d * H : (d + 1) * H])
            assert_near("h", h_b[0], h[d, b])
            assert_near("c", c_b[0], c[d, b])


@pytest.mark.parametrize("norm", NORMS)
def test_with_a_norm_too_the_backward_direction_is_a_layer_on_reversed_input(norm):
    lstm, x = random_lstm(bidirectional=True, **norm), randn(T, B, I)
    y, (h, _) = lstm(x)
    forwards, backwards = (layer(v) for layer, v in zip(lstm.layers, (x, x.flip(0)), strict=True))
    assert torch.equal(y, torch.cat([forwards[0], backwards[0].flip(0)], dim=2))
    assert torch.equal(h, torch.stack([forwards[1][0], backwards[1][0]]))


def products(lstm: bnrnn.LSTM, x: Tensor) -> Tensor:
    return x @ lstm.layers[0].weight_ih.T


def of_padded(lstm: bnrnn.LSTM, x: Tensor, lengths: list[int]) -> SequenceBatchNorm:
    """The input norm with the statistics of one padded batch."""
    estimate_population_statistics(partial_module(lstm, lengths=lengths), [x])
    return lstm.layers[0].bn_ih


@pytest.mark.parametrize("norm", ["batch", "input_batch"])
def test_statistics_over_time_are_flat_ones_of_the_unpadded_frames(norm):
    lstm, x = random_lstm(norm=norm, input_statistics="sequence"), randn(T, B, I)
    frames = torch.cat([products(lstm, x[:n, b]) for b, n in enumerate(LENGTHS)])
    found = of_padded(lstm, x, LENGTHS)
    assert_near("mean", frames.mean(0), found.pop_mean[0])
    assert_near("var", frames.var(0, correction=0), found.pop_var[0])
    expected = found.pop_var.clone()
    more = of_padded(lstm, torch.cat([x, torch.full((3, B, I), 7.0, dtype=torch.float64)]), LENGTHS).pop_var
    assert_near("var with more padding", expected, more)


def test_sequence_wise_normalization_is_written_out_in_laurent_eqs_20_and_21():
    lstm, x = random_lstm(norm="input_batch", input_statistics="sequence"), randn(T, B, I)
    (layer,) = lstm.layers
    frames = torch.cat([products(lstm, x[:n, b]) for b, n in enumerate(LENGTHS)])
    normed = nn.functional.batch_norm(frames, None, None, layer.bn_ih.gamma, layer.bias, training=True)
    plain = nn.LSTM(4 * H, H, bias=False, dtype=torch.float64)  # its input is the output of the normalization
    with torch.no_grad():
        plain.weight_ih_l0.copy_(torch.eye(4 * H))
        plain.weight_hh_l0.copy_(layer.weight_hh)
    expected, last = plain(pack_sequence(normed.split(LENGTHS), enforce_sorted=False))
    y, found = lstm(x, lengths=LENGTHS)
    assert_near("y", pad_packed_sequence(expected)[0], y)
    assert_near("h", last[0], found[0])


def test_statistics_per_time_step_are_of_the_sequences_that_still_run():
    lstm, x = random_lstm(norm="input_batch"), randn(T, B, I)
    found = of_padded(lstm, x, LENGTHS)
    for t in range(T):
        running = [b for b, n in enumerate(LENGTHS) if n > t]
        assert_near(f"mean {t}", products(lstm, x[t, running]).mean(0), found.pop_mean[t])
        assert_near(f"var {t}", products(lstm, x[t, running]).var(0, correction=0), found.pop_var[t])
    before = found.pop_mean.clone()
    after = of_padded(lstm, torch.cat([x, randn(T, 1, I)], dim=1), [*LENGTHS, 2]).pop_mean
    assert (before[:2] != after[:2]).all()
    assert_near("later steps", before[2:], after[2:])


def test_where_a_single_sequence_is_left_its_normalized_value_is_the_shift_alone():
    lstm, x = random_lstm(norm="input_batch"), randn(T, 2, I)
    other = x.clone()
    other[4:, 1] += 5
    lengths = [4, T]
    assert_near("y", lstm(x, lengths=lengths)[0], lstm(other, lengths=lengths)[0])


@pytest.mark.parametrize("norm", NORMS)
def test_population_statistics_are_estimated_from_packed_sequences(norm):
    lstm, x = random_lstm(2, True, **norm), randn(T, B, I)
    lengths = [6, 5, 6, 2, 2]
    batch = pack_padded_sequence(x, lengths, enforce_sorted=False)
    estimate_population_statistics(lstm, [batch])
    assert not any(v.isnan().any() for v in statistics(lstm).values())
    lstm.eval()
    with batch_statistics(lstm):
        expected = lstm(batch)[0].data
    assert_near("y", expected, lstm(batch)[0].data)
    y, _ = lstm(x, lengths=lengths)
    for b, n in enumerate(lengths):  # evaluation depends neither on the batch nor on the padding
        assert_near("alone", y[:n, b], lstm(x[:n, b])[0])


@pytest.mark.parametrize("norm", [{}, *NORMS])
def test_padded_batches_in_bounded_memory_give_the_same(norm, monkeypatch):
    lstm, x = random_lstm(2, True, **norm), randn(T, B, I)
    lengths = [6, 5, 3, 2, 2]
    model = partial_module(lstm, lengths=lengths)
    with torch.no_grad():
        estimate_population_statistics(model, [x])
        whole, expected = model.eval()(x), copy.deepcopy(statistics(lstm))
        monkeypatch.setattr(base, "MAX_PRODUCT_SIZE", 2 * B * 4 * H)  # two steps at once
        assert_near("in pieces", whole, model(x))
        estimate_population_statistics(model, [x])
    for name, value in statistics(lstm).items():
        assert_near(name, expected[name], value)


@pytest.mark.parametrize("norm", [{}, *NORMS])
def test_evaluation_in_pieces_is_that_of_the_whole(norm):
    lstm, x = random_lstm(2, **norm), randn(T, B, I)
    estimate_population_statistics(lstm, [x])
    lstm.eval()
    y, last = lstm(x)
    first, state = lstm(x[:2])
    second, state = lstm(x[2:], state, t_start=2)
    assert_near("y", y, torch.cat([first, second]))
    for ref, value in zip(last, state, strict=True):
        assert_near("state", ref, value)


@pytest.mark.parametrize("norm", [{}, *NORMS])
def test_under_autocast_products_are_bfloat16_and_states_float32(norm):
    lstm = bnrnn.LSTM(I, H, 2, bidirectional=True, t_max=T, **norm)
    x = torch.randn(T, B, I)
    ref, _ = lstm(x)
    with torch.autocast("cpu", torch.bfloat16):
        given = lstm(x), lstm(x, lengths=[T] * B), lstm(x.bfloat16()), lstm(x.bfloat16(), lengths=[T] * B)
        for y, (h, c) in given:
            assert (y.dtype, h.dtype, c.dtype) == (torch.bfloat16, torch.float32, torch.float32)
            assert_near("y", ref, y.float(), 0.05)
        _, (h, c) = lstm(pack_padded_sequence(x.bfloat16(), LENGTHS, enforce_sorted=False))
        assert h.dtype == c.dtype == torch.float32
        y, _ = lstm(x, lengths=LENGTHS)
        y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in lstm.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [{}, *NORMS])
def test_padded_and_packed_batches_on_a_gpu_give_what_they_give_on_the_cpu(norm):
    lstm, x = random_lstm(2, True, **norm), randn(T, B, I)
    y, last = lstm(x, lengths=LENGTHS)
    lstm, x = lstm.cuda(), x.cuda()
    for lengths in (LENGTHS, torch.tensor(LENGTHS).cuda()):
        on_gpu, last_on_gpu = lstm(x, lengths=lengths)
        for name, ref, value in zip("yhc", (y, *last), (on_gpu, *last_on_gpu), strict=True):
            assert_near(name, ref, value.cpu())
    out, last_packed = lstm(pack_padded_sequence(x, LENGTHS, enforce_sorted=False), (x.new_zeros(4, B, H),) * 2)
    for name, ref, value in zip("yhc", (y, *last), (pad_packed_sequence(out)[0], *last_packed), strict=True):
        assert_near(name, ref, value.cpu())


@pytest.mark.parametrize("norm", [{}, *NORMS])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_with_everything_in_bfloat16_it_is_near_float32(norm, lengths):
    full = bnrnn.LSTM(I, 32, 2, t_max=T, **norm)
    low = copy.deepcopy(full).bfloat16()
    x = torch.randn(T, B, I)
    for mode in ("train", "eval"):
        for lstm, inputs in ((full, x), (low, x.bfloat16())):
            if mode == "eval":
                estimate_population_statistics(lstm, [inputs])
            getattr(lstm, mode)()
        y, _ = low(x.bfloat16(), lengths=lengths)
        assert y.dtype == torch.bfloat16
        assert_near("y", full(x, lengths=lengths)[0], y.float(), 0.1)
        if mode == "train":
            y.float().square().sum().backward()
            assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in low.parameters())


# Dropout


def test_dropout_zeroes_and_scales_what_goes_between_layers_and_nothing_after_the_last():
    lstm, x = random_lstm(2), randn(T, 200, I)
    lstm.dropout = 0.25
    seen: list[Tensor] = []
    lstm.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    y, _ = lstm(x)
    between, _ = lstm.layers[0](x)
    kept = seen[0] != 0
    assert abs(kept.double().mean().item() - 0.75) < 0.02
    assert_near("kept", between[kept] / 0.75, seen[0][kept])
    assert (y != 0).all()
    lstm.eval()(x)
    assert torch.equal(seen[1], between)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "weight"}, "norm='weight' is unknown: use None, 'batch', 'input_batch', 'layer'"),
        ({"norm": "batch"}, "norm='batch' keeps population statistics .* t_max"),
        ({"norm": "batch", "input_statistics": "sequence"}, "t_max"),
        ({"norm": "input_batch"}, "t_max"),
        ({"norm": "batch", "t_max": 0}, "t_max must be at least 1"),
        ({"norm": "batch", "t_max": 3, "input_statistics": "step"}, "input_statistics='step' is unknown: use 'frame'"),
        ({"gamma_init": 0.1}, "need a normalization: set norm"),
        ({"input_statistics": "sequence"}, "need a normalization: set norm"),
        ({"norm": "input_batch", "t_max": 3, "bias": False}, "needs bias=True"),
        ({"proj_size": 2}, "proj_size=2 is not supported"),
        ({"dropout": 1.5}, r"dropout must be a finite number from 0.0 to 1.0, got 1.5"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with without_shape_checks(), pytest.raises(BnrnnError, match=message):
        bnrnn.LSTM(**{"input_size": I, "hidden_size": H} | options)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda lstm: lstm(torch.zeros(T, B, I + 1)), r"\(T, B, I\) or \(T, I\) with I = 3, got shape \(6, 5, 4\)"),
        (lambda lstm: lstm(torch.zeros(T)), r"got shape \(6,\)"),
        (lambda lstm: lstm(torch.zeros(0, B, I)), "length 0"),
        (
            lambda lstm: lstm(torch.zeros(T, B, I), (torch.zeros(1, B, H),) * 2),
            r"\(2, 5, 4\); got shapes \[\(1, 5, 4\)",
        ),
        (lambda lstm: lstm(torch.zeros(T, I), (torch.zeros(2, 1, H),) * 2), r"\(2, 4\); got shapes \[\(2, 1, 4\)"),
        (lambda lstm: lstm(pack_sequence([torch.zeros(T, I)]), (torch.zeros(2, 2, H),) * 2), r"\(2, 1, 4\); got"),
        (lambda lstm: lstm(pack_sequence([torch.zeros(T, I + 1)])), r"packed frames \(N, 3\), got shape \(6, 4\)"),
        (lambda lstm: lstm(pack_sequence([torch.zeros(T, I)]), lengths=[T]), "which has its own lengths"),
        (lambda lstm: lstm(torch.zeros(T, B, I), t_start=1), "t_start=1: a bidirectional stack needs the whole"),
    ],
)
def test_bad_input_is_named(run: Callable, message):
    with pytest.raises(BnrnnError, match=message):
        run(bnrnn.LSTM(I, H, bidirectional=True))


@pytest.mark.parametrize(
    "lengths", [[T] * (B - 1), [T + 1] * B, [0, *[T] * (B - 1)], torch.full((B,), 2.0), torch.full((B, 1), 2)]
)
def test_bad_lengths_are_named(lengths):
    with pytest.raises(BnrnnError, match="lengths must be 5 integers between 1 and 6, one per sequence; got"):
        bnrnn.LSTM(I, H)(torch.zeros(T, B, I), lengths=lengths)


def test_a_nan_is_found_where_it_was_given():
    x = torch.zeros(T, B, I)
    x[3, 3] = torch.nan
    lstm, place = bnrnn.LSTM(I, H, 2), "first at time step 3 of sequence 3 of the batch"
    for lengths in (None, LENGTHS):
        with pytest.raises(BnrnnError, match=place):
            lstm(x, lengths=lengths)
    with pytest.raises(BnrnnError, match=place):
        lstm(pack_padded_sequence(x, LENGTHS, enforce_sorted=False))


def test_a_nan_inside_the_stack_is_not_reported_as_bad_input():
    lstm = bnrnn.LSTM(I, H, 2)
    nn.init.constant_(lstm.layers[0].weight_hh, torch.nan)
    assert lstm(torch.zeros(T, B, I))[0].isnan().any()


def test_batch_first_is_named_in_the_error():
    with pytest.raises(BnrnnError, match=r"expects \(B, T, I\)"):
        bnrnn.LSTM(I, H, batch_first=True)(torch.zeros(B, T, I + 1))


def test_a_single_sequence_cannot_train_a_batch_norm():
    with pytest.raises(BnrnnError, match="at least 2 sequences"):
        random_lstm(norm="batch")(randn(T, I))


def test_dropout_without_effect_is_a_warning_as_in_nn_lstm():
    with pytest.warns(UserWarning, match="dropout has no effect: it acts between layers"):
        bnrnn.LSTM(I, H, dropout=0.5)


def test_statistics_over_time_alone_need_no_t_max():
    lstm = bnrnn.LSTM(I, H, norm="input_batch", input_statistics="sequence")
    lstm(torch.randn(T, B, I))
    assert lstm.layers[0].bn_ih.gamma.unique().tolist() == [1.0]
    assert bnrnn.LSTM(I, H, norm="batch", t_max=T).layers[0].bn_hh.gamma.unique().tolist() == pytest.approx([0.1])


# Other layers


@pytest.mark.parametrize("layer", [LSTM, partial(BNLSTM, gamma_init=0.5), RNN, BNRNN])
def test_a_stack_of_any_layer_is_its_layers_one_after_the_other(layer):
    stack, x = Stack(layer, I, H, num_layers=3, t_max=T), torch.randn(T, B, I)
    y, state = stack(x)
    assert [name for name, _ in zip(stack.state_names, state, strict=True)] == list(stack.state_names)
    for k, single in enumerate(stack.layers):
        x, last = single(x)
        assert all(torch.equal(s[k], v) for s, v in zip(state, last, strict=True))
    assert torch.equal(x, y)
