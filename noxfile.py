"""Tests under the lowest and the highest versions of all direct dependencies that pyproject.toml allows, and beside
SpeechBrain.

nox                     both, each in an environment of its own; `make versions` does the same
nox -s "versions(end='lowest')"
nox -s speechbrain

The lowest torch is a CUDA build of several gigabytes, which brings its own Triton. No GPU is needed.
"""

import re
import tomllib
from pathlib import Path

import nox

nox.options.default_venv_backend, nox.options.sessions = "venv", ["versions"]
PROJECT = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
EXTRAS = ("train", "gpu", "speech", "sweep", "test")  # those of other extras are tested in the newest versions only
TESTS = ["tests/scan", "tests/layers", "tests/test_kernels.py", "tests/test_config.py", "tests/test_train.py",
         "tests/test_resume.py", "tests/test_identity.py"]  # fmt: skip


def lowest(requirement: str) -> str:
    """The lowest version that a requirement allows: torch==2.11 for torch>=2.11,<2.14."""
    found = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<[\d.]+)?(;.*)?", requirement)
    assert found is not None, f"{requirement} in pyproject.toml has no lower bound"
    return f"{found[1]}=={found[2]}{found[3] or ''}"


def requirements(end: str) -> list[str]:
    """All direct dependencies of the layers, of training and of the tests, at this end of their ranges."""
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in EXTRAS)]
    return [lowest(line) if end == "lowest" else line for group in groups for line in group]


@nox.session
@nox.parametrize("end", ["lowest", "highest"])
def versions(session: nox.Session, end: str) -> None:
    """Run the tests of layers, engines, configurations and training, and compile the kernels."""
    session.install(*requirements(end), "-e", ".")
    session.run("python", "-m", "pytest", "-q", "-m", "not slow", *TESTS, *session.posargs)


@nox.session
def speechbrain(session: nox.Session) -> None:
    """Compare bnrnn.LiGRU with SpeechBrain's own layers, whose one module needs none of its dependencies."""
    session.install(*requirements("highest"), "-e", ".")
    session.install("--no-deps", "speechbrain")
    session.run("python", "-m", "pytest", "-q", "tests/layers/test_ligru.py", *session.posargs)
