"""Ctrl-C, at any moment, is one line and exit code 130.

While Python loads modules a KeyboardInterrupt can surface anywhere, as a traceback or swallowed by an import's
clean-up. So a command starts with `leave_at_once`: nothing has been begun, and the process simply ends. What must clean
up behind itself, processes or half-written files, runs within `interruptible` and gets the KeyboardInterrupt.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["hold_back", "interruptible", "leave_at_once", "let_through"]

_LINE = b"error: interrupted\n"


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process, unless whoever started us had it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def hold_back() -> None:
    """Keep Ctrl-C waiting, across an `exec`, until `let_through`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def let_through() -> None:
    """Deliver what was held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, _LINE)
    os._exit(130)
