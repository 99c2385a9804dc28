"""Workers and teams of them: what they train, and what becomes of those that fail, are killed or do not stop."""

import errno
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest

from bnrnn.commands import workers
from bnrnn.commands.workers import run_team, work
from bnrnn.config import compose_config
from bnrnn.errors import lacks_memory
from bnrnn.system import processes
from bnrnn.system.locks import is_being_trained, locked
from bnrnn.train import train
from bnrnn.training.failures import failure
from bnrnn.training.results import Result
from bnrnn.training.stop import Interrupted, Stop
from tests.commands.test_campaign import cells_of, entry, hold, write
from tests.commands.test_cluster import cells_in


def test_a_worker_trains_in_order_what_is_neither_finished_nor_being_trained(tmp_path, capsys):
    cells = cells_of(write(tmp_path, entry("model=bn_lstm", seeds="0,1"), entry("model=lstm", seeds="0,1")))
    train(cells[1].cfg, cells[1].folder, cells[1].overrides)
    capsys.readouterr()
    failed = set()
    with hold(cells[2].folder):
        work(cells, 0.0, failed)
    begun = [line for line in capsys.readouterr().out.splitlines() if "from the start" in line]
    assert [line.split(": ")[0] for line in begun] == [cells[0].title, cells[3].title]
    assert failed == set() and not (cells[2].folder / "result.json").exists()
    stored = Result.read(cells[0].folder / "result.json")
    assert stored.overrides == cells[0].overrides and stored.updates == 5


def test_a_worker_takes_the_next_run_if_another_was_faster(tmp_path, monkeypatch):
    cells = cells_of(write(tmp_path, entry("model=lstm", seeds="0,1")))
    monkeypatch.setattr(workers, "is_being_trained", lambda folder: len(tried) > 0 and folder == cells[0].folder)
    tried = []
    monkeypatch.setattr(workers, "train", lambda *run: tried.append(run[1]) or train(*run))
    failed = set()
    with hold(cells[0].folder):
        work(cells, 0.0, failed)
    assert tried == [cells[0].folder, cells[1].folder] and failed == set()


def test_a_run_that_fails_does_not_stop_the_others_even_if_it_is_a_bug(tmp_path, monkeypatch, capsys):
    cells = cells_of(write(tmp_path, entry("grad_klip=3"), entry("model=lstm", seeds="0,1")))

    def train_or_fail(cfg, folder, *rest):
        if folder == cells[2].folder:
            raise RuntimeError("a bug")
        return train(cfg, folder, *rest)

    monkeypatch.setattr(workers, "train", train_or_fail)
    failed, before = set(), time.time() - 1
    work(cells, before, failed)
    assert failed == {cell.folder for cell in cells[:3]}
    assert "grad_klip" in failure(cells[0].folder)
    assert failure(cells[2].folder) == "RuntimeError: a bug"
    assert "in train_or_fail" in (cells[2].folder / "run.log").read_text()
    output = capsys.readouterr()
    assert "Traceback" in output.err and f"{cells[2].title} failed: RuntimeError: a bug\n" in output.out
    assert (cells[3].folder / "result.json").exists()
    work(cells, before, set())
    assert "failed" not in capsys.readouterr().out, "another worker does not try them again"
    monkeypatch.setattr(workers, "train", train)
    work(cells, time.time() + 1, failed := set())
    assert failed == {cell.folder for cell in cells[:2]} and failure(cells[2].folder) is None, "a later one does"


def test_a_worker_stops_at_once_between_two_runs(tmp_path, monkeypatch):
    cells = cells_of(write(tmp_path, entry("model=lstm")))
    monkeypatch.setattr(workers, "train", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match="SIGTERM: stopped between"):
        work(cells, 0.0, set())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_worker_stops_even_if_an_error_takes_the_place_of_the_signal(tmp_path, monkeypatch):
    """As omegaconf's clean-up does, when the signal arrives while a configuration is composed: once in 25 times."""
    options = write(tmp_path, entry("model=lstm", seeds="0,1"))

    def train_with_bad_clean_up(*_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise AttributeError("'NoneType' object has no attribute '_invalidate_flags_cache'")

    monkeypatch.setattr(workers, "train", train_with_bad_clean_up)
    with pytest.raises(SystemExit, match="SIGTERM: stopped between"):
        work(cells_of(options), 0.0, failed := set())
    assert failed == set() and all(failure(cell.folder) is None for cell in cells_of(options))


def test_a_worker_stops_even_if_the_signal_arrives_where_python_ignores_exceptions(tmp_path, monkeypatch):
    """As in a generator that is cleaned up while a configuration is composed: once in 6,000 times."""
    ignored = []

    class CleanedUp:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)

    def compose(*overrides):
        CleanedUp()
        return compose_config(*overrides)

    (cell,) = cells_of(write(tmp_path, entry("model=lstm")))
    monkeypatch.setattr("bnrnn.training.cells.compose_config", compose)
    monkeypatch.setattr(workers, "train", lambda *_: pytest.fail("training began"))
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    with pytest.raises(SystemExit, match="SIGTERM: stopped between"):
        work([cell], 0.0, set())
    assert [type(one.exc_value) for one in ignored] == [Interrupted]


def test_a_worker_whose_parent_has_ended_does_not_begin(tmp_path, monkeypatch, capsys):
    options = write(tmp_path, entry("model=lstm"))
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setenv("TQDM_DISABLE", "")  # put back afterwards
    assert workers.run_worker(cells_of(options), 0.0, parent=2**30) == workers.STOPPED  # which is not os.getppid()
    assert capsys.readouterr().out.startswith("SIGTERM: stopped")
    assert not options.out_dir.exists()


def test_a_killed_worker_is_replaced_and_a_run_that_kills_it_twice_has_failed(tmp_path, monkeypatch, capfd):
    bad, good = cells = cells_in(tmp_path, "seed=0,1")

    def train_or_die(cfg, folder, *rest):
        if folder == bad.folder:
            folder.mkdir(exist_ok=True, parents=True)
            with locked(folder), (folder / "deaths").open("a") as file:
                file.write("x")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return train(cfg, folder, *rest)

    monkeypatch.setattr(workers, "train", train_or_die)
    assert run_team([cells], 0.0, Stop()) == [0]
    assert (bad.folder / "deaths").read_text() == "xx"
    assert failure(bad.folder) == (
        "its process was killed by SIGKILL, and another ended before: if memory is short, use a smaller JOBS or "
        "batch_size"
    )
    assert Result.read(good.folder / "result.json").status == "finished"
    assert capfd.readouterr().out.count("its process was killed by SIGKILL\n") == 2


def test_a_worker_whose_gpu_is_broken_ends_and_another_process_trains_on(tmp_path, monkeypatch, capfd):
    bad, good = cells = cells_in(tmp_path, "seed=0,1")

    def train_or_break(cfg, folder, *rest):
        if folder == bad.folder:
            folder.mkdir(exist_ok=True, parents=True)
            with locked(folder):
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
        return train(cfg, folder, *rest)

    monkeypatch.setattr(workers, "train", train_or_break)
    assert workers.run_worker(cells, 0.0) == workers.BROKEN and failure(bad.folder) is None
    assert not (good.folder / "result.json").exists()
    assert run_team([cells], 0.0, Stop()) == [0]
    assert failure(bad.folder).startswith(
        "its process could not use the GPU, and another ended before: see its run.log"
    )
    assert "illegal memory access" in (bad.folder / "run.log").read_text()
    assert Result.read(good.folder / "result.json").status == "finished"
    assert "encountered: this process ends, because the GPU can no longer be used in it" in capfd.readouterr().out


@pytest.mark.parametrize(("text", "broken", "memory"), [
    ("CUDA error: an illegal memory access was encountered", True, False),
    ("Triton Error [CUDA]: an illegal memory access was encountered", True, False),
    ("CUDA driver error: unknown error", True, False),
    ("CUDA error: out of memory", False, True),
    ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", False, True),
    ("CUDA error: no kernel image is available for execution on the device", False, False),
    ("CUDA out of memory. Tried to allocate 2 GiB", False, True),
])  # fmt: skip
def test_errors_that_leave_a_gpu_unusable_are_told_from_a_lack_of_memory(text, broken, memory):
    assert workers.is_broken(RuntimeError(text)) is broken and lacks_memory(RuntimeError(text)) is memory


def test_a_folder_that_cannot_be_read_does_not_end_the_worker(tmp_path, monkeypatch, capfd):
    bad, good = cells = cells_in(tmp_path, "seed=0,1")

    def look(folder):
        if folder == bad.folder:
            raise OSError(errno.ESTALE, "Stale file handle")
        return is_being_trained(folder)

    monkeypatch.setattr(workers, "is_being_trained", look)
    assert workers.run_worker(cells, 0.0) == 1
    assert Result.read(good.folder / "result.json").status == "finished" and not bad.folder.exists()
    assert capfd.readouterr().out.count("passed over, because its folder cannot be read") == 1


def test_a_worker_that_does_not_stop_is_killed_after_a_while(tmp_path, monkeypatch, capsys):
    stop, begun = SimpleNamespace(received=None), tmp_path / "begun"

    def train_deafly(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        begun.touch()
        time.sleep(900)

    def look():
        stop.received = signal.SIGTERM if begun.exists() else None

    monkeypatch.setattr(workers, "train", train_deafly)
    monkeypatch.setattr(workers, "PATIENCE", 0.2)
    assert run_team([cells_in(tmp_path, "seed=0")], 0.0, stop, look=look) == [-signal.SIGKILL]
    message = "did not stop within 0.2 seconds and is killed: its run resumes from its last checkpoint\n"
    assert capsys.readouterr().out.count(message) == 1


def test_a_worker_that_is_killed_between_runs_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "run_worker", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    assert run_team([cells_in(tmp_path, "seed=0")] * 2, 0.0, Stop()) == [-signal.SIGKILL] * 2
