"""Renders the comparison of running, exact and batch statistics that scripts/running.py has measured."""

from typing import Any

from bnrnn.config import ROOT
from bnrnn.report.markdown import markdown

FILE = ROOT / "results/layer/running.json"
KINDS = ("running", "exact", "batch")


def render(result: dict[str, Any], name: str) -> str:
    """The table of one corpus, with a line that says how it was made."""
    case = result["cases"][name]
    unit = {"bpc": "bits per character", "accuracy": "accuracy"}[case["metric"]]
    rows = [[str(row["update"]), *(f"{row[kind]:.3f}" for kind in KINDS)] for row in case["rows"]]
    options = ", ".join(case["overrides"])
    made = f"Validation, {unit}. BN-LSTM, {options}, Adam at {case['lr']}, one seed, {result['date']}; {case['data']}."
    return f"{markdown(['update', *KINDS], rows)}\n{made}\n"
