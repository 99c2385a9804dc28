"""Damages the kernels, and tells how the emulator notices it: one JSON object a line.

python -m tests.emulator.mutations order 90       deletes and moves barriers, fences and waits of compiled kernels
python -m tests.emulator.mutations order 80 12    those of every twelfth of these instructions
python -m tests.emulator.mutations source         changes lines of the kernels' source

Damage is noticed if there is a conflict, a fault, or an error that rounding does not explain.
`scripts/emulate.py --damage` stores what this program prints.
"""

import json
import multiprocessing
import shutil
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch  # imported once, before processes are forked
import triton

from tests.emulator.orders import damages, traced
from tests.emulator.ptx import Kernel
from tests.emulator.source_mutations import MUTATIONS

ROOT = Path(__file__).parents[2]


def noticed(case, edit=None) -> str:
    """How damage was noticed; "" if it was not."""
    from tests.emulator.cases import run

    try:
        outcome = run(case, edit, stop=True)
    except triton.CompilationError:
        raise
    except Exception as error:  # a finding, a fault, or what the damage leads to
        return f"{type(error).__name__}: {str(error)[:80]}"
    return "" if outcome.passed else f"error {outcome.error:.1e}"


def of_order(architecture: int, every: int) -> Iterator[dict[str, str]]:
    """Damage to the order within a forward and a backward kernel."""
    from tests.emulator.cases import SEQUENCE, Case, Schedule, run
    from tests.scan.cases import problem

    size = (6, 17) if architecture == 80 else (64, 32)  # all rows and columns of the programs are used
    case = Case("BN-LSTM", partial(problem, 2, *size), architecture, "tf32", SEQUENCE, Schedule(1), overwrite=True)
    kernels = dict[str, Kernel]()

    def seen(kernel: Kernel) -> Kernel:
        return kernels.setdefault(kernel.name, kernel)

    with traced() as trace:
        assert run(case, seen).passed
    for kernel in kernels.values():
        for damage in damages(kernel, trace):
            if damage.number % every == 0:
                how = noticed(case, lambda given, by=damage.kernel: by if given.name == by.name else given)
                instruction = damage.instruction
                what = f"{damage.number}: {instruction.opcode} {', '.join(instruction.operands)}"
                yield {"where": f"{kernel.name}, sm_{architecture}", "what": what.strip(), "line": instruction.line,
                       "change": damage.change, "noticed": how}  # fmt: skip


def of_source() -> Iterator[dict[str, str]]:
    """Changes of the source, each in a process of its own."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("bnrnn", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        for mutation in MUTATIONS:
            path = copy / "bnrnn/scan" / mutation.file
            original = path.read_text()
            assert original.count(mutation.old) == 1, mutation
            path.write_text(original.replace(mutation.old, mutation.new))
            with context.Pool(1) as pool:
                how = pool.apply(_in_copy, (folder, mutation.file))
            line = original[: original.index(mutation.old)].count("\n") + 1
            yield {"where": mutation.file, "what": mutation.old, "line": f"{path.name}:{line}",
                   "change": mutation.new, "noticed": how}  # fmt: skip
            path.write_text(original)


def _in_copy(folder: str, file: str) -> str:
    """How the change in a copy of the project is noticed. Nothing of the project was imported by this process."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("bnrnn", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    from tests.emulator.cases import of_mutations

    for case in of_mutations(file):
        if how := noticed(case):
            return f"{case.title}, {case.launch}: {how}"
    return ""


def main() -> None:
    parser = ArgumentParser(description="Damage the Triton kernels in the emulator")
    parser.add_argument("kind", choices=("order", "source"))
    parser.add_argument("architecture", nargs="?", type=int, default=90)
    parser.add_argument("every", nargs="?", type=int, default=1)
    args = parser.parse_args()
    for damage in of_source() if args.kind == "source" else of_order(args.architecture, args.every):
        print(json.dumps(damage), flush=True)


if __name__ == "__main__":
    main()
