"""Metrics over HTTP, on an address of the operator's choice: `GET /metrics`, and nothing else.

`prometheus_client` formats them, out of a registry that holds nothing else: not the figures of this process that the
package collects by itself, and nothing of its global registry, which is the embedding program's. The connections are
ours to bound:

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
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import TYPE_CHECKING

from protofleet.contract.errors import UsageError
from protofleet.contract.mqtt.address import LOOPBACK, in_url

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

__all__ = ["MOST", "MetricsServer"]

ANSWER_S = 5.0
MOST = 32
PAUSE_S = 0.02


class MetricsServer:
    """Serves while its block lasts.

    Args:
        host, port: where; port 0 for a free one.
        metrics: what is served; read from any thread.

    Attributes:
        url: where they are.

    Raises:
        UsageError: when the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, metrics: Collector) -> None:
        kind = type("Kind", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
        try:
            self._server: _Server = kind((host, port), _handler(metrics))
        except OSError as error:
            raise UsageError(
                f"--metrics {host}:{port}", expected="an address that is free", got=error.strerror or error
            ) from None
        self.url = f"http://{in_url(host)}:{self._server.server_address[1]}/metrics"
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


def _handler(metrics: Collector) -> type[BaseHTTPRequestHandler]:
    """Answers for one server. The package is loaded here, and only where metrics are served."""
    from prometheus_client import CollectorRegistry, MetricsHandler

    class Handler(MetricsHandler):
        registry = CollectorRegistry()
        server: _Server
        timeout = ANSWER_S

        def do_GET(self) -> None:
            """The metrics, all of them whatever the query asks for."""
            self.path = self.path.partition("?")[0]
            if self.path != "/metrics":
                self.send_error(404)
                return
            self.server.note_request(self.connection)
            super().do_GET()

        def version_string(self) -> str:
            return "protofleet"

    Handler.registry.register(metrics)
    return Handler


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
