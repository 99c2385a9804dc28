"""What the compiled Triton kernels need of a GPU: registers, spills, shared memory and barriers. Needs no GPU.

Triton's compiler is absent from a process with TRITON_INTERPRET=1.
"""

import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bnrnn.scan.lstm.fused import PARAMETERS as OF_LSTM
from bnrnn.scan.lstm.triton import LSTMForm
from bnrnn.scan.rhn.fused import PARAMETERS as OF_RHN
from bnrnn.scan.rhn.triton import RHNForm
from bnrnn.scan.triton_shared import tuning
from bnrnn.scan.triton_shared.form import Call, Form
from bnrnn.scan.triton_shared.tuning import Division

DEVICES = {80: "A100 (sm_80)", 90: "H100, H200 (sm_90)", 100: "B200 (sm_100)"}
MOST_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of shared memory that a program can have
TYPES = {"table": "*i64", "offset": "i32", "d": "i32", "form": "constexpr"}  # of the kernels' arguments


@dataclass(frozen=True)
class Resources:
    """What one kernel needs on one architecture.

    Args:
        registers: of a thread; there are at most 255.
        spilled: bytes of a thread in memory, for registers that did not fit.
        shared: bytes of a program.
        barriers: number of instructions that wait for all threads of a program.
    """

    registers: int
    spilled: int
    shared: int
    barriers: int


@dataclass(frozen=True)
class Kernel:
    """A kernel, for one shape."""

    title: str
    call: Call
    division: Division


def _kernels(title: str, of: Form, whole_sequence: bool = False) -> Iterable[Kernel]:
    """The kernels of a form, forward and backward; of several layers, the first."""
    for direction in ("forward", "backward") if of.keep else ("forward",):
        division = tuning.by_rule(of.size(direction))
        if whole_sequence:
            division = replace(division, fused=True, whole_sequence=True)
        yield Kernel(f"{title}, {direction}", of.calls(direction, division)[0], division)


def _lstm(title: str, B: int, H: int, low: torch.dtype = torch.float32, tf32: bool = True,
          whole_sequence: bool = False, **options: Any) -> Iterable[Kernel]:  # fmt: skip
    fields = {"given": OF_LSTM, "batch": True, "padded": False, "keep": True, "ended_count": False} | options
    of = LSTMForm(device=torch.device("cpu"), hidden_size=H, num_gates=4, num_layers=1, tile=tuning.tile_of(B),
                  eps=1e-5, low=low, tf32=tf32, **fields)  # fmt: skip
    return _kernels(title, of, whole_sequence)


def _rhn(title: str, B: int, H: int, Q: int, **options: Any) -> Iterable[Kernel]:
    fields = {"given": OF_RHN, "batch": True, "padded": False, "num_layers": 3, "num_entered": 3} | options
    of = RHNForm(device=torch.device("cpu"), hidden_size=H, num_gates=Q, tile=tuning.tile_of(B), keep=True, eps=1e-5,
                 low=torch.float32, tf32=True, **fields)  # fmt: skip
    return _kernels(title, of)


def kernels() -> list[Kernel]:
    """The kernels of the table, for the shapes of docs/kernels.md in TF32, if their title says no other precision."""
    return [
        *_lstm("S1", 64, 100),
        *_lstm("S1, whole sequence", 64, 100, whole_sequence=True),
        *_lstm("S1, float32", 64, 100, tf32=False),
        *_lstm("S2", 64, 1000),
        *_lstm("S2, bfloat16", 64, 1000, low=torch.bfloat16),
        *_lstm("S3", 128, 2000),
        *_lstm("S4", 32, 650),
        *_lstm("reader, padded", 40, 240, padded=True, ended_count=True),
        *_lstm("S1 in evaluation", 64, 100, batch=False, keep=False),
        *_rhn("RHN of 512 units", 64, 512, 3),
        *_rhn("RHN of 512 units, coupled, padded", 64, 512, 2, padded=True, given=("bias", "gamma_z"), num_entered=0),
        *_rhn("BN-RNN of 100 units", 64, 100, 1, given=("bias", "gamma_z"), num_layers=1, num_entered=0),
    ]


def compiled(kernel: Kernel, architecture: int) -> Resources:
    """Compile a kernel, and look at the result."""
    function = kernel.call.kernel
    names = list(inspect.signature(function.fn).parameters)
    source = ASTSource(
        function,
        {name: TYPES[name] for name in names},
        {(names.index("form"),): kernel.call.constants},
        {(names.index("table"),): [["tt.divisibility", 16]]},
    )
    options = kernel.division.options() | {"launch_cooperative_grid": kernel.division.whole_sequence}
    built: Any = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        command = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        shown = subprocess.run([command, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    assert found is not None, shown
    barriers = len(re.findall(r"\bbar\.sync", built.asm["ptx"]))
    return Resources(int(found[1]), int(found[2]), built.metadata.shared, barriers)


def resources(titles: Iterable[str], architecture: int) -> dict[str, tuple[int, ...]]:
    """Registers, spilled bytes, bytes of shared memory and barriers by title of the kernel."""
    found = {kernel.title: kernel for kernel in kernels()}
    return {title: astuple(compiled(found[title], architecture)) for title in titles}
