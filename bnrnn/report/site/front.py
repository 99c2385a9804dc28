"""The front page, made of parts of README.md: what this is, a figure, the install lines, the layer, and what holds."""

import re

from bnrnn.config import ROOT
from bnrnn.report.markdown import BLOCK
from bnrnn.report.site.parts import colored

ABOUT = re.compile(r"^# bnrnn\n.*?(?=^Use it if|^!\[[^\]]*\]\(results/)", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"^!\[[^\]]*\]\(results/\S+\)\n(?:\n\*[^*].*?[^*]\*\n)?", re.DOTALL | re.MULTILINE)
INSTALL = re.compile(r"^## Install\n.*?(?=^## )", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^## A training loop\n.*?\n```python\n.*?```\n", re.DOTALL | re.MULTILINE)
BADGE = re.compile(r"^\[?!\[.*\n", re.MULTILINE)


def render(navigation: str) -> str:
    """The front page as MyST Markdown, with the tables of contents of the sidebar at its end.

    All numbers of the page are those of generated blocks in README.md.
    """
    readme = (ROOT / "README.md").read_text()
    about = BADGE.sub("", _part(ABOUT, readme, "an introduction")).rstrip()
    blocks = {match[2]: match[0].split("-->\n", 1)[1].rsplit("<!--", 1)[0] for match in BLOCK.finditer(readme)}
    return f"""{about}

{_part(FIGURE, readme, "a figure of results")}
{blocks["facts"]}
{_part(INSTALL, readme, "a section 'Install'")}
{_part(CODE, readme, "a section 'A training loop' with an example")}
[Using the layer](docs/layer.md) explains the other normalizations, when they help, and sequences of different lengths.

## What holds

[Results](results/README.md) has our numbers beside the published ones, for every table.

A program judges the papers' claims by rules. These are the main ones; [the page of all claims](results/claims.md)
can be filtered and says what the verdicts mean.

{colored(blocks["claims"])}
## How fast

{blocks["bench/cpu-quick"]}
[Engines](docs/engines.md) says what computes the layers, and how to choose.

{navigation}"""


def _part(pattern: re.Pattern[str], readme: str, name: str) -> str:
    match = pattern.search(readme)
    assert match, f"README.md has no part that is {name}"
    return match[0]
