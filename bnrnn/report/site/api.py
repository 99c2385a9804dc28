"""The reference of the API: a page for each part of the package, made from docstrings."""

from importlib import import_module
from pkgutil import iter_modules

from bnrnn.report.site.parts import toctree

PARTS = {
    "bnrnn": "what `import bnrnn` offers",
    "bnrnn.layers": "the recurrent layers and normalizations of the papers",
    "bnrnn.models": "whole models made of layers",
    "bnrnn.scan": "the recurrences and their engines",
    "bnrnn.data": "the datasets",
    "bnrnn.training": "training loop, checkpoints, optimizers, logs and results",
    "bnrnn.report": "claims, verdicts, tables and figures",
}
TOP = """```{{eval-rst}}
.. automodule:: {name}
   :members: {members}
```
"""
MODULE = """## {name}

```{{eval-rst}}
.. automodule:: {name}
```
"""


def pages() -> dict[str, str]:
    """The pages of the reference by their names."""
    names = [f"api/{name}" for name in PARTS]
    rows = "\n".join(f"- [{name}]({name}.md): {about}" for name, about in PARTS.items())
    tree = toctree(name.removeprefix("api/") for name in names)
    index = f"# Reference\n\nFrom the docstrings of the package.\n\n{rows}\n\n{tree}"
    return {"api/index": index, **{f"api/{name}": _page(name) for name in PARTS}}


def _page(name: str) -> str:
    package = import_module(name)
    if name == "bnrnn":
        return f"# bnrnn\n\n{TOP.format(name=name, members=', '.join(package.__all__))}"
    parts = [f"# {name}\n"]
    if hasattr(package, "__all__"):
        return parts[0] + "\n" + TOP.format(name=name, members=", ".join(package.__all__))
    modules = sorted(m.name for m in iter_modules(package.__path__) if not m.ispkg)
    return "\n".join([*parts, *(MODULE.format(name=f"{name}.{module}") for module in modules)])
