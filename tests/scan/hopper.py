"""Compiles Triton kernels for a Hopper GPU, without having one. This finds errors that the interpreter accepts."""

import subprocess
import sys
from pathlib import Path

from bnrnn.config import ROOT

BEGIN = """
import inspect
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
"""
END = """
for kernel, constants, missing in CASES:
    names = list(inspect.signature(kernel.fn).parameters)
    constants = constants | dict.fromkeys(name for name in missing if name in names)
    types = {"t": "i32", "d": "i32", "eps": "fp32", "running": "*i32"}
    signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in names}
    given = {(names.index(n),): v for n, v in constants.items()}
    built = compile(ASTSource(kernel, signature, given), target=GPUTarget("cuda", 90, 32))
    assert built.asm["cubin"]
"""


def assert_compiles(cases: str, cache: Path) -> None:
    """Python that imports kernels and sets CASES to (kernel, constants, arguments that are None), in a fresh process:
    tests run Triton's interpreter, which replaces its compiler."""
    env = {"PATH": "/usr/bin:/bin", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", BEGIN + cases + END]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
