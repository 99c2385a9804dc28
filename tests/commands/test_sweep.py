"""Sweeps of several processes on one machine: real workers on tiny runs, stopped and started again; their display."""

import io
import os
import signal
import sys
import time

import pytest
from rich.console import Console

from bnrnn.commands import campaign, cluster, sweep, workers
from bnrnn.commands.live import Live, in_words
from bnrnn.config import ROOT
from bnrnn.errors import BnrnnError
from bnrnn.system.locks import is_being_trained, locked
from bnrnn.training.cells import expand
from bnrnn.training.failures import record_failure
from bnrnn.training.log import read_jsonl
from bnrnn.training.progress import Entry
from bnrnn.training.results import METRICS, Result, config_record
from bnrnn.training.states import check_results
from tests.helpers import cuda_untouched, forked

TINY = ["experiment=quickstart", "model=lstm", "model.hidden_size=8", "budget.eval_every=20", "budget.eval_batches=1",
        "budget.population_batches=1", "log_every=5", "device=cpu"]  # fmt: skip


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Overrides of a sweep in a folder, which are also the command line of bnrnn.commands.sweep with two processes."""
    monkeypatch.chdir(ROOT)

    def given(*overrides: str, jobs: str = "2") -> list[str]:
        arguments = [*TINY, f"out_dir={tmp_path}", *overrides]
        monkeypatch.setattr(sys, "argv", ["bnrnn-sweep", f"jobs={jobs}", *arguments])
        return arguments

    return given


def test_a_failed_run_is_listed_and_does_not_stop_the_others(arguments, capfd, tmp_path):
    cells = expand(arguments("budget.updates=5", "seed=0,1", "data=digits,smnist", f"data_dir={tmp_path}"))
    with pytest.raises(SystemExit) as ended:
        sweep.cli()
    output = capfd.readouterr().out
    assert ended.value.code == sweep.FAILED
    for cell in cells:
        has_data = cell.overrides["data"] == "digits"
        line = f"failed: {cell.title}: {tmp_path}/mnist/train-images-idx3-ubyte.gz is missing: run `make data`"
        assert (cell.folder / "result.json").exists() == has_data != (line in output)
    assert output.endswith("2 of 4 finished, 2 failed\n")
    arguments("budget.updates=5", "seed=0,1", "data=digits", f"data_dir={tmp_path}")
    with pytest.raises(SystemExit) as ended:
        sweep.cli()
    assert ended.value.code == 0 and "from the start" not in capfd.readouterr().out


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_sweep_saves_its_runs_and_resumes_them(arguments, capfd, number, status):
    cells = expand(arguments("budget.updates=100000", "seed=0,1"))
    process = forked(sweep.cli)
    while not all(read_jsonl(cell.folder / METRICS) for cell in cells):
        assert process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == status
    end = time.monotonic() + 60
    while any(is_being_trained(cell.folder) for cell in cells):  # workers end by themselves if their parent is killed
        assert number == signal.SIGKILL and time.monotonic() < end
        time.sleep(0.02)
    last = "0 of 2 finished, 2 left\nthe runs are saved: the same command resumes them\n"
    assert capfd.readouterr().out.endswith(last) == (number != signal.SIGKILL)
    assert all((cell.folder / "checkpoint.pt").exists() for cell in cells)


def test_cuda_is_not_initialized_in_the_process_that_forks_the_workers(arguments, monkeypatch, capfd):
    arguments("seed=0,1", "device=cuda")
    monkeypatch.setattr(workers, "run_worker", lambda *_: 0)
    with cuda_untouched(), pytest.raises(SystemExit):
        sweep.main()
    assert capfd.readouterr().out.endswith("0 of 2 finished, 2 left\n")


def test_a_wrong_option_is_one_message_before_anything_is_trained(arguments):
    arguments("seed=0", jobs="0")
    with pytest.raises(SystemExit, match=r"^error: jobs=0 is not valid: expected the number of runs at a time"):
        sweep.cli()
    arguments("model.layer.gama_init=1")
    with pytest.raises(SystemExit, match=r"gama_init': did you mean model.layer.gamma_init?"):
        sweep.cli()
    arguments("optim.lr=-1")
    with pytest.raises(SystemExit, match=r"^error: optim.lr=-1 is not valid"):
        sweep.cli()


def test_an_out_dir_that_is_a_file_is_one_message(arguments, tmp_path):
    (tmp_path / "file").write_text("")
    arguments("budget=smoke", "seed=0", f"out_dir={tmp_path}/file")
    with pytest.raises(SystemExit, match=r"^error: .*file/quickstart/smoke cannot be written \(Not a directory\)"):
        sweep.cli()


def test_a_result_of_another_configuration_is_one_message_before_anything_is_trained(arguments, monkeypatch, tmp_path):
    """Workers would take it for the result of this recipe."""
    (first, _) = expand(arguments("budget=smoke", "seed=0,1"))
    config = config_record(first.cfg)
    result = Result("quickstart", first.overrides, "finished", 4, 4, {}, 1.0, 1, [], {}, config)
    result.write(first.folder)
    check_results([first])
    config["grad_clip"] = 0.25
    result.write(first.folder)
    with pytest.raises(SystemExit, match=r"another configuration \(grad_clip: 0.25 there, 1 now\). Remove its folder"):
        sweep.cli()
    assert not list(tmp_path.rglob(METRICS))
    monkeypatch.setattr(campaign, "load_entries", lambda *_: [Entry("", "quickstart", [], 1.0, False, [first])])
    with pytest.raises(BnrnnError, match="another configuration"):
        campaign.run_campaign(campaign.Options(hours=1.0))
    monkeypatch.setattr(sys, "argv", ["bnrnn-cluster", "submit", *sys.argv[2:]])
    with pytest.raises(SystemExit, match="another configuration"):
        cluster.cli()


def screen(live: Live) -> list[str]:
    """The lines that the display shows."""
    with live.console.capture() as captured:
        live.console.print(live.progress.get_renderable())
    return captured.get().splitlines()


def test_the_display_has_a_line_for_each_run_and_one_for_all(arguments):
    cells = expand(arguments("budget.updates=40", "seed=0,1,2,3"))
    for cell in cells[:3]:
        cell.folder.mkdir(parents=True)
    (cells[1].folder / METRICS).write_text('{"update": 10, "seconds": 1200.0}\n')
    record_failure(cells[2].folder, "a reason")
    live = Live(cells, 0.0, Console(file=io.StringIO(), force_terminal=True, width=100, height=30))
    with locked(cells[1].folder):
        live.refresh()
        lines = screen(live)
        live.console.height = 6  # two lines for runs: that which is trained comes first
        live.refresh()
        few = screen(live)
    assert [line.split()[0] for line in lines] == ["all", "seed=0", "seed=1", "seed=2", "seed=3"]
    assert "1/4" in lines[0] and "2 left, 1 running, 1 failed" in lines[0]
    assert "10/40" in lines[2] and lines[2].rstrip().endswith("running, 1.0 h left")
    assert lines[3].rstrip().endswith("failed") and lines[4].rstrip().endswith("left")
    assert [line.split()[0] for line in few] == ["all", "seed=0", "seed=1"]


def test_the_display_ends_with_the_command_and_gives_the_cursor_back(arguments):
    file = io.StringIO()
    with Live(expand(arguments("seed=0,1")), 0.0, Console(file=file, force_terminal=True)) as live:
        assert live.progress.live.is_started
    assert not live.progress.live.is_started and file.getvalue().endswith("\x1b[?25h")


def test_outside_a_terminal_there_is_no_display(arguments):
    file = io.StringIO()
    with Live(expand(arguments("seed=0,1")), 0.0, Console(file=file)) as live:
        live.look()
    assert file.getvalue() == ""


def test_durations_are_in_hours_or_minutes():
    assert (in_words(2.25), in_words(0.5), in_words(0.001)) == ("2.2 h", "30 min", "0 min")
