"""Parts that several pages of the site have: names, durations, folded code, lists of pages, tables with filters."""

import re
from collections.abc import Iterable
from html import escape
from typing import Any

from bnrnn.report.claim_types import PaperEntry
from bnrnn.report.evidence import Evidence
from bnrnn.report.markdown import markdown
from bnrnn.report.run import Run
from bnrnn.report.verdicts import WORDS

BOLD = re.compile(rf"\*\*({'|'.join(WORDS)})\*\*")
CURVES = '<div id="curves" class="curves"><noscript>The plot needs JavaScript.</noscript></div>'


def again(entry: PaperEntry) -> str:
    """The command that makes a table or figure."""
    target = entry.name if entry.paper == "cooijmans2016" else f"{entry.paper}-{entry.name}"
    return f"Make it again with `make reproduce-{target}`."


def page_of(run: Run, evidence: Evidence) -> str:
    """The address of a run's page in the site, without its ending."""
    return "runs/" + re.sub(r"[^\w./-]", "-", str(run.folder.relative_to(evidence.folder)))


def hours(seconds: float) -> str:
    """A duration in hours or minutes."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def folded(title: str, language: str, text: str) -> str:
    """A block of code that opens with a click."""
    shown = re.sub(r"`(.*?)`", r"<code>\1</code>", title)
    return f"<details><summary>{shown}</summary>\n\n```{language}\n{text.rstrip()}\n```\n\n</details>\n\n"


def raw_html(text: str) -> str:
    """HTML in a page of MyST Markdown."""
    return f"```{{raw}} html\n{text}\n```\n"


def toctree(pages: Iterable[str], *options: str) -> str:
    """A list of pages that only the navigation shows."""
    listed = "\n".join([":hidden:", *options, "", *pages])
    return f"```{{toctree}}\n{listed}\n```\n"


def provenance_of(result: dict[str, Any]) -> str:
    """The date, the commit and the environment of an analysis. Old results have no date."""
    found = {"date": result.get("date", "not recorded"), "commit": result["commit"], **result["environment"]}
    return "## Provenance\n\n" + markdown(["", ""], [[k, f"`{v}`"] for k, v in found.items()])


def kind_of(word: str) -> str:
    """The class in site.css of the word of a verdict."""
    return word.replace(" ", "-") if word != "–" else "none"


def colored(text: str) -> str:
    """A text in Markdown whose verdicts in bold have the colors of their words."""
    return BOLD.sub(lambda match: f'<span class="verdict {kind_of(match[1])}">{match[1]}</span>', text)


def filtered_table(name: str, header: list[str], rows: list[tuple[dict[str, str], str]], filters: list[str]) -> str:
    """A table in HTML with a form before it; `docs/site/static/tables.js` sorts and filters it.

    Args:
        rows: for each row, the values of its `data-` attributes, and the HTML of its cells.
        filters: the keys of these values that a reader can choose.
    """
    fields = []
    for key in filters:
        values = sorted({values[key] for values, _ in rows})
        options = "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in values)
        fields.append(f'<label>{key} <select name="{key}"><option value="">all</option>{options}</select></label>')
    fields.append('<label>words <input type="search" name="words" autocomplete="off"></label>')
    form = f'{"".join(fields)}<button type="reset">reset</button> <output aria-live="polite"></output>'
    heads = "".join(f'<th scope="col"><button type="button">{escape(text)}</button></th>' for text in header)
    body = []
    for values, cells in rows:
        attributes = " ".join(f'data-{key}="{escape(value)}"' for key, value in values.items())
        body.append(f"<tr {attributes}>{cells}</tr>\n")
    return (
        f'<form class="filters" id="{name}-controls">{form}</form>\n'
        f'<div class="table-wrapper"><table class="docutils filtered" id="{name}" data-controls="{name}-controls">\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{''.join(body)}</tbody></table></div>"
    )
