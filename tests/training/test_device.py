"""The hardware that results record."""

import platform
import subprocess
from pathlib import Path

import pytest
import torch

from bnrnn.config import compose_config
from bnrnn.scan import backends
from bnrnn.training import device
from bnrnn.training.build import build, environment_of
from bnrnn.training.device import hardware, named_in, processor_name, shortened

CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model\t\t: 85
model name\t: Intel(R)  Xeon(R) CPU @ 2.00GHz
flags\t\t: fpu avx2 avx512f

processor\t: 1
model name\t: another
"""


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """The name of the processor is asked for once a process. Tests change it."""
    monkeypatch.setattr(device, "_processor", device._processor.__wrapped__)


def on(monkeypatch, system: str, cpuinfo: str | OSError = "", processor: str = "") -> None:
    """Pretend to run on another system."""

    def read(path: Path) -> str:
        assert str(path) == "/proc/cpuinfo"
        if isinstance(cpuinfo, OSError):
            raise cpuinfo
        return cpuinfo

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "processor", lambda: processor)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (CPUINFO, "Intel Xeon @ 2.00GHz"),
        ("model name : AMD EPYC\n", "AMD EPYC"),
        ("model name\t: unknown\n", ""),
        ("model name\t:\nflags\t: fpu\n", ""),
        ("processor\t: 0\nmodel\t: 85\n", ""),  # ARM has no such line
        ("", ""),
    ],
)
def test_the_processor_is_named_in_the_first_model_name(text, name):
    assert named_in(text) == name


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("AMD EPYC", "AMD EPYC"),
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7763"),
        ("AMD Ryzen 9 5950X 16-Core Processor", "AMD Ryzen 9 5950X"),
        ("AMD Ryzen Threadripper 1900X Eight-Core Processor", "AMD Ryzen Threadripper 1900X"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "Intel Xeon Platinum 8481C"),
        ("Intel(R) Xeon(R) CPU E5-2670 v3 @ 2.30GHz", "Intel Xeon E5-2670 v3"),
        ("Intel(R) Core(TM) i7 CPU       M 620  @ 2.67GHz", "Intel Core i7 M 620"),
        ("11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz", "11th Gen Intel Core i7-1165G7"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon @ 2.20GHz"),
    ],
)
def test_a_name_is_short_and_still_tells_processors_apart(name, short):
    assert shortened(name) == short


def test_a_system_that_tells_no_name_has_that_of_python(monkeypatch):
    on(monkeypatch, "Linux", CPUINFO, "ours")
    assert processor_name() == "Intel Xeon @ 2.00GHz"
    on(monkeypatch, "Linux", "flags: fpu", "ours")
    assert processor_name() == "ours"
    on(monkeypatch, "Linux", FileNotFoundError(), "ours")
    assert processor_name() == "ours"
    on(monkeypatch, "Windows", CPUINFO, "ours")
    assert processor_name() == "ours"


def test_macos_is_asked_by_its_own_command(monkeypatch):
    def run(command: list[str], **options) -> subprocess.CompletedProcess:
        assert command == ["sysctl", "-n", "machdep.cpu.brand_string"] and options["check"]
        return subprocess.CompletedProcess(command, 0, "Intel(R) Core(TM) i7-8569U CPU @ 2.80GHz\n")

    def fail(command: list[str], **_) -> subprocess.CompletedProcess:
        raise subprocess.CalledProcessError(1, command)

    on(monkeypatch, "Darwin", processor="arm")
    monkeypatch.setattr(subprocess, "run", run)
    assert processor_name() == "Intel Core i7-8569U"
    monkeypatch.setattr(subprocess, "run", fail)
    assert processor_name() == "arm"


@pytest.mark.parametrize(
    ("name", "level", "expected"),
    [
        ("AMD EPYC", "AVX512", "x86_64 (AMD EPYC, AVX512)"),
        ("AMD EPYC", "DEFAULT", "x86_64 (AMD EPYC)"),
        ("", "AVX2", "x86_64 (AVX2)"),
        ("x86_64", "DEFAULT", "x86_64"),
    ],
)
def test_hardware_is_the_architecture_the_processor_and_its_widest_instructions(monkeypatch, name, level, expected):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(device, "processor_name", lambda: name)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    assert hardware(torch.device("cpu")) == expected


def test_hardware_of_a_gpu_is_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU of {device}")
    assert hardware(torch.device("cuda", 1)) == "a GPU of cuda:1"


def test_this_machine_has_a_name():
    assert hardware(torch.device("cpu")).startswith(platform.machine())


@pytest.mark.parametrize(
    ("selected", "options", "recorded"),
    [
        ("triton", ["model=lstm"], "triton"),
        ("triton", ["model=ln_lstm"], "fused"),
        ("triton", ["model=lstm", "+model.layer.zoneout=[0.1,0.1]"], "fused"),
        ("fused", ["model=rnn"], "reference"),
        ("cpu", ["model=ln_lstm"], "cpu"),
    ],
)
def test_the_engine_that_runs_is_recorded_where_the_selected_one_lacks_a_layer(
    monkeypatch, selected, options, recorded
):
    cfg = compose_config(*options)
    _, device, data, model = build(cfg)
    monkeypatch.setattr(backends, "_chosen", selected)  # what `auto` selects on a GPU
    assert environment_of(cfg, device, data, model)["backend"] == recorded


def test_training_replaces_vanishing_gradients_by_zero():
    """On many CPUs, an operation with a number below the least normal one takes more than ten times as long."""
    inputs = torch.zeros(400, 2, 1, requires_grad=True)
    build(compose_config("model=lstm"))
    torch.nn.LSTM(1, 3)(inputs)[0][-1].sum().backward()
    sizes = inputs.grad.abs()
    assert sizes[-1].min() > 0
    assert sizes[0].max() == 0
    assert sizes[sizes > 0].min() >= torch.finfo(torch.float32).tiny
