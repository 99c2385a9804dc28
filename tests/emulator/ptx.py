"""Reads the PTX of one kernel: its parameters, its instructions and the lines of source they come from."""

import re
from dataclasses import dataclass

WIDTHS = {"pred": 0, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4,
          "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        opcode: with all modifiers, such as "ld.global.v4.b32".
        operands: their texts; a vector or an address is one operand.
        guard: the predicate that must be true, or false if `negated`; "" if there is none.
        line: file and line of source.
    """

    opcode: str
    operands: tuple[str, ...]
    guard: str = ""
    negated: bool = False
    line: str = ""

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)} ({self.line})"


@dataclass(frozen=True)
class Kernel:
    """A kernel.

    Args:
        parameters: names and types.
        widths: bytes of the registers, by the prefix of their names; 0 of predicates.
        labels: the number of the instruction that follows.
        unit: bytes of the narrowest access to memory, for which accesses are recorded.
    """

    name: str
    num_threads: int
    parameters: dict[str, str]
    widths: dict[str, int]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    unit: int


def parse(ptx: str) -> Kernel:
    """The only kernel of a PTX text."""
    files = {number: path.rpartition("/")[2] for number, path in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', ptx)}
    text = re.sub(r"//[^\n]*", "", ptx)
    head, _, rest = text.partition(".entry")[2].partition("{")
    body = _until_closed(rest)
    name, threads = re.match(r"\s*(\w+)", head), re.search(r"\.reqntid\s+(\d+)", head)
    assert name is not None and threads is not None, head
    parameters = {match[2]: match[1] for match in re.finditer(r"\.param\s+\.(\w+)[^,)]*?(\w+_param_\d+)", head)}
    widths = {prefix: WIDTHS[kind] for kind, prefix in re.findall(r"\.reg\s+\.(\w+)\s+(%?[a-z]\w*?)(?:<\d+>)?;", body)}
    instructions, labels = _instructions(body, files)
    unit = min([4, *(width for i in instructions if (width := _access(i)))])
    return Kernel(name[1], int(threads[1]), parameters, widths, instructions, labels, unit)


def _until_closed(text: str) -> str:
    """The text before the brace that closes the one that is open."""
    depth = 1
    for end, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if not depth:
            return text[:end]
    raise ValueError("the body of the kernel does not end")


def _instructions(body: str, files: dict[str, str]) -> tuple[tuple[Instruction, ...], dict[str, int]]:
    """Instructions and labels. Labels of inline assembly, which may occur several times, get a number."""
    instructions, labels, line = list[Instruction](), dict[str, int](), ""
    blocks, block = 0, ""
    for row in body.split("\n"):
        row = row.strip()
        if row in ("{", "}"):
            blocks += row == "{"
            block = f"@{blocks}" if row == "{" else ""
        elif found := re.match(r"\.loc\s+(\d+)\s+(\d+)", row):
            line = f"{files.get(found[1], found[1])}:{found[2]}"
        elif found := re.match(r"([$\w]+):$", row):
            labels[found[1] + block * (not found[1].startswith("$"))] = len(instructions)
        else:
            for statement in filter(None, map(str.strip, row.split(";"))):
                if not statement.startswith("."):
                    instructions.append(_instruction(statement, line, block))
    return tuple(instructions), labels


def _instruction(text: str, line: str, block: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([\w.:]+)\s*(.*)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"cannot read the instruction {text!r}")
    operands = _operands(found[4])
    if found[3].startswith("bra") and not operands[0].startswith("$"):
        operands = (operands[0] + block,)
    return Instruction(found[3], operands, found[2] or "", found[1] == "!", line)


def _operands(text: str) -> tuple[str, ...]:
    """The operands, which commas separate outside braces and brackets."""
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip())


def names(operand: str) -> list[str]:
    """The registers of an operand: one, or several in braces."""
    return [name.strip() for name in operand.strip("{} ").split(",")]


def _access(instruction: Instruction) -> int:
    """Bytes of the elements that an instruction reads or writes in memory; 0 of any other."""
    kind, *rest = instruction.opcode.split(".")
    if kind in ("ldmatrix", "stmatrix") and "trans" in rest:
        return 2
    return WIDTHS[rest[-1]] if kind in ("ld", "st", "atom") and rest[0] in ("global", "shared") else 0
