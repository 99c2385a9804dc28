"""The command for someone who has a GPU for half an hour: its steps, and what becomes of one that fails or hangs."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from bnrnn.errors import BnrnnError
from bnrnn.training.device import expected_device
from scripts import gpu_evidence
from scripts.gpu_evidence import Options, Step, parse, run, steps
from tests.helpers import cuda_untouched, forked

HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); time.sleep(99)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_campaign_gets_what_the_other_steps_leave_of_the_time():
    begun = time.monotonic() - 600
    found = {step.name: step for step in steps(parse(["hours=0.5"]), begun)}
    assert list(found) == ["doctor", "bench-tf32", "bench-float32", "campaign", "compress"]
    assert found["doctor"].seconds == pytest.approx(180) and found["bench-tf32"].seconds == pytest.approx(270)
    hours = float(found["campaign"].command[3].removeprefix("hours="))
    assert 3600 * hours == pytest.approx(1800 - 600 - 60, abs=2)
    assert "out_dir=evidence/results" in found["campaign"].command
    assert {"device=cuda", "jobs=8"} <= set(found["campaign"].command)
    assert "jobs=8" not in found["compress"].command
    rehearsed = {step.name: step for step in steps(Options(device="cpu"), begun)}
    assert "bench-tf32" not in rehearsed and "device=cpu" in rehearsed["campaign"].command


def test_a_step_that_fails_or_hangs_is_noted(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpu_evidence, "PATIENCE", 0.2)
    ended = run(Step("fails", python("print('a line'); raise SystemExit(3)"), 60.0), tmp_path)
    assert ended.startswith("fails: exit status 3, ")
    assert (tmp_path / "fails.log").read_text() == "a line\n" and "a line\n" in capfd.readouterr().out
    slow = run(Step("slow", python("import time; time.sleep(99)"), 0.2), tmp_path)
    assert slow.startswith("slow: exit status -15 after it was told to stop after 0 s, ")
    hangs = run(Step("hangs", python(HANGS), 1.0), tmp_path)
    assert hangs.startswith("hangs: exit status -9 after it was told to stop") or "status -15" in hangs


def test_all_steps_are_listed_also_after_one_has_failed(tmp_path, monkeypatch):
    given = [Step("first", python("raise SystemExit(1)"), 60.0), Step("second", python("pass"), 60.0)]
    monkeypatch.setattr(gpu_evidence, "steps", lambda options, begun: iter(given))
    monkeypatch.setattr(sys, "argv", ["gpu_evidence.py", f"out_dir={tmp_path}/new", "device=cpu"])
    gpu_evidence.cli()
    lines = (tmp_path / "new/summary.txt").read_text().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["first: exit status 1", "second: exit status 0"]


def test_cuda_is_not_initialized_by_the_program_that_starts_the_others(tmp_path, monkeypatch):
    """Its steps are programs of their own; that of the campaign has workers, which are forks."""
    real = steps
    monkeypatch.setattr(gpu_evidence, "steps", lambda *given: [s for s in real(*given) if seen.append(s.name) is None])
    monkeypatch.setattr(gpu_evidence, "run", lambda step, folder: f"{step.name}: exit status 0, 1 s")
    monkeypatch.setattr(sys, "argv", ["gpu_evidence.py", f"out_dir={tmp_path}", "device=cuda", "hours=0.5"])
    seen = []
    with cuda_untouched():
        gpu_evidence.main()
    assert seen == ["doctor", "bench-tf32", "bench-float32", "campaign", "compress"]


@pytest.mark.parametrize("touch", [torch.cuda.is_available, torch.cuda.current_device, torch.cuda.get_device_name])
def test_what_initializes_cuda_is_noticed(touch):
    with cuda_untouched():
        assert expected_device() == "cuda"
        with pytest.raises(AssertionError, match="whose workers are forks"):
            touch()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_the_program_that_runs(tmp_path, monkeypatch, number, status):
    code = f"import time; open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid())); time.sleep(99)"

    monkeypatch.setattr(gpu_evidence, "steps", lambda options, begun: iter([Step("slow", python(code), 99.0)]))
    monkeypatch.setattr(sys, "argv", ["gpu_evidence.py", f"out_dir={tmp_path}", "device=cpu"])

    def begin() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
        gpu_evidence.cli()

    process = forked(begin)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == status
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


@pytest.mark.parametrize(("argument", "message"), [
    ("device=tpu", "device=tpu is not valid: expected device=cuda, or device=cpu to rehearse"),
    ("file=none.yaml", "file=none.yaml is not valid: expected a file that exists"),
    ("job=2", "job=2 is not an option of scripts/gpu_evidence.py: use hours=..., jobs=..., device=..."),
])  # fmt: skip
def test_bad_input_is_refused(argument, message):
    with pytest.raises(BnrnnError, match=message):
        parse([argument])
