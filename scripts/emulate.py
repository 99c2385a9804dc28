"""Run the compiled Triton kernels instruction by instruction on a CPU, and compare them with the reference in float64.

python -m scripts.emulate                    every case, into results/bench/emulated.json: half an hour
python -m scripts.emulate --costs            renew only the counts of real sizes in that file
python -m scripts.emulate --damage order     renew only what is noticed of damaged barriers, fences and waits: minutes
python -m scripts.emulate --damage source    renew only what is noticed of changed lines of the kernels: half an hour
python -m scripts.emulate --damage reasons   renew only the reasons why some damage was not noticed
python -m scripts.emulate --few              some cases, which are only printed: a minute

`make tables` renders what was stored.
"""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

import triton

from bnrnn.errors import BnrnnError, report_errors
from bnrnn.report.emulated_page import FILE
from bnrnn.system.files import read_record, write_record
from bnrnn.training.provenance import provenance
from tests.emulator.cases import Case, Outcome, every, few, of_costs, run
from tests.emulator.reasons import reason


def row(case: Case, outcome: Outcome, seconds: float) -> dict[str, Any]:
    """What is stored of a case."""
    emulation = outcome.emulation
    return {
        "case": case.title,
        "architecture": case.architecture,
        "precision": case.precision,
        "launch": case.launch,
        "kernels": dict(emulation.kernels),
        "programs": max(grid[0] for grid in emulation.grids),
        "instructions": emulation.executed.total(),
        "error": float(f"{outcome.error:.2g}"),
        "tolerance": float(f"{outcome.tolerance:.2g}"),
        "conflicts": [" | ".join(finding) for finding in emulation.findings],
        "seconds": round(seconds, 1),
    }


def rows(cases: list[Case]) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        begun = time.monotonic()
        outcome = run(case)
        found.append(row(case, outcome, time.monotonic() - begun))
        print(
            *(v for k, v in found[-1].items() if k != "kernels"),
            "" if outcome.passed else "FAILED",
            sep=" | ",
            flush=True,
        )
    return found


def costs() -> list[dict[str, Any]]:
    """Counts of a step: of each kernel, the instructions of a warp, and the barriers and bytes of a program."""
    found = []
    for case in of_costs():
        emulation = run(case).emulation
        programs = max(grid[0] for grid in emulation.grids)
        for kernel, warps in emulation.warps.items():
            executed, traffic = emulation.executed[kernel], emulation.traffic[kernel]
            found.append({"case": case.title, "precision": case.precision, "launch": case.launch, "kernel": kernel,
                          "programs": programs, "warps": warps, "instructions": executed // (programs * warps),
                          "barriers": emulation.barriers[kernel], "bytes": traffic // programs})  # fmt: skip
            print(*found[-1].values(), sep=" | ", flush=True)
    return found


def damage(kind: str) -> Iterator[dict[str, str]]:
    """What the emulator noticed of damaged kernels. A process without this project's modules starts those of copies."""
    command = [sys.executable, "-m", "tests.emulator.mutations", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            print(*found.values(), *() if found["noticed"] else ("NOT NOTICED",), sep=" | ", flush=True)
            yield found
    if process.returncode:
        raise BnrnnError(f"{' '.join(command[1:])} ended with exit status {process.returncode}")


def store_damage(kind: str) -> None:
    """Renew one kind of damage in the stored result, or only the reasons why some was not noticed."""
    made = {} if kind == "reasons" else {kind: {**provenance(), "triton": triton.__version__, "rows": [*damage(kind)]}}
    stored = read_record(FILE, "make emulate")
    found = stored.get("damage", {}) | made
    for of in found.values():
        of["rows"] = [row | {"reason": reason(row)} for row in of["rows"]]
    write_record(FILE, stored | {"damage": found})


def main() -> None:
    parser = ArgumentParser(description="Run the compiled Triton kernels on a CPU")
    parser.add_argument("--few", action="store_true", help="some cases, and store nothing")
    parser.add_argument("--costs", action="store_true", help="only count the instructions of real sizes")
    parser.add_argument("--damage", choices=("order", "source", "reasons"), help="only damage kernels")
    args = parser.parse_args()
    if args.damage:
        store_damage(args.damage)
        return
    if args.costs:
        counted = costs()
        write_record(FILE, {**read_record(FILE, "make emulate"), "costs": counted})
        return
    found = rows(few() if args.few else every())
    if not args.few:
        kept = {"damage": read_record(FILE, "make emulate").get("damage", {})} if FILE.exists() else {}
        write_record(FILE, {**provenance(), "triton": triton.__version__, "rows": found, "costs": costs(), **kept})
    failed = sum(bool(row["conflicts"]) or row["error"] >= row["tolerance"] for row in found)
    if failed:
        sys.exit(f"{failed} of {len(found)} cases have conflicts, or an error that rounding does not explain")


if __name__ == "__main__":
    report_errors(main)
