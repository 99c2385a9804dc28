"""bnrnn.LSTM in programs that were written for torch.nn.LSTM: names, state_dicts, what they print and get wrong."""

import math
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import bnrnn
from bnrnn import batch_statistics, estimate_population_statistics
from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.lstm import LSTM
from bnrnn.layers.rhn import RHN
from bnrnn.layers.stack import Stack
from tests.helpers import assert_near, forked, without_shape_checks

T, B, I, H = 4, 6, 3, 5
SHAPES = [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}]


@pytest.mark.parametrize("options", SHAPES)
def test_the_weights_have_the_names_and_the_order_of_nn_lstm(options):
    ours, theirs = bnrnn.LSTM(I, H, **options), nn.LSTM(I, H, **options)
    ours.load_state_dict(theirs.state_dict())
    for name, value in theirs.named_parameters():
        expected = value
        if name.startswith("bias"):  # one here: the sum of the two
            of_ih = name.startswith("bias_ih")
            expected = value + getattr(theirs, name.replace("ih", "hh")) if of_ih else torch.zeros_like(value)
        assert torch.equal(getattr(ours, name), expected)
    assert [[w.shape for w in of_one] for of_one in ours.all_weights] == [
        [w.shape for w in of_one] for of_one in theirs.all_weights
    ]
    with pytest.raises(AttributeError, match="weight_ih_l7"):
        ours.weight_ih_l7  # noqa: B018


def test_initialization_by_name_reaches_the_weights():
    lstm, x = bnrnn.LSTM(I, H, norm="batch", t_max=T), torch.randn(T, B, I)
    before = lstm(x)[0]
    nn.init.orthogonal_(lstm.weight_hh_l0)
    lstm.bias_ih_l0.data[H : 2 * H].fill_(1)
    assert not torch.allclose(lstm(x)[0], before)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):  # what would be lost is refused
        lstm.bias_hh_l0.data[H : 2 * H].fill_(1)


@pytest.mark.parametrize("value", [torch.zeros(4 * H, H), nn.Parameter(torch.zeros(4 * H, H))])
def test_a_weight_cannot_be_hidden_by_an_attribute_of_its_name(value):
    lstm = bnrnn.LSTM(I, H, 2, bidirectional=True)
    with pytest.raises(BnrnnError, match=r"weight_hh_l1_reverse cannot be set: set layers\[3\].weight_hh to an nn"):
        lstm.weight_hh_l1_reverse = value
    with pytest.raises(BnrnnError, match=r"bias_hh_l0 cannot be set: set layers\[0\].bias to an nn"):
        lstm.bias_hh_l0 = value
    lstm.layers[3].weight_hh = nn.Parameter(value)
    assert not lstm.weight_hh_l1_reverse.any()


def test_weight_norm_takes_a_layer_and_its_own_name_of_a_weight():
    lstm, x = bnrnn.LSTM(I, H, norm="batch", t_max=T), torch.randn(T, B, I)
    y = lstm(x)[0]
    nn.utils.parametrizations.weight_norm(lstm.layers[0], "weight_hh")
    assert_near("y", y, lstm(x)[0])
    assert lstm.layers[0].parametrizations.weight_hh.original0.shape == (4 * H, 1)


def test_it_has_the_options_of_nn_lstm_as_attributes():
    ours, theirs = bnrnn.LSTM(I, H, 2, dropout=0.5), nn.LSTM(I, H, 2, dropout=0.5)
    for name in (
        "input_size",
        "hidden_size",
        "num_layers",
        "bias",
        "batch_first",
        "dropout",
        "bidirectional",
        "proj_size",
    ):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize("statistics", ["exact", "running"])
def test_reset_parameters_leaves_nothing_of_an_earlier_training(statistics):
    def make(device: str) -> bnrnn.LSTM:
        return bnrnn.LSTM(I, H, 2, norm="batch", t_max=T, statistics=statistics, gamma_init=0.3, device=device)

    torch.manual_seed(1)
    new = make("cpu").state_dict()
    trained, unfilled = make("cpu"), make("meta").to_empty(device="cpu")
    trained(torch.randn(T, B, I))
    for value in (*trained.parameters(), *unfilled.state_dict().values()):
        value.data.fill_(7)
    for lstm in (trained, unfilled):
        torch.manual_seed(1)
        lstm.reset_parameters()
        for name, value in lstm.state_dict().items():
            torch.testing.assert_close(value, new[name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layer", [LSTM, InputBNLSTM])
def test_the_shift_of_the_cell_is_reset_too(layer):
    single = layer(I, H, t_max=T, cell_bias=True)
    nn.init.ones_(single.beta_c)
    single.reset_parameters()
    assert not single.beta_c.any()


@pytest.mark.parametrize("options", SHAPES)
def test_without_norm_the_state_dict_goes_back_into_nn_lstm(options):
    ours, x = bnrnn.LSTM(I, H, **options), torch.randn(T, B, I)
    theirs = nn.LSTM(I, H, **options)
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_near("y", theirs(x)[0], ours(x)[0])
    inside = nn.ModuleDict({"rnn": nn.LSTM(I, H, **options)})
    inside.load_state_dict(nn.ModuleDict({"rnn": ours}).state_dict())
    assert_near("within a model", theirs(x)[0], inside["rnn"](x)[0])
    again = bnrnn.LSTM(I, H, **options)
    again.load_state_dict(ours.state_dict())
    assert_near("and back", ours(x)[0], again(x)[0])


def test_a_state_dict_of_our_own_names_is_still_loaded():
    lstm, x = bnrnn.LSTM(I, H), torch.randn(T, B, I)
    earlier = {name: p.detach().clone() for name, p in lstm.named_parameters()}
    assert "layers.0.weight_ih" in earlier
    again = bnrnn.LSTM(I, H)
    again.load_state_dict(earlier)
    assert torch.equal(lstm(x)[0], again(x)[0])
    normalized = bnrnn.LSTM(I, H, norm="batch", t_max=T)
    assert "layers.0.weight_ih" in normalized.state_dict()  # nn.LSTM has no place for a norm


def test_a_layer_says_what_it_is():
    lstm = bnrnn.LSTM(I, H, 2, norm="batch", t_max=T, statistics="running")
    assert repr(lstm).startswith("LSTM(\n  3, 5, num_layers=2, t_max=4, norm='batch'\n")
    assert "SequenceBatchNorm(20, t_max=4, eps=1e-05, statistics='running', momentum=0.1)" in repr(lstm)
    assert repr(RHN(I, H, depth=2)) == "RHN(3, 5, depth=2, coupled=True)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bnrnn.LSTM(I, 16.0), "hidden_size must be an integer, got 16.0"),
        (lambda: bnrnn.LSTM("3", H), "input_size must be an integer, got '3'"),
        (lambda: bnrnn.LSTM(I, H, num_layers=True), "num_layers must be an integer, got True"),
        (lambda: bnrnn.LSTM(I, H, norm="batch", t_max=2.5), r"t_max must be an integer, got 2.5"),
        (
            lambda: bnrnn.LSTM(I, H, norm="batch", t_max=T, gamma_init=math.nan),
            "gamma_init must be a .* got nan",
        ),
        (lambda: bnrnn.LSTM(I, H, norm="batch", t_max=T, gamma_init="0.1"), "gamma_init must be a finite .* got '0.1'"),
        (lambda: BNRHN(I, H, T, eps=-1.0), r"eps must be a finite number from 0.0 to inf, got -1.0"),
        (lambda: bnrnn.LSTM(I, H)(numpy.zeros((T, B, I))), r"input must be a torch.Tensor, got numpy.ndarray"),
        (lambda: bnrnn.LSTM(I, H)(torch.zeros(T, B, I).long()), "input must be floating point .* got torch.int64"),
        (
            lambda: bnrnn.LSTM(I, H)(torch.zeros(T, B, I).double()),
            r"x is torch.float64 and the weights are",
        ),
        (lambda: bnrnn.LSTM(I, H, 2, dropout="0.5"), "dropout must be a finite number from 0.0 to 1.0, got '0.5'"),
        (lambda: bnrnn.LSTM(I, H, norm=["batch"]), r"norm=\['batch'\] is unknown: use None, 'batch'"),
        (lambda: run_packed(lambda x: x.long()), "input must be floating point .* got torch.int64"),
        (lambda: run_packed(lambda x: x.to(torch.complex64)), "input must be floating point, .* got torch.complex64"),
        (lambda: RHN(I, H)([1.0]), "x must be a torch.Tensor, got builtins.list"),
        (lambda: RHN(I, H)(torch.zeros(T, B, I).bool()), r"x must be floating point, or integers .* got torch.bool"),
    ],
)
def test_wrong_types_are_named(make, message):
    with without_shape_checks(), pytest.raises(BnrnnError, match=message):
        make()


def run_packed(change: Callable[[Tensor], Tensor]) -> None:
    x = pack_sequence([torch.randn(T, I)])
    bnrnn.LSTM(I, H)(x._replace(data=change(x.data)))


@pytest.mark.parametrize(
    "make", [lambda: Stack(BNLSTM, I, H, t_max=T), lambda: BNLSTM(I, H, T), lambda: BNRNN(I, H, T)]
)
@pytest.mark.parametrize("x", [torch.zeros(T, B, I).long(), torch.zeros(I), torch.zeros(I).long(), torch.zeros(T, I)])
def test_input_of_a_wrong_shape_is_named(make, x):
    message = rf"floating-point x of shape \(T, B, 3\), or ids \(T, B\) as integers: got .*{x.dtype}"
    with without_shape_checks(), pytest.raises(BnrnnError, match=message):
        make()(x)


H_0 = torch.zeros(1, B, H)


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (lambda: bnrnn.LSTM(I, H), (H_0, None), r"h and c, each of shape \(1, 6, 5\); got shapes .* 'NoneType'\]"),
        (lambda: bnrnn.LSTM(I, H), 7, "the state must be a tuple of h and c, .* got int"),
        (lambda: BNLSTM(I, H, T), H_0[0], r"a tuple of h and c, each of shape \(6, 5\); got Tensor"),
        (lambda: BNRNN(I, H, T), (H_0[0, :1],), r"a tuple of h, each of shape \(6, 5\); got shapes \[\(1, 5\)\]"),
    ],
)
def test_a_wrong_state_is_named(make, state, message):
    with without_shape_checks(), pytest.raises(BnrnnError, match=message):
        make()(torch.randn(T, B, I), state)


@pytest.mark.parametrize("lengths", [[None] * B, "abc", [[1], 2], [1j] * B, [True] * B])
def test_lengths_of_a_wrong_type_are_named(lengths):
    with without_shape_checks(), pytest.raises(BnrnnError, match="lengths must be 6 integers between 1 and 4"):
        bnrnn.LSTM(I, H)(torch.randn(T, B, I), lengths=lengths)


@pytest.mark.parametrize(("t_start", "message"), [(-1, "at least 0, got -1"), (1.5, "an integer, got 1.5")])
@pytest.mark.parametrize("norm", [None, "batch"])
def test_a_wrong_t_start_is_named(norm, t_start, message):
    with without_shape_checks(), pytest.raises(BnrnnError, match=f"t_start must be {message}"):
        bnrnn.LSTM(I, H, norm=norm, t_max=T, statistics="running" if norm else "exact").eval()(
            torch.randn(T, B, I), t_start=t_start
        )


def test_another_default_device_changes_nothing():
    lstm, x, lengths = bnrnn.LSTM(I, H, bidirectional=True), torch.randn(T, B, I), [4, 1, 3, 4, 2, 2]
    packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
    y, out = lstm(x, lengths=lengths)[0], lstm(packed)[0]
    with torch.device("meta"):
        assert torch.equal(lstm(x, lengths=lengths)[0], y)
        assert torch.equal(lstm(packed)[0].data, out.data)


def loader(n: int, batch_size: int) -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(n, T, I), torch.zeros(n)), batch_size)


def test_an_estimate_takes_a_data_loader_and_leaves_out_a_last_batch_of_one():
    lstm, batches = bnrnn.LSTM(I, H, norm="batch", t_max=T, batch_first=True), loader(2 * B + 1, B)
    with pytest.warns(UserWarning, match="1 of the batches had a single sequence"):
        estimate_population_statistics(lstm, batches)
    found = lstm.layers[0].bn_hh.pop_mean.clone()
    estimate_population_statistics(lstm, [x for x, _ in batches if len(x) > 1])
    assert torch.equal(found, lstm.layers[0].bn_hh.pop_mean)
    with pytest.raises(BnrnnError, match="needs at least one batch"):
        estimate_population_statistics(lstm, [torch.randn(1, T, I)])


def test_an_estimate_takes_packed_sequences_and_arguments():
    lstm = bnrnn.LSTM(I, H, norm="batch", t_max=T)
    x, h, c = torch.randn(T, B, I), torch.randn(1, B, H), torch.randn(1, B, H)
    packed = pack_sequence(list(x.unbind(1)))
    estimate_population_statistics(lstm, [packed])
    with batch_statistics(lstm):
        expected = lstm.eval()(x)[0]
    assert_near("packed", expected, lstm(x)[0])
    estimate_population_statistics(lstm, [{"x": x, "state": (h, c)}], lambda batch: (batch["x"], batch["state"]))
    with batch_statistics(lstm):
        expected = lstm(x, (h, c))[0]
    assert_near("with a state", expected, lstm(x, (h, c))[0])


def estimate_on_a_rank(rank: int, store: str, batches: Tensor, found: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(bnrnn.LSTM(I, H, norm="batch", t_max=T))
    estimate_population_statistics(model, batches[[0]] if rank == 0 else batches[[1, 2]])  # not the same number
    torch.save(model.module.state_dict(), f"{found}{rank}")
    torch.distributed.destroy_process_group()


def test_two_processes_estimate_the_same_from_the_batches_of_both(tmp_path):
    batches = torch.randn(3, T, B, I)
    arguments = (str(tmp_path / "store"), batches, str(tmp_path / "found"))
    processes = [forked(estimate_on_a_rank, rank, *arguments) for rank in range(2)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    torch.manual_seed(0)
    alone = bnrnn.LSTM(I, H, norm="batch", t_max=T)
    estimate_population_statistics(alone, batches)
    for rank in range(2):
        for name, value in torch.load(tmp_path / f"found{rank}").items():
            assert_near(f"{name} of rank {rank}", alone.state_dict()[name], value)


@pytest.mark.parametrize("norm", [None, "batch", "input_batch"])
def test_a_layer_on_the_device_meta_gives_the_shapes(norm):
    with torch.device("meta"):
        lstm, x = bnrnn.LSTM(3, 5, num_layers=2, bidirectional=True, norm=norm, t_max=4), torch.empty(4, 6, 3)
        y, (h, c) = lstm(x)
    assert y.device.type == "meta" and y.shape == (4, 6, 10) and h.shape == c.shape == (4, 6, 5)


def test_a_layer_can_be_built_of_fake_tensors():
    with FakeTensorMode():
        lstm = bnrnn.LSTM(3, 5, norm="batch", t_max=4)
    assert lstm.layers[0].weight_ih.shape == (20, 3)


def test_statistics_of_another_t_max_are_one_sentence():
    stored = bnrnn.LSTM(I, H, norm="batch", t_max=T).state_dict()
    message = (
        rf"pop_mean has statistics of {T} time steps, and this layer has t_max={T + 3}: build it with t_max={T}, as"
    )
    with pytest.raises(BnrnnError, match=message):
        nn.Sequential(bnrnn.LSTM(I, H, norm="batch", t_max=T + 3))[0].load_state_dict(stored)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiler_that_cannot_compile_the_layer_is_one_sentence():
    with pytest.raises(BnrnnError, match=r"torch.jit.script cannot compile LSTM: use torch.export or torch.jit.trace"):
        torch.jit.script(nn.Sequential(bnrnn.LSTM(I, H)))


def test_an_estimate_with_a_model_that_needs_more_of_a_batch_is_one_sentence():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = bnrnn.LSTM(I, H, norm="batch", t_max=T)

        def forward(self, x, lengths):
            return self.lstm(x, lengths=lengths)[0]

    model, batch = Classifier(), (torch.randn(T, 4, I), [T] * 4, torch.zeros(4))
    with pytest.raises(BnrnnError, match=r"Classifier cannot be called .* 'lengths'.* such as arguments=lambda batch"):
        bnrnn.estimate_population_statistics(model, [batch])
    with pytest.raises(BnrnnError, match="and none were estimated: call"):
        model.eval()(*batch[:2])
    bnrnn.estimate_population_statistics(model, [batch], lambda b: b[:2])
    model.eval()(*batch[:2])
    model.train()(*batch[:2])
    with pytest.raises(BnrnnError, match="a forward pass in training mode has discarded them"):
        model.eval()(*batch[:2])
