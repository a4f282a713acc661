"""A page over HTTP: Python's own server, with bounds on all that a browser may ask for.

    GET  /                      the page with its first state in it, or the form for the pairing code
    GET  /page.js, /page.css    script and style, from the site's package; /shared.js and /shared.css from this one
    GET  /events                server-sent events: the state, or what has changed of it
    GET  …                      what else the site has, for who was let in
    POST /pair                  the pairing code → a cookie
    POST …                      what changes something: JSON in, JSON out, with the visitor's token

No path becomes a file's name. At most `_MOST` connections are open, of which `_STREAMS` are streams of events, four of
each visitor; a further one is refused at once. Each has a thread of its own, so a slow browser holds up nobody. A
request has ten seconds and 64 KiB. Nothing of another host is loaded (content-security policy), and nothing is logged
but with `--verbose`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from protofleet.contract.errors import ProtofleetError, UsageError
from protofleet.contract.page.html_page import form_page, site_page
from protofleet.contract.page.page_address import PageAddress
from protofleet.contract.page.site import Site
from protofleet.contract.page.visitors import COOKIE, Visitor, Visitors, is_own_host, is_own_origin

__all__ = ["PageServer"]

logger = logging.getLogger(__name__)

_MOST, _STREAMS = 24, 8
_STREAMS_EACH = 4  # a browser has six connections to one address: the rest is for what it asks
_TIMEOUT_S, _BEAT_S, _PACE_S = 10.0, 15.0, 1.0
_LARGEST = 64 << 10
_POLICY = (
    "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'"
)
_AT_ONCE = 64 << 10  # bytes of an answer that a browser takes within `_TIMEOUT_S`
_HTML = "text/html; charset=utf-8"
_WRONG = '<p class="bad" role="alert">That is not the code. It can be tried again after a second.</p>\n'
_KINDS = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
_STATIC = {f"/{name}.{end}": kind for name in ("page", "shared") for end, kind in _KINDS.items()}


class PageServer:
    """The server of one page, in threads of its own.

    Args:
        certificate: PEM files of a certificate and its key, for TLS; both or none.

    Raises:
        UsageError: the port is taken, or the files are none.
    """

    def __init__(
        self, address: PageAddress, site: Site, *, certificate: tuple[str | None, str | None] = (None, None)
    ) -> None:
        self.visitors = Visitors(needs_code=not address.is_local)
        try:
            self._server = _Server(address, site, self.visitors)
        except OSError as error:
            raise UsageError(
                "--page", expected="a free port of this machine", got=f"{address}: {error.strerror}"
            ) from None
        self._scheme = "http"
        file, key = certificate
        if file is not None and key is not None:
            self._server.context = _context(file, key)
            self._scheme = "https"
        self._thread = threading.Thread(target=self._server.serve_forever, name="page", daemon=True)

    @property
    def port(self) -> int:
        """The one that it listens at."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Serve."""
        self._thread.start()
        logger.info(f"page at {self._scheme}://{self._server.page_address.reached_at}:{self.port}/")
        self.visitors.tell()

    def stop(self) -> None:
        """Serve nothing further."""
        self._server.is_over = True
        self._server.site.came()
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

    def __init__(self, address: PageAddress, site: Site, visitors: Visitors) -> None:
        self.site, self.visitors, self.page_address = site, visitors, address
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


class _Patient(io.RawIOBase):
    """What a browser sends, until a moment: a request that comes letter by letter has no more time than another.

    Attributes:
        until_s: that moment, of a steady clock.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self.until_s = connection, 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self.until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("a request that does not end")
        self._connection.settimeout(left_s)
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(_TIMEOUT_S)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "protofleet", ""
    timeout = _TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._from_browser = _Patient(self.connection)
        self.rfile = io.BufferedReader(self._from_browser)

    def handle_one_request(self) -> None:
        self._from_browser.until_s = time.monotonic() + _TIMEOUT_S
        super().handle_one_request()

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("page: " + format, *args)

    def do_GET(self) -> None:
        if not self._is_ours():
            return
        (path, _, query), visitor = self.path.partition("?"), self._visitor()
        if path in _STATIC:
            package = __package__ if path.startswith("/shared") else self.server.site.PACKAGE
            self._answer(200, files(package).joinpath(path[1:]).read_bytes(), _STATIC[path])
        elif path == "/":
            self._page(visitor)
        elif visitor is None:
            self._refuse(403, "pair first")
        else:
            asked = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
            if path == "/events":
                since = asked.get("since", "")
                self._events(visitor, int(since) if since.isdecimal() and len(since) < 16 else -1)
            else:
                self._get(visitor, path, asked)

    def _get(self, visitor: Visitor, path: str, query: Mapping[str, str]) -> None:
        try:
            found = self.server.site.get(visitor, path, query)
        except ProtofleetError as error:
            self._refuse(409, str(error))
            return
        if found is None:
            self._refuse(404, "no such page")
        else:
            self._answer(200, found.body, found.kind)

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
                self._refuse(403, "no token of this page; load it again")
            else:
                self._change(visitor, body)

    def _change(self, visitor: Visitor, body: bytes) -> None:
        try:
            given = json.loads(body or b"{}")
            if not isinstance(given, dict):
                raise ValueError("no object")
            answer = self.server.site.post(visitor, self.path, given)
        except ProtofleetError as error:
            self._refuse(409, str(error))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError, OverflowError):
            self._refuse(400, "expected JSON of this page's")
        else:
            if answer is None:
                self._refuse(404, "no such page")
            else:
                self._answer(200, json.dumps(answer).encode(), "application/json")

    def _page(self, visitor: Visitor | None) -> None:
        cookie = None
        if visitor is None and not self.server.visitors.needs_code:
            cookie = self.server.visitors.enter(self._who())
            visitor = self.server.visitors.known(cookie or "", self._who())
        site = self.server.site
        if visitor is None:
            self._ask_for_code(200)
            return
        try:
            first = f'{{"token": {json.dumps(visitor.token)}, "state": {site.first(visitor)}}}'
        except ProtofleetError as error:
            self._refuse(500, str(error))
            return
        page = site_page(site.PACKAGE, site.title, site.ABOUT, first)
        self._answer(200, page.encode(), _HTML, cookie=cookie)

    def _ask_for_code(self, code: int, wrong: str = "") -> None:
        self._answer(code, form_page(self.server.site.CODE_AT, wrong).encode(), _HTML)

    def _pair(self, body: bytes) -> None:
        given = parse_qs(body.decode("utf-8", "replace")).get("code", [""])[0]
        cookie = self.server.visitors.enter(self._who(), given[:40])
        if cookie is None:
            self._ask_for_code(403, _WRONG)
        else:
            self._answer(303, b"", "text/plain", cookie=cookie, location="/")

    def _events(self, visitor: Visitor, known: int) -> None:
        site, server = self.server.site, self.server
        with server.stream(visitor.token) as has_room:
            if not has_room:
                self._refuse(503, "too many open pages")
                return
            self.close_connection = True
            self.send_response(200)
            self._heads("text/event-stream", None)
            self.end_headers()
            while not server.is_over:
                with site.changed:
                    site.changed.wait_for(lambda: site.version != known or server.is_over, _BEAT_S)  # noqa: B023
                    is_new = site.version != known
                try:
                    event = ": here\n\n"
                    if is_new:
                        known, news = site.event(visitor, known)
                        event = f"data: {news}\n\n"
                    self.wfile.write(event.encode())
                except (OSError, ProtofleetError):
                    return
                threading.Event().wait(_PACE_S)

    def _is_ours(self) -> bool:
        if is_own_host(self.headers.get("Host", "")):
            return True
        self._refuse(421, "expected the address of this machine as Host")
        return False

    def _visitor(self) -> Visitor | None:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie)
        except CookieError:
            return None
        visitor = None if found is None else self.server.visitors.known(found.value, self._who())
        if visitor is not None:
            visitor.has_returned = True
        return visitor

    @property
    def _cookie(self) -> str:
        """Of this port: to a browser, all pages of one machine are one place for cookies."""
        return f"{COOKIE}-{self.server.server_address[1]}"

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
        for start in range(0, len(body), _AT_ONCE):
            self.wfile.write(body[start : start + _AT_ONCE])

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
            self.send_header("Set-Cookie", f"{self._cookie}={cookie}; Path=/; HttpOnly; SameSite=Strict{secure}")
