"""What the broker retains is published again only where it is lost."""

from __future__ import annotations

from protofleet.aggregator.server.retained import Retained


def test_what_this_connection_has_shown_is_not_missing() -> None:
    retained = Retained()
    assert retained.missing(1, [b"a", b"b"]) == [0, 1]
    retained.heard(1, 0, b"a")
    retained.heard(1, 1, b"of another state")
    assert retained.missing(1, [b"a", b"b"]) == [1]
    retained.heard(1, 1, b"b")
    assert retained.missing(1, [b"a", b"b"]) == []


def test_a_new_connection_shows_anew() -> None:
    retained = Retained()
    retained.heard(1, 0, b"a")
    assert retained.missing(2, [b"a", b"b"]) == [0, 1]
    retained.heard(2, 1, b"b")
    assert retained.missing(2, [b"a", b"b"]) == [0]
