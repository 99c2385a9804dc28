"""The page of a notebook that was run: its text, its code, what it printed and its figures."""

import base64
import json
from pathlib import Path

from bnrnn.system.files import write_text


def write(notebook: Path, page: Path) -> None:
    """Write the page as MyST Markdown, and the figures beside it."""
    parts, figures = [], 0
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text'])}```")
                continue
            figures += 1
            image = page.with_name(f"{page.stem}_{figures}.png")
            image.parent.mkdir(parents=True, exist_ok=True)
            image.write_bytes(base64.b64decode(output["data"]["image/png"]))
            parts.append(f"![Figure {figures}]({image.name})")
    write_text(page, "\n\n".join(parts) + "\n")
