"""The commands, options and paths in README.md, CONTRIBUTING.md and docs/ exist."""

import io
import re
import runpy
import shlex
import subprocess
import sys

import pytest
import torch
import yaml

from bnrnn.commands import campaign, cluster, plan, sweep
from bnrnn.commands.campaign import parse
from bnrnn.config import ROOT, compose_config
from bnrnn.report.claims import needed
from scripts import gpu_evidence

FILES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*FILES, *sorted((ROOT / "results").glob("*.md")), *sorted((ROOT / "experiments").glob("*/notes.md"))]
PAGES = "".join(path.read_text() for path in FILES)
CODE = [line for block in re.findall(r"```sh\n(.*?)```", PAGES, re.DOTALL) for line in block.splitlines()]
COMMANDS = list(dict.fromkeys(command for line in CODE if (command := line.split("#")[0].strip())))
FOLDERS = "bnrnn|conf|experiments|results|scripts|tests|docs|examples"
PATHS = re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", "".join(path.read_text() for path in LINKING))
MAX_LINES = 150


@pytest.mark.parametrize("out", ["results", "results/", "./results", str(ROOT / "results"), "outputs", "results/mine"])
def test_pages_are_written_only_after_runs_that_count(out):
    """The folder of the pages may be written in several ways."""
    command = ["make", "--dry-run", "render-table1", f"OUT={out}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (test,) = re.findall(r"if (\[ .* \]); then \S+ scripts/make_tables.py; fi;", run.stdout)
    counts = subprocess.run(["sh", "-c", test], cwd=ROOT, check=False).returncode == 0
    assert counts == (out not in ("outputs", "results/mine"))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_every_make_command_has_a_target_and_its_recipes_exist(command):
    given = shlex.split(command, comments=True)[1:]
    run = subprocess.run(["make", "--dry-run", *given], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for key in set(re.findall(r"needs.py recipes '(\S+?)'\)", run.stdout)):
        recipes, analyses = needed(key)
        assert recipes or analyses
        assert all((ROOT / "conf" / "experiment" / f"{recipe}.yaml").exists() for recipe in recipes)
        assert all((ROOT / analysis).exists() for analysis in analyses)


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.search(r"bnrnn[.-]train", c) and "pip" not in c])
def test_every_training_command_composes(command):
    overrides = [o for o in re.split(r"bnrnn[.-]train", command)[1].split() if not o.startswith("-")]
    cfg = compose_config(*(re.sub(r"=([^,\s]+),\S*", r"=\1", o) for o in overrides))
    assert cfg.model and cfg.budget.updates > 0


def test_every_script_knows_its_options(monkeypatch, capsys):
    options: dict[str, set[str]] = {}
    for command in COMMANDS:
        if match := re.match(r"(bnrnn-prepare|python scripts/\S+)(.*)", command):
            options.setdefault(match[1], set()).update(re.findall(r"--[\w-]+", match[2]))
    assert len(options) == 2
    for program, names in options.items():
        path = ROOT / program.removeprefix("python ").replace("bnrnn-prepare", "bnrnn/commands/prepare.py")
        monkeypatch.setattr(sys, "argv", [path.name, "--help"])
        with pytest.raises(SystemExit):
            runpy.run_path(str(path), run_name="__main__")
        assert names <= set(re.findall(r"--[\w-]+", capsys.readouterr().out))


@pytest.mark.parametrize("command", [sweep, plan, campaign, cluster, gpu_evidence])
def test_every_command_prints_its_usage_also_where_a_character_is_missing(monkeypatch, command):
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "argv", [command.__name__, "--help"])
    monkeypatch.setattr(sys, "stdout", output)
    command.cli()
    print("–", end="", flush=True)
    text = output.buffer.getvalue().decode()
    name = command.__name__.rpartition(".")[2]
    usage = f"python scripts/{name}.py " if command is gpu_evidence else f"bnrnn-{name} "
    assert usage in text and text.endswith("?")


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_every_path_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("bnrnn-campaign")])
def test_every_campaign_command_is_one(command):
    assert parse(command.removeprefix("bnrnn-campaign").split())


@pytest.mark.parametrize("page", LINKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading(page):
    for target, heading in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text()):
        workflow = re.fullmatch(r"\.\./\.\./actions/(workflows/.*?\.yaml)(/badge\.svg)?", target)  # pages of GitHub
        path = ROOT / ".github" / workflow[1] if workflow else page.parent / target if target else page
        assert path.exists(), target
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) if heading else []
        anchors = [re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-") for title in titles]
        assert not heading or heading in anchors, heading


def test_readme_stays_short_and_shows_the_main_claims():
    readme = (ROOT / "README.md").read_text()
    files = sorted((ROOT / "experiments").glob("*/claims.yaml"))
    claims = [yaml.safe_load(path.read_text())["claims"] for path in files]
    main = [name for of_paper in claims for name, entry in of_paper.items() if entry.get("main")]
    assert re.findall(r"^\| ([A-Z]\d+) \|", readme, re.MULTILINE) == main
    assert len(readme.splitlines()) <= MAX_LINES


def test_there_is_something_to_check():
    assert len(COMMANDS) > 50
    assert len(PATHS) > 50
    for part in ("make reproduce-", "bnrnn.train", "bnrnn-prepare", "bnrnn-campaign", "scripts/caption.py"):
        assert any(part in command for command in COMMANDS), part


def python_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_loop_of_readme_trains_and_validates_after_every_epoch(capsys):
    (block,) = python_of("README.md")
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    accuracies = [float(n) for n in re.findall(r"^epoch \d: validation accuracy (\S+)$", capsys.readouterr().out, re.M)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 0.75  # guessing: 0.5; there are 128 validation sequences


def test_the_loop_of_readme_needs_no_estimate_with_running_statistics(capsys):
    (block,) = python_of("README.md")
    lines = [line for line in block.splitlines() if "estimate_population_statistics" not in line]
    running = "\n".join(lines).replace('norm="batch"', 'norm="batch", statistics="running"')
    torch.manual_seed(0)
    exec(compile(running, "README.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) > 0.75


def test_the_python_of_a_page_runs_from_top_to_bottom():
    page = "docs/layer.md"
    blocks = python_of(page)
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
        assert names["y"].shape[2] in (32, 64)
    assert blocks


def test_readme_says_that_no_number_is_reproduced_until_one_is():
    reproduced = any("| reproduced (" in page.read_text() for page in (ROOT / "results").glob("*/*.md"))
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert ("none of them is reproduced yet" in readme) is not reproduced
