"""How many published numbers were compared at the paper's full length, for README.md."""

from pathlib import Path

from bnrnn.report.claims import claim_keys, load_claim
from bnrnn.report.runs import load_runs
from bnrnn.report.tables import published_rows
from bnrnn.report.verdicts import NOT_RUN


def render(results_dir: Path) -> str:
    """How many published numbers have runs of the paper's length, and how many of these are reproduced."""
    rows = []
    for key in claim_keys():
        claim = load_claim(key)
        runs = load_runs(key, results_dir) if "published" in claim else []
        for part in claim.get("published", []):
            rows += published_rows(key, claim, part, runs)
    verdicts = [row[-1] for row in rows if row[-1] != NOT_RUN]
    counted = sum("reproduced" in verdict for verdict in verdicts)
    reproduced = f"{counted} of them reproduced" if counted else "none of them is reproduced yet"
    return (
        f"Of {len(rows)} published numbers, {len(verdicts)} have runs of the paper's full length; {reproduced}. The "
        "others are missing because their runs take hundreds of core hours."
    )
