"""What was compared with a published number at the paper's full length, for README.md."""

from pathlib import Path

from bnrnn.report.claims import claim_keys, load_claim, load_paper
from bnrnn.report.markdown import markdown
from bnrnn.report.runs import load_runs
from bnrnn.report.tables import published_rows
from bnrnn.report.verdicts import NOT_RUN


def render(results_dir: Path) -> str:
    """Every published number with a run of the paper's length, beside ours, and how many have none."""
    rows, total = [], 0
    for key in claim_keys():
        claim = load_claim(key)
        runs = load_runs(key, results_dir) if "published" in claim else []
        for part in claim.get("published", []):
            found = published_rows(key, claim, part, runs)
            total += len(found)
            paper, title = load_paper(key.partition("/")[0]).partition(",")[0], claim["title"].partition(",")[0]
            name = f"{paper}, [{title}](results/{key}.md): {part['what']}"
            rows += [[name, *row] for row in found if row[-1] != NOT_RUN]
    counted = sum("reproduced" in row[-1] for row in rows)
    begun = f"Of {total} published numbers, {len(rows)} have runs of the paper's full length"
    reproduced = f"{counted} of them reproduced" if counted else "none of them is reproduced yet"
    hours = "The others are missing because their runs take hundreds of core hours."
    header = ["number", "model", "data or setting", "published", "ours", "difference", "verdict"]
    return f"{begun}; {reproduced}. {hours}\n\n{markdown(header, rows)}"
