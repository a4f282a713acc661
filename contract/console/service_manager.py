"""Messages to the service manager: this process is ready, it makes progress, it waits for something (sd_notify(3)).

- Each message is a datagram to the socket that `NOTIFY_SOCKET` names. Without that variable nothing is sent.
- With `WatchdogSec=` in the unit, systemd ends a process that has been silent for so long.
- `alive` must be called where work was done, and nowhere else. No thread and no timer calls it, so a process that hangs
  is found out.

A container has no such socket. There, a health command checks when the file was last touched that `PROTOFLEET_ALIVE`
names. `ready` touches the file, and then `alive`, by the same rule (`deploy/Containerfile`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = ["ServiceManager"]

_SHARE = 4  # how often the watchdog is fed in its time
_TOUCH_S = 10.0
_FILE_S = 600.0  # after which who looks at the file takes the process for hung
_TEXT = 200


class ServiceManager:
    """The service manager that started this process, if there is one.

    Args:
        environment: has `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` where a service manager set them, and
            `PROTOFLEET_ALIVE` in a container.
        clock: seconds of a steady clock.

    Attributes:
        watchdog_s: how long this process may be silent; None without a limit.
    """

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name if name.startswith("/") else ""
        self._clock, self._fed_at, self._last_status = clock, float("-inf"), ""
        self._file, self._touched_at = environment.get("PROTOFLEET_ALIVE", ""), float("-inf")
        micros, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        ours = bool(self._address) and micros.isascii() and micros.isdigit() and pid in ("", str(os.getpid()))
        self.watchdog_s = int(micros) / 1e6 if ours and int(micros) else None

    def ready(self) -> None:
        """The service does its work from now on."""
        self._tell("READY=1")
        self._touch()

    def alive(self) -> None:
        """Work was done: a turn of the loop, a training step, a batch of photos. Cheap, however often it is called."""
        now = self._clock()
        if self.watchdog_s is not None and now - self._fed_at >= self.watchdog_s / _SHARE:
            self._fed_at = now
            self._tell("WATCHDOG=1")
        if self._file and now - self._touched_at >= _TOUCH_S:
            self._touch()

    @property
    def wait_s(self) -> float | None:
        """The longest sleep of a waiting process that still reports in time; None without a limit."""
        waits = [] if self.watchdog_s is None else [self.watchdog_s / 2]
        return min([*waits, *([_FILE_S / 2] if self._file else [])], default=None)

    @contextlib.contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Around work of up to so many seconds that does not call `alive`."""
        with self._patient_watchdog(seconds):
            self._touch(max(0.0, seconds - _FILE_S))
            try:
                yield
            finally:
                self._touch()

    @contextlib.contextmanager
    def _patient_watchdog(self, seconds: float) -> Iterator[None]:
        if self.watchdog_s is None or seconds <= self.watchdog_s:
            yield
            return
        self._tell(f"WATCHDOG_USEC={int(seconds * 1e6)}\nWATCHDOG=1")
        try:
            yield
        finally:
            self._tell(f"WATCHDOG_USEC={int(self.watchdog_s * 1e6)}\nWATCHDOG=1")

    def status(self, line: str) -> None:
        """Report what the process does or waits for, for `systemctl status`."""
        line = line.splitlines()[0][:_TEXT] if line.strip() else ""
        if line and line != self._last_status:
            self._last_status = line
            self._tell(f"STATUS={line}")

    def stopping(self) -> None:
        """The service is about to end."""
        self._tell("STOPPING=1")

    def _touch(self, ahead_s: float = 0.0) -> None:
        if self._file:
            self._touched_at, now = self._clock(), time.time() + ahead_s
            with contextlib.suppress(OSError):
                Path(self._file).touch()
                os.utime(self._file, (now, now))

    def _tell(self, message: str) -> None:
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)  # a manager that does not read must not stop us
                sock.sendto(message.encode(), self._address)
