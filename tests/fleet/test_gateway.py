"""A fleet with gateways, over real brokers with separate processes: equal sums, kills, and who leaves."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import Embedded
from fleets import CLASSES, FLEET, Fleet, bundle, run, share
from gateways import STANDING, Site, site_of
from postgres_server import need_postgres

from protofleet.aggregator.database import place_of
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.methods import method
from protofleet.contract.wire.messages import Contribution

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ncm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(tmp_path_factory.mktemp("bundle") / "ncm.bundle", "ncm")


@pytest.fixture
def broker() -> Iterator[Embedded]:
    """Above; it forgets everything when it dies."""
    made = Embedded()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def fleet(tmp_path: Path, broker: Embedded) -> Iterator[Fleet]:
    made = Fleet(folder=tmp_path, url=broker.url)
    yield made
    made.end()


@pytest.fixture
def site(fleet: Fleet) -> Iterator[Site]:
    with site_of(fleet, "site-1") as made:
        yield made


def stop(fleet: Fleet, name: str, how: signal.Signals = signal.SIGTERM) -> None:
    process = fleet.processes.pop(name)
    process.send_signal(how)
    process.wait()


def sums(fleet: Fleet, path: Path, name: str) -> dict[str, ExactSum]:
    """The exact sums that a store holds, by who sent them; its aggregator must have ended."""
    kind, made = method(name).statistic, read_bundle(path)
    with DurableStore(fleet.folder / "store.sqlite", made.sha256, FLEET) as store:
        width = made.manifest.features
        return {who: ExactSum.sent_in(held_by(it), kind, CLASSES, width) for who, it in store.standing.payloads()}


def total(found: dict[str, ExactSum]) -> ExactSum:
    first, *others = found.values()
    for other in others:
        first = first.add(other)
    return first


@pytest.mark.parametrize("name", ["ncm", "ffc"])
def test_sums_through_a_gateway(fleet: Fleet, site: Site, ncm: Path, name: str) -> None:
    """Two devices behind a gateway and one beside it: the sums above are those of the three, as integers."""
    fleet.aggregator([ncm], "--method", name, *STANDING, "--gateway", "site-1")
    site.gateway(ncm, fleet.url, "--method", name)
    site.client("a", ncm, share(0, [0, 1, 2]))
    site.client("b", ncm, share(1, [2, 3, 4]))
    fleet.client("c", ncm, share(2, [0, 4]))
    fleet.wait_for("aggregator", "120 samples of 3 devices")
    for device in "ab":
        site.wait_for(device, "committed|duplicate")
    (version,) = re.findall(r"global version (\d+)\S* 120 samples", fleet.log("aggregator"))
    site.wait_for("gateway", f"the head is version {version} of the aggregator above")
    _check_names_stay_on_the_site(fleet, site)
    stop(site, "gateway")
    stop(fleet, "aggregator")
    above, below = sums(fleet, ncm, name), sums(site, ncm, name)
    (kind,) = method(name).global_rows
    states = [each.state(read_bundle(ncm).sha256).rows[kind] for each in (fleet, site)]
    np.testing.assert_array_equal(states[0].rows.astype(np.float32), states[1].rows)  # as heads travel
    assert (sorted(above), sorted(below)) == (["c", "site-1"], ["a", "b"])
    assert above["site-1"].equal(total(below))


def _check_names_stay_on_the_site(fleet: Fleet, site: Site) -> None:
    """Above stands how many devices there are, and where their names are; there they are."""
    told = ("--store", fleet.folder / "store.sqlite", "--json", "-")
    code, said = run("fleet", "list", *told)
    assert (code, "site-1: a gateway: its newest sums are of 2 devices, whose names" in said) == (0, True), said
    listed = json.loads(said[said.index("{") :].partition("\n")[0])
    assert listed["gateways"] == {"site-1": 2}
    assert {each["device"] for each in listed["devices"]} == {"c", "site-1"}
    code, said = run("fleet", "list", "--store", site.folder / "store.sqlite", "--json", "-")
    listed = json.loads(said[said.index("{") :].partition("\n")[0])
    assert (code, listed["gateways"]) == (0, {})
    assert {each["device"] for each in listed["devices"]} == {"a", "b"}


def test_a_device_behind_a_gateway_goes(fleet: Fleet, site: Site, ncm: Path) -> None:
    """One withdraws, another is forgotten on the site: above stands what is left, as if they had never been there."""
    fleet.aggregator([ncm], *STANDING, "--gateway", "site-1")
    site.gateway(ncm, fleet.url)
    for index, device in enumerate("abc"):
        site.client(device, ncm, share(index, [0, 1, 2, 3, 4]))
    fleet.wait_for("aggregator", "120 samples of 3 devices")
    stop(site, "a")
    told = ("--bundle", ncm, "--broker", site.url, "--fleet", FLEET, "--id", "a", "--state", site.folder / "state-a")
    code, said = run("client", *told, "--withdraw")
    assert (code, "withdrawn" in said) == (0, True), said
    fleet.wait_for("aggregator", "(?s)of 3 devices.*80 samples of 2 devices")
    code, said = run("forget", "b", "--store", site.folder / "store.sqlite")
    assert (code, "done, global version" in said) == (0, True), said
    fleet.wait_for("aggregator", "(?s)of 3 devices.*of 2 devices.*40 samples of 1 device")
    stop(site, "gateway")
    stop(fleet, "aggregator")
    above, below = sums(fleet, ncm, "ncm"), sums(site, ncm, "ncm")
    assert sorted(below) == ["c"]
    assert above["site-1"].equal(below["c"])


@pytest.mark.parametrize("name", ["ncm", "ffc"])
def test_whoever_is_killed(fleet: Fleet, site: Site, broker: Embedded, ncm: Path, name: str) -> None:
    """Gateway, aggregator above, devices, both brokers: kill -9 while sums are on their way; none is lost or twice."""
    above = ("--method", name, *STANDING, "--gateway", "site-1")
    fleet.aggregator([ncm], *above)
    site.gateway(ncm, fleet.url, "--method", name)
    for number in range(1, 7):
        for index, device in enumerate("ab"):
            if device in site.processes:
                stop(site, device, signal.SIGKILL)
            site.client(device, ncm, share(index, [0, 1, 2], 40 + 10 * number))
        time.sleep(0.35 * number)
        for who in ("gateway", "aggregator")[: 1 + number % 2] if number % 3 else ("aggregator",):
            stop(site if who == "gateway" else fleet, who, signal.SIGKILL)
        for each in (broker, site.broker) if number in (3, 5) else ():
            each.kill()
            each.start()
        if "aggregator" not in fleet.processes:
            fleet.aggregator([ncm], *above)
        if "gateway" not in site.processes:
            site.gateway(ncm, fleet.url, "--method", name)
    fleet.wait_for("aggregator", "200 samples of 2 devices", 120.0)
    for device in "ab":
        site.wait_for(device, "committed|duplicate")
    stop(site, "gateway")
    stop(fleet, "aggregator")
    assert sums(fleet, ncm, name)["site-1"].equal(total(sums(site, ncm, name)))


def test_a_receipt_is_of_the_aggregator_above(fleet: Fleet, site: Site, ncm: Path) -> None:
    """While nobody above answers a device has no receipt. Without --gateway the sums are refused, in one line, and go
    up again as soon as the aggregator names the gateway, without anybody starting that anew."""
    fleet.aggregator([ncm], *STANDING)
    site.gateway(ncm, fleet.url)
    site.client("a", ncm, share(0, [0, 1, 2]))
    site.wait_for("gateway", "refused by the aggregator above: .*--gateway; .* tried again in 5 minutes")
    assert "committed" not in site.log("a")
    stop(fleet, "aggregator")
    fleet.aggregator([ncm], *STANDING, "--gateway", "site-1")
    site.wait_for("a", "committed|duplicate", 30.0)
    fleet.wait_for("aggregator", "40 samples of 1 device")


@pytest.mark.parametrize(("name", "options"), [("ncm", ()), ("fedproto", ("--calibrate",))])
def test_rounds_through_a_gateway(
    fleet: Fleet, site: Site, tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    """Three rounds, with FFC's at the end where devices train: each the exact sum of all devices, and all end."""
    made = bundle(tmp_path / "b.bundle", name)
    rounds = 3 + len(options)
    fleet.aggregator([made], "--rounds", 3, "--min-clients", 2, "--gateway", "site-1", *options)
    site.gateway(made, fleet.url, "--min-clients", 2)
    site.client("a", made, share(0, [0, 1, 2]))
    site.client("b", made, share(1, [2, 3, 4]))
    fleet.client("c", made, share(2, [0, 4]))
    assert set(fleet.finish(120.0).values()) | set(site.finish(120.0).values()) == {0}
    for number in range(1, rounds + 1):
        found, behind = fleet.payloads(number), site.payloads(number)
        assert (sorted(found), sorted(behind)) == (["c", "site-1"], ["a", "b"])
        way = held_by(found["site-1"]).method
        kind, width = method(way).statistic, read_bundle(made).manifest.features
        up, *below = (ExactSum.sent_in(held_by(it), kind, CLASSES, width) for it in (found["site-1"], *behind.values()))
        assert up.equal(below[0].add(below[1])), (number, way)
        for device, payload in behind.items():
            sent, outcome = site.sent(device)[number]
            assert (sent, outcome in ("committed", "duplicate")) == (payload, True)
    states = [each.state(read_bundle(made).sha256) for each in (fleet, site)]
    for kind, rows in states[0].rows.items():
        np.testing.assert_array_equal(rows.rows.astype(np.float32), states[1].rows[kind].rows)


def test_rounds_that_no_gateway_can_take_part_in(fleet: Fleet, site: Site, tmp_path: Path) -> None:
    """Refused in one line, on either side."""
    made = bundle(tmp_path / "b.bundle", "fedcof")
    fleet.aggregator([made], "--every", "1h", "--min-clients", "5")
    site.gateway(made, fleet.url)
    site.wait_for("gateway", "above there are rounds of fedcof, which weighs devices one by one.*; nothing is sent")
    code, said = run("aggregate", "--bundle", made, "--broker", fleet.url, "--store", "x", "--gateway", "g")
    assert (code, "--gateway, expected rounds whose result is a sum" in said) == (2, True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [STANDING, ("--rounds", 2, "--min-clients", 2)], ids=["standing", "rounds"])
def test_a_gateway_below_several_workers(fleet: Fleet, site: Site, ncm: Path, options: tuple[object, ...]) -> None:
    """One of the two above is killed; the other goes on, and the site's sums count once."""
    place = need_postgres().new_place()
    told = ("--bundle", ncm, "--broker", fleet.url, "--store", place, "--fleet", FLEET, *options)
    for name in ("first", "second"):
        fleet.start(name, "aggregate", *told, "--worker", "--gateway", "site-1", "-v")
        fleet.wait_for(name, "connected to")
    site.gateway(ncm, fleet.url, "--min-clients", 2)
    site.client("a", ncm, share(0, [0, 1, 2]))
    if options is not STANDING:
        site.client("b", ncm, share(1, [2, 3, 4]))
        fleet.client("c", ncm, share(2, [0, 4]))
        assert set(fleet.finish(240.0).values()) | set(site.finish(240.0).values()) == {0}
        with DurableStore(place_of(place), read_bundle(ncm).sha256, FLEET) as store:
            assert [list(record.uplink_bytes) for record in store.rounds()] == [["c", "site-1"]] * 2
            _, up = (_exactly(ncm, held_by(payload)) for payload in store.contributions(2, "ncm"))
        first, second = (_exactly(ncm, held_by(payload)) for payload in site.payloads(2).values())
        assert up.equal(first.add(second))
        return
    fleet.wait_for("first", "40 samples of 1 device")
    stop(fleet, "first", signal.SIGKILL)
    site.client("b", ncm, share(1, [2, 3, 4]))
    fleet.wait_for("second", "80 samples of 2 devices", 120.0)
    site.wait_for("b", "committed|duplicate")
    stop(site, "gateway")
    stop(fleet, "second")
    with DurableStore(place_of(place), read_bundle(ncm).sha256, FLEET) as store:
        ((who, payload),) = store.standing.payloads()
    assert who == "site-1"
    assert _exactly(ncm, held_by(payload)).equal(total(sums(site, ncm, "ncm")))


def _exactly(path: Path, message: Contribution) -> ExactSum:
    return ExactSum.sent_in(message, method("ncm").statistic, CLASSES, read_bundle(path).manifest.features)
