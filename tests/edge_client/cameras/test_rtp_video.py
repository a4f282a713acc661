"""edge_client/cameras/rtp_video.py: pictures cut into packets in every way, and put together again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from camera_samples import key_frame
from hypothesis import given
from hypothesis import strategies as st

from protofleet.edge_client.cameras import rtp_video
from protofleet.edge_client.cameras.camera import CameraGoneError
from protofleet.edge_client.cameras.key_frames import decoder
from protofleet.edge_client.cameras.rtp_video import CODINGS, Coding, KeyFrames

PT = 96
START = b"\0\0\0\1"


def _unit(coding: Coding, kind: int, body: bytes) -> bytes:
    return bytes([kind << coding.type_shift]) + b"\1" * (coding.header_bytes - 1) + body


def _packet(sequence: int, timestamp: int, payload: bytes, *, marker: bool = False, extended: bool = False) -> bytes:
    first = 0x80 | (0x10 if extended else 0)
    head = bytes([first, PT | (0x80 if marker else 0)])
    head += (sequence & 0xFFFF).to_bytes(2, "big") + timestamp.to_bytes(4, "big") + b"ssrc"
    return head + (b"\xbe\xde\0\1\0\0\0\0" if extended else b"") + payload


def _payloads(coding: Coding, units: list[bytes], sizes: Iterator[int]) -> Iterator[bytes]:
    """Each unit whole, with its neighbours in one packet, or in pieces, as the sizes have it."""
    size = coding.header_bytes
    together: list[bytes] = []
    for unit in units:
        piece = next(sizes)
        if piece == 0:
            together.append(unit)
            continue
        if together:
            yield _several(coding, together)
            together = []
        if piece >= len(unit) - size:
            yield unit
            continue
        head = bytes([unit[0] & ~(coding.type_mask << coding.type_shift) | coding.piece << coding.type_shift])
        body, kind = unit[size:], coding.type_of(unit[0])
        for at in range(0, len(body), piece):
            which = kind | (0x80 if at == 0 else 0) | (0x40 if at + piece >= len(body) else 0)
            yield head + unit[1:size] + bytes([which]) + body[at : at + piece]
    if together:
        yield _several(coding, together)


def _several(coding: Coding, units: list[bytes]) -> bytes:
    head = _unit(coding, coding.several, b"")
    return head + b"".join(len(unit).to_bytes(2, "big") + unit for unit in units)


codings = pytest.mark.parametrize("name", list(CODINGS))


def _pictures(coding: Coding, data: st.DataObject) -> list[tuple[bool, list[bytes]]]:
    """Whether each is a key frame, and its units; the first is one, with parameter sets."""
    body = st.binary(min_size=1, max_size=40)
    plain = 1 if coding.decoder == "h264" else 0
    found = []
    for number in range(data.draw(st.integers(1, 4))):
        is_key = number == 0 or data.draw(st.booleans())
        has_sets = number == 0 or (is_key and data.draw(st.booleans()))
        kinds = [*coding.parameter_sets] if has_sets else []
        kinds += [min(coding.key) if is_key else plain] * data.draw(st.integers(1, 3))
        found.append((is_key, [_unit(coding, kind, data.draw(body)) for kind in kinds]))
    return found


@codings
@given(data=st.data())
def test_however_pictures_are_cut_their_key_frames_come_out(name: str, data: st.DataObject) -> None:
    coding = CODINGS[name]
    frames, sequence, found, wanted = KeyFrames(coding, PT), data.draw(st.integers(0, 65535)), [], []
    sets: dict[int, bytes] = {}
    for number, (is_key, units) in enumerate(_pictures(coding, data)):
        sizes = iter(data.draw(st.lists(st.integers(0, 30), min_size=len(units), max_size=len(units))))
        payloads = list(_payloads(coding, units, sizes))
        for at, payload in enumerate(payloads):
            last = at == len(payloads) - 1
            found.append(
                frames.put(_packet(sequence, number * 3000, payload, marker=last, extended=data.draw(st.booleans())))
            )
            sequence += 1
        sets |= {coding.type_of(unit[0]): unit for unit in units if coding.type_of(unit[0]) in coding.parameter_sets}
        if is_key:
            keys = [unit for unit in units if coding.type_of(unit[0]) in coding.key]
            wanted.append(b"".join(START + unit for unit in [*(sets[kind] for kind in coding.parameter_sets), *keys]))
    assert [frame for frame in found if frame is not None] == wanted


@codings
@given(data=st.data())
def test_a_key_frame_with_a_packet_missing_is_thrown_away(name: str, data: st.DataObject) -> None:
    coding = CODINGS[name]
    units = [_unit(coding, kind, bytes(50)) for kind in (*coding.parameter_sets, min(coding.key))]
    payloads = list(_payloads(coding, units, iter([20] * len(units))))
    lost = data.draw(st.integers(0, len(payloads) - 2))
    frames = KeyFrames(coding, PT)
    assert frames.put(_packet(9, 1, b"\0\0\0", marker=True)) is None  # the picture before
    sent = [_packet(10 + at, 3000, payload, marker=at == len(payloads) - 1) for at, payload in enumerate(payloads)]
    assert not any(frames.put(packet) for packet in sent[:lost] + sent[lost + 1 :])
    again = [_packet(packet_at, 6000, payload) for packet_at, payload in enumerate(payloads, 10 + len(payloads))]
    assert not any(frames.put(packet) for packet in again)
    assert frames.put(_packet(10 + 2 * len(payloads), 9000, b"\0")) is not None  # without a marker the next one ends it


@codings
@given(st.lists(st.binary(max_size=60), max_size=20))
def test_no_packet_breaks_it(name: str, packets: list[bytes]) -> None:
    frames = KeyFrames(CODINGS[name], PT)
    for packet in packets:
        frames.put(packet)
        frames.put(_packet(0, 0, packet))


@codings
def test_a_real_encoders_key_frame_comes_through_and_decodes_with_the_sets_that_were_described(name: str) -> None:
    coding = CODINGS[name]
    encoded = key_frame({"h264": "libx264", "hevc": "libx265"}[coding.decoder], 96, 64)
    units = [unit.removesuffix(b"\0") for unit in encoded.split(b"\0\0\1") if unit.strip(b"\0")]
    sets = [unit for unit in units if coding.type_of(unit[0]) in coding.parameter_sets]
    others = [unit for unit in units if unit not in sets]
    frames, decode = KeyFrames(coding, PT, sets), decoder(coding.decoder)
    payloads = list(_payloads(coding, others, iter([100] * len(others))))
    found = [frames.put(_packet(at, 0, payload, marker=at == len(payloads) - 1)) for at, payload in enumerate(payloads)]
    (frame,) = (frame for frame in found if frame is not None)
    pixels = decode(frame)
    assert pixels is not None
    assert pixels.shape == (64, 96, 3)
    assert abs(int(pixels.mean()) - 90) < 4


@codings
def test_a_picture_without_an_end_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rtp_video, "LARGEST_BYTES", 1 << 20)
    coding = CODINGS[name]
    frames, unit = KeyFrames(coding, PT), _unit(coding, min(coding.key), bytes(1 << 16))
    for number in range(15):
        frames.put(_packet(number, 0, unit))
    with pytest.raises(CameraGoneError, match="a picture of more than 1 MiB"):
        frames.put(_packet(15, 0, unit))


@pytest.mark.parametrize(("coding", "encoder"), [("h264", "libx264"), ("hevc", "libx265")])
def test_a_picture_above_25_megapixels_is_never_decoded(coding: str, encoder: str) -> None:
    decode = decoder(coding)
    assert decode(key_frame(encoder, 5056, 5056)) is None
    smaller = decode(key_frame(encoder, 64, 48))  # and what comes after it is
    assert smaller is not None
    assert smaller.shape == (48, 64, 3)
