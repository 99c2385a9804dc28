"""The front page: what this is, the layer in ten lines, and the claims as a table that can be sorted and filtered."""

import re
from html import escape

from bnrnn.config import ROOT
from bnrnn.report.claims import load_claim, load_paper
from bnrnn.report.claims_page import evidence, rests_on, verdict_with_tendency
from bnrnn.report.outcomes import CONTRADICTED, CONTRADICTED_IN_PART, HOLDS, IN_PART, NOT_SHOWN
from bnrnn.report.site.filtered import filtered_table
from bnrnn.report.verdicts import SCOPES, Claim

CODE = re.compile(r"## The layer in ten lines\n(.*?\n```python\n.*?```\n)", re.DOTALL)
ABOUT = re.compile(r"^# bnrnn\n(.*?)(?=^Use it if|^!\[)", re.DOTALL | re.MULTILINE)
IN_WORDS = {"paper": "paper's data and length", "shorter": "paper's data, shorter", "other data": "other data"}
NOT_RUN = "not run"
VERDICTS = (HOLDS, IN_PART, CONTRADICTED, CONTRADICTED_IN_PART, NOT_SHOWN, NOT_RUN)  # in the order of sorting


def render(claims: list[Claim], navigation: str) -> str:
    """The front page as MyST Markdown; `navigation` is the tables of contents of the sidebar."""
    readme = (ROOT / "README.md").read_text()
    about, code = ABOUT.search(readme), CODE.search(readme)
    assert about, "README.md has no introduction before its list of uses"
    assert code, "README.md has no section 'The layer in ten lines' with an example"
    run = sum(claim.scope is not None for claim in claims)
    return f"""# bnrnn
{about[1].rstrip()}

## The layer in ten lines
{code[1]}
[Using the layer](docs/layer.md) explains the other normalizations, when they help, and sequences of different lengths.

## What holds

The papers make {len(claims)} claims that runs can test; {run} of them have runs so far. A program judges each claim by
rules in the repository; [all claims with their tests](results/claims.md) explains verdicts and effects. The evidence is
often weaker than the papers' own, because most runs are shorter.

```{{raw}} html
{claims_table(claims)}
```

[Published and our numbers](results/README.md) stand beside each other for every table.

{navigation}"""


def claims_table(claims: list[Claim]) -> str:
    """The claims with verdict, scope, effect and evidence."""
    rows = []
    for claim in claims:
        effects, keys = evidence(claim)
        data = {"paper": _short(claim.paper), "verdict": claim.verdict if claim.scope else NOT_RUN,
                "scope": IN_WORDS[claim.scope] if claim.scope else NOT_RUN}  # fmt: skip
        pages = ", ".join(f'<a href="results/{k}.html">{escape(_title(k))}</a>' for k in keys)
        shown = verdict_with_tendency(claim) if claim.scope else NOT_RUN
        kind = data["verdict"].replace(" ", "-")
        number = f'<a href="results/claims.html#{claim.name.lower()}">{claim.name}</a>'
        order = SCOPES.index(claim.scope) if claim.scope else len(SCOPES)
        strength = f"{VERDICTS.index(data['verdict'])} {shown}"
        cells = [
            ("claim", f' data-sort="{claim.paper} {claim.name}"', f"{number} {escape(claim.says)}"),
            ("paper", "", escape(data["paper"])),
            ("verdict", f' data-sort="{strength}"', f'<span class="verdict {kind}">{escape(shown)}</span>'),
            ("rests on", f' data-sort="{order} {escape(rests_on(claim))}"', escape(rests_on(claim))),
            ("effect [95 %]", "", escape(effects)),
            ("evidence", "", pages or "–"),
        ]
        html = "".join(f'<td data-title="{title}"{extra}>{cell}</td>' for title, extra, cell in cells)
        attributes = " ".join(f'data-{key}="{escape(value)}"' for key, value in data.items())
        rows.append((data, f"<tr {attributes}>{html}</tr>"))
    header = ["claim", "paper", "verdict", "rests on", "effect [95 %]", "evidence"]
    return filtered_table("claims", header, rows, ["paper", "verdict", "scope"])


def _title(key: str) -> str:
    """The beginning of an entry's title, such as Table 1."""
    return load_claim(key)["title"].split(", ")[0]


def _short(paper: str) -> str:
    """Authors and year, such as Cooijmans et al. 2016."""
    return load_paper(paper).split(",")[0]
