"""A build step that copies conf/ and the papers' claims into the wheel, where bnrnn.config finds them.

All other properties of the package are in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # an editable install reads these files in the checkout
            return
        for path in sorted(
            [
                *Path("conf").rglob("*.yaml"),
                *Path("experiments").glob("*/claims.yaml"),
                *Path("experiments").glob("*/points.json"),
            ]
        ):
            target = Path(self.build_lib, "bnrnn", path)
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildPy})
