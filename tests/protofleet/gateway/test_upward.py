"""What goes up of sums that stand: one generation at a time, when it changed, and of the run that is announced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gateway_samples import sends, standing_above, standing_site, whole

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.wire.messages import Receipt
from protofleet.edge_client.settings import ClientSettings
from protofleet.gateway.uplink import Uplink
from protofleet.gateway.upward import StandingUpward
from tests.aggregator.merging.test_exact_sums import means

__all__ = ["whole"]


@pytest.fixture
def uplink(tmp_path: Path, whole: Bundle) -> Iterator[Uplink]:
    """One that does not connect: what it would send is in its journal."""
    up = Uplink(ClientSettings(bundle="", broker="mqtt://127.0.0.1:1", id="site", state=str(tmp_path / "up")), whole)
    yield up
    up.journal.close()


def generations(uplink: Uplink) -> list[int]:
    return [pending.key[1] for pending in uplink.journal.pending()]


def answered(uplink: Uplink, upward: StandingUpward, receipt: Receipt) -> None:
    assert uplink.journal.record_receipt(receipt, 0)
    uplink._upward = upward
    uplink._told(receipt)


def test_sums_go_up_when_they_changed_and_nothing_is_on_its_way(tmp_path: Path, whole: Bundle, uplink: Uplink) -> None:
    above, site = standing_above(tmp_path / "above", whole, "ncm"), standing_site(tmp_path, whole, "ncm")
    upward, a = StandingUpward(uplink, site), above.announcement()
    upward.turn(a, 100.0)
    assert generations(uplink) == []  # of nobody
    sends(site.core, whole, "a", means(0), 1)
    upward.turn(a, 200.0)
    sends(site.core, whole, "b", means(1), 1)
    upward.turn(a, 300.0)
    assert (generations(uplink), site.settled) == ([1], None)
    (told,) = above.take([("site", uplink.journal.pending()[0].payload)], 0.0)
    assert told.outcome == "committed"
    answered(uplink, upward, Receipt(a.run, 1, "ncm", "committed"))
    upward.turn(a, 400.0)
    assert (generations(uplink), site.settled) == ([2], {"a": 1})
    upward.turn(a, 401.0)
    assert site.settled is None  # until it is known whose sums are in the second
    answered(uplink, upward, Receipt(a.run, 2, "ncm", "committed"))
    upward.turn(a, 500.0)
    assert (generations(uplink), site.settled) == ([], {"a": 1, "b": 1})
    upward.turn(replace(a, run=b"run2"), 501.0)
    assert site.settled == {}  # another run's aggregator has nothing yet


def test_what_was_refused_above_waits(tmp_path: Path, whole: Bundle, uplink: Uplink) -> None:
    above, site = standing_above(tmp_path / "above", whole, "ncm"), standing_site(tmp_path, whole, "ncm")
    upward, a = StandingUpward(uplink, site), above.announcement()
    sends(site.core, whole, "a", means(0), 1)
    upward.turn(a, 100.0)
    answered(uplink, upward, Receipt(a.run, 1, "ncm", "rejected", reason="too many"))
    again = uplink.again_at_s
    upward.turn(a, again - 1.0)
    assert generations(uplink) == []
    upward.turn(a, again)
    assert generations(uplink) == [2]
