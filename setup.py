"""A build step that copies conf/, the papers' claims and a summary of results/ into the wheel, where bnrnn finds them.

All other properties of the package are in pyproject.toml.
"""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

EVIDENCE = Path("bnrnn", "evidence.jsonl")  # bnrnn.report.stored reads it


def write_evidence(folder: str) -> None:
    """Write the stored runs for `bnrnn-verify`. A source distribution has this file in the place of results/."""
    if Path("results").is_dir():
        lines = runpy.run_path("bnrnn/report/summary.py")["summary_lines"](Path("results"))
        text = "".join(f"{line}\n" for line in lines)
    else:
        text = EVIDENCE.read_text()
    Path(folder, EVIDENCE).write_text(text)


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # an editable install reads these files in the checkout
            return
        papers = [path for name in ("claims.yaml", "points.json") for path in Path("experiments").glob(f"*/{name}")]
        for path in sorted([*Path("conf").rglob("*.yaml"), *papers]):
            target = Path(self.build_lib, "bnrnn", path)
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))
        write_evidence(self.build_lib)


class Sdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_evidence(base_dir)


setup(cmdclass={"build_py": BuildPy, "sdist": Sdist})
