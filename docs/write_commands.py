"""Write docs/commands.md from the commands' own help texts: `python docs/write_commands.py`.

A test compares the file with what this prints, so that the reference cannot fall behind the program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from protofleet.cli import COMMANDS

PAGE = Path(__file__).parent / "commands.md"
SUBCOMMANDS = {"lab": ("list", "run", "table")}
_HEAD = """# Commands

Every command and option, as `--help` prints them; written by `python docs/write_commands.py`.

Exit codes: 0 done, 1 failed while running, 2 used wrongly or given bad input, 130 interrupted. An error is one line on
standard error: `error: what, expected …, got …, try …`.
"""


def reference() -> str:
    """The whole page."""
    names = [(name, *path) for name in COMMANDS for path in [(), *((sub,) for sub in SUBCOMMANDS.get(name, ()))]]
    return _HEAD + "".join(f"\n## protofleet {' '.join(name)}\n\n```\n{help_of(*name)}\n```\n" for name in names)


def help_of(*command: str) -> str:
    """What `protofleet COMMAND --help` prints, 100 columns wide at most."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    line = [sys.executable, "-m", "protofleet", *command, "--help"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment, cwd=PAGE.parent.parent)
    return "\n".join(row.rstrip() for row in done.stdout.strip().splitlines())


if __name__ == "__main__":
    PAGE.write_text(reference())
