"""The operator's page of a fleet whose sums stand, with a liar and a gateway: who contradicts the others, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aggregator_samples import BUNDLE
from browser import chromium
from fleets import Served

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.page import standing_comparison
from protofleet.aggregator.page.standing_comparison import StandingComparison
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.standing_tables import Stands
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import ClassRows, Contribution, Status
from tests.aggregator.screening.test_named import fleet

WHY = "what it calls 0 is like what others call 2: contradicted by 4 of 4 devices"
BEHIND = 3


def sent(store: DurableStore, statistic: Statistic, members: int = 0) -> bytes:
    """A device's standing sums, or a gateway's."""
    about: dict[str, Any] = {"run": store.run, "round": 1, "method": "ncm", "bundle": BUNDLE, "standing": "present"}
    message = Contribution.of(statistic, **about)
    if members:
        nothing = Contribution.of(type(statistic).zero(statistic.classes, statistic.width), **about)
        nothing = replace(nothing, body=ClassRows(nothing.body.classes, nothing.body.rows[:, :0]))
        message = ExactSum.of(statistic).for_others(type(statistic), statistic.width, members, nothing)
        assert message.devices == members
    return encode(message, "f64")


def stand(store: DurableStore, statistics: Mapping[str, Statistic], generation: int = 1) -> None:
    for name, statistic in statistics.items():
        members = BEHIND if name == "site-1" else 0
        store.standing.commit([Stands(name, generation, sent(store, statistic, members), 4)], {}, 1000.0)
        store.devices.status(name, Status(True, b"instance", 1), 1, 1.0)
        store.devices.decided(name, 1, 1.0, members=members)
    store.devices.keep(20.0 * generation, 3.0)


def stocked(path: Path, statistics: Mapping[str, Statistic]) -> Path:
    with DurableStore(path, BUNDLE, "orchard") as store:
        store.meta.put("standing", "ncm")
        stand(store, statistics)
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A page of five devices, of which `hall` lies, and a gateway whose sums lie as much."""
    folder = tmp_path_factory.mktemp("standing")
    whole = {**fleet("ncm"), "site-1": fleet("ncm")["hall"]}
    path = stocked(folder / "store", whole)
    near = {"peak_rss_bytes": 1.1e8, "profile_memory_at_most_bytes": 1.2e8, "profile_train_step_peak_rss_bytes": 1e8}
    far = near | {"peak_rss_bytes": 1.05e8}
    with DurableStore(path, BUNDLE, "orchard") as store:
        for name, figures in (("attic", near), ("shed", far)):
            store.devices.status(name, Status(True, b"instance", 1, "", {}, figures), 1, 1.0)
        store.devices.keep(100.0, 3.0)
    found = Served(folder, "watch", "watch", "--page", "0", "--store", path)
    yield found
    found.end()


def test_who_contradicts_the_others_is_told_with_the_evidence_and_a_gateway_is_not_compared(served: Served) -> None:
    def holds(parts: dict[str, Any], rows: dict[str, Any]) -> object:
        return parts.get("compared", {}).get("at")

    visitor = served.visitor()
    visitor.open()
    parts = served.until(visitor, holds)
    assert parts["compared"] == {"at": parts["compared"]["at"], "devices": 5, "suspects": [["hall", True, WHY]]}
    assert ["hall", "contradicts", WHY] in parts["top"]["cares"]
    assert "1 contradicts" in parts["top"]["sentence"]
    assert (parts["gateways"], parts["behind"]) == ([["site-1", BEHIND]], [1, BEHIND])
    assert f"{BEHIND} more behind 1 gateway" in parts["top"]["sentence"]
    found = json.loads(visitor.ask("GET", "/device?name=hall")[2])
    assert ["contradicts", WHY] in found["cares"]
    lines = json.loads(visitor.ask("GET", "/device?name=site-1")[2])["lines"]
    assert [line for line in lines if line.startswith("a gateway: its newest sums are of 3 devices, whose names stay")]
    assert visitor.ask("GET", "/runbook?part=contradicts")[0] == 200


def test_an_operator_sees_the_liar_and_the_gateway(served: Served) -> None:
    with chromium() as browser:
        page = browser.open(f"http://127.0.0.1:{served.port}/", width=1400)
        page.until("document.getElementById('compared').textContent.startsWith('Sums of 5 devices were compared')")
        named = "document.getElementById('named').textContent"
        assert page.run(named) == f"hall: {WHY} (contradicts)"
        gateways = page.run("document.getElementById('gateways').innerText")
        assert gateways.startswith("3 more devices behind 1 gateway: site-1 (3). Their names stay on their sites;")
        page.run("location.hash = '#filter=contradicts'")
        page.until("document.getElementById('count').textContent === '1 of 6 devices'")
        assert page.run("document.querySelector('#rows th').textContent") == "hall"
        page.run("location.hash = '#filter=memory'")  # near what was predicted at most
        page.until("document.querySelector('#rows th').textContent === 'attic'")
        assert page.run("document.getElementById('count').textContent") == "1 of 6 devices"
        assert "110" in page.run("document.querySelector('#rows tr').innerText")
        page.run("location.hash = '#device=attic'")
        words = "110 MB at most, 100 MB profiled, 120 MB predicted at most"
        page.until(f"document.getElementById('one-body').textContent.includes('{words}')")
        page.run("location.hash = '#device=site-1'")
        page.until("document.getElementById('one-body').textContent.includes('whose names stay on its site')")


# ── when it is compared ─────────────────────────────────────────────────────────────────────────────────────────────


def test_sums_are_compared_again_only_when_others_stand(tmp_path: Path) -> None:
    place, news = stocked(tmp_path / "s", fleet("ncm")), []
    comparison = StandingComparison(place, lambda: news.append(1))
    assert comparison.newest is None
    comparison.compare()
    first = comparison.newest
    assert first is not None
    assert first.accused == {"hall": WHY}
    comparison.compare()
    assert comparison.newest is first
    assert len(news) == 1
    with DurableStore(place, BUNDLE, "orchard") as store:
        stand(store, {"hall": fleet("ncm", liar=None)["hall"]}, 2)  # it has corrected its labels
    comparison.compare()
    assert comparison.newest is not None
    assert (comparison.newest.accused, len(news)) == ({}, 2)


def test_a_device_that_takes_the_place_of_a_forgotten_one_is_compared(tmp_path: Path) -> None:
    place = stocked(tmp_path / "s", fleet("ncm"))
    comparison = StandingComparison(place, lambda: None)
    comparison.compare()
    with DurableStore(place, BUNDLE, "orchard") as store:
        liar = sent(store, fleet("ncm")["hall"])
        with store._file.transaction() as db:
            db.execute("DELETE FROM standing WHERE device = 'hall'")
        store.standing.commit([Stands("lodge", 1, liar, 4)], {}, 1001.0)
    comparison.compare()
    assert comparison.newest is not None
    assert comparison.newest.accused == {"lodge": WHY}


@pytest.mark.parametrize("devices", [1, 2])
def test_few_devices_are_not_said_to_agree(tmp_path: Path, devices: int) -> None:
    comparison = StandingComparison(stocked(tmp_path / "s", dict(list(fleet("ncm").items())[:devices])), lambda: None)
    comparison.compare()
    assert comparison.newest is not None
    assert (comparison.newest.devices, comparison.newest.suspects) == (devices, [])


def test_where_rounds_are_nothing_is_compared(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "orchard"):
        comparison = StandingComparison(tmp_path / "s", lambda: None)
        comparison.compare()
    assert comparison.newest is None


def test_comparing_rests_many_times_as_long_as_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    comparison = StandingComparison(stocked(tmp_path / "s", fleet("ncm")), lambda: None)
    monkeypatch.setattr(comparison._over, "wait", lambda rest_s: (rests.append(rest_s), comparison._over.set()))
    for least_s in (60.0, 0.0):
        monkeypatch.setattr(standing_comparison, "LEAST_REST_S", least_s)
        comparison._over.clear()
        comparison._mark, comparison.took_s = None, 0.0
        comparison._compare_again()
    assert rests[0] == max(60.0, rests[0])
    np.testing.assert_allclose(rests[1], 99 * comparison.took_s)
    assert comparison.took_s > 0
