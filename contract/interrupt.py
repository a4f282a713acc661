"""Ctrl-C, at any moment, is one line and exit code 130.

While Python loads modules a KeyboardInterrupt can surface anywhere, as a traceback or swallowed by an import's
clean-up. So a command starts with `leave_at_once`: nothing has been begun, and the process simply ends. What must clean
up behind itself, processes or half-written files, runs within `interruptible` and gets the KeyboardInterrupt. A library
that is just being loaded may answer it with an exception of its own; `interruptible` knows what was meant.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "hold_back", "interruptible", "leave_at_once", "let_through"]

_LINE = b"error: interrupted\n"


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process, unless whoever started us had it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


class Terminated(KeyboardInterrupt):
    """SIGTERM where it is asked for: as Ctrl-C, with its own exit code."""


@contextmanager
def interruptible(*, terminable: bool = False) -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt and, if `terminable`, SIGTERM raises `Terminated`."""
    meant = {signal.SIGINT: KeyboardInterrupt} | ({signal.SIGTERM: Terminated} if terminable else {})
    asked: list[type[KeyboardInterrupt]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(meant[signal.Signals(number)])
        raise asked[-1]

    before = {number: signal.getsignal(number) for number in meant}
    if before[signal.SIGINT] is signal.SIG_IGN:
        del before[signal.SIGINT]
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    except Exception:
        if asked:  # an extension module that was being loaded made another error of it
            raise asked[-1] from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hold_back() -> None:
    """Keep Ctrl-C waiting, across an `exec`, until `let_through`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def let_through() -> None:
    """Deliver what was held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, _LINE)
    os._exit(130)
