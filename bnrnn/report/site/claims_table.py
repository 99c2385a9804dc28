"""The claims as a table that can be sorted and filtered, for the page of all claims."""

from html import escape

from bnrnn.report.claims import entry_of, paper_of
from bnrnn.report.claims_page import COLUMNS, INTRODUCTION, ages, summary, support
from bnrnn.report.site.parts import filtered_table, kind_of, raw_html
from bnrnn.report.verdicts import WORDS, JudgedClaim, Verdict

KEYS = ("length", "early")  # what a reader can filter: the words of the two verdicts


def render(claims: list[JudgedClaim], text: str) -> str:
    """The page of all claims as MyST Markdown, with the table first.

    Args:
        text: the page as `make tables` wrote it, of which the rules and the missing tests are taken.
    """
    rest = text[text.index("## The rules") :]
    return f"""# Claims of the papers

{summary(claims)}

{raw_html(claims_table(claims))}
## What the words mean
{INTRODUCTION}
{rest}"""


def claims_table(claims: list[JudgedClaim]) -> str:
    """The claims with both verdicts, effect and evidence."""
    rows = []
    for judged in claims:
        claim, verdicts, (effects, keys) = judged.claim, (judged.at_length, judged.early), support(judged)
        data = {"paper": _short(claim.paper), **{k: v.word for k, v in zip(KEYS, verdicts, strict=True)}}
        pages = ", ".join(f'<a href="{k}.html">{escape(_title(k))}</a>' for k in keys)
        number = f'<a href="claims/{claim.name}.html">{claim.name}</a>'
        cells = [
            ("claim", f' data-sort="{claim.paper} {claim.name}"', f"{number} {escape(claim.says)}"),
            *((title, f' data-sort="{_place(v)}"', _badge(v)) for title, v in zip(COLUMNS, verdicts, strict=True)),
            ("rules", "", escape(ages(judged))),
            ("effect [95 %]", "", escape(effects)),
            ("evidence", "", pages or "–"),
        ]
        html = "".join(f'<td data-title="{title}"{extra}>{cell}</td>' for title, extra, cell in cells)
        rows.append((data, html))
    header = ["claim", *COLUMNS, "rules", "effect [95 %]", "evidence"]
    return filtered_table("claims", header, rows, ["paper", *KEYS])


def _place(verdict: Verdict) -> str:
    """Sorts verdicts by their word, in the order of WORDS."""
    return f"{WORDS.index(verdict.word)} {escape(verdict.text)}"


def _badge(verdict: Verdict) -> str:
    """The verdict in full, with the color of its word."""
    return f'<span class="verdict {kind_of(verdict.word)}">{escape(verdict.text)}</span>'


def _title(key: str) -> str:
    """The beginning of an entry's title, such as Table 1."""
    return entry_of(key).title.split(", ")[0]


def _short(paper: str) -> str:
    """Authors and year, such as Cooijmans et al. 2016."""
    return paper_of(paper).title.split(",")[0]
