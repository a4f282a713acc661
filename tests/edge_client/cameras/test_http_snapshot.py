"""edge_client/cameras/http_snapshot.py against Python's own HTTP server, and against servers that mean harm."""

from __future__ import annotations

import base64
import hashlib
import http.server
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from brokers import free_port
from camera_samples import jpeg, scripted
from certificates import issue

from protofleet.edge_client.cameras import http_snapshot
from protofleet.edge_client.cameras.camera import LARGEST_BYTES, CameraGoneError, Picture
from protofleet.edge_client.cameras.sources import camera_of

Handler = http.server.BaseHTTPRequestHandler


@contextmanager
def _server(get: Callable[[Handler], object]) -> Iterator[int]:
    class Served(Handler):
        def do_GET(self) -> None:
            get(self)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def _reply(handler: Handler, code: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(code)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def _one(text: str) -> Picture:
    return next(iter(camera_of(text).pictures(0.01)))


def test_each_picture_is_asked_for_anew_and_knows_when() -> None:
    colours = [(200, 20, 10), (10, 20, 200)]
    asked: list[tuple[float, str]] = []

    def get(handler: Handler) -> None:
        asked.append((time.time(), handler.path))
        _reply(handler, 200, jpeg(colour=colours[len(asked) - 1]))

    with _server(get) as port:
        pictures = camera_of(f"http://127.0.0.1:{port}/snap?channel=1").pictures(0.01)
        found = [next(pictures) for _ in colours]
    for (asked_s, path), picture, colour in zip(asked, found, colours, strict=True):
        assert path == "/snap?channel=1"
        assert asked_s - 5 < picture.taken_s <= asked_s
        x = picture.fitted((4, 4, 3))[1]
        assert np.abs(np.asarray(x, int) - colour).max() < 8  # a JPEG's error


def test_a_password_is_given_as_the_camera_asks_basic_or_digest() -> None:
    """Digest by hand, as RFC 7616 has it."""

    def basic(handler: Handler) -> None:
        right = "Basic " + base64.b64encode(b"me:a/b@c").decode()
        if handler.headers.get("Authorization") == right:
            return _reply(handler, 200, jpeg())
        return _reply(handler, 401, WWW_Authenticate='Basic realm="camera"')

    def digest(handler: Handler) -> None:
        given = dict(re.findall(r'(\w+)="?([^",]*)"?', handler.headers.get("Authorization", "")))
        one, two = (hashlib.md5(text.encode()).hexdigest() for text in ("me:camera:a/b@c", "GET:/snap"))
        beside = (given.get(name, "") for name in ("nc", "cnonce", "qop"))
        if given.get("response") == hashlib.md5(":".join((one, "n0", *beside, two)).encode()).hexdigest():
            return _reply(handler, 200, jpeg())
        return _reply(handler, 401, WWW_Authenticate='Digest realm="camera", nonce="n0", qop="auth"')

    for get in (basic, digest):
        with _server(get) as port:
            assert _one(f"http://me:a%2Fb%40c@127.0.0.1:{port}/snap").content == jpeg()
            for wrong in (f"http://127.0.0.1:{port}/snap", f"http://me:no@127.0.0.1:{port}/snap"):
                with pytest.raises(CameraGoneError, match=r"^HTTP 401$"):
                    _one(wrong)


def test_a_redirect_is_followed_at_this_host_alone_and_three_times() -> None:
    reached: list[str] = []

    def other(handler: Handler) -> None:
        reached.append(handler.path)
        _reply(handler, 200, jpeg())

    def get(handler: Handler) -> None:
        step = handler.path.lstrip("/")
        if step == "away":
            _reply(handler, 302, Location=f"http://127.0.0.1:{elsewhere}/x")
        elif step == "named":
            _reply(handler, 307, Location=f"http://localhost:{port}/0")
        elif step == "0":
            _reply(handler, 200, jpeg())
        else:
            _reply(handler, 302, Location=f"/{int(step) - 1}")

    with _server(other) as elsewhere, _server(get) as port:
        assert _one(f"http://127.0.0.1:{port}/3").content == jpeg()
        with pytest.raises(CameraGoneError, match="more than 3 redirects"):
            _one(f"http://127.0.0.1:{port}/4")
        for path in ("away", "named"):
            with pytest.raises(CameraGoneError, match="it redirects to another address"):
                _one(f"http://me:secret@127.0.0.1:{port}/{path}")
    assert not reached


def test_a_server_that_no_authority_knows_is_refused_before_the_password(tmp_path: Path) -> None:
    issue(tmp_path, "camera")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "camera.pem", tmp_path / "camera.key")

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as tls:
            read.append(tls.recv(4096))

    read: list[bytes] = []
    with scripted(answer) as port, pytest.raises(CameraGoneError, match=r"^TLS: certificate verify failed$"):
        _one(f"https://me:secret@127.0.0.1:{port}/")
    assert not any(read)


def test_a_redirect_does_not_lead_out_of_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same host and port: there the picture and the password could be read on the way."""
    issue(tmp_path, "camera")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "camera.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "camera.pem", tmp_path / "camera.key")

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as tls:
            tls.recv(4096)
            tls.sendall(f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{port}/\r\n\r\n".encode())

    with scripted(answer) as port, pytest.raises(CameraGoneError, match=r"^it redirects to another address$"):
        _one(f"https://me:secret@127.0.0.1:{port}/")


def test_a_proxy_of_the_environment_hears_of_no_camera(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    with scripted(lambda connection: heard.append(connection.recv(4096))) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        with _server(lambda handler: _reply(handler, 200, jpeg())) as port:
            assert _one(f"http://me:secret@127.0.0.1:{port}/").content == jpeg()
    assert heard == []


def _head(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\n")


def _endless(connection: socket.socket) -> None:
    _head(connection)
    connection.sendall(b"\r\n")
    while True:
        connection.sendall(bytes(1 << 16))


def _endless_chunks(connection: socket.socket) -> None:
    _head(connection)
    connection.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + bytes(1 << 16) + b"\r\n")


def _endless_head(connection: socket.socket) -> None:
    _head(connection)
    while True:
        connection.sendall(b"X: y\r\n" * 1000)


def _endless_redirect(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n")
    while True:
        connection.sendall(bytes(1 << 16))


def _too_short(connection: socket.socket) -> None:
    _head(connection)
    connection.sendall(b"Content-Length: 1000\r\n\r\n" + jpeg()[:500])


def _dripping_body(connection: socket.socket) -> None:
    _head(connection)
    connection.sendall(b"Content-Length: 1000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def _dripping_head(connection: socket.socket) -> None:
    _head(connection)
    while True:
        connection.sendall(b"X")
        time.sleep(0.02)


def _silent(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def _no_http(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"SSH-2.0-x\r\n")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_endless, "more than 16 MiB"),
        (_endless_chunks, "more than 16 MiB"),
        (_endless_head, "no HTTP"),
        (_endless_redirect, "it redirects to another address"),
        (_too_short, r"500 bytes, and another number in Content-Length|no HTTP"),
        (_dripping_body, "no whole answer in 0.5 s"),
        (_dripping_head, "no whole answer in 0.5 s"),
        (_silent, "no whole answer in 0.5 s"),
        (_no_http, "no HTTP"),
    ],
)
def test_a_server_that_means_harm_is_refused(
    answer: Callable[[socket.socket], object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_snapshot, "_WHOLE_S", 0.5 if said.startswith("no whole") else 60.0)
    with scripted(answer) as port, pytest.raises(CameraGoneError, match=f"^(?:{said})$"):
        _one(f"http://me:secret@127.0.0.1:{port}/")


def test_a_picture_may_be_as_large_as_is_said_and_a_host_may_be_away() -> None:
    whole = bytes(LARGEST_BYTES)
    with _server(lambda handler: _reply(handler, 200, whole)) as port:
        assert _one(f"http://127.0.0.1:{port}/").content == whole
    with pytest.raises(CameraGoneError, match=r"^Connection refused$"):
        _one(f"http://127.0.0.1:{free_port()}/")
    with pytest.raises(CameraGoneError, match=r"^no such host$"):
        _one("http://nowhere.invalid/")
