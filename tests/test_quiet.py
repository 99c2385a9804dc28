"""Default commands contact nobody: no name is resolved, and no socket leaves the machine.

An audit hook watches the commands and all their children that are Python. wandb's service, a program of its own, is not
Python: that it opens no socket of the internet either was seen with strace, on the training of the first command below.
Two things are allowed, because they stay on the machine: Unix sockets, by which wandb's service is called, and binding
to ::1, by which urllib3 finds out whether the machine has IPv6 when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bnrnn.config import ROOT
from bnrnn.training import mirror
from tests.helpers import composed

HOOK = """
import os
import sys

NAMES = ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getnameinfo")


def note(text):
    number = os.open(os.environ["BNRNN_SOCKETS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(number, f"{text}\\n".encode())
    os.close(number)


def hook(event, args):
    kind, _, name = event.partition(".")
    if kind != "socket" or name in ("__new__", "gethostname", "sethostname"):
        return
    if name in NAMES or args[0].family.name != "AF_UNIX" and (name, args[1][0]) != ("bind", "::1"):
        note(f"{name} {args[:2]} in {sys.argv}")


note("watched")
sys.addaudithook(hook)
os.setpriority = lambda *_: None  # on a busy machine, the runs of a campaign would take very long
"""
TRAIN = ["-m", "bnrnn.train", "device=cpu", "budget=smoke"]
CAMPAIGN = """
- {experiment: quickstart, overrides: [model=lstm, budget.updates=2], seeds: "0", claims: [C1], hours: 0.01}
"""


def sockets_of(folder: Path, *arguments: object) -> list[str]:
    """What the hook noted of a command: a line for each process that it watched, and for each socket and name."""
    (folder / "sitecustomize.py").write_text(HOOK)
    noted, path = folder / "noted", os.pathsep.join([str(folder), str(ROOT)])
    ours = ("WANDB_", "HF_", "TRITON_")  # set for all tests, not for users
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment |= {"PYTHONPATH": path, "BNRNN_SOCKETS": str(noted)}
    command = [sys.executable, *(str(a) for a in arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return noted.read_text().splitlines()


def test_the_hook_sees_names_and_sockets_also_in_children(tmp_path):
    inner = "import socket; socket.getaddrinfo('127.0.0.1', 9); socket.socket().connect_ex(('127.0.0.1', 9))"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    noted = [line.split(" ")[0] for line in sockets_of(tmp_path, "-c", code)]
    assert noted == ["watched", "watched", "getaddrinfo", "connect"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        [*TRAIN, "experiment=quickstart", "seed=0"],
        [*TRAIN, "data=digits", "model=bn_lstm"],
        ["-m", "bnrnn.commands.sweep", "jobs=2", *TRAIN[2:], "experiment=quickstart", "seed=0", "model=lstm,bn_lstm"],
    ],
    ids=["quickstart", "train", "sweep"],
)
def test_training_contacts_nobody(tmp_path, arguments):
    noted = sockets_of(tmp_path, *arguments, f"out_dir={tmp_path}/out")
    assert set(noted) == {"watched"}
    assert list(tmp_path.glob("out/**/result.json")) and list(tmp_path.glob("out/**/wandb/offline-run-*"))


@pytest.mark.slow
def test_a_campaign_and_what_reads_its_runs_contact_nobody(tmp_path):
    (tmp_path / "file.yaml").write_text(CAMPAIGN)
    options = ["hours=0.1", "device=cpu", f"file={tmp_path}/file.yaml", f"out_dir={tmp_path}/out"]
    noted = sockets_of(tmp_path, "-m", "bnrnn.commands.campaign", *options)
    assert set(noted) == {"watched"}  # also of the worker, which is a fork that keeps the hook
    assert len(list(tmp_path.glob("out/**/wandb/offline-run-*"))) == 1
    noted = sockets_of(tmp_path, "-m", "bnrnn.commands.campaign", "status", *options[-2:])
    noted += sockets_of(tmp_path, "scripts/make_tables.py", "--show", "quickstart", "--results", tmp_path / "out")
    assert set(noted) == {"watched"}


# These are `make check`, `make doctor` and `make site`, so `.ci/run` does not call `make check` and `make site` itself.
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["scripts/make_tables.py", "--check"],
        ["-m", "bnrnn.commands.doctor", "--device", "cpu", "--out-dir", "OUT"],
        ["scripts/make_site.py", "--out-dir", "OUT"],
    ],
    ids=["tables", "doctor", "site"],
)
def test_pages_the_doctor_and_the_site_succeed_and_contact_nobody(tmp_path, arguments):
    noted = sockets_of(tmp_path, *(tmp_path / "out" if a == "OUT" else a for a in arguments))
    assert set(noted) == {"watched"}


@pytest.mark.parametrize(
    ("mode", "given", "expected"),
    [("offline", None, "false"), ("offline", "true", "true"), ("online", None, None), ("disabled", None, None)],
)
def test_telemetry_is_off_in_offline_runs_unless_the_user_wants_it(tmp_path, monkeypatch, mode, given, expected):
    monkeypatch.setenv(mirror.TELEMETRY, "")  # so that it is as before after the test
    os.environ.pop(mirror.TELEMETRY)
    if given is not None:
        monkeypatch.setenv(mirror.TELEMETRY, given)
    monkeypatch.setattr(mirror, "_started", lambda given, system: os.environ.get(mirror.TELEMETRY))
    started = mirror.start(composed(f"wandb.mode={mode}"), {}, tmp_path, {}, "a", print)
    assert os.environ.get(mirror.TELEMETRY) == expected and started == (None if mode == "disabled" else expected)
