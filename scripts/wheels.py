"""Download what the experiments need beside torch, for a machine without a package index.

python scripts/wheels.py wheels [--python 3.12]

Takes the versions of constraints.txt, for Linux on x86-64. `make gpu-evidence` installs from wheels/ if it is there.
"""

import re
import subprocess
import sys
from argparse import ArgumentParser
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from bnrnn.config import ROOT

NEEDED = ("hydra-core", "omegaconf", "wandb", "jaxtyping", "plotext", "rich", "pooch", "tqdm", "pyyaml")
PRESENT = {"torch", "triton", "numpy", "scipy", "matplotlib", "typing-extensions"}  # come with the machine's torch
FROM_SOURCE = {"antlr4-python3-runtime"}  # has no wheel, and is plain Python
PLATFORMS = [f"manylinux{version}_x86_64" for version in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")]


def closure(names: tuple[str, ...]) -> list[str]:
    """The packages and all that they need here, without extras and without those in PRESENT."""
    found, todo = set(), list(names)
    while todo:
        name = re.sub(r"[._]+", "-", todo.pop()).lower()
        if name in found or name in PRESENT:
            continue
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            continue  # for another system or version of Python
        found.add(name)
        todo += [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]
    return sorted(found)


def main() -> None:
    parser = ArgumentParser(description="Download wheels for a machine without a package index.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of Python of that machine")
    args = parser.parse_args()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0].lower().replace("_", "-"): line for line in lines if "==" in line}
    wanted = [pins.get(name, name) for name in closure(NEEDED)]
    source = [pin for pin in wanted if pin.partition("==")[0].lower() in FROM_SOURCE]
    pip, where = [sys.executable, "-m", "pip", "--disable-pip-version-check"], ["--no-deps", "--dest", str(args.folder)]
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    given = ["--only-binary=:all:", "--python-version", args.python, "--implementation", "cp", *platforms]
    subprocess.run([*pip, "download", *where, *given, *(pin for pin in wanted if pin not in source)], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(args.folder), *source], check=True)
    size = sum(path.stat().st_size for path in args.folder.glob("*.whl")) / 2**20
    print(f"{args.folder}: {len(list(args.folder.glob('*.whl')))} wheels, {size:.0f} MiB")


if __name__ == "__main__":
    main()
