"""`protofleet` commands for tests: in a process of their own, or, where nothing of a process is looked at, in this one.

A process loads Python, numpy and typer anew, which costs more than most commands do. What differs between the two, the
exit code of the process, what is loaded, signals, pipes and streams, is tested in processes.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from protofleet import cli

__all__ = ["ROOT", "one_error_line", "run", "run_process"]

ROOT = Path(cli.__file__).parent.parent
_PLAIN = {"NO_COLOR": "1", "COLUMNS": "120"}
Done = subprocess.CompletedProcess[str]


def run(*words: object, encoding: str = "utf-8", **environment: str) -> Done:
    """The command in this process: its exit code, and what it wrote to either stream, in the terminal's encoding."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding, write_through=True) for _ in range(2))
    with (
        patch.dict(os.environ, _PLAIN | environment),
        patch.object(sys, "argv", ["tests"]),  # as called by a program, which the client must not replace
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = cli.main([str(word) for word in words])
    said = [stream.buffer.getvalue().decode(encoding) for stream in (out, err)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, code, *said)


def run_process(*words: object, code: str | None = None, **environment: str) -> Done:
    """The command as a user starts it, or, with `code`, Python that runs before its `main`."""
    after = "from protofleet.cli import main; sys.exit(main())"
    start = ["-m", "protofleet"] if code is None else ["-c", f"{code}\n{after}"]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), **_PLAIN} | environment
    command = [sys.executable, *start, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def one_error_line(done: Done) -> str:
    """The single line on standard error that starts with `error: `."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
