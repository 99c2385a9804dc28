"""Compile the Triton kernels for three generations of GPUs, and write what they need into docs/kernels.md.

python scripts/kernels.py           a minute or two; needs no GPU
"""

import triton

from bnrnn.bench.kernels import DEVICES, compiled, kernels
from bnrnn.config import ROOT
from bnrnn.report.markdown import markdown

PAGE = ROOT / "docs/kernels.md"
BEGIN, END = "<!-- written by make kernels -->\n", "<!-- end -->\n"


def rendered() -> str:
    """The table: a row for each kernel."""
    rows = []
    for kernel in kernels():
        division = kernel.division
        how = f"{division.units}, {32 * division.num_warps}, {'kernel' if division.fused else 'cuBLAS'}"
        needs = (compiled(kernel, architecture) for architecture in DEVICES)
        cells = [f"{r.registers}, {r.spilled}, {r.shared / 1024:.0f}, {r.barriers}" for r in needs]
        rows.append([kernel.title, how, *cells])
        print(*rows[-1], sep=" | ", flush=True)
    table = markdown(["kernel", "units, threads, product", *DEVICES.values()], rows)
    return f"{table}\nCompiled by Triton {triton.__version__}.\n"


def main() -> None:
    table = rendered()
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}{table}{END}{after}")


if __name__ == "__main__":
    main()
