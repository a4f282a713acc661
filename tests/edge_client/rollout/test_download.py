"""A bundle that is fetched in pieces: cut off, lost, doubled, foreign; and a disk without room."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest

from protofleet.contract.errors import StoreError
from protofleet.contract.wire.rollout_messages import MAX_PIECES, Offer, Piece
from protofleet.edge_client.rollout import download as download_module
from protofleet.edge_client.rollout.download import Download

RUN = bytes(4)


BLOB = random.Random(1).randbytes(10_000)


# ── fetched ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def blob_offer(blob: bytes = BLOB) -> Offer:
    return Offer(hashlib.sha256(blob).digest(), 2, len(blob))


def pieces(found: Download, blob: bytes, size: int, now_s: float = 0.0) -> list[Piece]:
    """What an aggregator answers to the download's next request."""
    asked = found.request(RUN, now_s)
    if asked is None:
        return []
    found.asked(asked, now_s)
    end = min(asked.offset + asked.wanted_bytes, len(blob))
    starts = range(asked.offset, end, size)[:MAX_PIECES]
    return [Piece(RUN, asked.bundle, at, blob[at : min(at + size, end)]) for at in starts]


def test_a_download_that_is_cut_off_at_any_byte_goes_on_there(tmp_path: Path) -> None:
    """The process is gone at any moment, and with it any number of the file's last bytes, or they are zero."""
    rng, offer, path = random.Random(3), blob_offer(), tmp_path / "b" / "p"
    for _ in range(25):
        path.unlink(missing_ok=True)
        rounds = 0
        while True:
            rounds += 1
            found = Download(path, offer, rng)
            for piece in pieces(found, BLOB, 700)[: rng.randrange(1, 8)]:
                found.take(piece, 0.0)
            here, whole = found.have, found.is_whole
            found.close()
            assert path.read_bytes() == BLOB[:here]
            if whole:
                break
            os.truncate(path, rng.randrange(here - min(here, 500), here + 1))
        found = Download(path, offer, rng)
        assert found.is_right()
        found.close()
        assert rounds > 2


def test_lost_doubled_and_foreign_pieces_are_asked_for_again_and_never_kept(tmp_path: Path) -> None:
    rng, found, now_s = random.Random(4), Download(tmp_path / "b" / "p", blob_offer(), random.Random(5)), 0.0
    while not found.is_whole:
        came = [piece for piece in pieces(found, BLOB, 900, now_s) if rng.random() < 0.8]
        came += [Piece(RUN, b"another!", found.have, b"x" * 50), *came[:1]]
        for piece in came:
            found.take(piece, now_s)
        now_s += found.wait_s(now_s) or 0.0
    assert found.is_right()
    assert found.have == len(BLOB)
    found.take(Piece(RUN, found.offer.digest, found.have, b"more"), now_s)
    assert found.have == len(BLOB)
    found.begin_again()
    for _ in range(30):  # other bytes than were offered, and more of them
        for piece in pieces(found, BLOB[::-1] + b"beyond", 900, now_s):
            found.take(piece, now_s)
        now_s += 700.0
    assert (found.have, found.is_right()) == (len(BLOB), False)
    found.close()


def test_what_a_piece_holds_beyond_the_end_is_left_out(tmp_path: Path) -> None:
    found = Download(tmp_path / "b" / "p", blob_offer(), random.Random())
    found.take(Piece(RUN, found.offer.digest, 0, BLOB + b"beyond"), 0.0)
    assert (found.have, found.is_whole, found.is_right()) == (len(BLOB), True, True)
    found.close()


def test_a_part_that_is_longer_than_what_is_offered_is_begun_again(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(BLOB + b"beyond")
    found = Download(tmp_path / "p", blob_offer(), random.Random())
    asked = found.request(RUN, 0.0)
    assert asked is not None
    assert (found.have, asked.offset, (tmp_path / "p").stat().st_size) == (0, 0, 0)
    found.close()


def test_after_as_many_pieces_as_a_request_brings_the_next_goes_out_at_once(tmp_path: Path) -> None:
    found = Download(tmp_path / "b" / "p", blob_offer(), random.Random())
    came = pieces(found, BLOB, 100)
    for piece in came[:-1]:
        found.take(piece, 1.0)
    assert (len(came), found.request(RUN, 1.0)) == (MAX_PIECES, None)
    found.take(came[-1], 1.0)
    assert found.request(RUN, 1.0) is not None
    found.close()


def test_a_request_that_nobody_answers_is_made_ever_more_rarely(tmp_path: Path) -> None:
    found, now_s, times = Download(tmp_path / "b" / "p", blob_offer(), random.Random(6)), 0.0, []
    while now_s < 7200:
        asked = found.request(RUN, now_s)
        assert asked is not None
        found.asked(asked, now_s)
        wait_s = found.wait_s(now_s)
        assert wait_s is not None
        times.append(wait_s)
        now_s += wait_s
    assert 7 < times[0] < 13
    assert 400 < times[-1] < 800
    assert len(times) < 25
    found.connected()
    assert found.request(RUN, now_s) is not None
    found.close()


def test_a_disk_without_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "_MARGIN_BYTES", 1 << 62)
    with pytest.raises(StoreError, match=r"no room for the bundle .* MB free, got .* MB, try freeing space"):
        Download(tmp_path / "b" / "p", blob_offer(), random.Random())
