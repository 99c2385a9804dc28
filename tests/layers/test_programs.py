"""Programs that torch makes of the layers: compiled, exported, ONNX; and gradients of gradients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bnrnn
from bnrnn.config import ROOT
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.population import estimate_population_statistics
from bnrnn.layers.rhn import RHN
from bnrnn.layers.stack import Stack
from bnrnn.scan import operator
from tests.helpers import assert_near

T, B, I, H = 6, 5, 3, 4
# The same file is run in a process of its own, without the checks of shapes, into which torch cannot look.
PROGRAMS = {
    "lstm": lambda: bnrnn.LSTM(I, H, num_layers=2),
    "bn_lstm": lambda: bnrnn.LSTM(I, H, norm="batch", t_max=T, bidirectional=True),
    "bn_lstm_running": lambda: bnrnn.LSTM(I, H, norm="batch", t_max=T, statistics="running"),
    "input_bn_lstm": lambda: bnrnn.LSTM(I, H, norm="input_batch", input_statistics="sequence", batch_first=True),
    "bn_rnn": lambda: Stack(BNRNN, I, H, t_max=T),
    "rhn": lambda: Stack(RHN, I, H),
    "bn_rhn": lambda: Stack(BNRHN, I, H, t_max=T),
}
LATER = """
import sys
import numpy, torch
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("bnrnn", "jaxtyping"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Block())
import onnxruntime
for name in sys.argv[1:]:
    x, expected = torch.load(f"{name}.pt")
    found = [torch.export.load(f"{name}.pt2").module()(x)[0].detach()]
    if name == "bn_lstm":
        session = onnxruntime.InferenceSession(f"{name}.onnx")
        found.append(torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]))
    for y in found:
        error = ((y - expected).norm() / expected.norm()).item()
        assert error < 1e-5, (name, error)
assert not any(name.startswith("bnrnn") for name in sys.modules)
"""


def trained(name: str) -> nn.Module:
    """In evaluation mode, with statistics of its own."""
    model, batches = PROGRAMS[name](), torch.randn(3, T, B, I)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    for x in batches:
        model(x)
    if name not in ("lstm", "rhn", "bn_lstm_running"):
        estimate_population_statistics(model, batches)
    return model.eval()


def gradients(y: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().mean(), list(model.parameters())))


def check_compiled(name: str) -> None:
    """In evaluation and in training, without a graph break, by the engine that runs otherwise."""
    model, x, runs = trained(name), torch.randn(T, B, I), []
    program = torch.compile(model, fullgraph=True, backend="aot_eager")
    recurrence = operator.RECURRENCES.get("rhn" if "rhn" in name else "lstm")
    operator.RECURRENCES["rhn" if "rhn" in name else "lstm"] = recurrence._replace(
        prepare=lambda *args, **options: runs.append(type(steps := recurrence.prepare(*args, **options))) or steps
    )
    for mode in (True, False):
        model.train(mode)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        expected = model(x)[0]
        model.load_state_dict(before)
        y = program(x)[0]
        assert_near(f"{name} y", expected, y, 1e-6)
        for n, (ref, grad) in enumerate(zip(gradients(expected, model), gradients(y, model), strict=True)):
            assert_near(f"{name} gradient {n}", ref, grad, 1e-5)
        with torch.no_grad():
            assert_near(f"{name} without gradients", expected, program(x)[0], 1e-6)
        model.load_state_dict(before)
    assert name == "bn_rnn" or {t.__module__ for t in runs} == {f"bnrnn.scan.{'rhn' if 'rhn' in name else 'lstm'}.cpu"}


def check_exported(name: str, folder: Path) -> None:
    """Strictly and not, for any size of the batch; what is saved is read by LATER."""
    model, x = trained(name), torch.randn(T, B, I)
    expected = model(x)[0].detach()
    shapes = ({0 if name == "input_bn_lstm" else 1: torch.export.Dim("B", min=1)},)
    strict = torch.export.export(model, (x,), strict=True)
    assert_near(f"{name} strict", expected, strict.module()(x)[0].detach(), 1e-5)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=False)
    torch.export.save(program, folder / f"{name}.pt2")
    other = torch.randn(*((B + 2, T) if name == "input_bn_lstm" else (T, B + 2)), I)
    torch.save((other, model(other)[0].detach()), folder / f"{name}.pt")
    if name == "bn_lstm":
        torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=({1: "B"},), verbose=False).save(
            folder / f"{name}.onnx"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_it_is_the_same(name, tmp_path):
    run(f"from tests.layers.test_programs import *; check_compiled({name!r})", tmp_path, ROOT)


@pytest.mark.slow
def test_exported_it_is_the_same_in_a_process_without_this_package(tmp_path):
    exports = "; ".join(f"check_exported({name!r}, folder)" for name in PROGRAMS)
    run(f"folder = Path({str(tmp_path)!r}); {exports}", tmp_path, ROOT, "from tests.layers.test_programs import *\n")
    run(LATER, tmp_path, None, "", *PROGRAMS)


def run(code: str, folder: Path, path: Path | None, start: str = "", *arguments: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (
        {"PYTHONPATH": str(path)} if path else {}
    )
    command = [sys.executable, "-W", "ignore", "-c", start + code, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
