"""A signed fleet whose aggregator has lost its store, or has an older copy of it, on a host whose clock is wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from aggregator_samples import BUNDLE
from aggregator_server_samples import FLEET, SETTINGS, Listener, Running, wait
from brokers import Embedded
from fleets import ENVIRONMENT, Fleet, bundle, fleet_in, share
from fleets import FLEET as METHODS

from protofleet.aggregator.enrolment.signed_publisher import SignedPublisher
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.parts.announcement_numbers import AnnouncementNumbers
from protofleet.aggregator.server import server
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.mqtt.link import Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.envelopes import Mark
from protofleet.contract.wire.messages import Announcement, Message, Signed, Status
from protofleet.edge_client.identity.signing_identity import Identity
from protofleet.edge_client.identity.trust import Trust
from protofleet.edge_client.journal.journal import Journal

AGGREGATOR, DEVICE = Signer(bytes(range(32))), Signer(b"o" * 32)
ROUND, STATUS = topics.round_(FLEET), topics.status(FLEET, "a")
YEARS_S = 365.0 * 86_400


@pytest.fixture
def url() -> Iterator[str]:
    broker = Embedded()
    broker.start()
    yield broker.url
    broker.stop()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The aggregator's: `ahead_s` seconds ahead of this host's."""
    made = SimpleNamespace(ahead_s=0.0, monotonic=time.monotonic, perf_counter=time.perf_counter)
    made.time = lambda: time.time() + made.ahead_s
    monkeypatch.setattr(server, "time", made)
    return made


class Device:
    """What a device believes, with its journal, beside a bystander's connection: it says its mark when that is due."""

    def __init__(self, listener: Listener, folder: Path) -> None:
        self._listener, self._births = listener, 0
        self.journal = Journal(folder, fleet=FLEET, device="a", bundle=BUNDLE)
        keys, own = [AGGREGATOR.public_key], Identity(DEVICE)
        self.trust = Trust(keys, own, self.journal.issued, fleet=FLEET, device_id="a")

    def hears(self, payload: bytes) -> Message | None:
        return self.trust.opened(Received(ROUND, payload, False, 1, 1))

    def believes_the_next(self) -> Announcement:
        """The next announcement that is believed; what is due meanwhile is said."""
        found: list[Message] = []

        def is_believed(message: Message) -> bool:
            believed = self.hears(encode(message)) if isinstance(message, Signed) else None
            if self.trust.has_to_tell:
                self.tells()
            if believed is not None:
                found.append(believed)
            return believed is not None

        self._listener.until(is_believed, 20.0)
        assert isinstance(found[0], Announcement)
        return found[0]

    def tells(self, **fields: object) -> None:
        self._births += 1
        heard = self.trust.heard()
        birth = Status(True, bytes(8), 1, issued=self._births, heard=heard)
        self._listener.link.publish(STATUS, DEVICE.sign(STATUS, encode(replace(birth, **fields))), retain=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead_s", [0.0, 10 * YEARS_S], ids=["clock right once", "clock ten years ahead once"])
@pytest.mark.parametrize("retained", [True, False], ids=["broker knows", "broker lost it"])
def test_a_lost_store_behind_a_slow_clock_is_told_the_number_and_goes_on(
    url: str, tmp_path: Path, clock: SimpleNamespace, ahead_s: float, retained: bool, said: list[str]
) -> None:
    with Listener(url, ROUND) as listener:
        device = Device(listener, tmp_path / "device")
        clock.ahead_s = ahead_s
        with DurableStore(tmp_path / "first", BUNDLE, FLEET) as store:
            Running(url, store, BUNDLE, SETTINGS, signer=AGGREGATOR)
            first = device.believes_the_next()
        if not retained:
            listener.link.publish(ROUND, b"", retain=True)
        clock.ahead_s = -YEARS_S
        with DurableStore(tmp_path / "second", BUNDLE, FLEET) as store:
            running = Running(url, store, BUNDLE, SETTINGS, signer=AGGREGATOR)
            again = device.believes_the_next()
            assert again.issued > first.issued
            assert again.run == store.run
            (told,) = running.told(events.NumbersLost)
            assert (told.heard, told.issued < first.issued) == (first.issued, True)  # type: ignore[attr-defined]
        if retained:  # else the device's birth may reach the aggregator before its announcement reaches the device
            assert not any("lost its store" in line for line in said)
        recorded = AGGREGATOR.sign(ROUND, encode(first))
        assert device.hears(recorded) is None  # a recording is refused as before
        device.journal.close()


def test_a_lost_store_that_takes_only_enrolled_devices_is_told_the_number_by_one_that_it_does_not_know(
    url: str, tmp_path: Path, clock: SimpleNamespace
) -> None:
    """The enrolments are lost with the store; the number is the key's own word, whoever tells it."""
    with Listener(url, ROUND) as listener:
        device, settings = Device(listener, tmp_path / "device"), replace(SETTINGS, enrolled=True)
        with DurableStore(tmp_path / "first", BUNDLE, FLEET) as store:
            store.enrolment.enrol("a", DEVICE.public_key, time.time())
            Running(url, store, BUNDLE, settings, signer=AGGREGATOR)
            first = device.believes_the_next()
        listener.link.publish(ROUND, b"", retain=True)
        clock.ahead_s = -YEARS_S
        with DurableStore(tmp_path / "second", BUNDLE, FLEET) as store:
            Running(url, store, BUNDLE, settings, signer=AGGREGATOR)
            assert device.believes_the_next().issued > first.issued
        device.journal.close()


def test_who_lies_about_the_number_moves_nothing(url: str, tmp_path: Path, clock: SimpleNamespace) -> None:
    with Listener(url, ROUND) as listener, DurableStore(tmp_path / "s", BUNDLE, FLEET) as store:
        store.enrolment.enrol("a", DEVICE.public_key, time.time())
        device = Device(listener, tmp_path / "device")
        running = Running(url, store, BUNDLE, SETTINGS, signer=AGGREGATOR)
        first = device.believes_the_next()
        proofs = (
            bytes(64),
            first.proof,  # of another number
            AGGREGATOR.mark(topics.round_("another"), 2**63 - 1).proof,  # of another fleet
            DEVICE.mark(ROUND, 2**63 - 1).proof,  # its own word
        )
        for proof in proofs:
            device.tells(heard=(Mark(AGGREGATOR.key_id, 2**63 - 1, proof),))
        true = AGGREGATOR.mark(ROUND, first.issued + 5)
        device.tells(heard=(true,))  # after these; it is the key's own word
        assert device.believes_the_next().issued > first.issued + 5
        assert store.meta.get("issued") < str(first.issued + YEARS_S)
        assert [told.heard for told in running.told(events.NumbersLost)] == [true.issued]  # type: ignore[attr-defined]
        device.journal.close()


@pytest.mark.parametrize("is_new_run", [False, True])
def test_what_is_told_knows_whether_the_store_goes_on_as_a_new_run(
    url: str, tmp_path: Path, clock: SimpleNamespace, is_new_run: bool
) -> None:
    with Listener(url, ROUND) as listener, DurableStore(tmp_path / "s", BUNDLE, FLEET) as store:
        store.enrolment.enrol("a", DEVICE.public_key, time.time())
        device = Device(listener, tmp_path / "device")
        running = Running(url, store, BUNDLE, SETTINGS, signer=AGGREGATOR, is_new_run=is_new_run)
        first = device.believes_the_next()
        device.tells(heard=(AGGREGATOR.mark(ROUND, first.issued + 5),))
        device.believes_the_next()
        assert [told.is_new_run for told in running.told(events.NumbersLost)] == [is_new_run]  # type: ignore[attr-defined]
        device.journal.close()


def test_of_numbers_that_are_heard_the_highest_counts_and_only_above_ours() -> None:
    voice = SignedPublisher(FLEET, AGGREGATOR, lambda wall: 1)
    marks = [AGGREGATOR.mark(ROUND, number) for number in (7, 9, 8)]
    forged = Mark(AGGREGATOR.key_id, 10, marks[1].proof)
    assert voice.lost([*marks, forged], 6) == 9
    assert voice.lost(marks, 9) == 0  # which every device of a fleet tells that has lost nothing
    assert SignedPublisher(FLEET, None, lambda wall: 1).lost(marks, 6) == 0


def test_no_clock_uses_the_numbers_up(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, FLEET) as store:
        numbers = AnnouncementNumbers(store.meta)
        assert [numbers.issue(1e17), numbers.issue(1e17), numbers.issue(0.0)] == [2**47, 2**47 + 1, 2**47 + 2]


def test_the_number_and_its_proof_outlive_the_process(tmp_path: Path) -> None:
    said = Announcement(b"run1", 3, "open", "ncm", bytes(32), issued=9, proof=AGGREGATOR.mark(ROUND, 9).proof)
    for _ in range(2):
        with Journal(tmp_path / "state", fleet=FLEET, device="a", bundle=BUNDLE) as journal:
            trust = Trust([AGGREGATOR.public_key], Identity(DEVICE), journal.issued, fleet=FLEET, device_id="a")
            assert trust.opened(Received(ROUND, AGGREGATOR.sign(ROUND, encode(said)), False, 1, 1)) == said
            assert trust.heard() == (AGGREGATOR.mark(ROUND, 9),)
            assert not trust.has_to_tell
            old = replace(said, issued=8, proof=b"")
            assert trust.opened(Received(ROUND, AGGREGATOR.sign(ROUND, encode(old)), False, 1, 1)) is None
            assert not trust.has_to_tell  # the aggregator has been told: a recording makes nobody speak
            assert trust.to_report(0.0) is None  # it was signed by a trusted key
    with Journal(tmp_path / "state", fleet=FLEET, device="a", bundle=BUNDLE) as journal:
        journal.issued.saw(AGGREGATOR.key_id, 10)  # of a release that gives no proof
        assert journal.issued.heard([AGGREGATOR.key_id]) == ()  # the one of 9 is none of 10


BEHIND = "import sys, time; now = time.time; time.time = lambda: now() - {}; from protofleet.cli import main; main()"


@pytest.mark.slow
def test_processes_go_on_when_the_store_is_lost_and_the_clock_is_set_back(tmp_path: Path) -> None:
    """Nobody is started anew but the aggregator, whose disk was changed; a broker that keeps nothing, too."""
    (tmp_path / "key").write_bytes(bytes(range(32)))
    (tmp_path / "key.pub").write_bytes(AGGREGATOR.public_key)
    (tmp_path / "own").write_bytes(b"o" * 32)
    made = bundle(tmp_path / "b", "ncm", private_key=bytes(range(32)))
    options = ("--rounds", 1, "--no-calibrate", "--sign", tmp_path / "key", "--every", "1h", "--window", "1h")
    with fleet_in(tmp_path) as fleet:
        fleet.aggregator([made], *options, "--min-clients", 2, "--open-clients", 2)
        _stays(fleet, "one", made)
        fleet.wait_for("one", "waiting for round 1 to open")
        aggregator = fleet.processes.pop("aggregator")
        aggregator.kill()
        aggregator.wait()
        with Listener(fleet.url, name="clears") as listener:
            listener.link.publish(topics.round_(METHODS), b"", retain=True)
            wait(lambda: listener.link.idle)
        told = ("--bundle", made, "--store", tmp_path / "another.sqlite", "--min-clients", 1)
        command = [sys.executable, "-u", "-c", BEHIND.format(YEARS_S), "aggregate", "--broker", fleet.url]
        with open(tmp_path / "second.log", "ab") as log:
            second = [*command, "--fleet", METHODS, *map(str, (*told, *options))]
            fleet.processes["second"] = subprocess.Popen(second, stdout=log, stderr=log, env=ENVIRONMENT)
        fleet.wait_for("one", r"round 1 \(ncm\): committed", 120)
        fleet.wait_for("second", "devices have heard announcement")
        assert "lost its store" in fleet.log("one")


def _stays(fleet: Fleet, name: str, made: Path) -> None:
    import numpy as np

    x, y = share(0, [0, 1, 2])
    np.savez(fleet.folder / f"{name}.npz", x=x, y=y)
    words = ("--id", name, "--bundle", made, "--data", fleet.folder / f"{name}.npz", "--state", fleet.folder / name)
    keys = ("--trust", fleet.folder / "key.pub", "--identity", fleet.folder / "own")
    fleet.start(name, "client", "--broker", fleet.url, "--fleet", METHODS, *words, *keys)
