"""Time a training step of a BN-LSTM against torch.nn.LSTM and a naive loop, for every engine of this machine.

python scripts/bench.py --quick                    ten minutes: short sequences, without memory; on a GPU few rounds
python scripts/bench.py [--device cuda]            sequences of the tasks' lengths, and memory
python scripts/bench.py --padded                   sequences of different lengths, and nothing else: a minute
"""

import argparse
import datetime
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bnrnn.bench import layers
from bnrnn.bench.gru import gru_cases
from bnrnn.bench.inference import inference_cases
from bnrnn.bench.layer_norm import layer_norm_cases
from bnrnn.bench.layers import CLEAR_REFS, Shape, in_fresh_process, memory_growth, relative_errors
from bnrnn.bench.padded import padded_cases
from bnrnn.bench.peers import peer_cases
from bnrnn.bench.readers import reader_cases
from bnrnn.bench.rhn import rhn_case
from bnrnn.bench.speech import speech_case
from bnrnn.bench.timing import LENGTHS, NAIVE, NN_LSTM, Case, Plan, engines, fastest, measure, say, set_precision
from bnrnn.config import ROOT
from bnrnn.errors import report_errors
from bnrnn.report.bench_page import render
from bnrnn.scan import set_backend
from bnrnn.scan.native.peak import peak
from bnrnn.system.files import write_record
from bnrnn.system.memory import keep_heap
from bnrnn.training.device import choose_device
from bnrnn.training.provenance import environment, git_commit

QUICK = Plan("quick", full_length=False, memory=False, threads=(1, 2), error_T=20, seconds=6.0)
QUICK_ON_GPU = Plan("quick", full_length=True, memory=False, threads=(1,), error_T=50, seconds=1.5, thorough=False)
PADDED = Plan("padded", full_length=True, memory=False, threads=(1,), error_T=0, seconds=12.0)
FULL = Plan("full", full_length=True, memory=True, threads=(1, 2), error_T=50, seconds=30.0)


def cases(shapes: dict[str, Shape], plan: Plan, device: torch.device, peers: bool) -> Iterator[Case]:
    """All cases. Training steps are timed for each number of threads, the rest on one thread."""
    if plan.name == PADDED.name:
        torch.set_num_threads(1)
        yield from padded_cases(device)
        return
    usable = [n for n in plan.threads if n == 1 or (device.type == "cpu" and n <= (os.cpu_count() or 1))]
    for num_threads in usable:
        torch.set_num_threads(num_threads)
        yield from layers.training_cases(shapes, device, plan)
    torch.set_num_threads(1)
    yield from inference_cases(device, plan)
    yield rhn_case(device)
    yield from layer_norm_cases(device, plan)
    yield from gru_cases(device, plan)
    yield from reader_cases(device, plan)
    yield speech_case(device, plan)
    if peers:
        yield from peer_cases(shapes, plan)


def errors_of(shapes: dict[str, Shape], plan: Plan, device: torch.device) -> dict[str, Any]:
    found = {}
    for key, shape in shapes.items():
        T = min(shape.T if plan.full_length else shape.quick_T, plan.error_T)
        say(f"{key}: error against float64 at T {T}")
        found[key] = {"T": T, "error": relative_errors([NAIVE, *engines(device)], shape, T, device)}
    return found


def memory_of(shapes: dict[str, Shape], plan: Plan, device: torch.device, precision: str) -> dict[str, Any]:
    """The memory growth of every variant; each is measured in a new process."""
    found = {}
    for key, shape in shapes.items():
        T = shape.T if plan.full_length else shape.quick_T
        say(f"{key}: memory at T {T}")
        variants = [NN_LSTM, NAIVE, *engines(device)]
        mib = {v: in_fresh_process(memory_growth, v, shape, T, device, precision) for v in variants}
        found[key] = {"T": T, "MiB": mib}
    return found


def everything(
    shapes: dict[str, Shape], plan: Plan, device: torch.device, precision: str, peers: bool
) -> Iterator[dict[str, Any]]:
    """Run the benchmark, and yield what is to be stored after each case. Afterwards the engine is `auto`."""
    set_precision(device, precision)
    keep_heap()  # as in training: page faults on new memory may take a third of nn.LSTM's time
    has_memory = plan.memory and (device.type == "cuda" or CLEAR_REFS.exists())
    set_backend("auto")
    result = {
        "name": f"{device.type}-{plan.name}",
        "commit": git_commit(),
        "date": datetime.date.today().isoformat(),
        "environment": {k: environment(device)[k] for k in ("python", "torch", "device")},
        "hardware": hardware(device),
        "peak": peak() if fastest(device) == "cpu" else None,
        "precision": precision,
        "heap": "times: freed memory is kept, as in training (bnrnn.keep_heap); memory: the system's default",
        "shapes": {key: shape.about for key, shape in shapes.items()} or {"lengths": LENGTHS},
        "errors": errors_of(shapes, plan, device),
        "rows": [],
        "memory": {},
    }
    for case in cases(shapes, plan, device, peers):
        result["rows"].append(measure(case, device, plan.seconds))
        yield result
    if has_memory:
        yield result | {"memory": memory_of(shapes, plan, device, precision)}


def hardware(device: torch.device) -> str:
    """The name of the processor or GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    name = found.get("model name", platform.machine())
    family = f" (family {found['cpu family']}, model {found['model']})" if "cpu family" in found else ""
    return f"{name}{family}, {os.cpu_count()} hardware threads"


def main(argv: list[str] | None = None, shapes: dict[str, Shape] = layers.SHAPES, plan: Plan | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--precision", choices=["float32", "tf32", "bfloat16"], help="precision of all variants; default tf32 on a GPU"
    )
    parser.add_argument("--peers", action="store_true", help="also time JAX and the compiled naive loop")
    parser.add_argument("--padded", action="store_true", help="only sequences of different lengths: a minute")
    parser.add_argument("--out-dir", type=Path, default=ROOT / "results" / "bench", metavar="DIR", help="store here")
    args = parser.parse_args(argv)
    device = choose_device(args.device)
    if args.padded:
        shapes, plan = {}, PADDED
    usual = "tf32" if device.type == "cuda" else "float32"
    precision = args.precision or usual
    if plan is None:
        quick = QUICK_ON_GPU if device.type == "cuda" else QUICK
        plan = quick if args.quick else FULL
    if precision != usual:
        plan = replace(plan, name=f"{plan.name}-{precision}")
    result = {}
    for result in everything(shapes, plan, device, precision, args.peers):
        write_record(args.out_dir / f"{result['name']}.partial", result)  # which stays if the rest is stopped
    write_record(args.out_dir / f"{result['name']}.json", result)
    (args.out_dir / f"{result['name']}.partial").unlink()
    print(render(result))


if __name__ == "__main__":
    report_errors(main)
