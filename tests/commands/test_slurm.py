"""Sweeps on a real Slurm cluster on this machine, whose jobs are stopped in every way. `make test-slurm` runs them.

Every cell must be trained once, with the same numbers as a run that nothing disturbs.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from bnrnn.config import ROOT
from bnrnn.system.locks import LOCK, is_being_trained
from bnrnn.train import train
from bnrnn.training.cells import Cell, expand
from bnrnn.training.checkpoint import CHECKPOINT
from bnrnn.training.log import LOG, read_jsonl
from bnrnn.training.results import Result
from tests.test_train import without_time

pytestmark = pytest.mark.slurm
SCRIPT = ROOT / "tests" / "commands" / "slurm_cluster.sh"
TINY = ["experiment=quickstart", "budget=paper", "model=lstm", "model.hidden_size=8", "budget.eval_every=100",
        "budget.eval_batches=1", "budget.population_batches=1", "device=cpu", "checkpoint_seconds=2"]  # fmt: skip
TASK = ["gpus_per_node=null", "cpus_per_task=1", "mem_gb=1", "timeout_min=30", "signal_delay_s=20"]
LONG = 4000  # updates of a run that lasts long enough to be disturbed
LONGER = 16000  # updates of a run that lasts longer than a time limit and than Slurm takes to miss a node


class Cluster:
    """The cluster of slurm_cluster.sh in a folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.env = os.environ | {"SLURM_LOCAL": str(folder), "SLURM_CONF": str(folder / "etc" / "slurm.conf")}
        self.env |= {"SLURMD_TIMEOUT": "15", "GRACE": "30", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
        self.options = options
        self.start()

    def start(self) -> None:
        with (self.folder / "start.log").open("w") as log:  # a pipe would stay open as long as the daemons run
            subprocess.run(
                ["bash", str(SCRIPT), "start", *self.options], env=self.env, stdout=log, stderr=log, check=True
            )

    def stop(self, command: str = "stop") -> None:
        self("bash", str(SCRIPT), command)

    def __call__(self, *command: str) -> str:
        run = subprocess.run(command, env=self.env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert run.returncode == 0, f"{command}: {run.stdout}{run.stderr}"
        return run.stdout

    def kill(self, daemon: str) -> None:
        """Kill a daemon, as when its machine fails, without its job steps."""
        os.kill(int((self.folder / "run" / f"{daemon}.pid").read_text()), signal.SIGKILL)

    def states(self, job: str) -> list[str]:
        """What accounting calls the states of a job's tasks in the end, after Slurm has forgotten none of them."""
        wait_for(lambda: not self("squeue", "-h", f"--jobs={job}", "--states=R,CG,PD", "-o%i").strip())
        return sorted(self("sacct", "-n", "-X", "-P", f"--jobs={job}", "-o", "State").split("\n")[:-1])


class Sweep:
    """A sweep that a command submits, and waits for."""

    def __init__(self, cluster: Cluster, folder: Path, *overrides: str, tasks: int = 1, task: list[str] = ()) -> None:
        self.cluster, self.folder = cluster, folder
        self.arguments = [*TINY, f"out_dir={folder}", *overrides]
        options = [f"hydra.launcher.{option}" for option in (*TASK, f"workers={tasks}", *task)]
        self.command = [sys.executable, "-m", "bnrnn.commands.cluster", "submit", *self.arguments, *options]
        self.cells = expand(self.arguments)
        self.process = self.submit()

    def submit(self) -> subprocess.Popen:
        return subprocess.Popen(self.command, cwd=ROOT, env=self.cluster.env, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True)  # fmt: skip

    def job(self) -> str:
        """The number of the job, as soon as it is submitted."""
        pattern = f"{self.folder}/**/slurm/*.json"
        return wait_for(lambda: sorted(p.stem for p in self.folder.rglob("slurm/*.json")), what=pattern)[-1]

    def started(self, number: int = 0, updates: int = 60) -> Cell:
        """Wait until a cell has made some updates."""
        cell = self.cells[number]
        path = cell.folder / "metrics.jsonl"
        wait_for(lambda: any(r["update"] >= updates for r in read_jsonl(path)), what=cell.title)
        return cell

    def end(self, status: int, *endings: str) -> str:
        """Wait for the command, and check its exit status and its last lines."""
        output, _ = self.process.communicate(timeout=600)
        print(output)
        assert self.process.returncode == status, output
        lines = output.splitlines()[-len(endings) :]
        for line, ending in zip(lines, endings, strict=True):
            assert re.search(ending, line), output
        return output

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.rglob("slurm/*_log.out")))

    def check(self, *, starts: int = 1) -> None:
        """Every cell was trained once, from the start once, and equals an undisturbed run bit for bit."""
        for cell in self.cells:
            lines = (cell.folder / LOG).read_text()
            assert lines.count("from the start") == starts and lines.count(": finished at update") <= 1, lines
            assert len(re.findall(r"finished at update", lines)) == 1, lines
            expected, result = (
                undisturbed(tuple(c for c in cell.choices if not c.startswith("out_dir="))),
                Result.read(cell.folder / "result.json"),
            )
            assert without_time(cell.folder) == expected[0]
            assert (result.metrics, result.best_update) == expected[1]
            assert not (cell.folder / CHECKPOINT).exists() and not is_being_trained(cell.folder)


@cache
def undisturbed(choices: tuple[str, ...]) -> tuple:
    """The records and the result of a run without any disturbance."""
    with tempfile.TemporaryDirectory() as folder:
        cell = Cell(list(choices), {}, "paper", Path(folder))
        result = train(cell.cfg, cell.folder)
        return without_time(cell.folder), (result.metrics, result.best_update)


def wait_for(condition: Callable, seconds: float = 240, what: str = ""):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it never came true: {what}"
        time.sleep(0.2)
    return found


def process_of(cell: Cell) -> int:
    return int((cell.folder / LOCK).read_text().split()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(new_folder())
    yield cluster
    cluster.stop("wipe")


def new_folder() -> Path:
    """A folder that everyone may read, as munge demands; pytest's own are closed."""
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    folder.chmod(0o755)
    return folder


def test_eight_cells_on_two_workers(cluster, tmp_path):
    cells = ["seed=0,1,2,3", "model=lstm,bn_lstm", "budget.updates=20"]
    sweep = Sweep(cluster, tmp_path, *cells, tasks=2, task=["jobs=2"])
    output = sweep.end(0, "8 of 8 finished$")
    job = sweep.job()
    assert f"job {job}: 2 workers for 8 unfinished runs of quickstart" in output
    for line in (
        f"slurm/{job}*_log.out",
        f"squeue --jobs={job}",
        f"scancel {job}",
        "bnrnn.commands.cluster status experiment=",
    ):
        assert line in output
    sweep.check()
    assert cluster.states(job) == ["COMPLETED"] * 2


def test_a_time_limit_shorter_than_a_cell(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONGER}", task=["timeout_min=2", "signal_delay_s=45"])
    sweep.end(0, "1 of 1 finished$")
    assert "Requeued job" in sweep.logs() and "resumed at update" in (sweep.cells[0].folder / LOG).read_text()
    sweep.check()


def test_a_time_limit_that_is_reached_too_often_is_reported(cluster, tmp_path):
    task = ["timeout_min=2", "signal_delay_s=30", "max_num_timeout=0"]
    sweep = Sweep(cluster, tmp_path, "seed=0", "budget.updates=100000", task=task)
    sweep.started()
    cluster("scancel", "--signal=USR2", sweep.job())
    sweep.end(1, r"ends with: not queued again: it has reached its time limit 1 times \(max_num_timeout\)$",
              "0 of 1 finished, 1 left; no worker is left: submit again to resume$")  # fmt: skip
    assert (sweep.cells[0].folder / CHECKPOINT).exists()
    assert cluster.states(sweep.job()) == ["FAILED"]


def test_preemption_with_a_grace_time(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}", task=["partition=gpu"])
    cell = sweep.started()
    node = cluster("squeue", "-h", f"--jobs={sweep.job()}", "-o%N").strip()
    cluster("sbatch", "-p", "urgent", "-w", node, "--exclusive", "--mem=100", "-o", "/dev/null", "--wrap", "sleep 20")
    sweep.end(0, "1 of 1 finished$")
    assert "preempted: queued again" in sweep.logs()
    assert "resumed at update" in (cell.folder / LOG).read_text()
    sweep.check()


def test_scontrol_requeue(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}")
    cell = sweep.started()
    cluster("scontrol", "requeue", sweep.job())
    sweep.end(0, "1 of 1 finished$")
    assert "resumed at update" in (cell.folder / LOG).read_text()
    sweep.check()


def test_scancel_of_one_worker_of_two(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0,1", f"budget.updates={LONG}", tasks=2)
    cell = sweep.started()
    job = re.search(r"Slurm job (\d+_\d)", (cell.folder / LOCK).read_text())[1]
    cluster("scancel", job)
    sweep.end(0, "2 of 2 finished$")
    sweep.check()
    assert [state.split()[0] for state in cluster.states(sweep.job())] == ["CANCELLED", "COMPLETED"]


def test_sigterm_from_a_person(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", "budget.updates=100000")
    sweep.started()
    cluster("scancel", "--signal=TERM", sweep.job())
    sweep.end(
        1,
        "ends with: stopped by SIGTERM; the runs are saved",
        "0 of 1 finished, 1 left; no worker is left: submit again to resume$",
    )
    assert cluster.states(sweep.job()) == ["FAILED"]
    assert (sweep.cells[0].folder / CHECKPOINT).exists()


def test_sigkill_of_a_training_process_and_then_of_its_task(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0,1", f"budget.updates={LONG}", tasks=2)
    cell = sweep.started(updates=400)
    killed = process_of(cell)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: process_of(cell) != killed and is_being_trained(cell.folder))
    other = sweep.started(1, updates=400)
    task = int(Path(f"/proc/{process_of(other)}/stat").read_text().split()[3])
    os.kill(task, signal.SIGKILL)
    sweep.end(0, "2 of 2 finished$")
    assert "its process was killed by SIGKILL" in sweep.logs()
    sweep.check()


def test_restart_of_both_daemons(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}")
    cell = sweep.started()
    before = process_of(cell)
    for daemon in ("slurmctld", "slurmd.n1", "slurmd.n2"):
        cluster.kill(daemon)
    time.sleep(12)  # the command asks for the queue meanwhile
    cluster.start()
    assert process_of(cell) == before
    sweep.end(0, "1 of 1 finished$")
    sweep.check()


def test_a_node_fails_while_its_step_is_alive(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONGER}", task=["wait_for_lock_s=10"])
    cell = sweep.started()
    before = process_of(cell)
    node = cluster("squeue", "-h", f"--jobs={sweep.job()}", "-o%N").strip()
    cluster.kill(f"slurmd.{node}")
    wait_for(lambda: "queued again: after 10 seconds" in sweep.logs())
    assert "waiting: quickstart" in sweep.logs() and process_of(cell) == before
    cluster.start()  # Slurm ends the step that was left
    sweep.end(0, "1 of 1 finished$")
    sweep.check()


def test_the_same_sweep_submitted_twice(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0,1,2,3", "budget.updates=800", tasks=1)
    first = sweep.job()
    second = sweep.submit()
    wait_for(lambda: sweep.job() != first)
    output, _ = second.communicate(timeout=600)
    assert second.returncode == 0 and output.splitlines()[-1] == "4 of 4 finished", output
    sweep.end(0, "4 of 4 finished$")
    sweep.check()
    assert all("from the start" in path.read_text() for path in tmp_path.rglob("slurm/*_log.out"))
    third, _ = sweep.submit().communicate()
    assert third == "4 of 4 finished\n"


def test_a_hundred_cells_of_three_updates(cluster, tmp_path):
    seeds = ",".join(map(str, range(100)))
    sweep = Sweep(cluster, tmp_path, f"seed={seeds}", "budget.updates=3", tasks=2)
    sweep.end(0, "100 of 100 finished$")
    assert len(list(tmp_path.rglob("slurm/*_log.out"))) == 2
    sweep.check()


def test_a_failed_cell_is_listed_with_its_log_and_the_others_are_finished(cluster, tmp_path):
    cells = ["data=smnist,digits", f"data_dir={tmp_path}", "seed=0", "budget.updates=20"]
    sweep = Sweep(cluster, tmp_path, *cells, tasks=2)
    bad = sweep.cells[0]
    output = sweep.end(1, rf"^failed: {re.escape(bad.title)}: .*run `make data`.*\(log: .*{LOG}\)$",
                       "^1 of 2 finished, 1 failed; submit again to try the failed runs again$")  # fmt: skip
    assert output.count("failed: ") == 1 and "make data" in (bad.folder / LOG).read_text()
    command = [sys.executable, "-m", "bnrnn.commands.cluster", "status", f"out_dir={tmp_path}"]
    status = cluster(*command)
    assert "seed=0 | failed | – |" in status and "seed=0 | finished | – | 20/20" in status


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (["partition=short", "timeout_min=60"], r"can never start; Slurm's reason is PartitionTimeL"),
        (["partition=nowhere"], r"^error: Slurm refused the job \(sbatch: error: .*[Ii]nvalid partition"),
        (["gpus_per_node=null", "gres=gpu:h999:1"], r"^error: Slurm refused the job \(sbatch: error: .*"),
    ],
)
def test_a_job_that_can_never_start(cluster, tmp_path, task, message):
    started = time.monotonic()
    sweep = Sweep(cluster, tmp_path, "seed=0", "budget.updates=20", task=task)
    output = sweep.end(1, message)
    assert time.monotonic() - started < 60 and "Traceback" not in output
    assert not cluster("squeue", "-h").strip()


def test_nothing_of_the_environment_is_passed_on(cluster, tmp_path):
    cluster.env["SBATCH_EXPORT"] = "NONE"
    try:
        sweep = Sweep(cluster, tmp_path, "seed=0", "budget.updates=20", "wandb.mode=disabled",
                      task=[f'setup=["export PYTHONPATH={ROOT}"]'])  # fmt: skip
        sweep.end(0, "1 of 1 finished$")
        assert (sweep.cells[0].folder / "result.json").exists()
    finally:
        del cluster.env["SBATCH_EXPORT"]


def test_wandb_is_killed_first(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0,1", "budget.updates=1500", "wandb.mode=offline")
    cell, second = sweep.started(), sweep.cells[1]
    children = Path(f"/proc/{process_of(cell)}/task/{process_of(cell)}/children").read_text().split()
    assert children
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    sweep.end(0, "2 of 2 finished$")
    assert (cell.folder / LOG).read_text().count("warning: wandb has ended") == 1
    assert "warning" not in (second.folder / LOG).read_text(), "it was started again"
    sweep.check()


def test_without_accounting(cluster, tmp_path):
    cluster.stop()
    bare = Cluster(new_folder(), "--no-accounting")
    try:
        assert subprocess.run(["sacct"], env=bare.env, capture_output=True).returncode != 0
        sweep = Sweep(bare, tmp_path / "one", "seed=0,1", f"budget.updates={LONG}", tasks=2)
        sweep.started()
        bare("scancel", f"{sweep.job()}_0")
        sweep.end(0, "2 of 2 finished$")
        sweep.check()
        sweep = Sweep(bare, tmp_path / "all", "seed=0,1", "budget.updates=100000", tasks=2)
        sweep.started()
        bare("scancel", sweep.job())
        sweep.end(1, "_log.out ends with: stopped by SIGTERM", "_log.out ends with: stopped by SIGTERM",
                  "^0 of 2 finished, 2 left; no worker is left: submit again to resume$")  # fmt: skip
    finally:
        bare.stop("wipe")
        cluster.start()


def test_ctrl_c_says_that_the_workers_continue(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}")
    sweep.started()
    status = cluster(sys.executable, "-m", "bnrnn.commands.cluster", "status", *sweep.arguments)
    assert re.search(
        r"seed=0 \| running \| process \d+ on \S+, Slurm job \d+ \| [\d,]+/4,000 \| [\d.]+ \| 0\.\d \|", status
    )
    assert "quickstart: 1 running; workers: 1 running (n" in status
    sweep.process.send_signal(signal.SIGINT)
    sweep.end(130, "the workers continue")
    waiting = [sys.executable, "-m", "bnrnn.commands.cluster", "wait", *sweep.arguments]
    assert cluster(*waiting).splitlines()[-1] == "1 of 1 finished"
    sweep.check()


def test_hydras_own_launcher_saves_at_the_warning_and_resumes(cluster, tmp_path):
    overrides = [*TINY, f"out_dir={tmp_path}", "seed=0,1", f"budget.updates={LONG}"]
    options = ["cpus_per_task=1", "mem_gb=1", "timeout_min=30", "max_num_timeout=3"]
    command = [sys.executable, "-m", "bnrnn.train", *overrides, "hydra/launcher=submitit_slurm",
               *(f"hydra.launcher.{option}" for option in options)]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT, env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    cells = expand(overrides)
    wait_for(lambda: any(r["update"] >= 60 for r in read_jsonl(cells[0].folder / "metrics.jsonl")))
    job = re.search(r"Slurm job (\S+)", (cells[0].folder / LOCK).read_text())[1]
    cluster("scancel", "--signal=USR2", job)
    output = process.communicate(timeout=600)[0].decode()
    assert process.returncode == 0, output
    assert "resumed at update" in (cells[0].folder / LOG).read_text()
    for cell in cells:
        expected = undisturbed(tuple(c for c in cell.choices if not c.startswith("out_dir=")))
        assert without_time(cell.folder) == expected[0]
