"""Become another `protofleet` command that ends when its parent does, however the parent ends.

    python -m lab.demo.child_process PARENT_PID COMMAND [OPTIONS]

The demo starts its broker, aggregator and devices through this. Linux is asked to kill this process when the parent
dies (PR_SET_PDEATHSIG, which survives `execv`); then the command takes this process over. So even `kill -9` on the
demo leaves nothing behind, and what is measured of the process is the command's own.
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
