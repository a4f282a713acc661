"""Ctrl-C, at any moment, is one line and exit code 130.

While Python loads modules a KeyboardInterrupt can surface anywhere, as a traceback or swallowed by an import's
clean-up. So a command starts with `leave_at_once`: nothing has been begun, and the process simply ends. A signal that
a command answers later, and that would end it before, is kept waiting from there on (`hold_back`). What must clean
up behind itself, processes or half-written files, runs within `interruptible` and gets the KeyboardInterrupt. A library
that is just being loaded may answer it with an exception of its own; `interruptible` knows what was meant.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Terminated", "hold_back", "interruptible", "leave_at_once", "let_through"]

_LINE = b"error: interrupted\n"
_AGAIN_S = 0.05


def leave_at_once() -> None:
    """From now on Ctrl-C ends the process, unless whoever started us had it ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


class Terminated(KeyboardInterrupt):
    """SIGTERM where it is asked for: as Ctrl-C, with its own exit code."""


@contextmanager
def interruptible(*, terminable: bool = False, once: bool = False) -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt and, if `terminable`, SIGTERM raises `Terminated`.

    Args:
        once: what follows the first signal is not interrupted again.
    """
    meant = {signal.SIGINT: KeyboardInterrupt} | ({signal.SIGTERM: Terminated} if terminable else {})
    before = {number: signal.getsignal(number) for number in meant}
    if before[signal.SIGINT] is signal.SIG_IGN:
        del before[signal.SIGINT]
    asked: list[signal.Signals] = []
    shown_by = sys.unraisablehook

    def stop(number: int, _: FrameType | None) -> None:
        asked.append(signal.Signals(number))
        for each in before if once else ():
            signal.signal(each, signal.SIG_IGN)
        raise meant[asked[-1]]

    def show(ignored: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised in a callback of its own clean-up: then the signal comes once more."""
        if not (asked and isinstance(ignored.exc_value, KeyboardInterrupt)):
            shown_by(ignored)
            return
        signal.signal(asked[-1], stop)
        again = threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, asked.pop()))
        again.daemon = True
        again.start()

    for number in before:
        signal.signal(number, stop)
    sys.unraisablehook = show
    try:
        yield
    except Exception:
        if asked:  # an extension module that was being loaded made another error of it
            raise meant[asked[-1]] from None
        raise
    finally:
        sys.unraisablehook = shown_by
        for number, handler in before.items():
            signal.signal(number, handler)


def hold_back(number: signal.Signals = signal.SIGINT) -> None:
    """Keep a signal waiting, across an `exec`, until `let_through`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def let_through(number: signal.Signals = signal.SIGINT) -> None:
    """Deliver what was held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, _LINE)
    os._exit(130)
