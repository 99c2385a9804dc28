"""The cluster's command and its tasks, with small programs for Slurm's. test_slurm.py uses a real Slurm."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from bnrnn.commands import cluster, live, slurm, workers
from bnrnn.commands.cluster import NEVER, describe, launcher_options, render_status, submissions, sweeps, wait
from bnrnn.commands.slurm import Queued, Task, folder_of, is_preempted, queued
from bnrnn.config import CONF, ROOT
from bnrnn.errors import BnrnnError
from bnrnn.system import locks as lock
from bnrnn.system.files import write_json
from bnrnn.system.locks import is_being_trained, locked
from bnrnn.train import train
from bnrnn.training.cells import Cell, expand
from bnrnn.training.failures import failure, record_failure
from bnrnn.training.results import Result
from bnrnn.training.states import state_of
from tests.system.test_locks import mounted
from tests.test_train import interrupt_at

TINY = ["experiment=quickstart", "budget=smoke", "model=lstm", "model.hidden_size=8", "device=cpu"]
SBATCH = r"""#!/usr/bin/env bash
# Starts every task of a job array at once, as a cluster with room would.
cp "${@: -1}" "$STUB/submitted.sh"
range=$(sed -n 's/^#SBATCH --array=\([0-9-]*\).*/\1/p' "$STUB/submitted.sh")
for task in $(seq "${range%-*}" "${range#*-}"); do
  env SLURM_JOB_ID=$((100 + task)) SLURM_ARRAY_JOB_ID=77 SLURM_ARRAY_TASK_ID=$task SLURM_JOB_NODELIST=localhost \
    SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0 \
    bash "$STUB/submitted.sh" >"$STUB/$task.log" 2>&1 </dev/null &
done
echo "Submitted batch job 77"
"""
SRUN = """#!/usr/bin/env bash
while [[ "$1" == -* ]]; do case "$1" in --output|--error) shift 2;; *) shift;; esac; done
exec "$@"
"""
# Warns as soon as the task's Python has begun, long before submitit has its handler.
WARNING_SRUN = SRUN.replace(
    "exec",
    """\
(until tr '\\0' ' ' </proc/$$/cmdline | grep -q '^[^ ]*python[^ ]* -u '; do sleep 0.01; done; kill -USR2 $$) &
exec""",
)
SQUEUE = """#!/usr/bin/env bash
printf '77|0|RUNNING|n1|None\\n77|1|PENDING||Resources\\n5|N/A|RUNNING|n2|None\\n'
"""


def cells_in(folder: Path, *overrides: str) -> list[Cell]:
    return expand([*TINY, f"out_dir={folder}", *overrides])


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def path_of_programs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path / 'stub'}:{os.environ['PATH']}")
    return tmp_path / "stub"


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(cluster, "POLL", 0)


@pytest.mark.slow
def test_a_submission_has_the_configured_resources_and_its_workers_train_every_cell(tmp_path: Path):
    stub = tmp_path / "stub"
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "squeue": SQUEUE}.items():
        program(stub, name, text)
    env = {**os.environ, "PATH": f"{stub}:{os.environ['PATH']}", "STUB": str(stub), "WANDB_MODE": "disabled"}
    sweep = [*TINY, "model=lstm,bn_lstm", "seed=0", f"out_dir={tmp_path}"]
    command = [sys.executable, "-m", "bnrnn.commands.cluster", "submit", *sweep, "hydra.launcher.partition=gpu",
               "hydra.launcher.workers=64", 'hydra.launcher.setup=["echo ready"]']  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)
    logs = "\n".join(path.read_text() for path in stub.glob("*.log"))
    assert run.returncode == 0, run.stdout + run.stderr + logs
    first, *others, last = run.stdout.splitlines()
    assert first == "job 77: 2 workers for 2 unfinished runs of quickstart"
    assert last == "2 of 2 finished" and "  cancel  scancel 77" in others
    assert any("1 running (n1), 1 pending (Resources)" in line for line in others)
    results = [Result.read(p) for p in tmp_path.glob("quickstart/smoke/*/result.json")]
    assert {r.overrides["model"] for r in results} == {"lstm", "bn_lstm"}
    script = (stub / "submitted.sh").read_text()
    for line in ("partition=gpu", "gpus-per-node=1", "time=720", "array=0-1%2", "requeue", "job-name=quickstart",
                 "signal=USR2@120", "mem=16GB"):  # fmt: skip
        assert f"#SBATCH --{line}\n" in script
    assert "\necho ready\n" in script and "--export=ALL" in script and "null" not in script
    assert subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True).stdout.splitlines() == [
        "quickstart: nothing is left to train, so nothing was submitted",
        "2 of 2 finished",
    ]


def test_the_warning_is_blocked_when_the_python_of_a_task_begins():
    program = "import signal, sys; print(signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, []), sys.prefix)"
    command = f'{slurm.python_command()} -u -c "{program}"'
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert run.stdout == f"True {sys.prefix}\n"


@pytest.mark.slow
def test_a_warning_that_arrives_before_there_is_a_handler_queues_the_task_again(
    tmp_path, monkeypatch, path_of_programs
):
    stub = path_of_programs
    program(stub, "sbatch", '#!/bin/sh\ncp "$1" "$STUB/submitted.sh"\necho Submitted batch job 77\n')
    program(stub, "srun", WARNING_SRUN)
    program(stub, "scontrol", '#!/bin/sh\necho "$@" >>"$STUB/asked"\n')
    monkeypatch.setenv("STUB", str(stub))
    cells = cells_in(tmp_path, "seed=0")
    folder_of(cells).mkdir(parents=True)
    options = launcher_options([], cells[0])
    for name in cluster.OWN:
        del options[name]
    task = Task([*TINY, f"out_dir={tmp_path}", "seed=0"], 1, 0.0, 1.0, 3)
    assert cluster._sbatch(task, 1, folder_of(cells), options) == "77"
    names = {"JOB_ID": 77, "JOB_NODELIST": "localhost", "NTASKS": 1, "JOB_NUM_NODES": 1, "NODEID": 0, "PROCID": 0,
             "LOCALID": 0}  # fmt: skip
    env = os.environ | {f"SLURM_{name}": str(value) for name, value in names.items()}
    run = subprocess.run(
        ["bash", stub / "submitted.sh"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=180
    )
    assert run.returncode == 255, run.stderr
    assert (stub / "asked").read_text() == "requeue 77\n" and "Caught signal SIGUSR2" in run.stderr
    assert not cells[0].folder.exists()


def test_there_are_no_more_workers_than_runs_need(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(cluster, "_sbatch", lambda task, workers, *_: asked.append(workers) or "7")
    sweep = [*TINY, "model=lstm", "seed=0,1,2,3", f"out_dir={tmp_path}"]
    for jobs in ("1", "3", "8"):
        cluster.submit([*sweep, f"hydra.launcher.jobs={jobs}"])
    assert asked == [4, 2, 1]


def test_every_option_is_in_the_file_and_an_unknown_one_is_an_error(tmp_path):
    (cell,) = cells_in(tmp_path, "seed=0")
    options = launcher_options(["hydra.launcher.qos=long"], cell)
    assert options["qos"] == "long" and options["name"] == "quickstart"
    assert set(options) == set(yaml.safe_load((CONF / "hydra" / "launcher" / "slurm.yaml").read_text()))
    with pytest.raises(Exception, match="partitoin"):
        launcher_options(["hydra.launcher.partitoin=gpu"], cell)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grad_clip=abc", "grad_clip=abc is not valid: expected a number from 0"),
        ("model.hiden_size=3", "Could not override 'model.hiden_size': did you mean model.hidden_size?"),
        ("hydra.launcher.timeout_min=abc", "hydra.launcher.timeout_min=abc is not valid: expected a whole number"),
        ("hydra.launcher.workers=0", "hydra.launcher.workers=0 is not valid: expected a whole number from 1"),
        ("hydra.launcher.setup=x", "hydra.launcher.setup=x is not valid: expected a list of texts"),
        ("hydra.launcher.max_num_timeout=x", "hydra.launcher.max_num_timeout=x is not valid"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_queued(tmp_path, monkeypatch, override, message):
    monkeypatch.setattr(cluster, "_sbatch", lambda *_: pytest.fail("queued"))
    monkeypatch.setattr(sys, "argv", ["bnrnn-cluster", "submit", *TINY, f"out_dir={tmp_path}", override])
    with pytest.raises(SystemExit) as ended:
        cluster.cli()
    assert str(ended.value.code).startswith(f"error: {message}") and not list(tmp_path.iterdir())


def test_the_queue_is_that_of_the_given_jobs(path_of_programs):
    program(path_of_programs, "squeue", SQUEUE)
    assert [task.name for task in queued({"77"})] == ["77_0", "77_1"]
    assert [task.name for task in queued({"5"})] == ["5"] and queued(set()) == []
    assert describe(queued({"77", "5"})) == "workers: 2 running (n1, n2), 1 pending (Resources)"
    assert describe([]) == "workers: none"


def test_only_a_job_in_its_grace_time_is_preempted(path_of_programs, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for answer, expected in [("RUNNING N/A", False), ("RUNNING 2026-01-01T00:00:00", True), ("", False),
                             ("COMPLETING 2026-01-01T00:00:00", False), ("'; exit 1 #", False)]:  # fmt: skip
        program(path_of_programs, "squeue", f"#!/bin/sh\necho '{answer}'\n")
        assert is_preempted() is expected, answer


@pytest.mark.parametrize("reason", ["PartitionTimeLimit", "BadConstraints", "QOSMaxWallDurationPerJobLimit",
                                    "InvalidAccount", "QOSNotAllowed", "PartitionNodeLimit"])  # fmt: skip
def test_workers_that_can_never_start_are_cancelled(tmp_path, monkeypatch, path_of_programs, quick, reason):
    program(path_of_programs, "scancel", f"#!/bin/sh\necho $@ >>{tmp_path}/cancelled\n")
    cells = cells_in(tmp_path, "seed=0")
    monkeypatch.setattr(cluster, "queued", lambda jobs: [Queued("7", "7_0", "PENDING", reason, "")])
    with pytest.raises(BnrnnError, match=f"can never start; Slurm's reason is {reason}"):
        wait(cells)
    assert (tmp_path / "cancelled").read_text() == "7\n"


def test_workers_that_only_wait_are_not():
    assert not any(
        map(NEVER.match, ("None", "Priority", "Resources", "BeginTime", "JobHeldUser", "QOSMaxJobsPerUserLimit"))
    )


def test_waiting_ends_when_no_worker_is_left_and_lists_what_is_not_finished(tmp_path, monkeypatch, capsys, quick):
    finished, failed, left = cells = cells_in(tmp_path, "seed=0,1,2")
    train(finished.cfg, finished.folder, finished.overrides)
    failed.folder.mkdir()
    folder = folder_of(cells)
    folder.mkdir()
    write_json(folder / "7.json", {"arguments": [], "since": 0.0, "workers": 1})
    (folder / "7_0_0_log.out").write_text("begun\nstopped by someone\nsrun: error: n1: task 0: Exited\n")
    record_failure(failed.folder, "no data")
    silent, running = BnrnnError("squeue does not answer (down)"), [Queued("7", "7_0", "RUNNING", "None", "n1")]
    answers = iter([silent, running, [], [], silent, [], [], running, [], [], []])  # three without a worker are the end

    def asked(jobs):
        assert set(jobs) == {"7"}
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(cluster, "queued", asked)
    capsys.readouterr()
    assert wait(cells) == 1 and list(answers) == []
    first, ended, of_failed, last = capsys.readouterr().out.splitlines()
    assert first.endswith("1 of 3 finished, 1 failed, 1 left; squeue does not answer (down)")
    assert ended.endswith("slurm/7_0_0_log.out ends with: stopped by someone")
    assert of_failed == f"failed: {failed.title}: no data (log: {os.path.relpath(failed.folder)}/run.log)"
    assert last == "1 of 3 finished, 1 failed, 1 left; no worker is left: submit again to resume"
    assert not left.folder.exists()


def test_ctrl_c_ends_only_the_waiting_and_says_how_to_wait_again(tmp_path, monkeypatch, capsys):
    def stopped(cells):
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "wait", stopped)
    arguments = [*TINY, f"out_dir={tmp_path / 'two words'}", "seed=0,1"]
    monkeypatch.setattr(sys, "argv", ["bnrnn-cluster", "wait", *arguments])
    with pytest.raises(SystemExit) as stop:
        cluster.main()
    assert stop.value.code == 130
    assert capsys.readouterr().out == (
        "\nstopped waiting; the workers continue. To wait again: "
        f"bnrnn-cluster wait {' '.join(TINY)} 'out_dir={tmp_path / 'two words'}' seed=0,1\n"
    )


@pytest.mark.parametrize("models", ["lstm,captioner/lstm", "captioner/lstm,lstm", "captioner/lstm"])
def test_a_model_in_a_folder_of_models_has_the_same_sweep(tmp_path, monkeypatch, models):
    cells = cells_in(tmp_path, f"model={models}", "seed=0")
    assert {cell.sweep_folder for cell in cells} == {tmp_path / "quickstart/smoke"}
    assert folder_of(cells) == tmp_path / "quickstart/smoke/slurm"
    looked = []
    for module in (cluster, live):
        monkeypatch.setattr(module, "load_known", lambda folder: looked.append(folder) or [])
    render_status(cells)
    live.Live(cells, 0.0, Console(file=io.StringIO(), force_terminal=True)).refresh()
    assert looked == [tmp_path / "quickstart"] * 2
    monkeypatch.setattr(slurm, "check_locks", lambda folder: looked.append(folder))
    monkeypatch.setattr(slurm, "run_team", lambda *_: [])
    Task([], 1, 0.0, 1.0, 3)._work(cells)
    assert looked[2:] == [tmp_path / "quickstart/smoke"]


def test_a_run_that_failed_before_the_submission_is_not_over(tmp_path):
    (cell,) = cells_in(tmp_path, "seed=0")
    cell.folder.mkdir(parents=True)
    record_failure(cell.folder, "earlier")
    time_of = (cell.folder / "failed.txt").stat().st_mtime
    assert (state_of(cell, time_of - 1), state_of(cell, time_of + 1)) == ("failed", "left")


def test_the_status_lists_every_run_of_all_submitted_sweeps(tmp_path, monkeypatch):
    finished, running, begun, failed, queued_one = cells = cells_in(tmp_path, "seed=0,1,2,3,4", "budget.updates=20")
    train(finished.cfg, finished.folder, finished.overrides)
    for cell in (running, begun):
        with pytest.raises(SystemExit):
            interrupt_at(11, cell.cfg, cell.folder)
    failed.folder.mkdir()
    record_failure(failed.folder, "no data")
    arguments = [*TINY, f"out_dir={tmp_path}", "budget.updates=20"]
    folder_of(cells).mkdir()
    for job, seeds in (("7", "0,1,2"), ("8", "2,3,4")):
        write_json(folder_of(cells) / f"{job}.json", {"arguments": [*arguments, f"seed={seeds}"], "since": 0.0})
    monkeypatch.setattr(cluster, "queued", lambda jobs: [Queued("7", "7_0", "PENDING", "Priority", "")])
    assert set(submissions(folder_of(cells))) == {"7", "8"}
    (listed,) = sweeps([f"out_dir={tmp_path}"])
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with locked(running.folder):
        page = render_status(listed)
    rows = {int(m[1]): m[2] for m in re.finditer(r"^\| .*seed=(\d) \| (.*) \|$", page, re.MULTILINE)}
    assert rows[0].startswith("finished | – | 20/20 |") and rows[2].startswith("begun | – | 10/20 |")
    assert re.fullmatch(rf"running \| process {os.getpid()} on \S+, Slurm job 12 \| 10/20 \| [\d.]+ \| 0.0", rows[1])
    assert rows[3].startswith("failed | – | 0/20 |") and rows[4].startswith("queued | – | 0/20 |")
    assert f"failed: {failed.title}: no data (log: " in page
    assert page.endswith("1 queued; workers: 1 pending (Priority)\n")
    assert not queued_one.folder.exists() and sweeps([f"out_dir={tmp_path / 'empty'}"]) == []
    with pytest.raises(BnrnnError, match="seed=0 needs an experiment"):
        sweeps(["seed=0"])


def test_a_damaged_submission_and_one_of_a_removed_experiment_hide_no_others(tmp_path, capsys):
    for name, content in {
        "a": {"arguments": [*TINY, f"out_dir={tmp_path}", "seed=0"], "since": 0.0},
        "b": {},
        "c": {"arguments": ["experiment=removed"], "since": 0.0},
    }.items():
        (tmp_path / name / "slurm").mkdir(parents=True)
        write_json(tmp_path / name / "slurm/1.json", content)
    ((cell,),) = sweeps([f"out_dir={tmp_path}"])
    assert cell.overrides["seed"] == "0"
    output = capsys.readouterr().out
    assert "b/slurm/1.json is not a submission (expected arguments and since): remove it\n" in output
    assert "experiment=removed is unknown" in output


def test_a_task_whose_node_failed_waits_for_the_process_that_was_left_and_is_queued_again(
    tmp_path, monkeypatch, capsys
):
    (cell,) = cells_in(tmp_path, "seed=0")
    cell.folder.mkdir(parents=True)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    again = []
    previous = signal.signal(signal.SIGUSR2, lambda number, frame: (again.append(number), sys.exit(255)))
    try:
        with locked(cell.folder):
            with pytest.raises(SystemExit) as left:
                Task([*TINY, f"out_dir={tmp_path}", "seed=0"], 1, 0.0, 0.01, 3)()
            monkeypatch.setenv("SLURM_JOB_ID", "13")  # the lock is then that of another job
            Task([*TINY, f"out_dir={tmp_path}", "seed=0"], 1, 0.0, 0.01, 3)()
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert left.value.code == 255 and len(again) == 1
    output = capsys.readouterr().out
    assert f"waiting: {cell.title} is still trained by process {os.getpid()} on " in output
    assert "queued again: after 0 seconds" in output and not (cell.folder / "result.json").exists()


@pytest.mark.parametrize(("statuses", "code"), [([-9, 0], 1), ([0, 1], 1), ([0, 0], None)])
def test_a_task_fails_if_a_worker_was_killed_or_a_run_failed(tmp_path, monkeypatch, statuses, code):
    folder_of(cells_in(tmp_path, "seed=0")).mkdir(parents=True)
    monkeypatch.setattr(slurm, "run_team", lambda *_: statuses)
    task = Task([*TINY, f"out_dir={tmp_path}", "seed=0"], 2, 0.0, 1.0, 3)
    if code is None:
        task()
    else:
        with pytest.raises(SystemExit) as left:
            task()
        assert left.value.code == code


def test_the_options_that_the_documentation_names_are_in_the_file():
    page = (ROOT / "docs" / "cluster.md").read_text()
    table = page.split("## Options")[1].split("**The environment.**")[0]
    options = set(re.findall(r"(?<![.\w])([a-z_]+)(?:=|: )", table)) & set(re.findall(r"`([a-z_]+)[=:]", table))
    options |= set(re.findall(r"(?<![.\w])([a-z_]+)=", table)) | {"workers", "jobs"}
    assert len(options) > 12
    assert options <= set(yaml.safe_load((CONF / "hydra" / "launcher" / "slurm.yaml").read_text()))
    assert set(re.findall(r"`([a-z_]+_s|max_num_timeout)`", page)) == {
        "signal_delay_s",
        "max_num_timeout",
        "wait_for_lock_s",
    }


def test_a_file_system_without_locks_stops_a_task_with_one_sentence(tmp_path, monkeypatch, capsys):
    def no_locks(file, kind):
        raise OSError(38, "Function not implemented")

    mounted(tmp_path, monkeypatch, "lustre", "rw")
    cells = cells_in(tmp_path, "seed=0,1")
    folder_of(cells).mkdir(parents=True)
    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    with pytest.raises(SystemExit) as stopped:
        Task([*TINY, f"out_dir={tmp_path}", "seed=0,1"], 1, 0.0, 1.0, 3)()
    message = str(stopped.value)
    assert "(Function not implemented): the file system lustre at" in message
    assert message.endswith(
        "Mount it with the option flock, or use another out_dir, so that two processes never train the same run"
    )
    assert workers.run_worker(cells, 0.0) == 1, "a worker of a campaign stops too"
    assert capsys.readouterr().out.startswith("error: ") and failure(cells[0].folder) is None
    assert not is_being_trained(cells[1].folder)
