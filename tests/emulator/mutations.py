"""Damages the kernels, and counts how much of the damage the emulator notices.

python -m tests.emulator.mutations barriers 80       deletes and moves barriers, fences and waits of compiled kernels
python -m tests.emulator.mutations barriers 80 12    every twelfth of these
python -m tests.emulator.mutations source            changes lines of the kernels' source

Each takes some ten minutes. Damage is noticed if there is a conflict, a fault, or an error that rounding does not
explain. A barrier that was moved often still orders what it must, and so may one that was deleted: where all that other
programs read was stored before an earlier barrier, that before the counter is not needed.
"""

import multiprocessing
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch  # imported once, before processes are forked
import triton

from tests.emulator.source_mutations import MUTATIONS

ROOT = Path(__file__).parents[2]
ORDERS = r"\n\t(?:bar\.(?:sync|warp)|cp\.async\.wait_group|fence\.|wgmma\.(?:fence|wait_group))[^;]*;"
# Accesses that barriers may guard: a move past a load from global memory alone often changes nothing.
ACCESS = re.compile(r"\n\t(?:@!?%p\d+ )?(?:ld\.shared|st|atom|cp\.async\.c[ag]|ldmatrix|wgmma\.mma)[^;]*;")


def noticed(case, edit=None) -> str:
    """How damage was noticed; "" if it was not."""
    from tests.emulator.cases import run

    try:
        outcome = run(case, edit)
    except triton.CompilationError:
        raise
    except Exception as error:  # a fault, or what the damage leads to
        return f"{type(error).__name__}: {str(error)[:80]}"
    if outcome.emulation.findings:
        return next(iter(outcome.emulation.findings)).kind
    return "" if outcome.passed else f"error {outcome.error:.1e}"


def without(text: str, kernel: str, number: int, moved: bool) -> str:
    """PTX without one of the instructions that order others, or with it after the next access to memory."""
    if f".entry {kernel}(" not in text:
        return text
    found = list(re.finditer(ORDERS, text))[number]
    rest = text[found.end() :]
    if moved and (access := ACCESS.search(rest)):
        rest = rest[: access.end()] + found[0] + rest[access.end() :]
    return text[: found.start()] + rest


def of_barriers(architecture: int, every: int) -> Iterator[tuple[str, str]]:
    """Damage to the order within a forward and a backward kernel, and how it was noticed."""
    from tests.emulator.cases import SEQUENCE, Case, Schedule, run
    from tests.scan.cases import problem

    B = 6 if architecture == 80 else 40
    case = Case("BN-LSTM", partial(problem, 2, B, 17), architecture, "tf32", SEQUENCE, Schedule(1), overwrite=True)
    texts = dict[str, str]()

    def seen(text: str) -> str:
        texts[re.search(r"\.entry (\w+)", text)[1]] = text  # pyright: ignore[reportOptionalSubscript]
        return text

    assert run(case, seen).passed
    for kernel, text in texts.items():
        for number, found in list(enumerate(re.finditer(ORDERS, text)))[::every]:
            for moved in (False, True):
                title = f"{kernel}: {found[0].strip()} number {number} {'moved' if moved else 'deleted'}"
                yield title, noticed(case, partial(without, kernel=kernel, number=number, moved=moved))


def of_source() -> Iterator[tuple[str, str]]:
    """Changes of the source, and how they were noticed, each in a process of its own."""
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
            yield f"{mutation.file}: {mutation.old} -> {mutation.new}", how
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
    kind, architecture, every = [*sys.argv[1:], "80", "1"][:3]
    results = dict[str, str]()
    for title, how in of_source() if kind == "source" else of_barriers(int(architecture), int(every)):
        results[title] = how
        print(f"{title}: {how or 'NOT NOTICED'}", flush=True)
    for kind in ("deleted", "moved", "->"):
        of_kind = {title: how for title, how in results.items() if title.endswith(kind) or f" {kind} " in title}
        missed = [title for title, how in of_kind.items() if not how]
        if of_kind:
            print(f"{kind}: {len(of_kind) - len(missed)} of {len(of_kind)} were noticed", *missed, sep="\n")
        if kind != "moved" and len(missed) > 0.05 * len(of_kind):
            sys.exit("less than 95 % of the damage was noticed")


if __name__ == "__main__":
    main()
