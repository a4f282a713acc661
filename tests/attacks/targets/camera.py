"""A camera's server that sends anything: the conversation ends as that of a camera that is gone, within its bounds.

Each byte of the input says how much comes at once; the answers and packets themselves follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from protofleet.edge_client.cameras import rtsp
from protofleet.edge_client.cameras.camera import LARGEST_BYTES, CameraGoneError
from protofleet.edge_client.cameras.rtp_video import CODINGS
from protofleet.edge_client.cameras.url import read_url

LONGEST_BYTES = 4096
_URL = read_url("rtsp://me:qzxcan@h/door", {"rtsp": 554}, "")
_OK = b"RTSP/1.0 200 OK\r\nCSeq: %d\r\n"
_SDP = b"v=0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 %s/90000\r\na=fmtp:96 %s\r\na=control:stream=0\r\n"
_SETS = (
    (b"H264", b"packetization-mode=1; sprop-parameter-sets=Z0IAHqtA,aM48gA=="),
    (b"H265", b"sprop-vps=QAEM;sprop-sps=QgEB;sprop-pps=RAHA"),
)


class _Wire:
    """A socket: what was sent to it, and what comes."""

    def __init__(self, comes: bytes, at_once: int) -> None:
        self._comes, self._at_once, self.sent = comes, at_once, b""

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def recv(self, most: int) -> bytes:
        count = min(most, self._at_once)
        part, self._comes = self._comes[:count], self._comes[count:]
        return part


def run(data: bytes) -> None:
    """The whole conversation, then packets."""
    if not data:
        return
    wire: Any = _Wire(data[1:], 1 + data[0])
    session = rtsp._Session(_URL, wire)
    why = ""
    try:
        if (elsewhere := session.begin()) is not None:
            assert (elsewhere.host, elsewhere.port) == (_URL.host, _URL.port)
            return
        while True:
            packet = session._packet()
            frame = None if packet is None else session._frames.put(packet)
            assert frame is None or len(frame) <= LARGEST_BYTES + (1 << 18)
    except CameraGoneError as error:
        why = str(error)
    finally:
        requests = wire.sent.split(b"\r\n\r\n")
        assert all(b"\n" not in line.rstrip(b"\r") for request in requests for line in request.split(b"\r\n"))
        assert why.isprintable()  # it is told to a person
        assert b"qzxcan" not in wire.sent  # Digest and Basic say it otherwise


def _packet(number: int, payload: bytes, *, marker: bool = True) -> bytes:
    head = bytes([0x80, 96 | marker << 7]) + number.to_bytes(2, "big") + (number * 3000).to_bytes(4, "big") + b"ssrc"
    return b"$\0" + (12 + len(payload)).to_bytes(2, "big") + head + payload


def seeds() -> Iterable[bytes]:
    """A whole conversation of each coding, in large pieces and small; refusals, redirects and questions."""
    for name, sets in _SETS:
        coding, sdp = CODINGS[name.decode()], _SDP % (name, sets)
        key = bytes([min(coding.key) << coding.type_shift]) + b"\1" * coding.header_bytes + b"picture"
        piece = bytes([coding.piece << coding.type_shift]) + b"\1" * (coding.header_bytes - 1)
        kind = min(coding.key)
        several = bytes([coding.several << coding.type_shift]) + b"\1" * (coding.header_bytes - 1)
        packets = _packet(1, key) + _packet(2, piece + bytes([0x80 | kind]) + b"a", marker=False)
        packets += _packet(2, piece + bytes([0x40 | kind]) + b"b")
        packets += _packet(3, several + len(key).to_bytes(2, "big") + key)
        head = _OK % 1 + b"Content-Base: rtsp://h/door/\r\nContent-Length: %d\r\n\r\n%s" % (len(sdp), sdp)
        setup = _OK % 2 + b"Session: 12;timeout=60\r\nTransport: RTP/AVP/TCP;interleaved=0-1\r\n\r\n"
        whole = head + setup + _OK % 3 + b"\r\n" + packets + _OK % 4 + b"\r\n" + packets
        yield from (bytes([size]) + whole for size in (255, 7, 0))
    asks = b"RTSP/1.0 401 No\r\nCSeq: %d\r\nWWW-Authenticate: %s\r\n\r\n"
    digest = b'Digest realm="camera", nonce="n0", qop="auth", algorithm=%s'
    for way in (b"Basic realm=x", digest % b"MD5", digest % b"SHA", digest % b"\xff", b"Digest x", b""):
        yield b"\xff" + asks % (1, way) + asks % (2, way)
    for where in (b"rtsp://h/other", b"rtsp://h:1/x", b"http://h/", b"", b"rtsp://h/a b"):
        yield b"\xff" + b"RTSP/1.0 302 Moved\r\nLocation: %s\r\n\r\n" % where
    yield b"\xff" + b"OPTIONS * RTSP/1.0\r\n\r\n" + b"RTSP/1.0 200 OK\r\nContent-Length: 99999999\r\n\r\n"


assert {name.decode() for name, _ in _SETS} == set(CODINGS)
