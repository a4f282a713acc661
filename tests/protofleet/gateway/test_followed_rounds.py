"""A gateway in this process while there are rounds above: how its site keeps step, and what stays out of a sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from aggregator_samples import CLASSES, WIDTH
from aggregator_samples import means as local_means
from gateway_samples import DEVICES, above_of, born, gathered, goes_up, opened, sends, site_of, steps, whole

from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.rounds.round_machine import Closed, Opened
from protofleet.aggregator.store.operator_orders import give
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Contribution
from protofleet.contract.wire.sampling import sampled
from protofleet.gateway.followed_rounds import QUIET_S, FollowedRounds, policy_of

__all__ = ["whole"]


def machine(whole: Bundle, folder: Path, least: int = 1, fraction: float = 1.0, **options: object) -> FollowedRounds:
    """That of a site, with round 1 open above."""
    above = above_of(folder, whole, "ncm", fraction=fraction, **options)  # type: ignore[arg-type]
    born(above, "site")
    steps(above)
    made = FollowedRounds(("ncm",), policy_of(least, fraction, 100.0))
    made.above, made.ready = above.announcement(), True
    return made


def test_who_is_online_and_silent_costs_one_round(tmp_path: Path, whole: Bundle) -> None:
    """A camera that hangs, or a birth without its will: not a deadline in each round of the whole fleet."""
    rounds = machine(whole, tmp_path)
    rounds.birth("a", b"1" * 8, 0.0)
    rounds.birth("hangs", b"1" * 8, 0.0)
    assert rounds.advance(0.0) == Opened(1, "ncm", 0)
    rounds.contributed("a")
    assert (rounds.advance(89.9), rounds.advance(90.0)) == (None, Closed(1, "ncm"))
    assert [device for device, _ in rounds.take_lost()] == ["hangs"]
    rounds.birth("hangs", b"1" * 8, 91.0)  # it is asked, and answers
    assert rounds.above is not None
    rounds.above = replace(rounds.above, round=2)
    assert rounds.advance(100.0) == Opened(2, "ncm", 0)
    rounds.contributed("a")
    assert rounds.advance(101.0) == Closed(2, "ncm")


@pytest.mark.parametrize(
    ("above", "site"), [(0.0, 0.0), (1.0, 0.5), (4.0, 2.0), (10.0, 7.5), (600.0, 540.0), (9e3, 8940.0)]
)
def test_a_site_leaves_time_for_the_way_up(above: float, site: float) -> None:
    assert policy_of(1, 1.0, above).deadline_s == pytest.approx(site)


def test_a_site_keeps_step_with_the_fleet(tmp_path: Path, whole: Bundle) -> None:
    """It closes what is over above, opens nothing before the state that it starts from is here, and waits for as many
    as it is told to."""
    rounds = machine(whole, tmp_path, least=2)
    rounds.ready = False
    assert rounds.advance(0.0) is None
    rounds.ready = True
    assert rounds.advance(0.0) == Opened(1, "ncm", 0)
    rounds.birth("a", b"1" * 8, 0.0)
    rounds.contributed("a")
    assert rounds.advance(QUIET_S + 1.0) is None
    rounds.birth("b", b"1" * 8, 0.0)
    rounds.refused("b")
    assert rounds.advance(QUIET_S + 1.0) == Closed(1, "ncm")
    for number, over in enumerate(({"round": 7}, {"phase": "finished"}), 2):
        told = replace(rounds.above, round=number, phase="open")  # type: ignore[type-var]
        rounds.above = told
        assert rounds.advance(20.0) == Opened(number, "ncm", 0)
        rounds.above = replace(told, **over)  # type: ignore[arg-type]
        assert rounds.advance(21.0) == Closed(number, "ncm")


def test_nobody_waits_for_who_is_not_asked(tmp_path: Path, whole: Bundle) -> None:
    rounds = machine(whole, tmp_path, fraction=0.5, seed=3)
    rounds.expect(DEVICES)
    assert isinstance(rounds.advance(0.0), Opened)
    asked = [device for device in DEVICES if sampled(device, 1, rounds.seed, 0.5)]
    assert 1 < len(asked) < len(DEVICES)
    rounds.contributed(asked[0])
    for device in asked[1:]:
        assert rounds.advance(0.0) is None
        rounds.birth(device, b"1" * 8, 0.0)
        rounds.refused(device)
        rounds.death(device, b"1" * 8)
    assert rounds.advance(0.0) == Closed(1, "ncm")


@pytest.mark.parametrize(("what", "detail"), [("forget", ""), ("forget class", "1")])
def test_what_goes_up_is_without_what_was_forgotten_meanwhile(
    tmp_path: Path, whole: Bundle, what: str, detail: str
) -> None:
    above, site = opened(tmp_path, whole, "ncm", DEVICES[:3])
    gathered(site, whole, *DEVICES[:3])
    before = decode(goes_up(site, above.announcement()))
    name = whole.manifest.labels[int(detail)] if detail else ""
    give(tmp_path / "site.sqlite", what, "" if detail else "a", "operator", detail=name)
    site.core.parts.orders.look_at = 0.0
    steps(site.core)
    after = decode(goes_up(site, above.announcement()))
    assert isinstance(before, Contribution)
    assert isinstance(after, Contribution)
    if detail:
        assert (before.holds((1,)), after.holds((1,))) == (True, False)
    else:
        assert (before.devices, after.devices) == (3, 2)
    site.core.parts.store.close()
    assert goes_up(site_of(tmp_path, whole), above.announcement()) == encode(after)


def test_what_no_exact_sum_can_hold_is_refused_on_the_site(tmp_path: Path, whole: Bundle) -> None:
    """One device's refusal, and not the end of the site's round. Who sends nothing is not counted."""
    above, site = opened(tmp_path, whole, "fedproto", DEVICES[:3])
    sends(site.core, whole, "a")
    huge = local_means(1).from_means(local_means(1).means * 1e3, [10**5, 10**5, 0])
    (told,) = sends(site.core, whole, "b", huge)
    assert (told.outcome, "exact sums" in told.reason) == ("rejected", True)
    none = local_means(1).zero(CLASSES, WIDTH)
    sends(site.core, whole, "c", none)
    assert steps(site.core) == [Closed(1, "fedproto")]
    assert decode(goes_up(site, above.announcement())).devices == 1  # type: ignore[union-attr]


def test_a_round_opens_with_the_state_that_it_is_announced_with(tmp_path: Path, whole: Bundle) -> None:
    """And what the round before gathered can still be told then; nothing is told twice."""
    above, site = opened(tmp_path, whole, "ncm", ("a",))
    gathered(site, whole, "a")
    first = goes_up(site, above.announcement())
    above.take([("site", first)], 0.0)
    steps(above)
    site.follow(above.announcement(), None, 0.0)
    assert steps(site.core) == []
    site.follow(above.announcement(), above.state, 0.0)
    assert [type(step) for step in steps(site.core)] == [Solved, Opened]
    site.follow(above.announcement(), above.state, 0.0)
    assert steps(site.core) == []
    record = site.closed
    assert record is not None
    assert (record.number, site.rounds.number) == (1, 2)


def test_a_device_beside_a_gateway_has_its_share_and_no_more(tmp_path: Path, whole: Bundle) -> None:
    """Of the samples of all, with those behind gateways; and it is three devices that there must be, with those."""
    above, site = opened(tmp_path, whole, "fedproto", DEVICES[:3], ("e",), least=2)
    gathered(site, whole, *DEVICES[:3])
    above.take([("site", goes_up(site, above.announcement()))], 0.0)
    sends(above, whole, "e", local_means(4, count=500))
    assert isinstance(above.advance(0.0, 1000.0), Closed)
    (found,) = above.findings
    assert (found.device, found.reason) == ("e", "1,001 samples, more than the others allow, count as 63")


def test_a_gateway_takes_part_whoever_is_sampled(tmp_path: Path, whole: Bundle) -> None:
    """And what no exact sum can hold is refused beside it, since all are added up as whole numbers."""
    seed = next(seed for seed in range(99) if not sampled("site", 1, seed, 0.5) and sampled("e", 1, seed, 0.5))
    above, site = above_of(tmp_path, whole, "fedproto", fraction=0.5, seed=seed), site_of(tmp_path, whole)
    born(above, "site")
    assert steps(above) == [Opened(1, "fedproto", seed)]
    site.follow(above.announcement(), None, 0.0)
    steps(site.core)
    device = next(device for device in DEVICES if sampled(device, 1, seed, 0.5))
    born(site.core, device)
    sends(site.core, whole, device)
    steps(site.core)
    (told,) = above.take([("site", goes_up(site, above.announcement()))], 0.0)
    assert told.outcome == "committed"
    huge = local_means(1).from_means(local_means(1).means * 1e3, [10**5, 10**5, 0])
    (told,) = sends(above, whole, "e", huge)
    assert (told.outcome, "exact sums" in told.reason) == ("rejected", True)


@pytest.mark.parametrize("name", ["site", "anyone"])
def test_what_comes_late_for_others_stands_in_no_round(tmp_path: Path, whole: Bundle, name: str) -> None:
    """A gateway has told its devices that it was late; who is no gateway speaks for nobody by coming late."""
    above, site = above_of(tmp_path, whole, "ncm", every=10.0, window=5.0), site_of(tmp_path, whole)
    born(above, "e")
    born(site.core, *DEVICES[:3])
    steps(above)
    site.follow(above.announcement(), None, 0.0)
    steps(site.core)
    gathered(site, whole, *DEVICES[:3])
    payload = goes_up(site, above.announcement())
    sends(above, whole, "e")
    above.rounds.steer("close-round")
    assert Closed(1, "ncm") in steps(above)
    (told,) = above.take([(name, payload)], 0.0)
    assert (told.outcome, above.books.late._late) == ("late", {})
