"""A gateway in this process: its total above is exact, who is answered when, and whose terms hold on its site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import CLASSES, WIDTH
from gateway_samples import drawn, sends, standing_above, standing_site, steps, whole

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.operator_orders import give
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import StatisticError, UsageError, WireError
from protofleet.contract.sums.fixed_point import FixedPoint
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Contribution
from tests.aggregator.merging.test_exact_sums import means

__all__ = ["whole"]

METHODS = ("ncm", "ffc")


@pytest.mark.parametrize("name", METHODS)
def test_a_total_travels_as_the_integers_that_it_is(tmp_path: Path, whole: Bundle, name: str) -> None:
    """Five devices behind a gateway and the same five without: equal totals above, also once one has gone."""
    direct = standing_above(tmp_path, whole, name)
    above, site = standing_above(tmp_path / "two", whole, name), standing_site(tmp_path, whole, name)
    for index in range(5):
        sends(direct, whole, f"d{index}", drawn(name, index), 1)
        sends(site.core, whole, f"d{index}", drawn(name, index), 1)
    for generation in (1, 2):
        up = site.contribution(above.announcement(), generation)
        payload = encode(up)
        (told,) = above.take([("site", payload)], 0.0)
        assert (told.outcome, up.devices, decode(payload).devices) == ("committed", 6 - generation, 6 - generation)
        assert above.standing.total.equal(direct.standing.total)
        assert above.devices == 6 - generation
        for core, device in ((site.core, "d3"), (direct, "d3")):
            key = {"run": core.parts.run, "round": 9, "method": name, "bundle": whole.sha256}
            gone = Contribution.withdrawal(**key, extractor=whole.extractor(core.method))
            core.take([(device, encode(gone))], 0.0)
    above.parts.store.close()
    assert standing_above(tmp_path / "two", whole, name).devices == 4  # also when it is started anew
    for beyond in (2**62 + 1, -(2**63)):
        with pytest.raises(WireError, match="exact sums, expected integers up to"):
            replace(up, body=ClassRows(up.body.classes, np.full_like(up.body.rows, beyond)))


def test_who_may_send_for_others(tmp_path: Path, whole: Bundle) -> None:
    above, site = standing_above(tmp_path, whole, "ncm", max_samples=20), standing_site(tmp_path, whole, "ncm")
    for index in range(2):
        sends(site.core, whole, f"d{index}", means(index), 1)
    payload = encode(site.contribution(above.announcement(), 1))
    (refused,) = above.take([("d7", payload)], 0.0)
    assert (refused.outcome, "--gateway" in refused.reason) == ("rejected", True)
    (taken,) = above.take([("site", payload)], 0.0)  # 24 samples, of two devices
    assert taken.outcome == "committed"
    with pytest.raises(UsageError, match="--rule with --gateway"):
        Settings(gateway=("site",), rule="median")


def test_above_stands_how_many_are_behind_a_gateway_and_no_name_of_theirs(tmp_path: Path, whole: Bundle) -> None:
    above, site = standing_above(tmp_path / "two", whole, "ncm"), standing_site(tmp_path, whole, "ncm")
    names, found = ("kitchen", "porch", "shed"), []
    for index, name in enumerate(names):
        sends(site.core, whole, name, means(index), 1)
    for generation, gone in ((1, "shed"), (2, "porch"), (3, "kitchen"), (4, "")):
        payload = encode(site.contribution(above.announcement(), generation))
        (told,) = above.take([("site", payload)], 0.0)
        assert told.outcome == "committed"
        assert not [name for name in names if name.encode() in payload]
        row = above.parts.store.devices.get("site")
        assert row is not None
        found.append(row.members)
        key = {"run": site.core.parts.run, "round": 9, "method": "ncm", "bundle": whole.sha256}
        leaves = Contribution.withdrawal(**key, extractor=whole.extractor(site.core.method))
        site.core.take([(gone, encode(leaves))] if gone else [], 0.0)
    assert found == [3, 2, 1, 0]
    assert all(site.core.parts.store.devices.get(name) for name in names)


def test_a_gateway_that_names_devices_and_sends_no_numbers(tmp_path: Path, whole: Bundle) -> None:
    """No gateway of ours does; whoever has the name of one ends nobody with it."""
    above, site = standing_above(tmp_path, whole, "ncm"), standing_site(tmp_path, whole, "ncm")
    sends(site.core, whole, "a", means(0), 1)
    said = site.contribution(above.announcement(), 1)
    none = ClassRows(said.body.classes[:0], said.body.rows[:0, :0])
    payload = encode(replace(said, body=none, counts=said.counts[:0], devices=10**9))
    (told,) = above.take([("site", payload)], 0.0)
    assert (told.outcome, above.standing.total.counts.sum()) == ("committed", 0)


def test_a_device_is_answered_when_its_sums_are_above(tmp_path: Path, whole: Bundle) -> None:
    site = standing_site(tmp_path, whole, "ncm")
    assert (
        sends(site.core, whole, "a", means(0), 1)
        == sends(site.core, whole, "a", means(0), 1)
        == site.core.stalled(0.0)
        == []
    )
    site.settled = {"a": 1}
    assert [(d.device, d.outcome) for d in site.core.stalled(0.0)] == [("a", "committed")]
    assert [d.outcome for d in sends(site.core, whole, "a", means(0), 1)] == ["duplicate"]
    assert sends(site.core, whole, "a", means(1), 2) == []
    assert [d.outcome for d in sends(site.core, whole, "a", means(0), 1)] == ["late"]
    site.settled = {"a": 2}
    assert [d.round for d in site.core.stalled(0.0)] == [2]


def test_who_goes_hears_it_when_the_sums_above_are_without_it(tmp_path: Path, whole: Bundle) -> None:
    """One that withdraws; and one that an operator forgets is never told that what it sent is committed."""
    site = standing_site(tmp_path, whole, "ncm")
    for device in ("a", "b"):
        sends(site.core, whole, device, means(0), 1)
    site.settled = {"a": 1}
    assert [d.device for d in site.core.stalled(0.0)] == ["a"]
    key = {"run": site.core.parts.run, "round": 2, "method": "ncm", "bundle": whole.sha256}
    assert (
        site.core.take(
            [("a", encode(Contribution.withdrawal(**key, extractor=whole.extractor(site.core.method))))], 0.0
        )
        == []
    )
    give(tmp_path / "site.sqlite", "forget", "b", "operator")
    site.core.parts.orders.look_at = 0.0
    steps(site.core, 0.0)
    site.settled = {}
    assert [(d.device, d.outcome) for d in site.core.stalled(0.0) if d.outcome == "committed"] == [("a", "committed")]


def test_a_site_may_ask_for_more_and_admits_what_is_admitted_above(tmp_path: Path, whole: Bundle) -> None:
    site, above = (
        standing_site(tmp_path, whole, "ncm", min_samples=5),
        standing_above(tmp_path, whole, "ncm", min_samples=3),
    )
    for forgotten, numbers in (((whole.manifest.labels[1],), (1,)), ((), ())):
        above.parts.exclusions.forgotten = forgotten
        site.hold_to(above.announcement(), 0.0)
        steps(site.core, 0.0)
        a = site.core.announcement()
        assert (a.min_samples, a.withheld) == (5, numbers)


def test_terms_and_heads_are_those_from_above(tmp_path: Path, whole: Bundle) -> None:
    """Also after a restart in which nobody above was heard."""
    labels, site = whole.manifest.labels, standing_site(tmp_path, whole, "ncm", min_samples=2)
    above = standing_above(tmp_path, whole, "ncm", min_samples=3, encoding="f64")
    above.parts.exclusions.forgotten = (labels[1],)
    site.hold_to(above.announcement(), 0.0)
    steps(site.core, 0.0)
    rows = ClassRows(np.array([0], np.uint16), np.ones((1, WIDTH)))
    site.hear(GlobalState(above.parts.run, 7, 7, {"prototypes": rows}))
    (made,) = steps(site.core, 0.0)
    assert isinstance(made, Solved)
    assert steps(site.core, 0.0) == []
    site.core.parts.store.close()
    again = standing_site(tmp_path, whole, "ncm", min_samples=2)
    a = again.core.announcement()
    assert (a.min_samples, a.encoding, a.withheld, a.global_version) == (3, "f64", (1,), 1)
    np.testing.assert_array_equal(again.core.state.rows["prototypes"].rows, rows.rows)


def test_sums_too_large_for_one_gateway_are_one_line() -> None:
    large = FixedPoint(np.array([1 << 31]), np.array([0]))
    with pytest.raises(StatisticError, match="exact sums in 64 bits, expected numbers up to 4,194,304"):
        large.words()
    kept = FixedPoint.of_integers(np.array([-(1 << 62), -1, (1 << 62) - 1]))
    np.testing.assert_array_equal(kept.words(), [-(1 << 62), -1, (1 << 62) - 1])
    assert ExactSum.zero(means(0).__class__, CLASSES, WIDTH).counts.sum() == 0
