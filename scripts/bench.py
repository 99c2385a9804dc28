"""Time a training step of a BN-LSTM against torch.nn.LSTM and a naive loop, for every engine of this machine.

python scripts/bench.py --quick                    two minutes: short sequences, one thread, no memory
python scripts/bench.py [--device cuda]            the tasks' own lengths, one and two threads, memory
python scripts/bench.py --render results/bench/cpu-full.json    print what was stored
"""

import argparse
import datetime
import os
import platform
from pathlib import Path
from typing import Any

import torch

from bnrnn import bench
from bnrnn.bench import NAIVE, NN_LSTM, Plan, Shape, say
from bnrnn.bench_page import render, render_file
from bnrnn.bench_reader import reader_cost
from bnrnn.bench_rhn import rhn_cost
from bnrnn.bench_speech import speech_cost
from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.files import write_json
from bnrnn.heap import keep_heap
from bnrnn.scan import set_backend
from bnrnn.training.device import choose_device
from bnrnn.training.results import environment, git_commit


def measure(shapes: dict[str, Shape], plan: Plan, device: torch.device, precision: str) -> dict[str, Any]:
    """Everything that is stored. Leaves the choice of engine at `auto`."""
    bench.set_precision(device, precision)
    keep_heap()  # as training does: page faults on fresh memory may be a third of nn.LSTM's time
    variants = [NN_LSTM, NAIVE, *bench.engines(device)]
    threads = [n for n in plan.threads if n == 1 or (device.type == "cpu" and n <= (os.cpu_count() or 1))]
    has_memory = plan.memory and (device.type == "cuda" or bench.CLEAR_REFS.exists())
    rows, memory = [], []
    for key, shape in shapes.items():
        T = shape.T if plan.full_length else shape.quick_T
        about = {"shape": key, "T": T}
        error_T = min(T, plan.error_T)
        torch.set_num_threads(threads[-1])
        say(f"{key} {shape.title}, {precision} on {device}: error against float64 at T={error_T}")
        errors = bench.relative_errors(variants[1:], shape, error_T, device)
        say("  " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
        for num_threads in threads:
            say(f"{key} {shape.title}: T={T}, threads={num_threads}")
            torch.set_num_threads(num_threads)
            times = bench.time_variants(variants, shape, T, device, plan)
            target = shape.targets.get(device.type) if num_threads == 1 else None
            judged = bench.judge_times(times, target)
            rows.append({**about, "threads": num_threads, "error_T": error_T, "error": errors, **judged})
        if has_memory:
            say(f"{key} {shape.title}: memory at T={T}, each in a fresh process")
            mib = {v: bench.in_fresh_process(bench.memory_growth, v, shape, T, device, precision) for v in variants}
            best = rows[-len(threads)]["best"]
            memory.append({**about, "MiB": mib, **bench.judge(mib, best, bench.MEMORY_TARGET)})
    key, shape = next(iter(shapes.items()))
    torch.set_num_threads(1)
    say(f"{key} {shape.title}: {bench.REPLICAS} replicas")
    replicas = {"shape": key, **bench.replica_cost(rows[0]["best"], shape, device, plan)}
    set_backend("auto")
    say("recurrent highway networks")
    rhn = rhn_cost(variants[2:], device, plan)
    say("attentive readers")
    readers = reader_cost(device, plan)
    say("speech")
    speech = speech_cost(device, plan)
    return {
        "name": f"{device.type}-{plan.name}",
        "commit": git_commit(),
        "date": datetime.date.today().isoformat(),
        "environment": {k: environment(device)[k] for k in ("python", "torch", "device")},
        "hardware": hardware(device),
        "precision": precision,
        "heap": "times: freed memory is kept, as in training (bnrnn.keep_heap); memory: the system's default",
        "shapes": {
            key: f"{s.title} (B {s.B}, I {s.I}, H {s.H}" + (f", {s.num_layers} layers)" if s.num_layers > 1 else ")")
            for key, s in shapes.items()
        },
        "rows": rows,
        "memory": memory,
        "replicas": replicas,
        "rhn": rhn,
        "readers": readers,
        "speech": speech,
    }


def hardware(device: torch.device) -> str:
    """The processor or GPU in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(models, platform.machine())}, {os.cpu_count()} hardware threads"


def chosen(names: str, shapes: dict[str, Shape]) -> dict[str, Shape]:
    """The shapes of a list such as S1,S4."""
    unknown = [name for name in names.split(",") if name not in shapes]
    if unknown:
        raise BnrnnError(f"shapes={names}: {', '.join(unknown)} is unknown, use {', '.join(shapes)}")
    return {name: shapes[name] for name in names.split(",")}


def main(argv: list[str] | None = None, shapes: dict[str, Shape] = bench.SHAPES, plan: Plan | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--precision", choices=["float32", "tf32", "bfloat16"], help="of both sides; on a GPU tf32 unless given"
    )
    parser.add_argument("--shapes", metavar="S1,S4", help="only these; then stored in outputs/bench")
    parser.add_argument("--out-dir", type=Path, metavar="DIR", help="instead of results/bench")
    parser.add_argument("--render", type=Path, metavar="FILE", help="print what is stored and measure nothing")
    args = parser.parse_args(argv)
    if args.render:
        print(render_file(args.render))
        return
    device = choose_device(args.device)
    if args.shapes:
        shapes = chosen(args.shapes, shapes)
    precision = args.precision or ("tf32" if device.type == "cuda" else "float32")
    result = measure(shapes, plan or (bench.QUICK if args.quick else bench.FULL), device, precision)
    out_dir = args.out_dir or ROOT / ("outputs" if args.shapes else "results") / "bench"
    write_json(out_dir / f"{result['name']}.json", result)
    print(render(result))


if __name__ == "__main__":
    report_errors(main)
