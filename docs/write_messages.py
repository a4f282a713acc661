"""Write docs/messages.md from contract/wire/messages.cddl and contract/accuracy.py: `python docs/write_messages.py`.

A test compares the page with the grammar; another one the grammar with the classes
(`tests/contract/wire/test_tables.py`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from protofleet.contract import accuracy

PAGE = Path(__file__).parent / "messages.md"
GRAMMAR = Path(__file__).parents[1] / "contract" / "wire" / "messages.cddl"
_HEAD = """# The fields of each message

Written by `python docs/write_messages.py` from [contract/wire/messages.cddl](../contract/wire/messages.cddl), and
compared by a test. What they are for, and who sends what when, is in [wire.md](wire.md). Keys 0 and 1 stand in every
message: its type, which is beside its name here, and the wire's version.

A field with a question mark may be left out; `share` and `seed` are there together or not at all.
"""


def reference() -> str:
    """The whole page."""
    grammar, values = GRAMMAR.read_text().split("; values\n")
    maps = re.findall(r"^([a-z-]+) = \{\n(.*?)^\}$", grammar, re.MULTILINE | re.DOTALL)
    sections = "".join(f"\n## {_title(name, body)}\n\n{_table(body)}" for name, body in maps)
    return f"{_HEAD}{sections}\n{_accuracy()}\n## Values\n\n```\n{values.strip()}\n```\n"


def _accuracy() -> str:
    """The figures of accuracy: the list in the docstring of `contract/accuracy.py`, with the prefix of a status."""
    listed = re.findall(r"^- (`.+?):\s(.+?)[;.](?=\n\n|\n- |\n$|\Z)", accuracy.__doc__ or "", re.MULTILINE | re.DOTALL)
    rows = [
        "| entry | what it is |",
        "| --- | --- |",
        "| `accuracy_run`, `accuracy_round` | the run and the round of them |",
    ]
    for names, meaning in listed:
        entries = ", ".join(f"`accuracy_{name}`" for name in re.findall(r"`(\w+)`", names))
        rows.append(f"| {entries} | {' '.join(meaning.split())} |")
    return (
        "## Figures of accuracy\n\nAmong the `metrics` of a status, where the device may tell them "
        "([accuracy.md](accuracy.md#on-the-aggregator)); shares are 0 to 1. One that does not apply is left out.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def _title(name: str, body: str) -> str:
    number = re.match(r"  0: (\d+),\n  1: \d+,\n", body)
    return f"{name}, {number.group(1)}" if number else name


def _table(body: str) -> str:
    """A row for each field: `  ? 14: bundle-hashes,  ; others: further bundles` has its key, type, name and meaning."""
    rows = ["| key | field | what it is | |", "| ---: | --- | --- | --- |"]
    together = re.compile(r"^  \? \(\n(.*?)^  \)", re.MULTILINE | re.DOTALL)  # they are there together or not at all
    body = together.sub(lambda found: re.sub(r"^    ", "  ? ", found[1], flags=re.MULTILINE), body)
    field = r"^  (\? )?(\d+): (.+?),? *; ([\w.]+)(?:: (.+))?$"
    for optional, key, kind, name, meaning in re.findall(field, body, re.MULTILINE):
        rows.append(f"| {key}{' ?' if optional else ''} | {name} | `{kind}` | {meaning} |")
    if "* u32 => any" in body:
        rows.append("| others | | | later additions, which a reader leaves out |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference())
