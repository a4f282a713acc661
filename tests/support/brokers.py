"""Real brokers for tests: the embedded one always, Debian's Mosquitto where it is installed (in CI it must be)."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from protofleet.aggregator.server.broker import EmbeddedBroker

BROKERS = ("embedded", "mosquitto")


class TestBroker(Protocol):
    """A broker on a port of its own that can be killed and started again there."""

    __test__ = False

    @property
    def url(self) -> str: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...
    def stop(self) -> None: ...


class Embedded:
    """rumqttd; forgets everything when it dies."""

    def __init__(self) -> None:
        self._broker = EmbeddedBroker()

    @property
    def url(self) -> str:
        return self._broker.url

    def start(self) -> None:
        self._broker.start()

    def kill(self) -> None:
        os.kill(self._broker.pid, signal.SIGKILL)
        self._broker.stop()

    def stop(self) -> None:
        self._broker.stop()


class Mosquitto:
    """Mosquitto with persistence; `extra` goes into its configuration."""

    def __init__(self, folder: Path, extra: str = "") -> None:
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o777)  # started by root it changes its user, and must still write its database
        self._config = folder / "mosquitto.conf"
        self._config.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\npersistence true\n"
            f"persistence_location {folder}/\nautosave_interval 1\nmax_queued_messages 0\n{extra}"
        )

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            ["mosquitto", "-c", str(self._config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for_port(self.port, self._process)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None


class Proxy:
    """A TCP proxy in front of a broker, that cuts what goes through it.

    Args:
        url: the broker's.
        cut_after: every connection is cut, both ways, after so many pieces of data; the next entry holds for the next
            connection, and those after the last are never cut by themselves.

    Attributes:
        connections: how many were made.
        swallows: while true, what comes goes nowhere, and neither end knows.
    """

    def __init__(self, url: str, cut_after: Sequence[int] = ()) -> None:
        self._target = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        self._cut_after, self.connections, self.swallows = list(cut_after), 0, False
        self._open: set[socket.socket] = set()
        self._clients: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self, *, client_only: bool = False) -> None:
        """End every connection that is open now, with a reset; `client_only`, and the broker does not notice."""
        for one in list(self._clients if client_only else self._open):
            self._open.discard(one)
            self._clients.discard(one)
            _reset(one)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._server.accept()
                there = socket.create_connection(self._target)
                pieces = itertools.count(1)
                limit = self._cut_after[self.connections] if self.connections < len(self._cut_after) else None
                self.connections += 1
                self._open |= {here, there}
                self._clients.add(here)
                for one, other in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=(one, other, pieces, limit), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, pieces: Iterator[int], limit: int | None) -> None:
        with contextlib.suppress(OSError):
            while (data := one.recv(65_536)) and (limit is None or next(pieces) < limit):
                if not self.swallows:
                    other.sendall(data)
        if one in self._open:  # else `cut` has ended it, and what the other end learns of that is its affair
            for end in (one, other):
                self._open.discard(end)
                self._clients.discard(end)
                _reset(end)


def _reset(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        one.shutdown(socket.SHUT_RDWR)
    one.close()


def require_mosquitto() -> None:
    """Skip where there is no Mosquitto, except in CI, where that is a failure."""
    if shutil.which("mosquitto", path=os.environ.get("PATH", "") + ":/usr/sbin") is None:
        if os.environ.get("PROTOFLEET_CI") == "1":
            pytest.fail("mosquitto is not installed")
        pytest.skip("mosquitto is not installed")


def make_broker(kind: str, folder: Path) -> TestBroker:
    if kind == "embedded":
        return Embedded()
    require_mosquitto()
    return Mosquitto(folder / "mosquitto")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the broker ended with {process.returncode}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on port {port}")
