"""Sweeps on a real Slurm cluster on this machine, whose jobs are stopped in every way. `make test-slurm` runs them.

Every cell must be trained once, with the same numbers as a run that nothing disturbs. A test that disturbs a run first
stops its process (`hold`), so that the run is always there at the disturbance, however fast the machine trains.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
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
        "budget.eval_batches=1", "budget.population_batches=1", "device=cpu", "checkpoint_seconds=0.2"]  # fmt: skip
TASK = ["gpus_per_node=null", "cpus_per_task=1", "mem_gb=1", "timeout_min=30", "signal_delay_s=20"]
LONG = 2000  # updates of a run that lasts several times as long as it takes to hold it after its first checkpoint


class Cluster:
    """The cluster of slurm_cluster.sh in a folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.env = os.environ | {"SLURM_LOCAL": str(folder), "SLURM_CONF": str(folder / "etc" / "slurm.conf")}
        self.env |= {"SLURMD_TIMEOUT": "15", "GRACE": "30", "WANDB_MODE": "disabled", "PYTHONPATH": str(ROOT)}
        self.options = options
        self.commands: list[subprocess.Popen] = []
        self.start()

    def start(self) -> None:
        with (self.folder / "start.log").open("w") as log:  # a pipe would stay open as long as the daemons run
            subprocess.run(
                ["bash", str(SCRIPT), "start", *self.options], env=self.env, stdout=log, stderr=log, check=True
            )

    def stop(self, command: str = "stop") -> None:
        self("bash", str(SCRIPT), command)

    def end(self) -> None:
        """End the commands and jobs that a test has left, which would disturb the next one if it has failed."""
        for command in self.commands:
            with command:
                command.kill()
        self.commands.clear()
        self.start()  # without the daemons that a test has killed, its jobs would stay
        self("scancel", "--me")
        wait_for(lambda: not self("squeue", "-h").strip(), what="the queue is empty")

    def begin(self, command: list[str]) -> subprocess.Popen:
        """Start a command that works beside the test."""
        process = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True)  # fmt: skip
        self.commands.append(process)
        return process

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
        return self.cluster.begin(self.command)

    def job(self) -> str:
        """The number of the job, as soon as it is submitted; of the last one if there are several."""
        pattern = f"{self.folder}/**/slurm/*.json"
        numbers = wait_for(lambda: [int(p.stem) for p in self.folder.rglob("slurm/*.json")], what=pattern)
        return str(max(numbers))

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
        time.sleep(0.05)
    return found


def process_of(cell: Cell) -> int:
    return int((cell.folder / LOCK).read_text().split()[1])


def hold(cell: Cell) -> int:
    """Wait until a run has a checkpoint and a record, and stop its process, so that it gets no further. Returns its id.

    It continues with SIGCONT, which Slurm also sends to the processes of a job that it ends.
    """
    metrics = cell.folder / "metrics.jsonl"
    wait_for(lambda: (cell.folder / CHECKPOINT).exists() and read_jsonl(metrics), what=f"{cell.title} has a checkpoint")
    process = process_of(cell)
    os.kill(process, signal.SIGSTOP)
    assert not (cell.folder / "result.json").exists(), "the run ended before it could be held: increase LONG"
    return process


def release(process: int, number: int = signal.SIGTERM) -> None:
    """Let a held process continue as soon as this signal has arrived there.

    If Slurm continues it before, it may have ended already.
    """

    def has_arrived() -> bool:
        pending = re.search(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)[1]
        return bool(int(pending, 16) & 1 << (number - 1))

    with suppress(FileNotFoundError, ProcessLookupError):
        wait_for(has_arrived, what=f"{signal.Signals(number).name} arrives at process {process}")
        os.kill(process, signal.SIGCONT)


@pytest.fixture(scope="module")
def daemons() -> Iterator[Cluster]:
    cluster = Cluster(new_folder())
    yield cluster
    cluster.stop("wipe")


@pytest.fixture
def cluster(daemons: Cluster) -> Iterator[Cluster]:
    yield daemons
    daemons.end()


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
        "bnrnn-cluster status experiment=",
    ):
        assert line in output
    sweep.check()
    assert cluster.states(job) == ["COMPLETED"] * 2


def test_a_time_limit_shorter_than_a_cell(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}", task=["timeout_min=2", "signal_delay_s=45"])
    release(hold(sweep.cells[0]))
    sweep.end(0, "1 of 1 finished$")
    assert "Requeued job" in sweep.logs() and "resumed at update" in (sweep.cells[0].folder / LOG).read_text()
    sweep.check()


def test_a_time_limit_that_is_reached_too_often_is_reported(cluster, tmp_path):
    task = ["timeout_min=2", "signal_delay_s=30", "max_num_timeout=0"]
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}", task=task)
    held = hold(sweep.cells[0])
    cluster("scancel", "--signal=USR2", sweep.job())
    release(held)
    sweep.end(1, r"ends with: not queued again: it has reached its time limit 1 times \(max_num_timeout\)$",
              "0 of 1 finished, 1 left; no worker is left: submit again to resume$")  # fmt: skip
    assert (sweep.cells[0].folder / CHECKPOINT).exists()
    assert cluster.states(sweep.job()) == ["FAILED"]


def test_preemption_with_a_grace_time(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}", task=["partition=gpu"])
    cell = sweep.cells[0]
    hold(cell)
    node = cluster("squeue", "-h", f"--jobs={sweep.job()}", "-o%N").strip()
    cluster("sbatch", "-p", "urgent", "-w", node, "--exclusive", "--mem=100", "-o", "/dev/null", "--wrap", "sleep 20")
    sweep.end(0, "1 of 1 finished$")
    assert "preempted: queued again" in sweep.logs()
    assert "resumed at update" in (cell.folder / LOG).read_text()
    sweep.check()


def test_scontrol_requeue(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}")
    cell = sweep.cells[0]
    hold(cell)
    cluster("scontrol", "requeue", sweep.job())
    sweep.end(0, "1 of 1 finished$")
    assert "resumed at update" in (cell.folder / LOG).read_text()
    sweep.check()


def test_scancel_of_one_worker_of_two(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0,1", f"budget.updates={LONG}", tasks=2)
    cell, other = sweep.cells
    hold(cell)
    held = hold(other)
    job = re.search(r"Slurm job (\d+_\d)", (cell.folder / LOCK).read_text())[1]
    cluster("scancel", job)
    wait_for(lambda: not is_being_trained(cell.folder))
    os.kill(held, signal.SIGCONT)
    sweep.end(0, "2 of 2 finished$")
    sweep.check()
    assert [state.split()[0] for state in cluster.states(sweep.job())] == ["CANCELLED", "COMPLETED"]


def test_sigterm_from_a_person(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}")
    held = hold(sweep.cells[0])
    cluster("scancel", "--signal=TERM", sweep.job())
    release(held)
    sweep.end(
        1,
        "ends with: stopped by SIGTERM; the runs are saved",
        "0 of 1 finished, 1 left; no worker is left: submit again to resume$",
    )
    assert cluster.states(sweep.job()) == ["FAILED"]
    assert (sweep.cells[0].folder / CHECKPOINT).exists()


def test_sigkill_of_a_training_process_and_then_of_its_task(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0,1", f"budget.updates={LONG}", tasks=2)
    cell, other = sweep.cells
    killed, held = hold(cell), hold(other)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: process_of(cell) != killed and is_being_trained(cell.folder))
    second = hold(cell)  # it must still be at work when the other run is left
    task = int(Path(f"/proc/{held}/stat").read_text().split()[3])
    os.kill(task, signal.SIGKILL)
    os.kill(held, signal.SIGCONT)
    wait_for(lambda: not is_being_trained(other.folder))
    os.kill(second, signal.SIGCONT)
    sweep.end(0, "2 of 2 finished$")
    assert "its process was killed by SIGKILL" in sweep.logs()
    sweep.check()


def test_restart_of_both_daemons(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}")
    cell = sweep.cells[0]
    held = hold(cell)
    for daemon in ("slurmctld", "slurmd.n1", "slurmd.n2"):
        cluster.kill(daemon)
    time.sleep(12)  # the command asks for the queue meanwhile
    cluster.start()
    assert process_of(cell) == held
    os.kill(held, signal.SIGCONT)
    sweep.end(0, "1 of 1 finished$")
    sweep.check()


def test_a_node_fails_while_its_step_is_alive(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}", task=["wait_for_lock_s=10"])
    cell = sweep.cells[0]
    held = hold(cell)
    node = cluster("squeue", "-h", f"--jobs={sweep.job()}", "-o%N").strip()
    cluster.kill(f"slurmd.{node}")
    wait_for(lambda: "queued again: after 10 seconds" in sweep.logs())
    assert "waiting: quickstart" in sweep.logs() and process_of(cell) == held
    cluster.start()  # Slurm ends the step that was left
    sweep.end(0, "1 of 1 finished$")
    sweep.check()


def test_the_same_sweep_submitted_twice(cluster, tmp_path):
    sweep = Sweep(cluster, tmp_path, "seed=0,1", f"budget.updates={LONG}", tasks=1)
    held = hold(sweep.cells[0])
    first, second = sweep.job(), sweep.submit()
    wait_for(lambda: (sweep.cells[1].folder / LOG).exists(), what="the second job trains the other run")
    assert sweep.job() != first
    os.kill(held, signal.SIGCONT)
    output, _ = second.communicate(timeout=600)
    assert second.returncode == 0 and output.splitlines()[-1] == "2 of 2 finished", output
    sweep.end(0, "2 of 2 finished$")
    sweep.check()
    logs = [path.read_text() for path in tmp_path.rglob("slurm/*_log.out")]
    assert [log.count("from the start") for log in logs] == [1, 1], logs
    third, _ = sweep.submit().communicate()
    assert third == "quickstart: nothing is left to train, so nothing was submitted\n2 of 2 finished\n"


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
    cell, second = sweep.cells
    held = hold(cell)
    children = Path(f"/proc/{held}/task/{held}/children").read_text().split()
    assert children
    for child in children:
        os.kill(int(child), signal.SIGKILL)
    os.kill(held, signal.SIGCONT)
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
        hold(sweep.cells[0])
        held = hold(sweep.cells[1])
        job = re.search(r"Slurm job (\d+_\d)", (sweep.cells[0].folder / LOCK).read_text())[1]
        bare("scancel", job)
        wait_for(lambda: not is_being_trained(sweep.cells[0].folder))
        os.kill(held, signal.SIGCONT)
        sweep.end(0, "2 of 2 finished$")
        sweep.check()
        sweep = Sweep(bare, tmp_path / "all", "seed=0,1", f"budget.updates={LONG}", tasks=2)
        hold(sweep.cells[0])
        hold(sweep.cells[1])
        bare("scancel", sweep.job())
        sweep.end(1, "_log.out ends with: stopped by SIGTERM", "_log.out ends with: stopped by SIGTERM",
                  "^0 of 2 finished, 2 left; no worker is left: submit again to resume$")  # fmt: skip
    finally:
        bare.end()
        bare.stop("wipe")
        cluster.start()


def test_ctrl_c_says_that_the_workers_continue(cluster, tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs and their children ignore it
    sweep = Sweep(cluster, tmp_path, "seed=0", f"budget.updates={LONG}")
    held = hold(sweep.cells[0])
    status = cluster(sys.executable, "-m", "bnrnn.commands.cluster", "status", *sweep.arguments)
    assert re.search(
        rf"seed=0 \| running \| process {held} on \S+, Slurm job \d+ \| [\d,]+/{LONG:,} \| [\d.]+ \| 0\.\d \|", status
    )
    assert "quickstart: 1 running; workers: 1 running (n" in status
    sweep.process.send_signal(signal.SIGINT)
    sweep.end(130, "the workers continue")
    os.kill(held, signal.SIGCONT)
    waiting = [sys.executable, "-m", "bnrnn.commands.cluster", "wait", *sweep.arguments]
    assert cluster(*waiting).splitlines()[-1] == "1 of 1 finished"
    sweep.check()


def test_hydras_own_launcher_saves_at_the_warning_and_resumes(cluster, tmp_path):
    overrides = [*TINY, f"out_dir={tmp_path}", "seed=0,1", f"budget.updates={LONG}"]
    options = ["cpus_per_task=1", "mem_gb=1", "timeout_min=30", "max_num_timeout=3"]
    command = [sys.executable, "-m", "bnrnn.train", *overrides, "hydra/launcher=submitit_slurm",
               *(f"hydra.launcher.{option}" for option in options)]  # fmt: skip
    process = cluster.begin(command)
    cells = expand(overrides)
    held = hold(cells[0])
    job = re.search(r"Slurm job (\S+)", (cells[0].folder / LOCK).read_text())[1]
    cluster("scancel", "--signal=USR2", job)
    release(held, signal.SIGUSR2)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert "resumed at update" in (cells[0].folder / LOG).read_text()
    for cell in cells:
        expected = undisturbed(tuple(c for c in cell.choices if not c.startswith("out_dir=")))
        assert without_time(cell.folder) == expected[0]
