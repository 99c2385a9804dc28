"""The commands, options and paths in README exist."""

import re
import subprocess
import sys

import pytest

from bnrnn.config import ROOT, compose_config
from bnrnn.report.claims import needed

README = (ROOT / "README.md").read_text()
CODE = [
    line.strip() for block in re.findall(r"```(?:sh|bash)\n(.*?)```", README, re.DOTALL) for line in block.split("\n")
]
COMMANDS = [line.split("#")[0].strip() for line in CODE if line.split("#")[0].strip()]
PAGES = "".join(path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")))
PATHS = re.findall(r"`((?:bnrnn|conf|experiments|results|scripts|tests|docs)/[\w./-]*)`", PAGES)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_every_make_command_has_a_target_and_its_recipes_exist(command):
    run = subprocess.run(["make", "--dry-run", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for key in re.findall(r"needs.py recipes (\S+?)\)", run.stdout):
        recipes, analyses = needed(key)
        assert recipes or analyses
        assert all((ROOT / "conf" / "experiment" / f"{recipe}.yaml").exists() for recipe in recipes)
        assert all((ROOT / analysis).exists() for analysis in analyses)


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.search(r"bnrnn[.-]train", c) and "pip" not in c])
def test_every_training_command_composes(command):
    overrides = [o for o in re.split(r"bnrnn[.-]train", command)[1].split() if not o.startswith("-")]
    cfg = compose_config(*(re.sub(r"=([^,\s]+),\S*", r"=\1", o) for o in overrides))
    assert cfg.model and cfg.budget.updates > 0


def test_every_script_knows_its_options():
    scripts = [command for command in COMMANDS if re.match(r"python (scripts/|-m bnrnn\.prepare)", command)]
    assert scripts
    for command in scripts:
        program, arguments = re.match(r"python (-m \S+|\S+)(.*)", command).groups()
        run = [sys.executable, *program.split(), "--help"]
        run = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True)
        assert all(option in run.stdout for option in arguments.split() if option.startswith("--"))


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_every_path_exists(path):
    assert (ROOT / path).exists()


def test_there_is_something_to_check():
    assert len(COMMANDS) > 5
    assert len(PATHS) > 5


@pytest.mark.parametrize("page", ["README.md", "docs/layer.md"])
def test_the_python_of_a_page_runs_from_top_to_bottom(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
        assert names["y"].shape[2] in (32, 64)
    assert blocks
