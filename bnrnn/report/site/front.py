"""The front page: what this is, a training loop, and the claims as a table that can be sorted and filtered."""

import re
from html import escape

from bnrnn.config import ROOT
from bnrnn.report.claims import load_claim, load_paper
from bnrnn.report.claims_page import COLUMNS, ages, evidence, summary
from bnrnn.report.site.filtered import filtered_table
from bnrnn.report.verdicts import WORDS, Claim, Verdict

CODE = re.compile(r"## A training loop\n(.*?\n```python\n.*?```\n)", re.DOTALL)
ABOUT = re.compile(r"^# bnrnn\n(.*?)(?=^!\[)", re.DOTALL | re.MULTILINE)
KEYS = ("length", "early")  # what a reader can filter: the words of the two verdicts


def render(claims: list[Claim], navigation: str) -> str:
    """The front page as MyST Markdown; `navigation` is the tables of contents of the sidebar."""
    readme = (ROOT / "README.md").read_text()
    about, code = ABOUT.search(readme), CODE.search(readme)
    assert about, "README.md has no introduction before its figure"
    assert code, "README.md has no section 'A training loop' with an example"
    return f"""# bnrnn
{about[1].rstrip()}

## A training loop
{code[1]}
[Using the layer](docs/layer.md) explains the other normalizations, when they help, and sequences of different lengths.

## What holds

{summary(claims)} [All claims](results/claims.md) explains the rules. Each claim has a page with its tests.

```{{raw}} html
{claims_table(claims)}
```

[Published and our numbers](results/README.md) stand beside each other for every table.

{navigation}"""


def claims_table(claims: list[Claim]) -> str:
    """The claims with both verdicts, effect and evidence."""
    rows = []
    for claim in claims:
        effects, keys = evidence(claim)
        verdicts = (claim.at_length, claim.early)
        data = {"paper": _short(claim.paper), **{k: v.word for k, v in zip(KEYS, verdicts, strict=True)}}
        pages = ", ".join(f'<a href="results/{k}.html">{escape(_title(k))}</a>' for k in keys)
        number = f'<a href="results/claims/{claim.name}.html">{claim.name}</a>'
        cells = [
            ("claim", f' data-sort="{claim.paper} {claim.name}"', f"{number} {escape(claim.says)}"),
            *((title, f' data-sort="{_place(v)}"', _badge(v)) for title, v in zip(COLUMNS, verdicts, strict=True)),
            ("rules", "", escape(ages(claim))),
            ("effect [95 %]", "", escape(effects)),
            ("evidence", "", pages or "–"),
        ]
        html = "".join(f'<td data-title="{title}"{extra}>{cell}</td>' for title, extra, cell in cells)
        attributes = " ".join(f'data-{key}="{escape(value)}"' for key, value in data.items())
        rows.append((data, f"<tr {attributes}>{html}</tr>"))
    header = ["claim", *COLUMNS, "rules", "effect [95 %]", "evidence"]
    return filtered_table("claims", header, rows, ["paper", *KEYS])


def _place(verdict: Verdict) -> str:
    """Sorts verdicts by their word, in the order of WORDS."""
    return f"{WORDS.index(verdict.word)} {escape(verdict.text)}"


def _badge(verdict: Verdict) -> str:
    """The verdict in full, with the colour of its word."""
    kind = verdict.word.replace(" ", "-") if verdict.word != "–" else "none"
    return f'<span class="verdict {kind}">{escape(verdict.text)}</span>'


def _title(key: str) -> str:
    """The beginning of an entry's title, such as Table 1."""
    return load_claim(key)["title"].split(", ")[0]


def _short(paper: str) -> str:
    """Authors and year, such as Cooijmans et al. 2016."""
    return load_paper(paper).split(",")[0]
