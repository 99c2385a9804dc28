"""The page of a program of others in which our layer takes the place of nn.LSTM."""

from functools import cache
from types import ModuleType

from bnrnn.config import ROOT
from bnrnn.report.claim_types import load_module
from bnrnn.report.evidence import Evidence
from bnrnn.report.site.parts import CURVES, folded, provenance_of

KEY = "programs/word_language_model"
SCOPE = """{data}. This shows that the layer fits into the program, and what an update costs. It does not show which
layer is best: the models are small, train for a part of an epoch, and with settings that were chosen for `nn.LSTM`. The
times are medians of the CPU time of an update with one thread. The machine also had other work."""
PROGRAM = ROOT / "experiments" / f"{KEY}.py"


@cache
def program() -> ModuleType:
    """The module of the program."""
    return load_module(PROGRAM)


def render(evidence: Evidence) -> str:
    """The page as MyST Markdown: the lines changed, the results, the curves and the program."""
    before, *after = program().VARIANTS.values()
    lines = "\n".join(["```diff", f"-lstm = {before}", *(f"+lstm = {line}" for line in after), "```"])
    parts = [
        "# In PyTorch's word language model",
        str(program().__doc__).split("\n\n")[2],
        "## The lines changed",
        "Either of the two lines with a plus takes the place of the first line; nothing else of the program changes. "
        '`statistics="running"` keeps moving averages, so that evaluation works at any time.',
        lines,
    ]
    if evidence.has_numbers(KEY):
        result = evidence.numbers(KEY)
        parts += ["## Results", program().render(result), SCOPE.format(data=result["data"])]
        parts += [CURVES, provenance_of(result)]
    else:
        parts += [f"It has not been measured yet: run `python {PROGRAM.relative_to(ROOT)} --out-dir results`."]
    parts += ["## The program", folded(f"`{PROGRAM.relative_to(ROOT)}`", "python", PROGRAM.read_text())]
    return "\n\n".join(parts) + "\n"
