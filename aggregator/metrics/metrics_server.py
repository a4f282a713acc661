"""Metrics over HTTP, on an address of the operator's choice: `GET /metrics`, and nothing else.

- Each scraper has its own thread, so a slow or silent scraper keeps no other waiting.
- A scraper has `ANSWER_S` in all, however slowly it speaks or listens.
- `MOST` scrapers are heard at a time. One more cuts off the scraper that has been connected longest without a request.
- The text is made from the newest look that the aggregator has left. At most `1 / PAUSE_S` scrapers are served in a
  second. So scrapers cost the aggregator only a little processor time.
- Nothing is looked up, logged or written, and a request has no effect.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from types import TracebackType

from protofleet.aggregator.metrics.metrics import CONTENT_TYPE
from protofleet.contract.errors import UsageError
from protofleet.contract.mqtt.address import parse_listen

__all__ = ["LOOPBACK", "MOST", "MetricsServer", "parse_metrics"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")
ANSWER_S = 5.0
MOST = 32
PAUSE_S = 0.02


def parse_metrics(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, or of `PORT` on this machine alone.

    Raises:
        UsageError: when it is no such text.
    """
    return parse_listen(f"127.0.0.1:{text}" if text.isdecimal() else text, "--metrics", "9464")


class MetricsServer:
    """Serves while its block lasts.

    Args:
        host, port: where; port 0 for a free one.
        text: gives the metrics, from any thread.

    Attributes:
        url: where they are.

    Raises:
        UsageError: when the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, text: Callable[[], str]) -> None:
        kind = type("Kind", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
        try:
            self._server: _Server = kind((host, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"--metrics {host}:{port}", expected="an address that is free", got=error.strerror or error
            ) from None
        self._server.text = text
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/metrics"
        self.is_local = host in LOOPBACK
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)

    def __enter__(self) -> MetricsServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    text: Callable[[], str]

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._heard = dict[socket.socket, bool]()  # oldest first; whether it has asked for something
        self._changes = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Begin to hear another one, and see to it that there are not too many."""
        with self._changes:
            if len(self._heard) >= MOST:
                silent = (connection for connection, has_asked in self._heard.items() if not has_asked)
                dropped = next(silent, next(iter(self._heard)))
                del self._heard[dropped]
                _cut(dropped)
            self._heard[request] = False
        super().process_request(request, client_address)
        time.sleep(PAUSE_S)

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """One connection, from its beginning to its end."""
        late = threading.Timer(ANSWER_S, _cut, [request])
        late.daemon = True
        late.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        """It is heard no longer."""
        with self._changes:
            self._heard.pop(request, None)
        super().shutdown_request(request)

    def note_request(self, request: socket.socket) -> None:
        """It has said what it wants."""
        with self._changes:
            if request in self._heard:
                self._heard[request] = True

    def server_close(self) -> None:
        super().server_close()
        with self._changes:
            for request in self._heard:
                _cut(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that went away is its own affair."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = ANSWER_S

    def do_GET(self) -> None:
        """The metrics."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        self.server.note_request(self.connection)
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "protofleet"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: whoever connects could fill a log."""


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
