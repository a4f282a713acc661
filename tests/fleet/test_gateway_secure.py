"""A fleet with a gateway as it is deployed: Mosquitto, TLS and signatures on both hops, a store on a server; what an
operator does to a site, and a gateway that vanishes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from brokers import Mosquitto, require_mosquitto
from fleets import CLASSES, FLEET, LABELS, Fleet, bundle, run, share
from gateways import STANDING, Site, site_of
from pki_samples import Authority, GuardedMosquitto
from postgres_server import need_postgres

from protofleet.aggregator.database import AnyPlace
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.methods import method

pytestmark = pytest.mark.slow

ABOVE, BELOW = bytes([9]) * 32, bytes([8]) * 32  # keys that sign what is told above, and on the site


@dataclass
class Secured:
    """A Mosquitto with the files of an authority."""

    authority: Authority
    running: GuardedMosquitto | None = None

    @property
    def url(self) -> str:
        return self.authority.url

    def start(self) -> None:
        self.running = GuardedMosquitto(self.authority)

    def kill(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        assert self.running is not None
        self.running.close()

    def own(self, name: str, prefix: str = "") -> tuple[object, ...]:
        """The options with the files of a member."""
        ca = self.authority.folder / "broker" / "ca.pem"
        return f"--{prefix}ca", ca, f"--{prefix}cert", self.authority.file(name)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[tuple[Fleet, Site]]:
    """A fleet and a site, with a Mosquitto each."""
    require_mosquitto()
    above, below = Mosquitto(tmp_path / "above"), Mosquitto(tmp_path / "below")
    above.start()
    fleet = Fleet(folder=tmp_path, url=above.url)
    try:
        with site_of(fleet, "site-1", below) as site:
            yield fleet, site
    finally:
        fleet.end()
        above.stop()


def sums(place: AnyPlace, path: Path, name: str) -> dict[str, ExactSum]:
    """The exact sums that a store holds, by who sent them; its aggregator must have ended."""
    kind, made = method(name).statistic, read_bundle(path)
    with DurableStore(place, made.sha256, FLEET) as store:
        width = made.manifest.features
        return {who: ExactSum.sent_in(held_by(it), kind, CLASSES, width) for who, it in store.standing.payloads()}


def stop(fleet: Fleet, name: str, how: signal.Signals = signal.SIGTERM) -> None:
    process = fleet.processes.pop(name)
    process.send_signal(how)
    process.wait()


def told(*words: object) -> str:
    code, said = run(*words)
    assert code == 0, said
    return said


def token(device: str, store: Path) -> str:
    found = re.search(r"^[\w-]{20,}$", told("fleet", "invite", device, "--store", store), re.M)
    assert found is not None
    return found.group()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("options", [STANDING, ("--rounds", 2, "--min-clients", 1)], ids=["standing", "rounds"])
def test_every_certificate_and_signature_on_both_hops(tmp_path: Path, options: tuple[object, ...]) -> None:
    """The gateway is a device of one authority and the aggregator of another; its sums travel up signed, and those of
    its devices as int32."""
    require_mosquitto()
    above, below = (
        Secured(Authority(tmp_path / name, dict.fromkeys(members, (FLEET,)), (FLEET,)))
        for name, members in (("pki-above", ("site-1",)), ("pki-below", ("a", "b")))
    )
    keys = {"above": ABOVE, "below": BELOW, "site-1": bytes([7]) * 32}
    for name, key in keys.items():
        (tmp_path / f"{name}.key").write_bytes(key)
        (tmp_path / f"{name}.pub").write_bytes(Signer(key).public_key)
    made = bundle(tmp_path / "b.bundle", "ncm", private_key=BELOW)
    above.start()
    fleet = Fleet(folder=tmp_path, url=above.url)
    try:
        with site_of(fleet, "site-1", below) as site:
            signs = ("--sign", tmp_path / "above.key", "--enrolled", "--encoding", "int32", "--gateway", "site-1")
            fleet.aggregator([made], *options, *signs, *above.own("aggregator"))
            fleet.wait_for("aggregator", "connected to")
            upward = ("--identity", tmp_path / "site-1.key", "--token", token("site-1", tmp_path / "store.sqlite"))
            upward += ("--trust", tmp_path / "above.pub", *above.own("site-1", "above-"))
            signs = ("--sign", tmp_path / "below.key", "--enrolled", "--min-clients", 2)
            site.gateway(made, fleet.url, *upward, *signs, *below.own("aggregator"))
            site.wait_for("gateway", "messages up to")
            for index, device in enumerate("ab"):
                hears = ("--trust", tmp_path / "below.pub", "--token", token(device, site.folder / "store.sqlite"))
                site.client(device, made, share(index, [index, 2]), *hears, *below.own(device))
            if options is STANDING:
                for device in "ab":
                    site.wait_for(device, "committed|duplicate")
                fleet.wait_for("aggregator", "80 samples of 2 devices")
                stop(site, "gateway")
                stop(fleet, "aggregator")
                up = sums(tmp_path / "store.sqlite", made, "ncm")["site-1"]
                first, second = sums(site.folder / "store.sqlite", made, "ncm").values()
                assert up.equal(first.add(second))
            else:
                assert set(fleet.finish(240.0).values()) | set(site.finish(240.0).values()) == {0}
                assert all({s for _, s in site.sent(d).values()} <= {"committed", "duplicate"} for d in "ab")
            for each in (above, below):
                assert each.running is not None
                assert "Denied" not in each.running.log
            site.end()
    finally:
        fleet.end()
        above.stop()


@pytest.mark.timeout(600)
def test_a_site_whose_store_is_on_a_server(plain: tuple[Fleet, Site]) -> None:
    """Killed, too."""
    fleet, site = plain
    server = need_postgres()
    place = server.new_place()
    made = bundle(fleet.folder / "b.bundle", "ffc")
    fleet.aggregator([made], *STANDING, "--gateway", "site-1", "--sums-encoding", "int32")
    site.gateway(made, fleet.url, "--store", place)
    site.client("a", made, share(0, [0, 1, 2]))
    fleet.wait_for("aggregator", "40 samples of 1 device")
    stop(site, "gateway", signal.SIGKILL)
    site.client("b", made, share(1, [2, 3, 4]))
    site.gateway(made, fleet.url, "--store", place)
    fleet.wait_for("aggregator", "80 samples of 2 devices")
    for device in "ab":
        site.wait_for(device, "committed|duplicate")
    stop(site, "gateway")
    stop(fleet, "aggregator")
    first, second = sums(place, made, "ffc").values()
    assert sums(fleet.folder / "store.sqlite", made, "ffc")["site-1"].equal(first.add(second))


@pytest.mark.timeout(600)
def test_what_an_operator_above_does_to_a_site(plain: tuple[Fleet, Site]) -> None:
    """A class is forgotten and admitted; then the whole site."""
    fleet, site = plain
    store = fleet.folder / "store.sqlite"
    made = bundle(fleet.folder / "b.bundle", "ncm")
    fleet.aggregator([made], *STANDING, "--gateway", "site-1")
    site.gateway(made, fleet.url)
    site.client("a", made, share(0, [0, 1, 2]))
    fleet.wait_for("aggregator", "40 samples of 1 device")
    counts = [int((share(0, [0, 1, 2])[1] == number).sum()) for number in range(CLASSES)]
    told("forget", "--class", LABELS[1], "--store", store)
    fleet.wait_for("aggregator", f"{40 - counts[1]} samples of 1 device")
    site.wait_for("gateway", f"forget class {LABELS[1]}|{LABELS[1]}")
    told("fleet", "admit", "--class", LABELS[1], "--store", store)
    fleet.wait_for("aggregator", f"{40 - counts[1]} samples(.|\n)*40 samples of 1 device", 120.0)
    told("forget", "site-1", "--store", store)
    site.client("b", made, share(1, [2, 3, 4]))
    site.wait_for("gateway", "refused by the aggregator above: .*forgotten", 120.0)
    assert "committed" not in site.log("b")
    told("fleet", "admit", "site-1", "--store", store)
    site.wait_for("b", "committed|duplicate", 120.0)
    fleet.wait_for("aggregator", "80 samples of 2 devices")
    stop(site, "gateway")
    stop(fleet, "aggregator")
    first, second = sums(site.folder / "store.sqlite", made, "ncm").values()
    assert sums(store, made, "ncm")["site-1"].equal(first.add(second))


@pytest.mark.timeout(600)
def test_a_gateway_vanishes_with_half_a_round(plain: tuple[Fleet, Site]) -> None:
    """The round closes without it at the deadline, its devices hear that they were too late, and the next has them."""
    fleet, site = plain
    made = bundle(fleet.folder / "b.bundle", "ncm")
    rounds = ("--rounds", 3, "--min-clients", 1, "--open-clients", 2, "--deadline", 20, "--gateway", "site-1")
    fleet.aggregator([made], *rounds)
    site.gateway(made, fleet.url, "--min-clients", 2)
    fleet.client("c", made, share(2, [0, 4]))
    site.client("a", made, share(0, [0, 1, 2]))
    site.wait_for("a", "round 1 .* bytes to send")
    stop(site, "gateway", signal.SIGKILL)
    fleet.wait_for("aggregator", "round 1 closed: 1 contribution", 120.0)
    site.gateway(made, fleet.url, "--min-clients", 2)
    site.client("b", made, share(1, [2, 3, 4]))
    fleet.wait_for("aggregator", "finished", 240.0)
    fleet.finish(120.0)
    site.finish(120.0)
    said = {number: outcome for number, (_, outcome) in site.sent("a").items()}
    assert (said[1], said[3] in ("committed", "duplicate")) == ("late", True)
    assert "site-1" not in fleet.payloads(1)
    assert "site-1" in fleet.payloads(3)
