"""A gateway in this process while there are rounds above: which open and close, what goes up, and who is told what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import CLASSES, WIDTH
from aggregator_samples import means as local_means
from gateway_samples import (
    DEVICES,
    above_of,
    born,
    gathered,
    goes_up,
    opened,
    sends,
    site_of,
    steps,
    whole,
    whole_of,
)

from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.rounds.round_machine import Closed, Finished, Opened
from protofleet.aggregator.store.operator_orders import give
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import Method
from protofleet.contract.methods import method as method_of
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, Contribution, Status
from protofleet.contract.wire.sampling import sampled
from protofleet.gateway.followed_rounds import QUIET_S
from protofleet.gateway.rounds_site import Fate, why_not

__all__ = ["whole"]


def exact(core: RoundCoordinator, number: int, name: str) -> ExactSum:
    """What the store holds of a round, added up."""
    kind = method_of(name).statistic
    total = ExactSum.zero(kind, CLASSES, WIDTH)
    for payload in core.parts.store.contributions(number, name):
        message = decode(payload)
        assert isinstance(message, Contribution)
        total = total.add(ExactSum.sent_in(message, kind, CLASSES, WIDTH))
    return total


@pytest.mark.parametrize("name", ["ncm", "ffc", "fedproto", "fedhkd"])
def test_a_round_goes_through_exactly(tmp_path: Path, whole: Bundle, name: str) -> None:
    """Four devices behind a gateway and one beside it: as integers the same sum as of five without, the same result
    but for how float64 adds, and the state of it on the site."""
    if name == "fedhkd":
        whole = whole_of(tmp_path, name)
    direct = above_of(tmp_path / "direct", whole, name, least=5)
    above, site = above_of(tmp_path / "two", whole, name, least=2), site_of(tmp_path / "site", whole)
    born(direct, *DEVICES)
    born(above, "site", "e")
    born(site.core, *DEVICES[:4])
    assert [type(step) for each in (direct, above) for step in steps(each)] == [Opened, Opened]
    site.follow(above.announcement(), None, 0.0)
    assert [type(step) for step in steps(site.core)] == [Solved, Opened]
    told, here = above.announcement(), site.core.announcement()
    same = ("round", "method", "seed", "fraction", "encoding", "global_version", "extractor")
    assert [getattr(told, what) for what in same] == [getattr(here, what) for what in same]
    for device in DEVICES:
        sends(direct, whole, device)
        sends(above if device == "e" else site.core, whole, device)
    assert [type(step) for step in steps(site.core)] == [Closed]
    payload = goes_up(site, told)
    (taken,) = above.take([("site", payload)], 0.0)
    assert (taken.outcome, decode(payload).devices) == ("committed", 4)  # type: ignore[union-attr]
    assert steps(direct)[0] == steps(above)[0] == Closed(1, name)
    assert exact(above, 1, name).equal(exact(direct, 1, name))
    assert direct.findings == above.findings == ()
    for kind, rows in direct.state.rows.items():
        np.testing.assert_allclose(above.state.rows[kind].rows, rows.rows, rtol=1e-9, atol=1e-10)
    site.follow(above.announcement(), above.state, 0.0)
    steps(site.core)
    assert site.core.state.version == above.state.version
    for kind, rows in above.state.rows.items():
        np.testing.assert_array_equal(site.core.state.rows[kind].rows, rows.rows)


def test_what_comes_from_above_while_a_round_closes_stays(
    tmp_path: Path, whole: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round below closes beside the loop: the state that was there when it began is not put back."""
    above, site = above_of(tmp_path, whole, "ncm", least=2), site_of(tmp_path, whole)
    born(above, "site", "e")
    born(site.core, "a")
    steps(above)
    told = above.announcement()
    site.follow(told, None, 0.0)
    steps(site.core)
    sends(site.core, whole, "a")
    sends(above, whole, "e")
    above.rounds.steer("close-round")
    assert Closed(1, "ncm") in steps(above, 200.0)
    adder = site._adder

    def slow(found: Method) -> Callable[..., object]:
        add = adder(found)

        def added(*given: object) -> object:
            site.follow(above.announcement(), above.state, 0.0)
            return add(*given)  # type: ignore[arg-type]

        return added

    monkeypatch.setattr(site, "_adder", slow)
    assert Closed(1, "ncm") in steps(site.core)
    assert site.core.state.version == above.state.version > 0
    assert site.core.parts.store.state().version == site.core.state.version
    assert goes_up(site, told)


def test_the_same_devices_are_sampled(tmp_path: Path, whole: Bundle) -> None:
    """The gateway always is; on the site those are that would be without it, also when the site was started anew."""
    above, site = above_of(tmp_path, whole, "ncm", fraction=0.5, seed=3), site_of(tmp_path, whole)
    born(above, "site")
    steps(above)
    site.follow(above.announcement(), None, 0.0)
    born(site.core, *DEVICES)
    steps(site.core)
    site.core.parts.store.close()
    again = site_of(tmp_path, whole)
    for device in DEVICES:
        (told,) = sends(again.core, whole, device) or [None]
        taken = sampled(device, 1, above.rounds.seed, 0.5)
        assert (told is None) == taken, device  # who is not is refused, and what was taken has no receipt yet
    assert sorted(again.rounds.contributions) == [d for d in DEVICES if sampled(d, 1, above.rounds.seed, 0.5)]


def test_who_is_waited_for(tmp_path: Path, whole: Bundle) -> None:
    """Who was here lately, though asleep now, until a tenth of the deadline before it; of nobody only for a moment."""
    above, site = opened(tmp_path, whole, "ncm")
    assert (steps(site.core, QUIET_S - 0.1), steps(site.core, QUIET_S)) == ([], [Closed(1, "ncm")])
    message = decode(goes_up(site, above.announcement()))
    assert isinstance(message, Contribution)
    assert message.says_nothing
    born(site.core, "a", "b", now=20.0)
    site.core.status("b", encode(Status(False, b"b".ljust(8), 1)), 21.0)
    above.take([("site", encode(message))], 20.0)
    steps(above, 20.0)
    site.follow(above.announcement(), above.state, 20.0)
    steps(site.core, 20.0)
    sends(site.core, whole, "a")
    assert steps(site.core, 20.0 + 89.9) == []
    assert steps(site.core, 20.0 + 90.0) == [Closed(2, "ncm")]


def test_a_device_is_told_what_the_site_was(tmp_path: Path, whole: Bundle) -> None:
    above, site = above_of(tmp_path, whole, "ncm"), site_of(tmp_path, whole)
    fates: dict[int, Fate] = {}
    site.fate = lambda number, method: fates.get(number)
    born(above, "site")
    born(site.core, *DEVICES[:2])
    steps(above)
    for number, fate in enumerate([("committed", ""), ("late", ""), ("rejected", "no room")], 1):
        site.follow(above.announcement(), above.state, 0.0)
        steps(site.core)
        assert (
            sends(site.core, whole, "a")
            == sends(site.core, whole, "b")
            == sends(site.core, whole, "a")
            == site.core.stalled(0.0)
            == []
        )
        steps(site.core)
        fates[number] = fate  # type: ignore[assignment]
        said = site.core.stalled(0.0)
        assert [(d.device, d.outcome, d.round) for d in said] == [("a", fate[0], number), ("b", fate[0], number)]
        assert [d.receipt.status for d in said if d.receipt] == [fate[0]] * 2
        assert ("no room" in said[0].reason) == (fate[0] == "rejected")
        again = sends(site.core, whole, "b")[0]
        assert again.outcome == ("duplicate" if fate[0] == "committed" else fate[0])
        above.take([("site", goes_up(site, above.announcement()))], 0.0)
        steps(above)
    site.follow(above.announcement(), above.state, 0.0)
    assert Finished(3) in steps(site.core)


def test_what_goes_up_is_the_same_after_a_kill(tmp_path: Path, whole: Bundle) -> None:
    above, site = above_of(tmp_path, whole, "ffc"), site_of(tmp_path, whole)
    born(above, "site")
    steps(above)
    site.follow(above.announcement(), None, 0.0)
    born(site.core, *DEVICES[:3])
    steps(site.core)
    for device in DEVICES[:2]:
        sends(site.core, whole, device)
    site.core.parts.store.close()
    site = site_of(tmp_path, whole)  # the round is open, with what it has; its terms are known
    site.follow(above.announcement(), None, 0.0)
    sends(site.core, whole, "c")
    assert steps(site.core, 5.0) == [Closed(1, "ffc")]
    first = goes_up(site, above.announcement())
    site.core.parts.store.close()
    again = site_of(tmp_path, whole)
    assert goes_up(again, above.announcement()) == first
    again.follow(above.announcement(), None, 0.0)
    assert steps(again.core) == []  # it is not opened once more


def test_screening_spares_a_gateway_and_not_its_devices(tmp_path: Path, whole: Bundle) -> None:
    """Most of the samples are its: it counts whole above. On its site a liar is left out."""
    above, site = opened(tmp_path, whole, "fedproto", DEVICES, DEVICES[:3], least=4)
    liar = local_means(9).from_means(local_means(9).means * 1e3, local_means(9).counts)
    sends(site.core, whole, "e", liar)
    gathered(site, whole, *DEVICES[:4])
    assert [(found.device, found.verdict) for found in site.core.findings] == [("e", "left out")]
    payload = goes_up(site, above.announcement())
    assert decode(payload).devices == 4  # type: ignore[union-attr]
    above.take([("site", payload)], 0.0)
    for device in DEVICES[:3]:
        sends(above, whole, device)
    steps(above)
    assert above.findings == ()


def test_what_is_forgotten_on_the_site(tmp_path: Path, whole: Bundle) -> None:
    """An operator is told what of a device has gone up. A class that is forgotten above is forgotten here."""
    above, site = opened(tmp_path, whole, "ncm", DEVICES[:2])
    gathered(site, whole, *DEVICES[:2])
    give(tmp_path / "site.sqlite", "forget", "a", "operator")
    site.core.parts.orders.look_at = 0.0
    (done,) = steps(site.core)
    assert "has it in the site's sum of round 1" in done.outcome  # type: ignore[attr-defined]
    above.parts.exclusions.forgotten = (whole.manifest.labels[1],)
    site.follow(above.announcement(), None, 0.0)
    steps(site.core)
    assert site.core.announcement().withheld == (1,)


def test_what_is_refused(tmp_path: Path, whole: Bundle) -> None:
    with pytest.raises(UsageError, match=r"--gateway, expected rounds whose result is a sum: .*fedproto.*, got fedcof"):
        above_of(tmp_path / "fedcof", whole, "fedcof")
    a = above_of(tmp_path, whole, "ncm").announcement()
    hyper = whole.manifest.hyper
    assert why_not(a, hyper) == ""
    assert "weighs devices one by one" in why_not(Announcement(**{**vars(a), "method": "fedcof"}), hyper)
    assert "weighs devices" in why_not(Announcement(**{**vars(a), "method": "fedproto"}), {"aggregation": "client"})
    refused = above_of(tmp_path / "other", whole, "ncm")
    born(refused, "x")
    steps(refused)
    site = site_of(tmp_path / "s", whole)
    born(site.core, "a")
    site.follow(refused.announcement(), None, 0.0)
    steps(site.core)
    gathered(site, whole, "a")
    (told,) = refused.take([("x", goes_up(site, refused.announcement()))], 0.0)
    assert (told.outcome, "--gateway" in told.reason) == ("rejected", True)
