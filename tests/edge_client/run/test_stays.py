"""A device that stays: photos that come and go, what it forgets, what it says in weeks alone, and run after run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import TestBroker, make_broker
from edge_peer import Peer
from edge_samples import fashion, rounds_done
from PIL import Image

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.device.own_samples import OwnSamples
from protofleet.edge_client.journal import history, retention
from protofleet.edge_client.journal.journal import read_kept
from protofleet.edge_client.privacy.ledger import read_ledger
from protofleet.edge_client.rounds.waiting_notice import Absence, Waits
from protofleet.edge_client.run import client as client_module
from protofleet.edge_client.run import process
from protofleet.edge_client.run.service import Service
from protofleet.edge_client.settings import ClientSettings
from tests.edge_client.journal.test_journal import commit, opened, receipt
from tests.edge_client.rounds.test_round_follower import OTHER, announced, follower

# ── photos ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def path(mnist_like_bundle: Callable[..., Path]) -> Path:
    return mnist_like_bundle()


@pytest.fixture(scope="module")
def bundle(path: Path) -> Bundle:
    return read_bundle(path)


def photos(bundle: Bundle, folder: Path, count: int = 12, *, first: int = 0) -> Path:
    """Real images of two classes in a folder for each; `first` is the number that the first of them is called."""
    data = fashion(bundle, first + count, (1, 3))
    for number, (x, y) in enumerate(zip(data.x[first:], data.y[first:], strict=True), first):
        into = folder / bundle.manifest.labels[int(y)]
        into.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[..., 0]).save(into / f"{number}.png")
    return folder


def own(bundle: Bundle, tmp_path: Path) -> OwnSamples:
    named = {"bundle": "b", "broker": "mqtt://h", "id": "d", "data": str(tmp_path / "photos"), "state": "s"}
    return OwnSamples(read_settings(ClientSettings, {**named, "hold_out": 0.0}), bundle.manifest, tmp_path / "s")


def test_photos_that_come_and_go_are_counted_until_a_contribution_holds_them(bundle: Bundle, tmp_path: Path) -> None:
    folder = photos(bundle, tmp_path / "photos")
    (tmp_path / "s").mkdir()
    mine = own(bundle, tmp_path)
    assert len(mine.read().data) == mine.new == 12
    mine.sent()
    assert (mine.new, mine.newer()) == (0, None)
    photos(bundle, folder, 3, first=12)
    next(folder.rglob("0.png")).unlink()
    mine.look()
    assert mine.new == 4  # three came, one went
    found = mine.newer()
    assert found is not None
    assert len(found.data) == 14
    assert mine.newer() is None
    again = own(bundle, tmp_path)  # after a restart
    again.read()
    assert again.new == 4
    photos(bundle, folder, 2, first=15)  # while it worked
    again.look()
    again.sent()
    assert again.new == 2


def test_photos_that_cannot_be_read_any_more_are_not_used_again(bundle: Bundle, tmp_path: Path) -> None:
    folder = photos(bundle, tmp_path / "photos")
    mine = own(bundle, tmp_path)
    mine.read()
    (folder / "no-class-of-ours").mkdir()
    (folder / "no-class-of-ours" / "x.png").write_bytes(next(folder.rglob("0.png")).read_bytes())
    for _ in range(2):  # it does not go back to what it read before
        with pytest.raises(DataError, match="no-class-of-ours"):
            mine.newer()
        assert mine.has_changed
    (folder / "no-class-of-ours" / "x.png").unlink()
    (folder / "no-class-of-ours").rmdir()
    found = mine.newer()
    assert found is not None
    assert len(found.data) == 12
    assert mine.newer() is None  # and of what could not be read nothing is said any more
    for photo in folder.rglob("*.png"):
        photo.unlink()
    mine.look()
    with pytest.raises(DataError, match="is empty"):
        mine.newer()


def test_one_file_of_many_images_is_read_again_when_it_is_another(bundle: Bundle, tmp_path: Path) -> None:
    data = fashion(bundle, 20, (0, 3))
    file = tmp_path / "photos"  # `own` names it so
    np.savez(tmp_path / "a.npz", x=data.x[:10], y=data.y[:10])
    (tmp_path / "a.npz").rename(tmp_path / "photos.npz")
    mine = own(bundle, tmp_path)
    mine._settings = read_settings(
        ClientSettings,
        {"bundle": "b", "broker": "mqtt://h", "id": "d", "data": f"{file}.npz", "state": "s", "hold_out": 0.0},
    )
    assert len(mine.read().data) == 10
    assert (mine.newer(), mine.new) == (None, None)
    np.savez(tmp_path / "photos.npz", x=data.x, y=data.y)
    found = mine.newer()
    assert found is not None
    assert len(found.data) == 20
    os.utime(tmp_path / "photos.npz", ns=(1, 1))  # another one of the same size
    assert mine.newer() is not None


# ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_old_rounds_are_forgotten_but_their_numbers_and_what_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention.drop_old_rounds, "__defaults__", (3,))
    with opened(tmp_path) as journal:
        for number in range(1, 11):
            commit(journal, number)
            if number != 2:  # whose receipt never came
                journal.record_receipt(receipt(number, "late" if number == 1 else "committed"), 7)
            if number != 3:  # the history lacks it
                journal.mark_reported((b"run1", number, "fedproto"))
        kept = [number for number in range(1, 11) if journal.is_done((b"run1", number, "fedproto"))]
        assert kept == [2, 3, 8, 9, 10]  # the last one is settled after the transaction that forgets
        assert rounds_done(journal) == rounds_done(journal, "fedproto") == 10
        assert journal.outcomes() == {
            "sent": 10, "committed": 8, "late": 1, "pending": 1, "duplicate": 0, "rejected": 0,
        }  # fmt: skip
        assert [pending.key[1] for pending in journal.pending()] == [2]
        assert journal.took_part(b"run1")
    assert read_kept(tmp_path).rounds == 10


def test_a_history_that_is_large_enough_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "HISTORY_BYTES", 100)
    path = tmp_path / "history.jsonl"
    for number in range(40):
        history.append_line(path, {"round": number})
    lines = [json.loads(line)["round"] for name in ("history.1.jsonl", path.name) for line in (tmp_path / name).open()]
    assert lines == list(range(40 - len(lines), 40))
    assert 100 <= sum(file.stat().st_size for file in tmp_path.iterdir()) < 300


# ── weeks alone ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_broker_that_stays_away_is_told_of_once_a_day_and_each_of_three_reasons_once() -> None:
    """A device whose certificate was revoked said that a message was refused, and nothing more for a day."""
    absence, said = Absence(), list[str]()
    for minute in range(3 * 1440):
        said.append(absence.line("connection lost", f"refused {minute % 10}", 60.0 * minute))
    assert [line for line in said if line] == [
        "connection lost (refused 0), trying again",
        "still no broker (refused 1), trying again",
        "still no broker (refused 2), trying again",
        "no broker for 1 day (refused 0), trying again",
        "no broker for 2 days (refused 0), trying again",
    ]
    absence.over()
    assert absence.line("connection lost", "gone", 1e9) == "connection lost (gone), trying again"


def test_what_waits_knows_when_it_has_something_to_say() -> None:
    waits = Waits()
    assert waits.wait_s(0.0) is None
    assert waits.line("a round", 0.0) == ""
    assert waits.wait_s(0.25) == 0.75
    assert waits.line("a round", 1.0) == "a round"
    assert waits.wait_s(1.0) is None


def test_a_device_that_stays_waits_for_its_own_run_and_for_the_next() -> None:
    fleet = follower()
    fleet._stays = True
    with pytest.raises(UsageError, match="the fleet runs another bundle"):
        fleet.announced(announced(1, bundle=b"\xff" * 32))
    assert fleet.task() is None
    assert fleet.newest_state is None
    assert fleet.waits_for() == "waiting for a run of this device's bundle"
    fleet.announced(announced(1))
    assert fleet.task() is not None
    fleet.announced(announced(1, "finished"))
    assert (fleet.finished, fleet.task()) == (True, None)
    assert fleet.waits_for() == "waiting for the next run"
    fleet.announced(announced(1, run=OTHER))
    assert fleet.task() is not None
    for number in range(100):
        fleet.announced(announced(1, run=number.to_bytes(4, "big")))
    assert len(fleet._opened_runs) <= 4


# ── the service manager ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["file", "abstract"])
def notified(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A socket as systemd's, and what `NOTIFY_SOCKET` says of it."""
    name = str(tmp_path / "notify") if request.param == "file" else f"@protofleet-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name[1:] if name.startswith("@") else name)
        sock.settimeout(5.0)
        yield name, sock


def words(sock: socket.socket) -> list[str]:
    """All that has come, without waiting."""
    found = list[str]()
    sock.setblocking(False)
    try:
        while True:
            found.append(sock.recv(4096).decode())
    except BlockingIOError:
        return found


def test_a_service_manager_hears_of_progress_and_of_nothing_else(notified: tuple[str, socket.socket]) -> None:
    name, sock = notified
    clock = [0.0]
    told = ServiceManager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "40000000"}, lambda: clock[0])
    assert (told.watchdog_s, told.wait_s) == (40.0, 20.0)
    told.ready()
    told.alive()
    clock[0] = 9.0
    told.alive()  # too soon
    clock[0] = 10.0
    told.alive()
    told.alive()
    told.status("waiting\nfor a round")
    told.status("waiting")
    assert words(sock) == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "STATUS=waiting"]
    with told.patient(100.0):
        assert words(sock)[-1] == "WATCHDOG_USEC=100000000\nWATCHDOG=1"
    with told.patient(1.0):
        pass
    told.stopping()
    assert words(sock) == ["WATCHDOG_USEC=40000000\nWATCHDOG=1", "STOPPING=1"]
    told.ready()
    sock.close()
    told.ready()  # a manager that is gone stops nothing


def test_a_service_manager_that_does_not_read_holds_nothing_up(notified: tuple[str, socket.socket]) -> None:
    name, sock = notified
    told = ServiceManager({"NOTIFY_SOCKET": name})

    def fill() -> None:
        for _ in range(int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 10):
            told.ready()

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    thread.join(20)
    held_up = thread.is_alive()
    words(sock)  # lets go of it
    assert not held_up


def test_a_file_that_a_container_looks_at_is_touched_by_progress_alone(tmp_path: Path) -> None:
    clock, file = [0.0], tmp_path / "alive"
    told = ServiceManager({"PROTOFLEET_ALIVE": str(file)}, lambda: clock[0])
    assert (told.watchdog_s, told.wait_s) == (None, 300.0)
    assert not file.exists()
    told.ready()
    assert abs(file.stat().st_mtime - time.time()) < 60
    for at, is_touched in ((9.0, False), (10.0, True), (19.0, False)):
        os.utime(file, (1.0, 1.0))
        clock[0] = at
        told.alive()
        assert (file.stat().st_mtime > 1.0) == is_touched
    with told.patient(3_600.0):  # in an hour it is ten minutes old
        assert abs(file.stat().st_mtime - time.time() - 3_000.0) < 60
    assert abs(file.stat().st_mtime - time.time()) < 60
    ServiceManager({"PROTOFLEET_ALIVE": str(tmp_path / "no" / "where")}).ready()  # is no reason to end


def test_without_a_service_manager_nothing_is_said() -> None:
    for environment in ({}, {"WATCHDOG_USEC": "1000"}, {"NOTIFY_SOCKET": "vsock:1:2", "WATCHDOG_USEC": "1000"}):
        told = ServiceManager(environment)
        assert (told.watchdog_s, told.wait_s) == (None, None)
        told.ready()
        told.alive()
    of_another = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    assert ServiceManager(of_another).watchdog_s is None
    assert ServiceManager({**of_another, "WATCHDOG_PID": str(os.getpid())}).watchdog_s == 0.001
    assert ServiceManager({**of_another, "WATCHDOG_PID": "", "WATCHDOG_USEC": "0"}).watchdog_s is None


# ── run after run ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker("mosquitto", tmp_path)
    found.start()
    yield found
    found.stop()


def test_a_round_that_the_policy_does_not_allow_is_answered_without_a_row_and_told(
    broker: TestBroker, bundle: Bundle, path: Path, tmp_path: Path, said: list[str]
) -> None:
    """One release in a day: the second round closes without waiting, the operator is told, and it goes on so."""
    folder = photos(bundle, tmp_path / "photos")
    (tmp_path / "policy.toml").write_text('releases_per_day = 1\nfigures = []\nmethods = ["fedproto"]\n')
    given = {"bundle": str(path), "broker": broker.url, "id": "pi-1", "data": str(folder), "hold_out": 0.0}
    given |= {"policy": str(tmp_path / "policy.toml"), "state": str(tmp_path / "state")}
    service = Service(read_settings(ClientSettings, given))
    thread = threading.Thread(target=lambda: service.run(lambda content, finished: None), daemon=True)
    thread.start()
    with Peer(broker.url, bundle) as peer:
        for number, rows in ((1, 2), (2, 0), (3, 0)):
            peer.announce(number)
            assert len(peer.contribution(number).counts) == rows
            peer.answer(number)
        while peer.statuses[-1].versions.get("policy") != "round 3 (fedproto): releases per day":
            peer.receive()
    assert not any("samples_new" in status.metrics for status in peer.statuses)
    service.stop()
    thread.join(30)
    assert [line[:29] for line in said if "refused" in line] == [f"round {n} (fedproto) is refused" for n in (2, 3)]
    entries, _, _ = read_ledger(tmp_path / "state" / "ledger.sqlite")
    assert [(each.what, each.round) for each in entries] == [("round", 1), ("sat-out", 2), ("sat-out", 3)]


def says_new(peer: Peer, count: int) -> None:
    """Wait until the device says that it has so many new photos."""
    deadline = time.monotonic() + 60
    while not peer.statuses or peer.statuses[-1].metrics.get("samples_new") != count:
        assert time.monotonic() < deadline, peer.statuses
        peer.receive()


def test_a_signal_makes_it_look_at_once(
    broker: TestBroker, bundle: Bundle, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before the ten minutes are over; in the main thread, as in the device's own process."""
    folder, counts = photos(bundle, tmp_path / "photos"), list[int]()
    services = list[Service]()

    class Kept(Service):
        def __init__(self, settings: ClientSettings) -> None:
            super().__init__(settings)
            services.append(self)

    monkeypatch.setattr("protofleet.edge_client.run.service.Service", Kept)

    def outside() -> None:
        try:
            with Peer(broker.url, bundle) as peer:
                says_new(peer, 12)
                photos(bundle, folder, 4, first=12)
                os.kill(os.getpid(), signal.SIGUSR1)
                says_new(peer, 16)
                counts.append(16)
        finally:
            services[0].stop()

    given = {"bundle": str(path), "broker": broker.url, "id": "pi-2", "data": str(folder), "hold_out": 0.0}
    before, other = signal.getsignal(signal.SIGUSR1), threading.Thread(target=outside, daemon=True)
    try:
        other.start()
        process._run(read_settings(ClientSettings, {**given, "state": str(tmp_path / "state")}))
    finally:
        signal.signal(signal.SIGUSR1, before)
        other.join(10)
    assert counts == [16]


def test_what_another_process_teaches_is_noticed_without_a_signal(
    broker: TestBroker, bundle: Bundle, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_IDLE_S", 3600.0)  # of who cannot be taught
    folder, state = photos(bundle, tmp_path / "photos"), tmp_path / "state"
    given = {"bundle": str(path), "broker": broker.url, "id": "pi-2", "data": str(folder), "hold_out": 0.0}
    service = Service(read_settings(ClientSettings, {**given, "state": str(state)}))
    thread = threading.Thread(target=lambda: service.run(lambda content, over: None), daemon=True)
    other = next(photos(bundle, tmp_path / "other", 1, first=12).rglob("*.png"))
    command = [sys.executable, "-m", "protofleet", "learn", str(other), "Bag"]
    with Peer(broker.url, bundle) as peer:
        thread.start()
        says_new(peer, 12)
        subprocess.run([*command, "--state", str(state), "--bundle", str(path)], check=True)
        says_new(peer, 12 + 1)
    service.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_one_that_comes_while_a_client_starts_is_answered_once_it_can(
    broker: TestBroker, bundle: Bundle, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Photos come, and are told of, when the others have been read and there is no client yet."""
    folder = photos(bundle, tmp_path / "photos")
    given = {"bundle": str(path), "broker": broker.url, "id": "pi-2", "data": str(folder), "hold_out": 0.0}
    service = Service(read_settings(ClientSettings, {**given, "state": str(tmp_path / "state")}))
    read = OwnSamples.read

    def then_told(own: OwnSamples) -> object:
        found = read(own)
        photos(bundle, folder, 4, first=12)
        service.look()
        return found

    monkeypatch.setattr(OwnSamples, "read", then_told)
    thread = threading.Thread(target=lambda: service.run(lambda content, over: None), daemon=True)
    with Peer(broker.url, bundle) as peer:
        thread.start()
        says_new(peer, 16)
    service.stop()
    thread.join(30)
    assert not thread.is_alive()


def test_run_after_run_with_photos_that_come_between(
    broker: TestBroker, bundle: Bundle, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """It starts on last week's end, takes part in two runs and sits out a round whose photos it cannot read; a run of
    other bundles does not end it."""
    monkeypatch.setattr(client_module, "_LOOK_S", 0.2)
    folder = photos(bundle, tmp_path / "photos")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        notes = list[str]()
        threading.Thread(target=lambda: notes.extend(iter(lambda: sock.recv(4096).decode(), "")), daemon=True).start()
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        with Peer(broker.url, bundle) as last_week:
            last_week.announce(7, phase="finished")
        given = {"bundle": str(path), "broker": broker.url, "id": "pi-1", "data": str(folder), "hold_out": 0.0}
        service = Service(read_settings(ClientSettings, {**given, "state": str(tmp_path / "state")}))
        thread = threading.Thread(target=lambda: service.run(lambda content, finished: None), daemon=True)
        thread.start()
        counts = []
        for photo in (12, None):
            with Peer(broker.url, bundle) as peer:
                says_new(peer, 12 if photo else 0)
                if photo:
                    peer.announce(1, bundle=b"\xff" * 32)
                peer.announce(1)
                sent = peer.contribution(1)
                counts.append(sent.samples)
                peer.answer(1)
                peer.give(1, sent)
                if photo:
                    photos(bundle, folder, 4, first=photo)
                    says_new(peer, 4)
                    peer.announce(2, global_version=1)
                    counts.append(peer.contribution(2).samples)
                    peer.answer(2)
                    (folder / "hamster").mkdir()
                    (folder / "hamster" / "x.png").write_bytes(b"")
                    peer.announce(3, global_version=1)
                    counts.append(peer.contribution(3).samples)
                    peer.answer(3)
                    (folder / "hamster" / "x.png").unlink()
                    (folder / "hamster").rmdir()
                peer.announce(1, phase="finished")
        service.stop()
        thread.join(10)
        assert not thread.is_alive()
        ServiceManager().status("the end")
        while not notes or notes[-1] != "STATUS=the end":
            time.sleep(0.01)
    assert counts == [12, 16, 0, 16]
    assert (notes[0], notes[-2], notes.count("WATCHDOG=1") > 3) == ("READY=1", "STOPPING=1", True)
    assert sum("the fleet runs another bundle" in line for line in said) == 1
    assert "the photos have changed: 16 samples now" in said
    assert any("hamster" in line and "the round is left out" in line for line in said)
