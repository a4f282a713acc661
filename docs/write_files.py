"""Write the end of docs/architecture.md, a line for every file, from the first sentences of the modules.

python docs/write_files.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "architecture.md"
ROOMS = ("protofleet", "lab", "edge_client", "aggregator", "export", "hw_profiles", "contract")
TITLE = "## Every file\n"


def first_sentence(module: Path) -> str:
    """What a module says of itself first: its docstring's first paragraph, as far as the first full stop."""
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.?]) (?=[A-Z`])", paragraph)[0]


def lines_of(folder: Path, indent: str) -> list[str]:
    """A list item for each module of `folder`, then for each of its sub-packages with their own below them."""
    lines = [
        f"{indent}- `{module.name}`: {first_sentence(module)}"
        for module in sorted(folder.glob("*.py"))
        if module.name != "__init__.py"
    ]
    for package in sorted(folder.glob("*/__init__.py")):
        lines.append(f"{indent}- `{package.parent.name}/`: {first_sentence(package)}")
        lines += lines_of(package.parent, indent + "  ")
    return lines


def section() -> str:
    """The whole section, title included."""
    parts = [TITLE, "Written by `python docs/write_files.py` from what each module says of itself first.\n"]
    for room in ROOMS:
        parts += [
            f"### {room}\n",
            first_sentence(ROOT / room / "__init__.py") + "\n",
            "\n".join(lines_of(ROOT / room, "")) + "\n",
        ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().split(TITLE)[0].rstrip() + "\n\n" + section())
