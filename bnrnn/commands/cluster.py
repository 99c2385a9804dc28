"""Trains a sweep with workers on a Slurm cluster, however often their jobs are stopped.

bnrnn-cluster submit experiment=cooijmans2016/table1 out_dir=results hydra.launcher.workers=8
bnrnn-cluster wait experiment=cooijmans2016/table1 out_dir=results    print the progress until all is done
bnrnn-cluster status experiment=cooijmans2016/table1 out_dir=results  list all runs
bnrnn-cluster status out_dir=results                                  list the runs of all submitted sweeps

`submit` takes the overrides of bnrnn.train and the options of conf/hydra/launcher/slurm.yaml. Submitting a sweep again
adds workers. It waits until all runs are done, or returns at once with wait=0.
"""

import contextlib
import io
import math
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bnrnn.commands.slurm import Queued, Task, folder_of, python_command, queued
from bnrnn.config import MENDABLE, compose_config
from bnrnn.errors import BnrnnError, report_errors
from bnrnn.report.markdown import NONE, markdown
from bnrnn.system.files import make_folder, read_json, reading, write_json
from bnrnn.system.locks import check_locks, holder
from bnrnn.training.cells import Cell, expand
from bnrnn.training.failures import failure
from bnrnn.training.log import LOG, say
from bnrnn.training.options import check_launcher
from bnrnn.training.progress import Known, last_record, load_known, run_of
from bnrnn.training.results import FILE
from bnrnn.training.states import check_cells, failure_line, failures_of, state_of, summary

COMMANDS = ("submit", "wait", "status")
OWN = ("workers", "jobs", "max_num_timeout", "wait_for_lock_s")  # options of slurm.yaml that sbatch does not have
SHARED = ("name", "timeout_min", "cpus_per_task", "gpus_per_node", "mem_gb", "stderr_to_stdout")  # submitit's own names
POLL = 10  # seconds between two looks at the queue and the results
LOOKS = 3  # results may arrive late over a network: so many looks without a worker and without news are the end
LINE = 60  # seconds between two lines of progress
# Slurm's reasons for which a job never starts, whatever becomes of other jobs
NEVER = re.compile(r"Partition\w*Limit|BadConstraints|InvalidAccount|InvalidQOS|\w+NotAllowed|\w+PerJob(Limit)?$")


def submit(arguments: list[str]) -> None:
    """Submit workers for the unfinished cells of a sweep. Raises BnrnnError if Slurm refuses them."""
    cells = expand(arguments)
    options = launcher_options(arguments, cells[0])
    left = [cell for cell in cells if not (cell.folder / FILE).exists()]
    if not left:
        say(f"{options['name']}: nothing is left to train, so nothing was submitted")
        return
    folder = folder_of(cells)
    make_folder(folder)
    check_locks(folder)
    own = {key: options.pop(key) for key in OWN}
    overrides = [a for a in arguments if not a.lstrip("+~").startswith(("hydra.", "hydra/"))]
    since = time.time()
    task = Task(overrides, own["jobs"], since, own["wait_for_lock_s"], own["max_num_timeout"])
    workers = min(own["workers"], math.ceil(len(left) / own["jobs"]))
    job = _sbatch(task, workers, folder, options)
    write_json(folder / f"{job}.json", {"arguments": overrides, "since": since, "workers": workers})
    say(f"job {job}: {_count(workers, 'worker')} for {_count(len(left), 'unfinished run')} of {options['name']}")
    for what, how in {
        "logs": f"{os.path.relpath(folder)}/{job}*_log.out, and {LOG} in the folder of each run",
        "queue": f"squeue --jobs={job}",
        "cancel": f"scancel {job}",
        "status": shlex.join(["bnrnn-cluster", "status", *overrides]),
    }.items():
        print(f"  {what:8}{how}", flush=True)


def launcher_options(arguments: list[str], cell: Cell) -> dict[str, Any]:
    """The options in conf/hydra/launcher/slurm.yaml, with those of the command line. Raises BnrnnError for wrong ones.

    Composes one cell, to check it.
    """
    own = [a for a in arguments if a.lstrip("+~").startswith("hydra.launcher.")]
    cfg = compose_config(*cell.choices, "hydra/launcher=slurm", *own, hydra=True)
    options: Any = OmegaConf.to_container(cfg.hydra.launcher, resolve=True)
    check_launcher(options)
    return options


def _sbatch(task: Task, workers: int, folder: Path, options: dict[str, Any]) -> str:
    """Submit a job array through submitit, and return its number."""
    try:
        import submitit
        from submitit.core.utils import FailedJobError
    except ImportError:
        raise BnrnnError("submitting to Slurm needs submitit: pip install 'bnrnn[sweep]'") from None
    messages = io.StringIO()
    try:
        executor = submitit.AutoExecutor(
            folder, cluster="slurm", slurm_max_num_timeout=task.most, slurm_python=python_command()
        )
        given = {k if k in SHARED else f"slurm_{k}": v for k, v in options.items() if v is not None}
        executor.update_parameters(**given)
        with contextlib.redirect_stderr(messages), executor.batch():
            jobs = [executor.submit(task) for _ in range(workers)]
    except FailedJobError as error:
        lines = str(error).splitlines() or messages.getvalue().splitlines()
        raise BnrnnError(
            f"Slurm refused the job ({'; '.join(lines)}): change hydra.launcher.partition, account, timeout_min and so "
            "on (conf/hydra/launcher/slurm.yaml)"
        ) from None
    except RuntimeError as error:
        raise BnrnnError(f"Slurm's commands are missing ({error}): submit on a machine of the cluster") from None
    return jobs[0].job_id.split("_")[0]


def submissions(folder: Path) -> dict[str, dict[str, Any]]:
    """What was submitted for a sweep, by the numbers of the jobs."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        with reading(path, "remove it", "a submission"):
            found[path.stem] = read_json(path, "remove it", "a submission")
            if not isinstance(found[path.stem], dict) or not {"arguments", "since"} <= found[path.stem].keys():
                raise ValueError("expected arguments and since")
    return found


def wait(cells: list[Cell]) -> int:
    """Print a line a minute until all runs are finished or failed, or no worker is left. Returns the exit status.

    Raises BnrnnError if the workers can never start.
    """
    folder, printed, looks = folder_of(cells), -math.inf, 0
    jobs = submissions(folder)
    since = max((job["since"] for job in jobs.values()), default=0.0)
    while any(state_of(cell, since) in ("running", "left") for cell in cells):
        try:
            tasks, state = queued(jobs.keys()), ""
        except BnrnnError as error:
            tasks, state = None, str(error)
        else:
            state = describe(tasks)
            _check_can_start(tasks, folder)
        looks = looks + 1 if tasks == [] else 0
        if looks == LOOKS:
            break
        if time.monotonic() - printed >= LINE:
            say(f"{time.strftime('%H:%M')} {summary(cells, since)}; {state}")
            printed = time.monotonic()
        time.sleep(POLL)
        jobs = submissions(folder)
    return _report(cells, since, jobs)


def describe(tasks: Collection[Queued]) -> str:
    """The workers in words: how many run and wait, where and why."""
    parts = []
    for state in dict.fromkeys(task.state for task in tasks):
        same = [task for task in tasks if task.state == state]
        where = dict.fromkeys(task.nodes or task.reason for task in same if task.reason != "None" or task.nodes)
        parts.append(f"{len(same)} {state.lower()}" + (f" ({', '.join(where)})" if where else ""))
    return f"workers: {', '.join(parts) or 'none'}"


def _check_can_start(tasks: list[Queued], folder: Path) -> None:
    """Cancel the workers, and raise BnrnnError, if Slurm says of all of them that they can never start."""
    import submitit

    if tasks and all(task.state == "PENDING" and NEVER.match(task.reason) for task in tasks):
        for job in {task.job for task in tasks}:
            submitit.SlurmJob(folder, job).cancel()
        raise BnrnnError(
            f"the workers can never start; Slurm's reason is {', '.join({task.reason for task in tasks})}. They were "
            "cancelled: change hydra.launcher.timeout_min, partition and so on (conf/hydra/launcher/slurm.yaml)"
        )


def _report(cells: list[Cell], since: float, jobs: dict[str, dict[str, Any]]) -> int:
    """Print how the sweep ended, with what failed. Returns the exit status: 0 if every run is finished."""
    states = [state_of(cell, since) for cell in cells]
    if "running" in states or "left" in states:
        last = max(jobs, key=lambda job: jobs[job]["since"], default="")
        for path in sorted(folder_of(cells).glob(f"{last}*_log.out")):
            say(f"{os.path.relpath(path)} ends with: {_last_line(path)}")
    for line in failures_of(cells, since):
        say(line)
    end = "" if set(states) == {"finished"} else (
        "; no worker is left: submit again to resume" if "left" in states or "running" in states else
        "; submit again to try the failed runs again")  # fmt: skip
    say(f"{summary(cells, since)}{end}")
    return int(set(states) != {"finished"})


def _last_line(path: Path) -> str:
    """The last line of a task's log, without those in which srun repeats its exit status."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line and not line.startswith("srun: ")]
    return lines[-1] if lines else "nothing"


def render_status(cells: list[Cell]) -> str:
    """A table with one row per run: its state, its process, its progress and the time left. Nothing is measured."""
    known = load_known(cells[0].sweep_folder.parent)
    try:
        tasks = queued(submissions(folder_of(cells)).keys())
        workers = describe(tasks)
    except BnrnnError as error:
        tasks, workers = [], str(error)
    rows = [_row(cell, known, bool(tasks)) for cell in cells]
    lines = [failure_line(cell) for cell, row in zip(cells, rows, strict=True) if row[1] == "failed"]
    counts = Counter(row[1] for row in rows)
    lines += [f"{cells[0].experiment}: {', '.join(f'{n} {state}' for state, n in counts.items())}; {workers}"]
    table = markdown(["run", "state", "process", "updates", "updates/s", "hours left"], rows)
    return table + "".join(f"{line}\n" for line in lines)


def _row(cell: Cell, known: list[Known], has_workers: bool) -> list[str]:
    run, (done, seconds) = run_of(cell, known, math.nan), last_record(cell.folder)
    state = "failed" if run.state in ("begun", "left") and failure(cell.folder) else run.state
    state = "queued" if state == "left" and has_workers else state
    name = " ".join(f"{k}={v}" for k, v in cell.overrides.items())
    rate = f"{done / seconds:.3g}" if seconds else NONE
    hours = f"{run.hours:.1f}" if math.isfinite(run.hours) else NONE
    return [name, state, holder(cell.folder) if state == "running" else NONE, run.progress, rate, hours]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def sweeps(arguments: list[str]) -> list[list[Cell]]:
    """The cells of the sweep with these overrides or, without an experiment, those of all submitted sweeps."""
    if any(a.startswith("experiment=") for a in arguments):
        return [expand(arguments)]
    if wrong := [a for a in arguments if not a.startswith("out_dir=")]:
        raise BnrnnError(f"{wrong[0]} needs an experiment: add experiment=<paper>/<table>, or give only out_dir=...")
    out_dir = Path(next((a.split("=", 1)[1] for a in arguments), "outputs"))
    found: dict[Path, dict[Path, Cell]] = {}
    for folder in sorted({path.parent for path in out_dir.rglob("slurm/*.json")}):
        try:
            cells = [cell for record in submissions(folder).values() for cell in expand(record["arguments"])]
        except BnrnnError as error:  # it must not hide the other sweeps
            say(f"left out: {folder}: {error}")
            continue
        found[folder] = {cell.folder: cell for cell in cells}
    return [list(cells.values()) for cells in found.values()]


def main() -> None:
    command, *arguments = sys.argv[1:] or [""]
    if command not in COMMANDS:
        raise BnrnnError(f"{command or 'nothing'} is not a command of bnrnn-cluster: use {', '.join(COMMANDS)}")
    if command == "status":
        print("\n".join(map(render_status, sweeps(arguments))), end="")
        return
    is_waiting = "wait=0" not in arguments
    arguments = [a for a in arguments if not a.startswith("wait=")]
    cells = expand(arguments)
    check_cells(cells)
    try:
        if command == "submit":
            submit(arguments)
        if is_waiting:
            sys.exit(wait(cells))
    except KeyboardInterrupt:
        again = shlex.join(["bnrnn-cluster", "wait", *arguments])
        print(f"\nstopped waiting; the workers continue. To wait again: {again}")
        sys.exit(130)


def cli() -> None:
    """Run main. Print errors that the user can correct as one message."""
    report_errors(main, *MENDABLE, usage=__doc__)


if __name__ == "__main__":
    cli()
