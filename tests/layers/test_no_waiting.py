"""Forward and backward passes look at no value: on a GPU, the program would wait until all earlier work is done."""

from functools import partial

import pytest
import torch
from torch import nn

import bnrnn
from bnrnn.layers.base import check_values
from bnrnn.layers.bn_lstm import BNLSTM
from bnrnn.layers.bn_rhn import BNRHN, PLACES
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.input_bn_lstm import InputBNLSTM
from bnrnn.layers.ln_lstm import LNLSTM
from bnrnn.layers.lstm import LSTM
from bnrnn.layers.norm import SequenceBatchNorm
from bnrnn.layers.population import batch_statistics, collecting_statistics
from bnrnn.layers.rhn import RHN
from bnrnn.layers.rnn import RNN
from bnrnn.layers.stack import Stack
from bnrnn.scan import set_backend
from bnrnn.scan.lstm.reference import Statistics
from bnrnn.scan.lstm.triton import triton_scan
from bnrnn.scan.rhn.triton import rhn_triton_scan
from bnrnn.scan.rnn import _on_triton
from bnrnn.scan.triton_shared.launches import Launches
from tests.helpers import without_shape_checks
from tests.scan.cases import NAMES, problem, rhn_problem
from tests.waiting import META, nothing_waits, on_meta

T, B, I, H = 3, 3, 4, 5
STATISTICS = ("exact", "running")
NOISE = {"zoneout": (0.3, 0.2), "recurrent_dropout": 0.4}


def stack(layer, **options):
    """A layer of this kind, in both directions."""
    return Stack(partial(layer, **options), I, H, bidirectional=True, t_max=T)


LAYERS = {
    "lstm": partial(stack, LSTM),
    "lstm, zoneout and recurrent dropout": partial(stack, LSTM, **NOISE),
    "ln_lstm": partial(stack, LNLSTM, **NOISE),
    "ln_lstm of gates": partial(stack, LNLSTM, per_gate=True),
    "bn_lstm with ended sequences": partial(stack, BNLSTM, **NOISE),
    "rnn": partial(stack, RNN),
    "rhn": partial(stack, RHN),
    "gru": partial(bnrnn.GRU, I, H, 2, dropout=0.5, bidirectional=True),
    "ln_gru": partial(bnrnn.GRU, I, H, norm="layer"),
    "ligru": partial(bnrnn.LiGRU, I, H, bidirectional=True, norm=None, recurrent_dropout=0.5),
    "ln_ligru": partial(bnrnn.LiGRU, I, H, norm="layer"),
    "nn_lstm": partial(bnrnn.LSTM, I, H, 2, batch_first=True, dropout=0.5, bidirectional=True),
}
NORMED = {
    "bn_lstm": partial(stack, BNLSTM, **NOISE),
    "bn_lstm over time": partial(stack, BNLSTM, input_statistics="sequence"),
    "input_bn_lstm": partial(stack, InputBNLSTM),
    "input_bn_lstm over time": partial(stack, InputBNLSTM, input_statistics="sequence"),
    "bn_rnn": partial(stack, BNRNN),
    **{f"bn_rhn, {place}": partial(stack, BNRHN, depth=2, place=place) for place in PLACES},
    "bn_gru": partial(bnrnn.GRU, I, H, norm="input_batch", t_max=T),
    "bn_gru over time": partial(bnrnn.GRU, I, H, norm="input_batch", input_statistics="sequence"),
    "bn_ligru": partial(bnrnn.LiGRU, I, H, bidirectional=True),
}
each_length = pytest.mark.parametrize("lengths", [None, [3, 1, 2]])


@pytest.fixture(autouse=True, params=["reference", "fused"])
def engine(request):
    set_backend(request.param)
    with without_shape_checks():  # other tests check them
        yield request.param
    set_backend("auto")


def run(model: nn.Module, lengths: list[int] | None, t_start: int | None = None) -> torch.Tensor:
    return model(torch.zeros(T, B, I, device=META, requires_grad=True), lengths=lengths, t_start=t_start)[0]


def assert_trains(model: nn.Module, lengths: list[int] | None) -> None:
    model = model.to(META)
    with nothing_waits():
        run(model, lengths).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@each_length
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_layers(make, lengths):
    model = make()
    for layer in model.modules():
        if isinstance(layer, BNLSTM):
            layer.ended_count = True
    assert_trains(model, lengths)


@each_length
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("make", NORMED.values(), ids=NORMED)
def test_layers_with_batch_norm(make, statistics, lengths):
    assert_trains(make(statistics=statistics), lengths)


@each_length
@pytest.mark.parametrize("make", NORMED.values(), ids=NORMED)
def test_population_statistics(make, lengths, monkeypatch):
    """Estimating them, evaluating with those of a batch and, once it is known that there are some, with them."""
    model = make(statistics="running").to(META)
    norms = [module for module in model.modules() if isinstance(module, SequenceBatchNorm)]
    monkeypatch.setattr("bnrnn.layers.average.PopulationAverage.write", lambda *_: None)  # waits once, at the end
    monkeypatch.setattr(SequenceBatchNorm, "_is_missing", lambda *_: False)  # waits once after each change
    with nothing_waits(), torch.no_grad():
        with collecting_statistics(model, norms):
            ys = [run(model, lengths)]
        model.eval()
        ys.append(run(model, lengths))
        if not getattr(model, "bidirectional", False):
            ys.append(run(model, lengths, t_start=T - 1))  # the last steps have the last statistics
        with batch_statistics(model):
            ys.append(run(model, lengths))
    assert all(y.device == META and y.shape[:2] == (T, B) for y in ys)


def test_ids():
    model = stack(BNLSTM).to(META)
    with nothing_waits():
        check_values(torch.zeros(T, B, dtype=torch.long, device=META), I)
        y, state = model(torch.zeros(T, B, dtype=torch.long, device=META), lengths=[3, 1, 2])
        (y.sum() + state[0].sum()).backward()


@pytest.mark.parametrize("batch_sizes", [None, [3, 2]])
def test_what_the_triton_engine_does_beside_its_kernels(batch_sizes, monkeypatch):
    monkeypatch.setattr(Launches, "run", lambda *_: None)
    of_lstm = on_meta({n: v for n, v in problem(2, 3, 4).items() if n in NAMES})
    of_rhn = on_meta({n: v for n, v in rhn_problem(T=2, B=3, H=4, D=2).items() if v is not None})
    of_rnn = on_meta({"x_proj": torch.zeros(2, 3, 4), "h": torch.zeros(3, 4), "weight_hh": torch.zeros(4, 4)})
    gamma, beta = on_meta((torch.zeros(4), torch.zeros(4)))
    with nothing_waits():
        y, (h, c), used = triton_scan(**of_lstm, batch_sizes=batch_sizes)
        torch.autograd.grad((y, h, c), list(of_lstm.values()), (y, h, c))
        assert isinstance(used, Statistics)
        y, s, _ = rhn_triton_scan(**of_rhn, batch_sizes=batch_sizes)
        torch.autograd.grad((y, s), list(of_rhn.values()), (y, s))
        options = {"eps": 1e-5, "population": None, "batch_sizes": batch_sizes, "product_dtype": None}
        y, h, _ = _on_triton(**of_rnn, gamma=gamma, beta=beta, **options)
        torch.autograd.grad((y, h), [*of_rnn.values(), gamma, beta], (y, h))


WAITS = {
    "item": lambda y: y.sum().item(),
    "cpu": lambda y: y.detach().cpu(),
    "tolist": lambda y: y.detach().tolist(),
    "bool": lambda y: bool((y > 0).all()),
    "nonzero": lambda y: (y > 0).nonzero(),
    "mask": lambda y: y[y > 0],
    "print": lambda y: str(y),
    "format": lambda y: f"{y.sum()}",
    "copy": lambda y: torch.zeros(len(y)).to(y.device),
    "copied into": lambda y: torch.zeros_like(y).copy_(torch.zeros(y.shape)),
    "tensor": lambda y: torch.tensor([0, 1], device=y.device),
    "new_tensor": lambda y: y.new_tensor([0.0]),
    "index on the CPU": lambda y: y[torch.tensor([0, 1])],
    "index_select": lambda y: y.index_select(0, torch.tensor([0])),
    "sum on two devices": lambda y: y + torch.zeros(y.shape),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_layer_that_waits_is_noticed(wait, monkeypatch):
    scan = LSTM.scan

    def waiting(layer, *given):
        y, state = scan(layer, *given)
        wait(y)
        return y, state

    monkeypatch.setattr(LSTM, "scan", waiting)
    with pytest.raises((AssertionError, RuntimeError), match=r"wait|meta|two devices|no data"):
        assert_trains(stack(LSTM), None)
