"""All that someone with a GPU for half an hour can measure, in one command: `make gpu-evidence HOURS=0.5`.

python scripts/gpu_evidence.py hours=0.5 [jobs=8] [device=cuda] [out_dir=evidence] [file=conf/campaign_gpu.yaml]

Tells what works (bnrnn-doctor), times the layers (scripts/bench.py), and spends the rest of the time on a campaign
(bnrnn-campaign). All that is measured lies in one folder, which can be carried to another machine: the reports, the
benchmarks, the results of finished runs, and the checkpoints of the others. If a step fails or takes too long,
summary.txt says so, and the next one begins.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from bnrnn.commands.arguments import HOURS, JOBS, Kind, read_arguments
from bnrnn.config import ROOT
from bnrnn.errors import report_errors
from bnrnn.system.files import make_folder, write_text

DOCTOR, BENCH = 0.1, 0.15  # parts of the time that the doctor and each of the two benchmarks may take
STOPPING = 60.0  # seconds at the end in which the campaign saves its runs
PATIENCE = 120.0  # seconds until a program that was told to stop is killed


KINDS = {
    "hours": HOURS,
    "jobs": JOBS,
    "device": Kind(str, lambda v: v in ("cuda", "cpu"), "device=cuda, or device=cpu to rehearse"),
    "out_dir": Kind(Path, lambda v: not v.is_file(), "a folder, such as out_dir=evidence"),
    "file": Kind(Path, Path.is_file, "a file that exists, such as file=conf/campaign_gpu.yaml"),
}


@dataclass
class Options:
    """The options of the command line."""

    hours: float = 0.5
    jobs: int = 8  # runs that share the GPU
    device: str = "cuda"
    out_dir: Path = Path("evidence")
    file: Path = ROOT / "conf" / "campaign_gpu.yaml"


@dataclass
class Step:
    """A program, the seconds after which it is told to stop, and the name of its log."""

    name: str
    command: list[str]
    seconds: float


def steps(options: Options, begun: float) -> Iterator[Step]:
    """The programs to run, in order. What is left of the time when the campaign begins is its own."""
    total, out = 3600 * options.hours, options.out_dir
    python = [sys.executable, "-m"]
    yield Step(
        "doctor", [*python, "bnrnn.commands.doctor", "--device", options.device, "--out-dir", str(out)], DOCTOR * total
    )
    for precision in ("tf32", "float32") if options.device == "cuda" else ("float32",):
        bench = [sys.executable, str(ROOT / "scripts/bench.py"), "--quick", "--device", options.device]
        bench += ["--precision", precision, "--out-dir", str(out / "bench" / precision)]
        yield Step(f"bench-{precision}", bench, BENCH * total)
    left = total - (time.monotonic() - begun) - STOPPING
    campaign, given = [*python, "bnrnn.commands.campaign"], [f"file={options.file}", f"out_dir={out / 'results'}"]
    how = [f"hours={max(left, 1.0) / 3600:.4f}", f"jobs={options.jobs}", f"device={options.device}"]
    yield Step("campaign", [*campaign, *how, *given], left + STOPPING)
    yield Step("compress", [*campaign, "compress", *given], PATIENCE)


def run(step: Step, folder: Path) -> str:
    """Run a step, print what it prints, and store it in a log. Returns how it ended, in words."""
    begun, told = time.monotonic(), ""
    print(f"\n{step.name}: {' '.join(step.command)}", flush=True)
    environment = os.environ if find_spec("wandb") else os.environ | {"WANDB_MODE": "disabled"}
    with (folder / f"{step.name}.log").open("wb") as log:
        tee = subprocess.Popen(["tee", log.name], stdin=subprocess.PIPE)
        process = subprocess.Popen(
            step.command, stdout=tee.stdin, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
        try:
            process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            told = f" after it was told to stop after {step.seconds:.0f} s"
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        except BaseException:  # Ctrl-C or a signal: the program is in another process group
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
        finally:
            if tee.stdin is not None:
                tee.stdin.close()
            tee.wait()
    return f"{step.name}: exit status {process.returncode}{told}, {time.monotonic() - begun:.0f} s"


def parse(arguments: list[str]) -> Options:
    """The options of the command line. Raises BnrnnError for unknown options and wrong values."""
    return Options(**read_arguments(arguments, KINDS, "scripts/gpu_evidence.py"))


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Context manager in which SIGTERM and SIGHUP raise SystemExit, so that `run` ends the program of its step.

    A signal that is ignored remains so, such as SIGHUP after `nohup`.
    """

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        if before[number] != signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    options, begun = parse(sys.argv[1:]), time.monotonic()
    make_folder(options.out_dir)
    lines: list[str] = []
    with exiting_on_signals():
        for step in steps(options, begun):
            lines.append(run(step, options.out_dir))
            write_text(options.out_dir / "summary.txt", "".join(f"{line}\n" for line in lines))
    print(f"\nAll of it lies in {options.out_dir}:\n" + "\n".join(f"  {line}" for line in lines))


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    report_errors(main, usage=__doc__)


if __name__ == "__main__":
    cli()
