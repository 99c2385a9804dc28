"""Variables of make reach the programs as they were given: nothing in them is a command of the shell."""

import os
import subprocess
import sys

import pytest

from bnrnn.config import ROOT

NASTY = "a b;touch PWNED;`touch PWNED`$$(touch PWNED)'\"&|>PWNED"
TARGETS = ["quickstart", "verify", "compare", "doctor", "bench", "stress", "wheels", "campaign", "status",
           "gpu-evidence", "plan-table1", "status-table1", "reproduce-table1", "render-fig5",
           "sweep-gamma"]  # fmt: skip
VARIABLES = ["OUT", "BUDGET", "SEEDS", "DEVICE", "JOBS", "HOURS", "WORKERS", "SINCE", "KEY", "METRIC", "KILLS",
             "INPUTS", "PYTHON_VERSION"]  # fmt: skip
ECHO = f"""#!{sys.executable}
import sys
if "scripts/needs.py" in sys.argv:
    print("one/recipe")
else:
    print("called with", sys.argv[1:])
"""


@pytest.fixture
def make(tmp_path):
    """Runs make with a Python that prints its arguments, in a folder of its own."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    for path in (tmp_path / "venv/bin/python", tmp_path / "python3"):
        path.write_text(ECHO)
        path.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", "venv/.stamp"):
        (tmp_path / name).write_text("")
    venv = [f"VENV={tmp_path}/venv", f"PYTHON3={tmp_path}/python3"]

    def run(*arguments: str) -> str:
        command = ["make", "-f", str(ROOT / "Makefile"), *venv, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize("launcher", ["", "slurm"])
@pytest.mark.parametrize("target", TARGETS)
def test_no_variable_runs_a_command(make, tmp_path, target, launcher):
    make(target, *(f"{name}={NASTY}" for name in VARIABLES), f"ARGS=x=1 {NASTY}", f"LAUNCHER={launcher}")
    make(target, f"LAUNCHER={NASTY}")
    assert not list(tmp_path.rglob("PWNED"))


def test_a_folder_is_one_word_and_args_are_several(make):
    out = make("reproduce-table1", "OUT=/tmp/a b;c", "ARGS=optim.lr=0.1 seed=1;2")
    given = ["experiment=one/recipe", "budget=paper", 'out_dir="/tmp/a b;c"', "device=auto", "optim.lr=0.1", "seed=1;2"]
    assert f"called with {['-m', 'bnrnn.train', *given]}" in out
    assert f"called with {['scripts/make_tables.py', '--show', 'one/recipe', '--results', '/tmp/a b;c']}" in out
    out = make("campaign", "OUT=it's here", "HOURS=2")
    assert str(["hours=2", "jobs=1", "device=auto", "out_dir=it's here"])[1:] in out


@pytest.mark.slow
def test_runs_are_trained_and_rendered_in_a_folder_with_spaces_a_semicolon_and_quotes(tmp_path):
    folder = tmp_path / "my runs; and 'more'"
    options = ["BUDGET=smoke", "SEEDS=0", f"OUT={folder}", "ARGS=data=digits model.layer.gamma_init=0.1,0.3"]
    command = ["make", "-o", ".venv/.stamp", f"PYTHON={sys.executable}", "reproduce-fig6_pmnist", *options]
    environment = os.environ | {"WANDB_MODE": "disabled"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.rglob("result.json"))) == 2 and [path.name for path in tmp_path.iterdir()] == [folder.name]
