"""Ctrl-C, at any moment, gives one line and exit code 130.

**At the start.** While Python loads modules, a KeyboardInterrupt can surface anywhere, as a traceback, or an import's
clean-up swallows it. So a command starts with `leave_at_once`: nothing has been begun, and the process simply ends.

**Waiting signals.** A command may answer a signal later that would end it now. `hold_back` keeps such a signal waiting.

**During work.** Work that must clean up behind itself, such as processes or half-written files, runs within
`interruptible` and gets the KeyboardInterrupt. A library that is just being loaded may turn it into another error;
`interruptible` raises the KeyboardInterrupt then.
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
    """From now on Ctrl-C ends the process, unless it was ignored when the process started."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave)


class Terminated(KeyboardInterrupt):
    """SIGTERM within `interruptible(terminable=True)`: like Ctrl-C, with an exit code of its own."""


@contextmanager
def interruptible(*, terminable: bool = False, once: bool = False) -> Iterator[None]:
    """Within, Ctrl-C raises KeyboardInterrupt and, if `terminable`, SIGTERM raises `Terminated`.

    Args:
        once: whether further signals are ignored after the first one.
    """
    errors = {signal.SIGINT: KeyboardInterrupt} | ({signal.SIGTERM: Terminated} if terminable else {})
    before = {number: signal.getsignal(number) for number in errors}
    if before[signal.SIGINT] is signal.SIG_IGN:
        del before[signal.SIGINT]
    received: list[signal.Signals] = []
    shown_by = sys.unraisablehook

    def stop(number: int, _: FrameType | None) -> None:
        received.append(signal.Signals(number))
        for blocked in before if once else ():
            signal.signal(blocked, signal.SIG_IGN)
        raise errors[received[-1]]

    def show(ignored: sys.UnraisableHookArgs) -> None:
        """Repeat the signal where Python drops the error, because it was raised in a callback of Python's clean-up."""
        if not (received and isinstance(ignored.exc_value, KeyboardInterrupt)):
            shown_by(ignored)
            return
        signal.signal(received[-1], stop)
        again = threading.Timer(_AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, received.pop()))
        again.daemon = True
        again.start()

    for number in before:
        signal.signal(number, stop)
    sys.unraisablehook = show
    try:
        yield
    except Exception:
        if received:  # an extension module that was being loaded made another error of it
            raise errors[received[-1]] from None
        raise
    finally:
        sys.unraisablehook = shown_by
        for number, handler in before.items():
            signal.signal(number, handler)


def hold_back(number: signal.Signals = signal.SIGINT) -> None:
    """Keep a signal waiting, across an `exec`, until `let_through`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def let_through(number: signal.Signals = signal.SIGINT) -> None:
    """Deliver a signal that was held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, _LINE)
    os._exit(130)
