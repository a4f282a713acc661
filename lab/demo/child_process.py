"""Become another `protofleet` command that ends when its parent does, however the parent ends.

    python -m protofleet.lab.demo.child_process PARENT_PID COMMAND [OPTIONS]

The demo starts its broker, aggregator and devices through this module:

1. The process asks Linux to kill it when its parent dies (PR_SET_PDEATHSIG, which survives `execv`).
2. The command takes the process over.

So even `kill -9` on the demo leaves no process behind. And measurements of the process are those of the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """See the module."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it was gone before we asked
        os._exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "protofleet", *command])


if __name__ == "__main__":
    main()
