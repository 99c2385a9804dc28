"""What `make doctor` says of this machine, of damaged data and of engines that compute something else."""

import sys

import pytest
import torch

from bnrnn.bench import engines as checks
from bnrnn.bench.layers import Shape
from bnrnn.commands import doctor
from bnrnn.commands.doctor import MISSING, OK, WRONG
from bnrnn.errors import BnrnnError
from bnrnn.scan import set_backend

CPU = torch.device("cpu")
TINY = {"tiny": 3}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(checks, "SHAPES", {"tiny": Shape("a task", 3, 3, 4, 5, 6)})
    monkeypatch.setattr(checks, "engines", lambda device: ["reference", "fused"])
    yield
    set_backend("auto")


def findings(errors) -> list[tuple[bool, str]]:
    return [(is_right, text.partition("; ")[0]) for is_right, text in errors]


def test_engines_have_errors_and_times():
    ((is_right, text),) = checks.engine_checks(CPU, TINY)
    assert is_right and text.startswith("tiny a task (B 4, I 5, H 6): reference ")
    errors, times = text.split(": ", 1)[1].split("; microseconds a step: ")
    assert all(0 < float(part.split()[1]) < 1e-5 for part in errors.split(", "))
    assert [part.split()[0] for part in times.split(", ")][-1] == "nn.LSTM"


def test_engines_are_timed_on_one_thread_as_runs_are_trained(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(doctor, "engine_checks", lambda device: [(True, f"{torch.get_num_threads()} thread")])
    try:
        torch.set_num_threads(2)
        assert list(doctor.engines(CPU)) == [(OK, "1 thread")]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("error", [float("nan"), 2e-5, 1.0])
def test_an_engine_that_computes_something_else_is_wrong(monkeypatch, error):
    monkeypatch.setattr(checks, "relative_errors", lambda names, *given: dict.fromkeys(names, 1e-6) | {"fused": error})
    assert findings(checks.engine_checks(CPU, TINY)) == [
        (False, f"tiny a task (B 4, I 5, H 6): reference 1.0e-06, fused {error:.1e}")
    ]


def test_an_engine_that_fails_does_not_hide_the_others(monkeypatch):
    def relative_errors(names, *given):
        if "fused" in names:
            raise RuntimeError("no kernel image\nand many more lines")
        return dict.fromkeys(names, 1e-6)

    monkeypatch.setattr(checks, "relative_errors", relative_errors)
    assert findings(checks.engine_checks(CPU, TINY)) == [
        (False, "tiny a task (B 4, I 5, H 6): reference 1.0e-06, fused RuntimeError: no kernel image")
    ]


def test_data_are_read_and_what_is_damaged_is_wrong(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist/train-images-idx3-ubyte.gz").write_bytes(b"damaged")
    found = {text.split(":")[0]: (state, text) for state, text in doctor.datasets(str(tmp_path))}
    assert found["data=digits"] == (OK, "data=digits: 1,200 / 297 / 300 images as sequences of 64 pixels")
    assert found["data=smnist"][0] == WRONG and "train-images-idx3-ubyte.gz" in found["data=smnist"][1]
    assert all(found[f"data={name}"][0] == MISSING for name in ("ptb_char", "text8", "cnn_qa", "flickr8k", "wsj"))


def test_a_package_that_is_not_installed_is_missing_not_wrong(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("in hydra's words") from ModuleNotFoundError("No module named 'datasets'", name="datasets")

    monkeypatch.setattr(doctor, "instantiate", refuse)
    assert {state for state, _ in doctor.datasets(str(tmp_path))} == {MISSING}


def test_a_folder_without_locks_is_wrong(tmp_path, monkeypatch):
    found = list(doctor.folders(str(tmp_path), str(tmp_path / "results")))
    assert [state for state, _ in found] == [OK] * 4

    def refuse(folder):
        raise BnrnnError("no locks here")

    monkeypatch.setattr(doctor, "check_locks", refuse)
    monkeypatch.setattr(doctor, "FREE", 1e9)
    found = list(doctor.folders(str(tmp_path), str(tmp_path / "results")))
    assert [state for state, _ in found] == [WRONG] * 4 and (WRONG, "no locks here") in found


@pytest.mark.slow
def test_the_exit_status_says_whether_anything_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "engine_checks", lambda device: checks.engine_checks(device, TINY))
    monkeypatch.setattr(sys, "argv", ["bnrnn-doctor", "--device", "cpu", "--data-dir", str(tmp_path), "--out-dir",
                                      str(tmp_path)])  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        doctor.cli()
    output = capsys.readouterr().out
    assert ended.value.code == 0 and output.endswith("Nothing is wrong.\n"), output
    assert f"ok      torch {torch.__version__}" in output and "ok      tiny a task" in output
    monkeypatch.setattr(doctor, "programs", lambda: iter([(WRONG, "everything"), (MISSING, "more")]))
    with pytest.raises(SystemExit) as ended:
        doctor.cli()
    assert ended.value.code == 1 and capsys.readouterr().out.endswith("1 wrong: see above\n")


def test_it_says_whether_several_processes_can_use_a_gpu_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert doctor.shared_by_processes()[0] == MISSING
    (tmp_path / "control").touch()
    assert doctor.shared_by_processes()[0] == OK
