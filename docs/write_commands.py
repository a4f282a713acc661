"""Write docs/commands.md from the commands' own help texts: `python docs/write_commands.py`.

A test compares the file with what this prints, so that the reference cannot fall behind the program.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent.parent))

from protofleet.cli import COMMANDS, main

PAGE = Path(__file__).parent / "commands.md"
SUBCOMMANDS = {
    "fleet": (
        *("list", "show", "log", "admit", "remove", "pause", "resume"),
        *("open-round", "rollback", "suspects", "close-round", "backup", "restore"),
        *("invite", "enrol", "revoke"),
    ),
    "pki": ("init", "device", "aggregator", "helper", "other", "revoke", "renew", "rotate-ca", "list"),
    "lab": ("list", "run", "compare", "table", "results"),
}
NESTED = SUBCOMMANDS | {name: tuple(command.below) for name, command in COMMANDS.items() if command.below}
_HEAD = """# Commands

Every command and option, as `--help` prints them; written by `python docs/write_commands.py`.

Exit codes: 0 done, 1 failed while running, 2 used wrongly or given bad input, 130 interrupted. An error is one line on
standard error: `error: what, expected …, got …, try …`.

`client`, `aggregate`, `gateway`, `helper`, `broker` and `predict` take each option from three places; the
later one wins:

1. `--config FILE.toml`, with the options' names as keys, without the dashes in front and with _ for -:
   `min_clients = 5`;
2. the environment, as `PROTOFLEET_<COMMAND>_<NAME>`, with commas between several values:
   `PROTOFLEET_AGGREGATE_STORE=postgresql://user:password@host/db`. Whoever lists processes does not see it;
3. the command line.

`--print-config` writes what then holds, as such a file, and ends. Tokens, and users and passwords in URLs, are left
out; the file says where. What holds for one start only, such as `--take-over`, is on the command line alone.
"""


def reference() -> str:
    """The whole page."""
    names = [(name, *path) for name in COMMANDS for path in [(), *((sub,) for sub in NESTED.get(name, ()))]]
    return _HEAD + "".join(f"\n## protofleet {' '.join(name)}\n\n```\n{help_of(*name)}\n```\n" for name in names)


def help_of(*command: str) -> str:
    """What `protofleet COMMAND --help` prints, 100 columns wide at most."""
    out = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}), redirect_stdout(out):
        assert main([*command, "--help"]) == 0, command
    return "\n".join(row.rstrip() for row in out.getvalue().strip().splitlines())


if __name__ == "__main__":
    PAGE.write_text(reference())
