"""Tables that a reader can sort and filter: `docs/site/static/tables.js` brings them to life."""

from html import escape


def filtered_table(name: str, header: list[str], rows: list[tuple[dict[str, str], str]], filters: list[str]) -> str:
    """A table in HTML with a form before it.

    Args:
        rows: for each row, its value for each filter and its HTML.
        filters: the keys of a row's values that a reader can choose.
    """
    fields = []
    for key in filters:
        values = sorted({values[key] for values, _ in rows})
        options = "".join(f'<option value="{escape(value)}">{escape(value)}</option>' for value in values)
        fields.append(f'<label>{key} <select name="{key}"><option value="">all</option>{options}</select></label>')
    fields.append('<label>words <input type="search" name="words" autocomplete="off"></label>')
    form = f'{"".join(fields)}<button type="reset">reset</button> <output aria-live="polite"></output>'
    heads = "".join(f'<th scope="col"><button type="button">{escape(text)}</button></th>' for text in header)
    body = "\n".join(row for _, row in rows)
    return (
        f'<form class="filters" id="{name}-controls">{form}</form>\n'
        f'<div class="table-wrapper"><table class="docutils filtered" id="{name}" data-controls="{name}-controls">\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
