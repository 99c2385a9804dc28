"""The tests of the engines, under the lowest and the highest versions that pyproject.toml allows for torch.

nox                     both, each in an environment of its own; `make versions` does the same
nox -s "engines(end='lowest')"

The lowest torch is a CUDA build of several gigabytes, which brings its own Triton. No GPU is needed.
"""

import re
import tomllib
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
PROJECT = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
TESTS = ["tests/scan", "tests/layers/test_no_waiting.py", "tests/test_kernels.py"]
TOOLS = ["pytest", "beartype"]


def requirement(end: str) -> str:
    """torch at this end of the range that pyproject.toml allows."""
    (allowed,) = (line for line in PROJECT["dependencies"] if re.match(r"torch\b", line))
    lowest = re.search(r">=([\d.]+)", allowed)
    assert lowest is not None, f"torch has no lower bound in pyproject.toml: {allowed}"
    return f"torch=={lowest[1]}.*" if end == "lowest" else allowed


@nox.session
@nox.parametrize("end", ["lowest", "highest"])
def engines(session: nox.Session, end: str) -> None:
    """Run the tests of the engines, and compile the kernels."""
    (hydra,) = (line for line in PROJECT["optional-dependencies"]["train"] if line.startswith("hydra-core"))
    session.install(requirement(end), hydra, *TOOLS, "-e", ".[gpu]")
    session.run("python", "-c", "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)")
    session.run("python", "-m", "pytest", "-q", *TESTS, *session.posargs)
