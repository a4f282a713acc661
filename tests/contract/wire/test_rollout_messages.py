"""What a status says of a roll-out, there and back; offers, requests and pieces that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.errors import WireError
from protofleet.contract.wire.messages import Status
from protofleet.contract.wire.rollout_messages import WORDS, Offer, Piece, Request, RolloutReport, bundle_tag
from protofleet.contract.wire.sampling import in_stage


@given(version=st.integers(1, 2**32 - 1), word=st.sampled_from(WORDS), reason=st.text(max_size=200))
def test_what_a_device_tells_fits_a_status_and_is_read_again(version, word, reason):
    told = RolloutReport(version, word, reason)
    Status(True, bytes(8), 1, versions={"rollout": told.text})
    back = RolloutReport.read(told.text)
    assert (back.version, back.word) == (version, word)
    assert reason.startswith(back.reason)
    assert RolloutReport.read(back.text) == back


@given(st.text(max_size=64))
def test_any_text_is_a_word_or_nothing(text):
    told = RolloutReport.read(text)
    assert told is None or (told.version >= 1 and told.word in WORDS)


@pytest.mark.parametrize("text", ["", "8", "8 great", "0 healthy", "08 healthy", "8 healthy:", "v8 healthy"])
def test_what_is_no_word_is_nothing(text):
    assert RolloutReport.read(text) is None


def test_a_bundle_is_named_by_its_version_and_the_beginning_of_its_hash():
    assert bundle_tag(7, bytes.fromhex("3fa94b12") + bytes(28)) == "7 3fa94b12"


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (lambda: Offer(bytes(31), 1, 1), "offer sha256"),
        (lambda: Offer(bytes(32), 0, 1), "offer version"),
        (lambda: Offer(bytes(32), 1, 0), "offer size_bytes"),
        (lambda: Offer(bytes(32), 1, 2**31 + 1), "offer size_bytes"),
        (lambda: Offer(bytes(32), 1, 1, 0.0), "offer fraction"),
        (lambda: Offer(bytes(32), 1, 1, float("nan")), "offer fraction"),
        (lambda: Offer(bytes(32), 1, 1, 1.0, "a/#"), "offer fleet"),
        (lambda: Request(bytes(4), bytes(7), 0, 1), "bundle"),
        (lambda: Request(bytes(4), bytes(8), 0, 0), "wanted_bytes"),
        (lambda: Piece(bytes(4), bytes(8), 0, b""), "piece"),
        (lambda: Piece(bytes(4), bytes(8), 2**31, b"x"), "piece"),
    ],
)
def test_what_cannot_be_is_refused(make, wrong):
    with pytest.raises(WireError, match=wrong):
        make()


@given(device=st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True), sha256=st.binary(min_size=32, max_size=32))
def test_who_is_in_a_stage_stays_in_it_as_it_widens(device, sha256):
    inside = [in_stage(Offer(sha256, 7, 1, fraction), device) for fraction in (0.01, 0.1, 0.5, 0.9, 1.0)]
    assert inside == sorted(inside)
    assert inside[-1]


def test_another_bundle_begins_with_other_devices():
    def first(sha256: bytes) -> set[int]:
        return {n for n in range(1000) if in_stage(Offer(sha256, 7, 1, 0.1), f"pi-{n}")}

    one, two = first(bytes(32)), first(bytes([1] * 32))
    assert 70 < len(one) < 130
    assert len(one & two) < 40
