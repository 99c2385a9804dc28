"""What compiled kernels need: registers, spills, shared memory and barriers. Compiling needs no GPU.

Run it in a process without TRITON_INTERPRET=1, which replaces Triton's compiler.
"""

import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 90, 100)  # A100, H100 and H200, B200
MOST_SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes of shared memory that a program can have
TYPES = {"table": "*i64", "offset": "i32", "d": "i32", "eps": "fp32"}


@dataclass(frozen=True)
class Resources:
    """What one kernel needs on one architecture.

    Args:
        registers: of a thread; at most 255.
        stack: bytes of a thread in memory: registers that did not fit are spilled there.
        shared: bytes of a program.
        barriers: number of instructions that wait for all threads of a program, in the code as a whole.
    """

    registers: int
    stack: int
    shared: int
    barriers: int


def compiled(kernel: Any, constants: dict[str, Any], architecture: int) -> Resources:
    """Compile a kernel of launches.py with these constants and options, and look at the result."""
    names = list(inspect.signature(kernel.fn).parameters)
    options = {name: value for name, value in constants.items() if name not in names}
    signature = {name: TYPES.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items() if name in names}
    aligned = {(names.index("table"),): [["tt.divisibility", 16]]}
    built = triton.compile(
        ASTSource(kernel, signature, values, aligned), target=GPUTarget("cuda", architecture, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        folder = f"{triton.__path__[0]}/backends/nvidia/bin"
        shown = subprocess.run([f"{folder}/cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing about registers: {shown.stdout} {shown.stderr}")
    barriers = len(re.findall(r"\bbar\.sync|\bbarrier\.", built.asm["ptx"]))
    return Resources(int(found[1]), int(found[2]), built.metadata.shared, barriers)
