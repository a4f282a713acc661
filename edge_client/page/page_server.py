"""The page over HTTP: Python's own server, with bounds on all that a browser may ask for.

    GET  /                  the page with its first state in it, or the form for the pairing code
    GET  /page.js, .css     script and style, from this package
    GET  /photo/ID.jpg      a photo that this visitor was shown
    GET  /events            server-sent events: the state, when it has changed
    POST /pair              the pairing code → a cookie
    POST /name, /aside, /undo   what a tap does: JSON in, JSON out, with the visitor's token

There is no other path, and none becomes a file's name. At most `_MOST` connections are open, of which `_STREAMS` are
streams of events, two of each visitor; a further one is refused at once. A request has ten seconds and 64 KiB.
Nothing of another host is loaded (content-security policy), and nothing is logged but with `--verbose`.
"""

from __future__ import annotations

import contextlib
import html
import json
import logging
import socket
import ssl
import threading
from collections import Counter
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from protofleet.contract.errors import ProtofleetError, UsageError
from protofleet.edge_client.page.device_page import DevicePage
from protofleet.edge_client.page.visitors import COOKIE, Visitor, Visitors, is_own_host, is_own_origin
from protofleet.edge_client.page_address import PageAddress
from protofleet.edge_client.photos.kept_photo import ID

__all__ = ["PageServer"]

logger = logging.getLogger(__name__)

_MOST, _STREAMS, _STREAMS_EACH = 24, 8, 2
_TIMEOUT_S, _BEAT_S, _PACE_S = 10.0, 15.0, 1.0
_LARGEST = 64 << 10
_POLICY = (
    "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'"
)
_STATIC = {"/page.js": "text/javascript; charset=utf-8", "/page.css": "text/css; charset=utf-8"}


class PageServer:
    """The server of one page, in threads of its own.

    Args:
        certificate: PEM files of a certificate and its key, for TLS.

    Raises:
        UsageError: the port is taken, or the files are none.
    """

    def __init__(self, address: PageAddress, page: DevicePage, *, certificate: tuple[str, str] | None = None) -> None:
        self.visitors = Visitors(needs_code=not address.is_local)
        try:
            self._server = _Server(address, page, self.visitors)
        except OSError as error:
            raise UsageError(
                "--page", expected="a free port of this machine", got=f"{address}: {error.strerror}"
            ) from None
        self._scheme = "http"
        if certificate is not None:
            self._server.context = _context(*certificate)
            self._scheme = "https"
        self._thread = threading.Thread(target=self._server.serve_forever, name="page", daemon=True)

    @property
    def port(self) -> int:
        """The one that it listens at."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Serve."""
        self._thread.start()
        host = self._server.page_address.host
        shown = f"[{host}]" if ":" in host else host
        logger.info(f"page at {self._scheme}://{shown}:{self.port}/")
        self.visitors.tell()

    def stop(self) -> None:
        """Serve nothing further."""
        self._server.is_over = True
        self._server.page.came()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError("--page-cert", expected="PEM files of a certificate and its key", got=error) from None
    return context


class _Server(ThreadingHTTPServer):
    """A server whose threads are counted."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: PageAddress, page: DevicePage, visitors: Visitors) -> None:
        self.page, self.visitors, self.page_address = page, visitors, address
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.context: ssl.SSLContext | None = None
        self.is_over = False
        self._room = threading.BoundedSemaphore(_MOST)
        self._streams: Counter[str] = Counter()
        self._counting = threading.Lock()
        super().__init__((address.host, address.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(_TIMEOUT_S)
            if self.context is not None:
                request = self.context.wrap_socket(request, server_side=True)
            super().process_request_thread(request, client_address)
        except OSError:  # a handshake that is none
            self.shutdown_request(request)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a request of the page", exc_info=True)

    @contextlib.contextmanager
    def stream(self, cookie: str) -> Any:
        """Room for a stream of events: True where there is some."""
        with self._counting:
            has_room = self._streams.total() < _STREAMS and self._streams[cookie] < _STREAMS_EACH
            self._streams[cookie] += has_room
        try:
            yield has_room
        finally:
            if has_room:
                with self._counting:
                    self._streams[cookie] -= 1
                    self._streams += Counter()  # without those that are 0


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "protofleet", ""
    timeout = _TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("page: " + format, *args)

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        path, visitor = self.path, self._visitor()
        if path in _STATIC:
            self._answer(200, files(__package__).joinpath(path[1:]).read_bytes(), _STATIC[path])
        elif path == "/":
            self._page(visitor)
        elif visitor is None:
            self._refuse(403, "pair first")
        elif path == "/events":
            self._events(visitor)
        elif path.startswith("/photo/") and path.endswith(".jpg") and ID.fullmatch(path[7:-4]):
            image = self.server.page.image(visitor, path[7:-4])
            if image is None:
                self._refuse(404, "no such photo")
            else:
                self._answer(200, image, "image/jpeg")
        else:
            self._refuse(404, "no such page")

    def do_POST(self) -> None:
        if not self._is_ours():
            return
        body = self._body()
        if body is None:
            return
        if not is_own_origin(self.headers.get("Origin"), self.headers.get("Host", "")):
            self._refuse(403, "from another page")
        elif self.path == "/pair":
            self._pair(body)
        else:
            visitor = self._visitor()
            token = self.headers.get("X-Protofleet-Token", "")
            if visitor is None or token != visitor.token:
                self._refuse(403, "no token of this page")
            else:
                self._change(visitor, body)

    def _change(self, visitor: Visitor, body: bytes) -> None:
        page = self.server.page
        try:
            given = json.loads(body or b"{}")
            ids = [str(id) for id in given.get("photos", [])]
            if self.path == "/name":
                count = page.name(ids, str(given.get("label", "")))
            elif self.path == "/aside":
                count = page.set_aside(ids, str(given.get("why", "")), str(given.get("proposed", "")))
            elif self.path == "/undo":
                count = page.undo()
            else:
                self._refuse(404, "no such page")
                return
            answer = {"count": count, "state": page.state(visitor)}
        except ProtofleetError as error:
            self._refuse(409, str(error))
        except (ValueError, AttributeError, TypeError, RecursionError):
            self._refuse(400, "expected JSON of this page's")
        else:
            self._answer(200, json.dumps(answer).encode(), "application/json")

    def _page(self, visitor: Visitor | None) -> None:
        cookie = None
        if visitor is None and not self.server.visitors.needs_code:
            cookie = self.server.visitors.enter(self._who())
            visitor = self.server.visitors.known(cookie or "", self._who())
        text = files(__package__).joinpath("page.html" if visitor else "pair.html").read_text("utf-8")
        if visitor is not None:
            try:
                state = self.server.page.state(visitor)
            except ProtofleetError as error:
                self._refuse(500, str(error))
                return
            first = json.dumps({**state, "token": visitor.token}).replace("<", "\\u003c").replace("&", "\\u0026")
            text = text.replace("{{device}}", html.escape(state["device"])).replace("{{first}}", first)
        self._answer(200, text.encode(), "text/html; charset=utf-8", cookie=cookie)

    def _pair(self, body: bytes) -> None:
        given = parse_qs(body.decode("utf-8", "replace")).get("code", [""])[0]
        cookie = self.server.visitors.enter(self._who(), given[:40])
        if cookie is None:
            self._refuse(403, "another code: it stands at the terminal of protofleet client")
        else:
            self._answer(303, b"", "text/plain", cookie=cookie, location="/")

    def _events(self, visitor: Visitor) -> None:
        page, server = self.server.page, self.server
        with server.stream(visitor.token) as has_room:
            if not has_room:
                self._refuse(503, "too many open pages")
                return
            self.close_connection = True
            self.send_response(200)
            self._heads("text/event-stream", None)
            self.end_headers()
            known = -1
            while not server.is_over:
                with page.changed:
                    page.changed.wait_for(lambda: page.version != known or server.is_over, _BEAT_S)  # noqa: B023
                    is_new, known = page.version != known, page.version
                try:
                    event = f"data: {json.dumps(page.state(visitor))}\n\n" if is_new else ": here\n\n"
                    self.wfile.write(event.encode())
                except (OSError, ProtofleetError):
                    return
                threading.Event().wait(_PACE_S)

    def _is_ours(self) -> bool:
        if is_own_host(self.headers.get("Host", "")):
            return True
        self._refuse(421, "expected the address of this device as Host")
        return False

    def _visitor(self) -> Visitor | None:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return None
        return None if found is None else self.server.visitors.known(found.value, self._who())

    def _who(self) -> str:
        return str(self.client_address[0])

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LARGEST:
            self._refuse(413, "expected a short body")
            return None
        return self.rfile.read(int(length))

    def _refuse(self, code: int, why: str) -> None:
        self.close_connection = True
        self._answer(code, json.dumps({"error": why}).encode(), "application/json")

    def _answer(
        self, code: int, body: bytes, kind: str, *, cookie: str | None = None, location: str | None = None
    ) -> None:
        self.send_response(code)
        self._heads(kind, cookie)
        if location is not None:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _heads(self, kind: str, cookie: str | None) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "same-origin")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if self.close_connection:
            self.send_header("Connection", "close")
        if cookie is not None:
            secure = "; Secure" if self.server.context is not None else ""
            self.send_header("Set-Cookie", f"{COOKIE}={cookie}; Path=/; HttpOnly; SameSite=Strict{secure}")
