"""edge_client/cameras/rtsp.py against a real server whose picture has a clock in it, and against hostile ones."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from brokers import free_port
from camera_samples import no_reader_is_left, rtsp_server, scripted
from rtsp_server import drawn_s

from protofleet.edge_client.cameras import key_frames, rtsp
from protofleet.edge_client.cameras.camera import CameraGoneError, Picture
from protofleet.edge_client.cameras.sources import camera_of, pictures_of

_OLDEST_S = 2.0  # a key frame's interval and a second
_BUSY_S = 20.0  # how late a machine may be that does other work


def _age_s(picture: Picture) -> float:
    assert isinstance(picture.content, np.ndarray)
    return time.time() - drawn_s(picture.content)


def test_no_picture_is_older_than_a_key_frames_interval_and_a_second_though_nobody_asks_for_long() -> None:
    """By the clock in the picture; a reader that only reads when it is asked would be four seconds late each time."""
    with rtsp_server("--key-s", 1, "--rate", 10) as port:
        pictures = pictures_of(camera_of(f"rtsp://127.0.0.1:{port}/clock"), 0.1)
        next(pictures)
        ages = []
        while not ages or (min(ages) >= _OLDEST_S and len(ages) < 5):  # a busy machine may be late at times
            time.sleep(4.0)
            picture = next(pictures)
            ages.append(_age_s(picture))
            assert isinstance(picture.content, np.ndarray)
            assert abs(picture.taken_s - drawn_s(picture.content)) < _BUSY_S
        assert min(ages) < _OLDEST_S
        pictures.close()  # type: ignore[attr-defined]
    no_reader_is_left()


def test_a_stream_that_changes_its_size_is_followed_and_one_in_parts_is_whole() -> None:
    with rtsp_server("--key-s", 0.5, "--larger-after", 3, "--slices", 3) as port:
        widths = []
        for picture in pictures_of(camera_of(f"rtsp://127.0.0.1:{port}/clock"), 0.1):
            assert isinstance(picture.content, np.ndarray)
            assert _age_s(picture) < _BUSY_S
            widths.append(picture.content.shape[1])
            if widths[-1] == 1280:
                break
    assert widths[0] == 640


def test_a_password_is_given_and_never_shown_and_a_camera_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    port, waits = free_port(), []
    camera = camera_of(f"rtsp://me:hunter%2F2@127.0.0.1:{port}/clock")

    def sleep(for_s: float) -> None:
        waits.append(for_s)
        time.sleep(0.2)

    pictures = pictures_of(camera, 0.1, sleep=sleep)
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            with rtsp_server("--port", port, "--user", "me:hunter/2", "--key-s", 0.5):
                assert _age_s(next(pictures)) < _BUSY_S
    said = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"camera rtsp://127.0.0.1:{port} gives no picture \(.*\): tried again, .*", said[0])
    assert said[1:] == [f"camera rtsp://127.0.0.1:{port} is back"]
    assert waits[:2] == [1.0, 2.0][: len(waits)]
    with rtsp_server("--user", "me:hunter/2") as port:
        for wrong in ("me:hunter2@", ""):
            with pytest.raises(CameraGoneError, match=r"^it wants another user or password$"):
                next(iter(camera_of(f"rtsp://{wrong}127.0.0.1:{port}/clock").pictures(1.0)))
        with pytest.raises(CameraGoneError, match=r"^it answers 404$"):
            next(iter(camera_of(f"rtsp://me:hunter%2F2@127.0.0.1:{port}/other").pictures(1.0)))


def test_a_stream_is_waited_for_only_where_nothing_of_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause at each look would read 2.5 MB a second at most, and a faster stream would grow old."""
    comes = iter([rtsp._TAKEN_BYTES] * 5 + [100, 100])
    waits: list[float] = []
    monkeypatch.setattr(rtsp.time, "sleep", waits.append)
    made: Any = SimpleNamespace(recv=lambda most: bytes(min(most, next(comes))))
    received = rtsp._Received(made)
    received.pause_s = 0.1
    received.read(5 * rtsp._TAKEN_BYTES + 200)
    assert waits == [0.1, 0.1]


def test_only_key_frames_that_are_wanted_are_decoded() -> None:
    """The others would cost a board's processor as much as the pictures that are looked at."""
    decoded: list[int] = []
    came = threading.Condition()

    def decode() -> np.ndarray:
        decoded.append(1)
        return np.zeros((4, 4, 3), np.uint8)

    class Fast:
        """A stream that gives forty key frames for each picture that is taken."""

        def frames(self) -> Iterator[key_frames.Decode | None]:
            while True:
                for _ in range(40):
                    yield decode
                with came:
                    came.notify_all()
                time.sleep(0.01)

        def close(self) -> None:
            pass

    pictures = key_frames.key_frames(Fast, 0.01)
    for _ in range(3):
        next(pictures)
        for _ in range(3):  # by then all that was wanted is decoded, and a hundred more have come
            with came:
                assert came.wait(30.0)
    assert len(decoded) <= 4  # the first is wanted before anybody asks
    pictures.close()  # type: ignore[attr-defined]
    no_reader_is_left()


# ── servers that mean harm ──────────────────────────────────────────────────────────────────────────────────────────

SDP = b"v=0\r\nm=audio 0 RTP/AVP 0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\na=control:stream=0\r\n"
Answer = Callable[[socket.socket], object]


def _asked(connection: socket.socket) -> Iterator[tuple[str, bytes]]:
    """Requests as they come: the method, and how an answer begins that goes with it."""
    lines = connection.makefile("rb")
    while request := lines.readline():
        number = b""
        while (line := lines.readline().strip()) != b"":
            number = line.partition(b": ")[2] if line.startswith(b"CSeq") else number
        yield request.split()[0].decode(), b" OK\r\nCSeq: %s\r\n" % number


def _always(code: bytes, rest: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        for _, begun in _asked(connection):
            connection.sendall(b"RTSP/1.0 " + code + begun + rest)

    return answer


def _played(sdp: bytes, then: Answer) -> Answer:
    def answer(connection: socket.socket) -> None:
        for method, begun in _asked(connection):
            body = sdp if method == "DESCRIBE" else b""
            connection.sendall(b"RTSP/1.0 200%sContent-Length: %d\r\n\r\n%s" % (begun, len(body), body))
            if method == "PLAY":
                then(connection)

    return answer


def _flood(part: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        while True:
            connection.sendall(part)

    return answer


def _drip(connection: socket.socket) -> None:
    for part in b"RTSP/1.0 200 OK\r\nX: " + b"y" * 1000:
        connection.sendall(bytes([part]))
        time.sleep(0.02)


def _silent(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


ENDLESS_UNIT = b"$\0\xff\xff\x80\x60" + bytes(10) + b"\x65" + bytes(65535 - 13)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_flood(b"x" * 4096), "no RTSP"),
        (_flood(b"x: y\r\n" * 1000), "an answer that is too long"),
        (_flood(b"$\0\xff\xff" + bytes(65535)), "no whole answer in 1 s"),
        (_flood(b"GET /x RTSP/1.0\r\n\r\n" * 100), "no whole answer in 1 s"),
        (_always(b"200", b"Content-Length: 2000000000\r\n\r\n"), "an answer that is too long"),
        (_always(b"200", b"Content-Length: -5\r\n\r\n"), "an answer that is too long"),
        (_always(b"302", b"Location: rtsp://127.0.0.1:1/x\r\n\r\n"), "it redirects to another address"),
        (_always(b"302", b"Location: http://127.0.0.1/x\r\n\r\n"), "it redirects to another address"),
        (_always(b"302", b"\r\n"), "it redirects to another address"),
        (_always(b"401", b"WWW-Authenticate: Digest x\r\n\r\n"), "it asks for the password in a way .*"),
        (_always(b"401", b"\r\n"), "it wants another user or password"),
        (_always(b"500", b"\r\n"), "it answers 500"),
        (_always(b"200", b"\r\n"), "a stream without pictures"),
        (_drip, "no whole answer in 1 s"),
        (_silent, "no whole answer in 1 s"),
        (_played(SDP.replace(b"H264", b"JPEG"), _silent), "pictures as JPEG, not H264 or H265"),
        (_played(SDP.replace(b"stream=0", b"a b\tc"), _silent), "an address with a space in it"),
        (_played(SDP, lambda connection: connection.shutdown(socket.SHUT_RDWR)), "the stream has ended"),
        (_played(SDP, _silent), "no picture in 1 s"),
        (_played(SDP, _drip), "no picture in 1 s"),
        (_played(SDP, _flood(ENDLESS_UNIT)), "a picture of more than 16 MiB"),
    ],
)
def test_a_server_that_means_harm_is_refused(answer: Answer, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtsp, "_WHOLE_S", 1.0)
    monkeypatch.setattr(key_frames, "_PATIENCE_S", 1.0 if "no picture" in said else 20.0)
    with scripted(answer) as port:
        began = time.monotonic()
        with pytest.raises(CameraGoneError, match=f"^(?:{said})$"):
            next(iter(camera_of(f"rtsp://me:secret@127.0.0.1:{port}/a").pictures(1.0)))
        assert time.monotonic() - began < 60.0
    no_reader_is_left()


def test_a_redirect_is_followed_at_this_host_three_times_and_no_other_host_is_asked() -> None:
    reached = []

    def loop(connection: socket.socket) -> None:
        for _, begun in _asked(connection):
            reached.append(begun)
            port = connection.getsockname()[1]
            connection.sendall(b"RTSP/1.0 302%sLocation: rtsp://127.0.0.1:%d/b\r\n\r\n" % (begun, port))

    with scripted(loop) as port, pytest.raises(CameraGoneError, match="more than 3 redirects"):
        next(iter(camera_of(f"rtsp://127.0.0.1:{port}/a").pictures(1.0)))
    assert len(reached) == 4
    with scripted(loop) as other:
        away = _always(b"302", b"Location: rtsp://localhost:%d/x\r\n\r\n" % other)
        with scripted(away) as port, pytest.raises(CameraGoneError, match="another address"):
            next(iter(camera_of(f"rtsp://me:secret@127.0.0.1:{port}/a").pictures(1.0)))
    assert len(reached) == 4
