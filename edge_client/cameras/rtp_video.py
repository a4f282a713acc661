"""Key frames out of RTP packets: H.264 (RFC 6184) and H.265 (RFC 7798).

An encoder cuts a picture into NAL units, and RTP cuts these into packets: one unit in a packet, several, or a piece of
one. Packets of one timestamp are one picture; it ends with the marker, or with the next timestamp. Some servers mark
every part of a picture; then it is given again with each part, and only the whole one decodes.

- Only units that a key frame needs are put together: the parameter sets, and what is coded by itself. All others are
  thrown away by their first byte.
- Parameter sets come in the stream, or before it in the session's description; the newest precede each key frame.
- A key frame with a packet missing is thrown away. One of more than 16 MiB ends the stream.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from protofleet.edge_client.cameras.camera import LARGEST_BYTES, CameraGoneError

__all__ = ["CODINGS", "Coding", "KeyFrames"]

_LARGEST_SET = 1 << 16
_START = b"\0\0\0\1"


@dataclass(frozen=True)
class Coding:
    """How pictures are coded, and cut into packets.

    Attributes:
        decoder: FFmpeg's name of it.
        header_bytes: of a NAL unit.
        type_shift, type_mask: where in the first byte the unit's type is.
        several, piece: types of packets: several units, a piece of one.
        parameter_sets: types of units that hold them, each in the order in which they are decoded.
        key: types of units of a picture that is coded by itself.
        described: the attributes of the session's description that hold parameter sets.
    """

    decoder: str
    header_bytes: int
    type_shift: int
    type_mask: int
    several: int
    piece: int
    parameter_sets: tuple[int, ...]
    key: Collection[int]
    described: tuple[str, ...]

    def type_of(self, first: int) -> int:
        """The type of the unit that begins with this byte."""
        return first >> self.type_shift & self.type_mask


CODINGS: Mapping[str, Coding] = MappingProxyType(  # by the name in a session's description
    {
        "H264": Coding("h264", 1, 0, 31, 24, 28, (7, 8), (5,), ("sprop-parameter-sets",)),
        "H265": Coding("hevc", 2, 1, 63, 48, 49, (32, 33, 34), range(16, 22), ("sprop-vps", "sprop-sps", "sprop-pps")),
    }
)


@dataclass
class KeyFrames:
    """Packets in, key frames out.

    Args:
        coding: of the pictures.
        payload_type: of the packets that hold them; others are left.
        described: parameter sets, each a NAL unit, that the session's description had.
    """

    coding: Coding
    payload_type: int
    described: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sets: dict[int, bytes] = {}
        for unit in self.described:
            self._take(unit)
        self._begin(-1)
        self._sequence = -1

    def _begin(self, timestamp: int) -> None:
        self._timestamp, self._is_whole = timestamp, True
        self._units: list[bytes] = []
        self._piece: bytearray | None = None
        self._bytes = self._given = 0

    def put(self, packet: bytes) -> bytes | None:
        """One RTP packet; gives a key frame, as a decoder takes it, once one is whole.

        Raises:
            CameraGoneError: a picture is larger than 16 MiB.
        """
        if len(packet) < 13 or packet[0] >> 6 != 2 or packet[1] & 127 != self.payload_type:
            return None
        begin, end = 12 + 4 * (packet[0] & 15), len(packet)
        if packet[0] & 16:
            begin += 4 + 4 * int.from_bytes(packet[begin + 2 : begin + 4], "big")
        if packet[0] & 32:
            end -= packet[-1]
        sequence, timestamp = int.from_bytes(packet[2:4], "big"), int.from_bytes(packet[4:8], "big")
        done = None
        if timestamp != self._timestamp:
            done = self._ended()
            self._begin(timestamp)
        if self._sequence >= 0 and sequence != (self._sequence + 1) & 0xFFFF:
            self._is_whole = False
        self._sequence = sequence
        if begin < end:
            self._payload(packet[begin:end])
        return self._ended() or done if packet[1] & 128 else done

    def _payload(self, payload: bytes) -> None:
        coding = self.coding
        kind, size = coding.type_of(payload[0]), coding.header_bytes
        if kind == coding.piece:
            self._put_piece(payload)
        elif kind == coding.several:
            at = size
            while at + 2 < len(payload):
                length = int.from_bytes(payload[at : at + 2], "big")
                self._put_unit(payload[at + 2 : at + 2 + length])
                at += 2 + length
        else:
            self._put_unit(payload)

    def _put_piece(self, payload: bytes) -> None:
        """A piece of a unit: its header, a byte that says which piece of what type, and bytes of it."""
        coding, size = self.coding, self.coding.header_bytes
        if len(payload) <= size + 1:
            return
        which = payload[size]
        kind = which & coding.type_mask
        if which & 128:  # the first
            first = payload[0] & ~(coding.type_mask << coding.type_shift) | kind << coding.type_shift
            self._piece = bytearray([first & 255]) + payload[1:size] if self._is_needed(kind) else None
        if self._piece is not None:
            self._count(len(payload))
            self._piece += payload[size + 1 :]
            if which & 64:  # the last
                unit, self._piece = bytes(self._piece), None
                self._bytes -= len(unit)  # which `_put_unit` counts
                self._put_unit(unit)

    def _put_unit(self, unit: bytes) -> None:
        if not unit or not self._is_needed(self.coding.type_of(unit[0])):
            return
        if not self._take(unit):
            self._count(len(unit))
            self._units.append(unit)

    def _take(self, unit: bytes) -> bool:
        """Keep a parameter set; False where the unit is none."""
        kind = self.coding.type_of(unit[0]) if unit else -1
        if kind in self.coding.parameter_sets:
            if len(unit) > _LARGEST_SET:
                raise CameraGoneError(f"a parameter set of more than {_LARGEST_SET >> 10} KiB")
            self._sets[kind] = unit
            return True
        return False

    def _is_needed(self, kind: int) -> bool:
        return kind in self.coding.key or kind in self.coding.parameter_sets

    def _count(self, count: int) -> None:
        self._bytes += count
        if self._bytes > LARGEST_BYTES:
            raise CameraGoneError(f"a picture of more than {LARGEST_BYTES >> 20} MiB")

    def _ended(self) -> bytes | None:
        if len(self._units) == self._given or not self._is_whole or self._piece is not None:
            return None
        self._given = len(self._units)
        sets = [self._sets[kind] for kind in self.coding.parameter_sets if kind in self._sets]
        return b"".join(_START + unit for unit in [*sets, *self._units])
