"""Run the compiled Triton kernels instruction by instruction on a CPU, and compare them with the reference in float64.

python -m scripts.emulate                    every case, into results/bench/emulated.json: half an hour
python -m scripts.emulate --costs            renew only the counts of real sizes in that file
python -m scripts.emulate --damage order     renew only what is noticed of damaged barriers, fences and waits: minutes
python -m scripts.emulate --damage source    renew only what is noticed of changed lines of the kernels: half an hour
python -m scripts.emulate --damage reasons   renew only the reasons why some damage was not noticed
python -m scripts.emulate --few              some cases, which are only printed: a minute
python -m scripts.emulate --on-gpu           every case on the GPU of this machine, into results/bench/executed.json

`make tables` renders what was stored.
"""

import json
import math
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import triton

from bnrnn.errors import BnrnnError, first_line, report_errors
from bnrnn.report.emulated_page import EXECUTED, FILE
from bnrnn.system.files import read_record, write_record
from bnrnn.training.provenance import environment, provenance
from tests.emulator.cases import Case, Executed, Outcome, every, execute, few, of_costs, run
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


def executed(case: Case) -> dict[str, Any]:
    """What is stored of a case that ran on a GPU. Whatever a kernel raises is part of it."""
    begun, problem, outcome = time.monotonic(), "", Executed(math.inf, 0.0)
    try:
        outcome = execute(case)
    except Exception as raised:
        problem = f"{type(raised).__name__}: {first_line(raised)}"
    found = {
        "case": case.title,
        "precision": case.precision,
        "launch": case.launch,
        "error": float(f"{outcome.error:.2g}") if math.isfinite(outcome.error) else None,
        "tolerance": float(f"{outcome.tolerance:.2g}"),
        "passed": outcome.error < outcome.tolerance,
        "problem": problem,
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(*found.values(), sep=" | ", flush=True)
    return found


def on_gpu() -> list[dict[str, Any]]:
    """All cases on the GPU of this machine, in as many processes as it has cores. Those of single programs once."""
    distinct = {(case.title, case.precision, case.launch): case for case in every() if "program" not in case.title}
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        found = list(pool.map(executed, distinct.values()))
    device = torch.device("cuda")
    made = {**provenance(), "environment": environment(device), "triton": triton.__version__}
    write_record(EXECUTED, {**made, "rows": found})
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
    parser.add_argument("--on-gpu", action="store_true", help="run every case on the GPU of this machine instead")
    args = parser.parse_args()
    if args.on_gpu:
        failed = sum(not row["passed"] for row in on_gpu())
        if failed:
            sys.exit(f"{failed} cases have an error that rounding does not explain")
        return
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
