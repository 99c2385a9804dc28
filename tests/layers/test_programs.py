"""Programs that torch makes of the layers: compiled, exported, ONNX; and gradients of gradients."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bnrnn
from bnrnn import scan
from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.layers.bn_rhn import BNRHN
from bnrnn.layers.bn_rnn import BNRNN
from bnrnn.layers.population import estimate_population_statistics
from bnrnn.layers.rhn import RHN
from bnrnn.layers.stack import Stack
from bnrnn.scan import operator
from tests.helpers import assert_near

T, B, I, H = 2, 5, 3, 4
# The same file is run in a process of its own, without the checks of shapes, into which torch cannot look.
PROGRAMS = {
    "lstm": lambda: bnrnn.LSTM(I, H, bidirectional=True),
    "bn_lstm": lambda: bnrnn.LSTM(I, H, norm="batch", t_max=T),
    "bn_lstm_running": lambda: bnrnn.LSTM(I, H, norm="batch", t_max=T, statistics="running"),
    "input_bn_lstm": lambda: bnrnn.LSTM(I, H, norm="input_batch", input_statistics="sequence", batch_first=True),
    "ln_lstm": lambda: bnrnn.LSTM(I, H, norm="layer", zoneout=(0.3, 0.2), recurrent_dropout=0.1),
    "zoneout_bn_lstm": lambda: bnrnn.LSTM(I, H, norm="batch", t_max=T, zoneout=(0.3, 0.2)),
    "gru": lambda: bnrnn.GRU(I, H, norm="layer"),
    "ligru": lambda: bnrnn.LiGRU(I, H, bidirectional=True),
    "bn_rnn": lambda: Stack(BNRNN, I, H, t_max=T),
    "rhn": lambda: Stack(RHN, I, H),
    "bn_rhn": lambda: Stack(BNRHN, I, H, t_max=T),
}
COMPILED = ("bn_lstm", "bn_lstm_running", "input_bn_lstm", "ln_lstm", "zoneout_bn_lstm", "gru", "ligru", "bn_rnn",
            "bn_rhn")  # fmt: skip
EXPORTED = ("bn_lstm", "ln_lstm", "ligru", "bn_rhn")
IN_ONNX = ("bn_lstm", "ln_lstm")
RECURRENCE = {"bn_rhn": "rhn", "gru": "gru_tanh", "ligru": "gru_relu"}  # those of others are the LSTM's
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
    if name in ("bn_lstm", "ln_lstm"):
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
    if name not in ("lstm", "ln_lstm", "rhn", "bn_lstm_running", "ligru"):
        estimate_population_statistics(model, batches)
    return model.eval()


def gradients(y: Tensor, model: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(y.square().mean(), list(model.parameters())))


def check_compiled(name: str) -> None:
    """In evaluation and in training, without a graph break, by the engine that runs otherwise."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x, runs = trained(name), torch.randn(T, B, I), []
    if name == "bn_rnn":  # no engine of ours rounds here, and batch normalization of few samples amplifies rounding
        model, x = model.double(), x.double()
    copied = copy.deepcopy(model)
    program = torch.compile(copied, fullgraph=True, backend="aot_eager")
    kind = RECURRENCE.get(name, "lstm")
    prepare = operator.RECURRENCES[kind].prepare

    def noted(*args: Any, **options: Any) -> Any:
        steps = prepare(*args, **options)
        runs.append(type(steps).__module__)
        return steps

    operator.RECURRENCES[kind] = operator.RECURRENCES[kind]._replace(prepare=noted)
    with torch.no_grad():
        assert_near(f"{name} in evaluation", model(x)[0], program(x)[0], 1e-6)
    torch.manual_seed(1)  # for zoneout
    expected = model.train()(x)[0]
    torch.manual_seed(1)
    y = (copied.train(), program(x)[0])[1]
    assert_near(f"{name} in training", expected, y, 1e-6)
    for n, (ref, grad) in enumerate(zip(gradients(expected, model), gradients(y, copied), strict=True)):
        assert_near(f"{name} gradient {n}", ref, grad, 1e-5)
    for key, value in model.state_dict().items():
        if "pop_mean" in key or "num_batches" in key:
            assert_near(key, value.double(), copied.state_dict()[key].double(), 1e-6)
    assert set(runs) == (set() if name == "bn_rnn" else {f"bnrnn.scan.{kind.partition('_')[0]}.cpu"})


def check_exported(name: str, folder: Path) -> None:
    """Strictly and not, for any size of the batch; what is saved is read by LATER."""
    model, x = trained(name), torch.randn(T, B, I)
    expected = model(x)[0].detach()
    shapes = ({1: torch.export.Dim("B", min=1)},)
    if name != "bn_rhn":  # strict tracing takes long, and two layers suffice
        strict = torch.export.export(model, (x,), strict=True)
        assert_near(f"{name} strict", expected, strict.module()(x)[0].detach(), 1e-5)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=False)
    torch.export.save(program, folder / f"{name}.pt2")
    other = torch.randn(T, B + 2, I)
    torch.save((other, model(other)[0].detach()), folder / f"{name}.pt")
    if name in IN_ONNX:
        torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=({1: "B"},), verbose=False).save(
            folder / f"{name}.onnx"
        )


IN_A_PROCESS = "import sys; from pathlib import Path; from tests.layers import test_programs as t; "


@pytest.mark.slow
def test_compiled_or_exported_they_are_the_same_also_without_this_package(tmp_path):
    """Compiled, outputs, gradients and statistics are the same; exported, the outputs, in a process that lacks us."""
    calls = (
        "[t.check_compiled(name) for name in t.COMPILED]; [t.check_exported(name, Path.cwd()) for name in t.EXPORTED]"
    )
    run(IN_A_PROCESS + calls, tmp_path, ROOT)
    run(LATER, tmp_path, None, *EXPORTED)


def run(code: str, folder: Path, path: Path | None, *arguments: str) -> None:
    """In a process of its own: torch cannot look into the checks of shapes that the tests have here."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("engine", ["fused", "cpu", "triton"])
@pytest.mark.parametrize("kind", ["lstm", "gru", "ligru", "bn_rhn", "input_bn_lstm"])
def test_a_gradient_of_a_gradient_names_the_reference(engine, kind):
    model, x = PROGRAMS[kind]().train(), torch.randn(B if kind == "input_bn_lstm" else T, B, I, requires_grad=True)
    scan.set_backend(engine)
    loss = model(x)[0].square().sum()
    with pytest.raises(BnrnnError, match=r"call bnrnn.scan.set_backend\('reference'\) before the forward pass"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("kind", ["lstm", "gru", "ligru", "bn_rhn"])
def test_by_the_reference_gradients_have_gradients(kind):
    model, x = PROGRAMS[kind]().double(), torch.randn(T, B, I, dtype=torch.float64, requires_grad=True)
    scan.set_backend("reference")
    assert torch.autograd.gradgradcheck(lambda x: model(x)[0], x, fast_mode=True)


@pytest.mark.parametrize("kind", ["lstm", "bn_lstm", "ln_lstm", "gru", "ligru", "bn_rhn"])
def test_torch_func_takes_the_reference_by_itself(kind):
    model, x = trained(kind), torch.randn(T, B, I)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,))[0].square().mean()

    found = torch.func.grad(loss)(parameters, x)
    for (name, grad), ref in zip(found.items(), gradients(model(x)[0], model), strict=True):
        assert_near(name, ref, grad, 1e-4)
    per_batch = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.stack([x, x + 1]))
    for name, ref in torch.func.grad(loss)(parameters, x + 1).items():
        assert_near(name, ref, per_batch[name][1], 1e-4)
    for engine in ("fused", "cpu", "triton"):
        scan.set_backend(engine)
        with pytest.raises(BnrnnError, match=f"backend={engine} cannot run within torch.func: use auto or reference"):
            torch.func.grad(loss)(parameters, x)


@pytest.mark.parametrize("statistics", ["exact", "running"])
def test_in_training_torch_func_takes_the_buffers_too(statistics):
    model = bnrnn.LSTM(I, H, norm="batch", t_max=T, statistics=statistics)
    parameters, xs = dict(model.named_parameters()), torch.randn(2, T, B, I)
    buffers = {name: torch.stack([value, value]) for name, value in model.named_buffers()}

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, (parameters, buffers), (x,))[0].square().mean()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, buffers, xs)
    for (name, grads), ref in zip(found.items(), gradients(model(xs[1])[0], model), strict=True):
        assert_near(name, ref, grads[1], 1e-4)


@pytest.fixture(autouse=True)
def _restore():
    yield
    scan.set_backend("auto")
