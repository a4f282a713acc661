"""`rtsp://[user:password@]host[:port]/path`: a camera's stream of H.264 or H.265, over one TCP connection (RFC 2326).

DESCRIBE tells how the pictures are coded, SETUP and PLAY have the packets sent between the answers, and OPTIONS now and
then keeps the session. FFmpeg has a client, too, but it goes wherever a redirect says, takes as much memory as an
answer claims to need, and tells the camera this machine's name. So this one is ours:

- nothing is connected to but the host of the URL; a redirect is followed three times, to the same host and port;
- an answer has at most 64 KiB, and all answers up to the first packet come within ten seconds, however they drip;
- what is sent is these four requests, with the password as it is asked for, Basic or Digest. No sound is asked for.
"""

from __future__ import annotations

import base64
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from protofleet.contract.errors import UsageError
from protofleet.edge_client.cameras.camera import CameraGoneError, Picture
from protofleet.edge_client.cameras.deadline import Deadline
from protofleet.edge_client.cameras.key_frames import Decode, decoder, key_frames
from protofleet.edge_client.cameras.rtp_video import CODINGS, KeyFrames
from protofleet.edge_client.cameras.signature import Signature, signature
from protofleet.edge_client.cameras.url import CameraUrl, read_url

__all__ = ["Rtsp"]

_PORTS = {"rtsp": 554}
_EXAMPLE = "rtsp://192.168.1.20/stream1"
_WHOLE_S, _SILENT_S = 10.0, 10.0
_ANSWER_BYTES, _LINE_BYTES = 1 << 16, 1 << 13
_REDIRECTS = 3
_KEEP_S = (5.0, 30.0)
_PAUSE_S, _TAKEN_BYTES = 0.1, 1 << 18
_DOLLAR = ord("$")  # which a packet between answers begins with


class Rtsp:
    """A stream of RTSP."""

    ends = False

    def __init__(self, text: str) -> None:
        self._url = read_url(text, _PORTS, _EXAMPLE)
        self.shown = str(self._url)

    def pictures(self, every_s: float) -> Iterator[Picture]:
        """See `Reader`."""
        return key_frames(lambda: _Stream(self._url), every_s)


class _Stream:
    """See `key_frames.Stream`."""

    def __init__(self, url: CameraUrl) -> None:
        self._url = url
        self._deadline = Deadline(_WHOLE_S)

    def frames(self) -> Iterator[Decode | None]:
        url = self._url
        try:
            for _ in range(1 + _REDIRECTS):
                with self._deadline.connect((url.host, url.port), _SILENT_S) as made:
                    session = _Session(url, made)
                    elsewhere = session.begin()
                    if elsewhere is None:
                        self._deadline.met()
                        yield from session.frames()
                        return
                    url = elsewhere
            raise CameraGoneError(f"more than {_REDIRECTS} redirects")
        except (OSError, CameraGoneError) as error:
            if self._deadline.is_over:
                raise CameraGoneError(f"no whole answer in {_WHOLE_S:g} s") from None
            raise error if isinstance(error, CameraGoneError) else CameraGoneError(_in_words(error)) from None

    def close(self) -> None:
        self._deadline.cut()
        self._deadline.close()


def _in_words(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, TimeoutError) and not error.errno:
        return f"nothing in {_SILENT_S:g} s"
    return os.strerror(error.errno) if error.errno else type(error).__name__


@dataclass(frozen=True)
class _Answer:
    code: int
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str:
        """The first of this name; empty without one."""
        return next((value for key, value in self.headers if key == name), "")


class _Session:
    """One connection."""

    def __init__(self, url: CameraUrl, made: socket.socket) -> None:
        self._url, self._socket, self._received = url, made, _Received(made)
        self._number, self._session, self._keep_s = 0, "", _KEEP_S[1]
        self._signed: Signature | None = None
        self._channel, self._frames = 0, KeyFrames(CODINGS["H264"], -1)

    def begin(self) -> CameraUrl | None:
        """Have the packets sent; or where a redirect leads, on the same host.

        Raises:
            CameraGoneError: the camera refuses, or has no pictures of a kind that is known.
            OSError: the connection is lost.
        """
        described = self._asked("DESCRIBE", self._url.bare, "Accept: application/sdp")
        if 300 <= described.code < 400:
            return self._elsewhere(described.header("location"))
        media, self._frames = _video(described.body)
        base = described.header("content-base") or described.header("content-location") or self._url.bare
        target = media if media.lower().startswith("rtsp://") else f"{base.rstrip('/')}/{media}" if media else base
        done = self._asked("SETUP", target, "Transport: RTP/AVP/TCP;unicast;interleaved=0-1")
        found = re.search(r"interleaved=(\d{1,3})", done.header("transport"))
        self._channel = int(found[1]) if found is not None else 0
        self._session, _, more = done.header("session").partition(";")
        timeout = re.search(r"timeout=(\d{1,5})", more)
        self._keep_s = min(max(int(timeout[1]) / 2 if timeout else _KEEP_S[1], _KEEP_S[0]), _KEEP_S[1])
        self._asked("PLAY", base, "Range: npt=0.000-")
        return None

    def frames(self) -> Iterator[Decode | None]:
        """Key frames as they come; None for every packet that makes none whole.

        Raises:
            CameraGoneError, OSError: the stream ends.
        """
        decode, kept_s = decoder(self._frames.coding.decoder), time.monotonic()
        self._received.pause_s = _PAUSE_S
        while True:
            packet = self._packet()
            frame = None if packet is None else self._frames.put(packet)
            yield None if frame is None else _decoding(decode, frame)
            if time.monotonic() - kept_s > self._keep_s:
                kept_s = time.monotonic()
                self._send("OPTIONS", self._url.bare)

    def _packet(self) -> bytes | None:
        """A packet of the pictures; None where something else came."""
        head = self._received.read(4)
        if head[0] != _DOLLAR:
            self._answer(head)
            return None
        packet = self._received.read(head[2] << 8 | head[3])
        return packet if head[1] == self._channel else None

    # ── requests and answers ────────────────────────────────────────────────────────────────────────────────────────

    def _asked(self, method: str, target: str, *headers: str) -> _Answer:
        answer = self._once(method, target, *headers)
        if answer.code == 401 and self._url.user + self._url.password:
            challenges = [value for name, value in answer.headers if name == "www-authenticate"]
            self._signed = signature(challenges, self._url)
            answer = self._once(method, target, *headers)
        if answer.code == 200 or (method == "DESCRIBE" and 300 <= answer.code < 400):
            return answer
        refused = "it wants another user or password" if answer.code in (401, 403) else f"it answers {answer.code}"
        raise CameraGoneError(refused)

    def _once(self, method: str, target: str, *headers: str) -> _Answer:
        number = self._send(method, target, *headers)
        while True:
            head = self._received.read(4)
            if head[0] == _DOLLAR:
                self._received.read(head[2] << 8 | head[3])
                continue
            answer = self._answer(head)
            if answer.header("cseq") in ("", str(number)) and answer.code:
                return answer

    def _send(self, method: str, target: str, *headers: str) -> int:
        if re.search(r"[\s\x00-\x1f\x7f]", target):  # as a hostile description would have it
            raise CameraGoneError("an address with a space in it")
        self._number += 1
        lines = [f"{method} {target} RTSP/1.0", f"CSeq: {self._number}", *headers]
        lines += [f"Session: {self._session}"] if self._session else []
        lines += [f"Authorization: {self._signed(method, target)}"] if self._signed is not None else []
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode())
        return self._number

    def _answer(self, head: bytes) -> _Answer:
        """An answer, or with code 0 a request of the camera's, which begins with these bytes."""
        status, left = (head + self._received.line()).decode("latin-1").split(), _ANSWER_BYTES
        headers = []
        while line := self._received.line().strip():
            left -= len(line)
            if left < 0:
                raise CameraGoneError("an answer that is too long")
            name, _, value = line.decode("latin-1").partition(":")
            headers.append((name.strip().lower(), value.strip()))
        is_answer = len(status) > 1 and status[0].startswith("RTSP/") and status[1].isascii() and status[1].isdecimal()
        answer = _Answer(int(status[1][:4]) if is_answer else 0, headers, b"")
        size = answer.header("content-length") or "0"
        if not re.fullmatch(r"\d{1,9}", size) or int(size) > _ANSWER_BYTES:
            raise CameraGoneError("an answer that is too long")
        return _Answer(answer.code, headers, self._received.read(int(size)))

    def _elsewhere(self, location: str) -> CameraUrl:
        try:
            found = read_url(location, _PORTS, _EXAMPLE)
        except UsageError:
            raise CameraGoneError("it redirects to another address") from None
        if (found.host, found.port) != (self._url.host, self._url.port):
            raise CameraGoneError("it redirects to another address")
        return CameraUrl("rtsp", found.host, found.port, self._url.user, self._url.password, found.path)


class _Received:
    """What comes over a connection, in as many bytes as are asked for.

    Attributes:
        pause_s: before a look at the connection, unless the one before left something there. What comes meanwhile is
            taken all at once, which costs less.
    """

    def __init__(self, made: socket.socket) -> None:
        self._socket, self._bytes, self._at = made, b"", 0
        self.pause_s, self._is_behind = 0.0, False

    def read(self, count: int) -> bytes:
        """So many bytes.

        Raises:
            CameraGoneError: the stream ends before.
            OSError: the connection is lost.
        """
        while len(self._bytes) - self._at < count:
            self._more()
        self._at += count
        return self._bytes[self._at - count : self._at]

    def line(self) -> bytes:
        """All up to the end of a line.

        Raises:
            CameraGoneError: it is too long, or the stream ends before.
            OSError: the connection is lost.
        """
        while (end := self._bytes.find(b"\n", self._at)) < 0:
            if len(self._bytes) - self._at > _LINE_BYTES:
                raise CameraGoneError("no RTSP")
            self._more()
        return self.read(end + 1 - self._at)

    def _more(self) -> None:
        if self.pause_s and not self._is_behind:
            time.sleep(self.pause_s)
        found = self._socket.recv(_TAKEN_BYTES)
        self._is_behind = len(found) == _TAKEN_BYTES
        if not found:
            raise CameraGoneError("the stream has ended")
        self._bytes, self._at = self._bytes[self._at :] + found, 0


def _decoding(decode: Callable[[bytes], NDArray[Any] | None], frame: bytes) -> Decode:
    return lambda: decode(frame)


def _video(description: bytes) -> tuple[str, KeyFrames]:
    """Of a session's description (SDP, RFC 8866) the first pictures of a known coding: where, and how they come."""
    media: list[list[str]] = []
    for line in description.decode("utf-8", "replace").splitlines():
        if line.startswith("m="):
            media.append([line])
        elif media:
            media[-1].append(line)
    seen = []
    for lines in (each for each in media if each[0].startswith("m=video ")):
        kind = next((found for line in lines if (found := re.match(r"a=rtpmap:(\d{1,3}) ([\w.-]{1,20})/", line))), None)
        seen += [kind[2]] if kind is not None else []
        if kind is None or kind[2].upper() not in CODINGS:
            continue
        coding = CODINGS[kind[2].upper()]
        terms = next((line.partition(" ")[2] for line in lines if line.startswith(f"a=fmtp:{kind[1]} ")), "")
        named = dict(term.strip().partition("=")[::2] for term in terms.split(";"))
        units = [unit for name in coding.described for unit in named.get(name, "").split(",") if unit]
        control = next((line[10:].strip() for line in lines if line.startswith("a=control:")), "")
        return "" if control == "*" else control, KeyFrames(coding, int(kind[1]), [*map(_unit, units)])
    raise CameraGoneError(f"pictures as {', '.join(seen)}, not H264 or H265" if seen else "a stream without pictures")


def _unit(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except ValueError:
        return b""
