"""The wheel and the source distribution: what is in them, and that they work outside of the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import bnrnn
from bnrnn.config import ROOT

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
LAYERS_ALONE = """
import re
import sys
from importlib.metadata import packages_distributions, requires

needed = {True: set(), False: set()}  # whether for training alone
for line in requires("bnrnn"):
    needed["extra == " in line].add(re.match("[a-z-]+", line)[0])
assert needed[False] == {"torch", "numpy", "jaxtyping"}, needed
needed[True].discard("bnrnn")  # extras may contain extras
blocked = {name for name, owners in packages_distributions().items() if needed[True] & {o.lower() for o in owners}}
assert {"hydra", "omegaconf", "wandb", "sklearn", "yaml"} <= blocked, blocked

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
import bnrnn
import torch
y, _ = bnrnn.LSTM(3, 4, norm="batch", t_max=5)(torch.randn(5, 2, 3))
assert y.shape == (5, 2, 4)
from bnrnn.commands import console
try:
    console.train()
except SystemExit as error:
    print(error)
"""


def run(*command: object, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"WANDB_MODE": "disabled"}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, folder: Path) -> Path:
    folder.mkdir()
    run(*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder, source, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what packages are built from: building leaves files behind."""
    folder = tmp_path_factory.mktemp("package") / "source"
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    for name in ("bnrnn", "conf", "examples", "experiments", "results"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    return folder


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    return build_wheel(source, source.parent / "wheel")


@pytest.fixture(scope="module")
def scripts(wheel) -> Path:
    """The commands of a fresh environment with the wheel, which sees the packages installed here."""
    folder = wheel.parent / "environment"
    venv.create(folder)
    scripts = Path(sysconfig.get_path("scripts", "venv", {"base": str(folder)}))
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (site / "present.pth").write_text(sysconfig.get_path("purelib"))
    run(*PIP, "--python", scripts / "python", "install", "--no-deps", "--no-index", wheel, cwd=wheel.parent)
    assert run(scripts / "python", "-c", "import bnrnn; print(bnrnn.__file__)", cwd=folder).startswith(str(site))
    return scripts


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_citation_is_of_this_version_and_names_the_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert bnrnn.__version__ == project["version"]
    years = (ROOT / "experiments").glob("*[0-9]/claims.yaml")  # the key of a paper ends with its year
    papers = {yaml.safe_load(p.read_text())["paper"] for p in years}
    assert {cited(reference) for reference in citation["references"]} == papers


def cited(reference: dict) -> str:
    """A reference as `paper` in claims.yaml names it."""
    names = [author["family-names"] for author in reference["authors"]]
    authors = " and ".join(names) if len(names) < 3 else f"{names[0]} et al."
    return f"{authors} {reference['year']}, {reference['title']}"


def test_a_paper_of_two_authors_is_cited_by_both():
    reference = {"authors": [{"family-names": "Zhang"}, {"family-names": "Sennrich"}], "year": 2019, "title": "Title"}
    assert cited(reference) == "Zhang and Sennrich 2019, Title"


def test_the_wheel_has_the_code_its_kernels_the_configurations_the_claims_and_the_evidence(source, wheel):
    code = [p for p in (source / "bnrnn").rglob("*") if p.suffix in (".py", ".cpp", ".h", ".typed")]
    papers = [p for name in ("claims.yaml", "points.json") for p in (source / "experiments").glob(f"*/{name}")]
    files = [*(source / "conf").rglob("*.yaml"), *papers]
    expected = {str(p.relative_to(source)) for p in code} | {f"bnrnn/{p.relative_to(source)}" for p in files}
    expected.add("bnrnn/evidence.jsonl")
    assert {name for name in content(wheel) if ".dist-info/" not in name} == expected
    with zipfile.ZipFile(wheel) as archive:
        assert archive.getinfo("bnrnn/evidence.jsonl").compress_size < 300_000


def test_the_source_distribution_builds_the_same_wheel(source, wheel, tmp_path):
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        examples = {Path(name).name for name in files.getnames() if "/examples/" in name}
    assert examples == {path.name for path in (source / "examples").glob("*.py")} != set()
    assert content(build_wheel(archive, tmp_path / "wheel")) == content(wheel)


@pytest.mark.slow
def test_the_commands_of_the_wheel_train_from_another_folder(scripts, tmp_path):
    run(
        scripts / "bnrnn-train",
        "experiment=quickstart",
        "budget=smoke",
        "device=cpu",
        "seed=0",
        "model=bn_lstm",
        cwd=tmp_path,
    )
    results = [json.loads(p.read_text()) for p in (tmp_path / "outputs/quickstart/smoke").glob("*/result.json")]
    assert [(r["overrides"]["model"], r["status"], r["commits"]) for r in results] == [
        ("bn_lstm", "finished", ["v0.1.0"])
    ]
    (tmp_path / "plan.yaml").write_text('[{experiment: quickstart, seeds: "0", claims: [C1], hours: 1}]')
    assert "quickstart" in run(scripts / "bnrnn-campaign", "status", "file=plan.yaml", "out_dir=outputs", cwd=tmp_path)
    assert "cnn_qa" in run(scripts / "bnrnn-prepare", "--help", cwd=tmp_path)


def test_the_wheel_verifies_runs_with_the_evidence_in_it(scripts, tmp_path):
    shutil.copytree(ROOT / "results" / "quickstart", tmp_path / "outputs" / "quickstart")
    *lines, last = run(scripts / "bnrnn-verify", cwd=tmp_path).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["consistent (the stored run itself)"] * 2
    assert last == "2 cells: 0 consistent, 0 differ, 0 nothing to compare with, 2 the stored run itself"


def test_the_layers_need_torch_numpy_and_jaxtyping_alone(scripts, tmp_path):
    message = run(scripts / "python", "-c", LAYERS_ALONE, cwd=tmp_path)
    assert message == "error: bnrnn-train needs hydra, which is not installed: pip install 'bnrnn[train]'\n"
