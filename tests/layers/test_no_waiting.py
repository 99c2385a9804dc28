"""Forward and backward passes look at no value: on a GPU, the program would wait until all earlier work is done.

Tensors on torch's device "meta" have no values, so that looking at one is an error.
"""

import pytest
import torch

from bnrnn.layers.base import check_values
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.stack import LSTM
from bnrnn.scan.lstm.reference import Statistics
from bnrnn.scan.lstm.triton import triton_scan
from bnrnn.scan.rhn.triton import rhn_triton_scan
from bnrnn.scan.triton_shared.launches import Launches
from tests.scan.cases import NAMES, problem, rhn_problem

META = torch.device("meta")


@pytest.fixture(autouse=True)
def _without_autocast(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # cannot be asked about this device


def on_meta(args: dict) -> dict:
    return {k: v.float().to(META).requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in args.items()}


@pytest.mark.parametrize("norm", ["batch", "input_batch"])
@pytest.mark.parametrize("lengths", [None, [3, 1, 2]])
@pytest.mark.parametrize("input_statistics", ["frame", "sequence"])
def test_layers(norm, lengths, input_statistics):
    layer = LSTM(4, 5, 2, norm=norm, t_max=3, input_statistics=input_statistics, bidirectional=True, device=META)
    y, _ = layer(torch.zeros(3, 3, 4, device=META, requires_grad=True), lengths=lengths)
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_ids_and_highways():
    check_values(torch.zeros(3, 2, dtype=torch.long, device=META), 4)
    y, _ = BNRHN(4, 5, t_max=3, depth=2).to(META)(torch.zeros(3, 2, 4, device=META))
    y.sum().backward()


@pytest.mark.parametrize("batch_sizes", [None, [3, 2]])
def test_what_the_triton_engine_does_beside_its_kernels(batch_sizes, monkeypatch):
    monkeypatch.setattr(Launches, "run", lambda *_: None)
    args = on_meta({n: v for n, v in problem(2, 3, 4).items() if n in NAMES})
    y, (h, c), used = triton_scan(**args, batch_sizes=batch_sizes)
    torch.autograd.grad((y, h, c), list(args.values()), (y, h, c))
    assert isinstance(used, Statistics)
    args = on_meta(rhn_problem(T=2, B=3, H=4, D=2))
    y, s, _ = rhn_triton_scan(**args, batch_sizes=batch_sizes)
    torch.autograd.grad((y, s), [v for v in args.values() if v is not None], (y, s))
