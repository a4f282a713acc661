"""A time by which a whole conversation with a server is over, however slowly it answers."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

__all__ = ["Deadline"]


class Deadline:
    """Cuts every connection that was made through it once the time is over, whatever waits for it.

    Args:
        after_s: from when it is made.

    Attributes:
        is_over: whether it has cut them.
    """

    def __init__(self, after_s: float) -> None:
        self._timer = threading.Timer(after_s, self.cut)
        self._timer.daemon = True
        self._sockets: list[socket.socket] = []
        self._lock, self.is_over = threading.Lock(), False
        self._timer.start()

    def connect(self, address: tuple[str, int], timeout_s: Any = None, source: Any = None) -> socket.socket:
        """As `socket.create_connection`.

        Raises:
            OSError: as that, and once the time is over.
        """
        made = socket.create_connection(address, timeout_s, source)
        with self._lock:
            self._sockets.append(socket.socket(fileno=os.dup(made.fileno())))  # TLS takes the socket itself apart
            if self.is_over:
                made.close()
                raise TimeoutError
        return made

    def met(self) -> None:
        """What was waited for is there: nothing is cut by the time."""
        self._timer.cancel()

    def cut(self) -> None:
        """Cut them now."""
        with self._lock:
            self.is_over = True
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._timer.cancel()
        with self._lock:
            for each in self._sockets:
                each.close()
            self._sockets.clear()
