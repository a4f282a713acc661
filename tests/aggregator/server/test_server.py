"""The server over real brokers, with devices that talk but do not train: order of promises, faults, rivals, manners."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paho.mqtt.client
import paho.mqtt.publish
import pytest
from aggregator_samples import bundle_file, gram, manifest, means, unassigned
from aggregator_server_samples import FLEET, SETTINGS, WIDTH, Listener, Running, wait
from brokers import BROKERS, Embedded, Proxy, TestBroker, free_port, make_broker
from commands import ROOT
from pooled_head import usual_head
from talker import Talker

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.ingest.broken_message import digest_of
from protofleet.aggregator.monitoring.events import LinkDown, LinkUp, RoundClosed
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.errors import StoreError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method as method_of
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram, Statistic
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, ClassRows, Contribution, Receipt, Status

RIDGE = method_of("ffc").hyper["ridge"].default


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker(request.param, tmp_path)
    made.start()
    yield made
    made.stop()


def _make(index: int, announcement: Announcement) -> Statistic:
    seed = index + 10 * announcement.round
    return gram(seed) if announcement.method == "ffc" else means(seed)


def _talkers(url: str, count: int = 3, resend_s: float = 1.0) -> list[Talker]:
    made = [Talker(url, FLEET, f"d{i}", lambda a, i=i: _make(i, a), resend_s=resend_s) for i in range(count)]
    for talker in made:
        talker.start()
    return made


def _stored(store: DurableStore, round: int, method: str) -> Statistic:
    messages = [decode(payload) for payload in store.contributions(round, method)]
    found = method_of(method).statistic
    return merge(lambda: (m.statistic(found, 3, WIDTH) for m in messages if isinstance(m, Contribution)))


def _same(one: Statistic, other: Statistic) -> None:
    np.testing.assert_array_equal(one.counts, other.counts)
    np.testing.assert_allclose(getattr(one, "gram", one.counts), getattr(other, "gram", other.counts), rtol=1e-6)


def test_a_run_over_a_real_broker(broker: TestBroker, tmp_path: Path) -> None:
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle)
        talkers = _talkers(broker.url)
        server.join()
        assert server.error is None
        for talker in talkers:
            talker.join(5)
            assert talker.receipts == {
                (1, "fedproto"): ["committed"],
                (2, "fedproto"): ["committed"],
                (3, "ffc"): ["committed"],
            }
            assert set(talker.states) == {1, 2, 3}
        for key in talkers[0].sent:
            _same(_stored(store, *key), merge(lambda key=key: [t.sent[key] for t in talkers]))
        final = talkers[0].states[3]
        np.testing.assert_allclose(final.prototypes.rows, _stored(store, 2, "fedproto").means[:2], rtol=1e-6)
        np.testing.assert_allclose(final.head.rows, usual_head(_stored(store, 3, "ffc"), RIDGE), rtol=1e-5)


def test_the_broker_dies_between_rounds_and_comes_back(broker: TestBroker, tmp_path: Path) -> None:
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle)
        talkers = _talkers(broker.url, 2)
        wait(lambda: server.core.rounds.online == 2)
        broker.kill()
        time.sleep(0.3)
        broker.start()
        talkers += _talkers_from(broker.url, 2)
        server.join(40)
        assert server.error is None
        for key in talkers[0].sent:
            _same(_stored(store, *key), merge(lambda key=key: [t.sent[key] for t in talkers]))


def _talkers_from(url: str, index: int) -> list[Talker]:
    talker = Talker(url, FLEET, f"d{index}", lambda a: _make(index, a))
    talker.start()
    return [talker]


def test_hostile_messages_do_not_stop_a_run(broker: TestBroker, tmp_path: Path) -> None:
    bundle = bundle_file(tmp_path / "f.bundle")
    rng = np.random.default_rng(0)
    hostile = Link(Address.parse(broker.url), "hostile", subscriptions=[f"pf/v2/{FLEET}/down/+"]).open()
    hostile.wait_connected(60)
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle, SETTINGS)
        wait(lambda: server.events)
        birth = encode(Status(True, bytes([255] * 8), 2**31))  # of the highest rank, but not where a rank is said
        hostile.publish(f"pf/v2/{FLEET}/up/aggregator", birth)
        good = encode(Contribution.of(means(), run=store.run, round=1, method="fedproto", bundle=bundle))
        for i in range(300):
            noise = bytearray(good)
            noise[rng.integers(len(noise))] ^= 1 << rng.integers(8)
            for topic in (f"up/x{i % 5}", f"status/x{i}", "global/9", "global/not-a-number", "up/UPPER"):
                hostile.publish(f"pf/v2/{FLEET}/{topic}", bytes(noise[: rng.integers(1, len(noise) + 1)]))
        hostile.publish(f"pf/v2/{FLEET}/round", b"noise")
        hostile.publish(f"pf/v2/{FLEET}/status/d0", b"", retain=True)
        talkers = _talkers(broker.url)
        server.join(40)
        hostile.close()
        assert server.error is None
        assert unassigned(store)["malformed"] >= 300
        for talker in talkers:
            assert all("committed" in statuses or "duplicate" in statuses for statuses in talker.receipts.values())
            assert len(talker.receipts) == 3


def test_what_a_larger_state_or_another_run_left_retained_is_cleared(broker: TestBroker, tmp_path: Path) -> None:
    bundle = bundle_file(tmp_path / "f.bundle")
    before = Link(Address.parse(broker.url), "before", subscriptions=[topics.global_all(FLEET)]).open()
    before.wait_connected(60)
    rows = ClassRows(np.arange(3, dtype=np.uint16), np.ones((3, 60)))
    stale = GlobalState(b"old!", 9, 9, {"prototypes": rows}).parts(400)
    assert len(stale) == 3
    for part in stale:
        before.publish(topics.global_part(FLEET, part.part), encode(part), retain=True)
    before.publish(topics.round_(FLEET), encode(Announcement(b"old!", 9, "finished", "fedproto", bundle)), retain=True)
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle)
        talkers = _talkers(broker.url)
        server.join()
        assert server.error is None
        assert set(talkers[0].states) >= {1, 2, 3}
        run = store.run
    after = Link(Address.parse(broker.url), "after", subscriptions=[f"pf/v2/{FLEET}/#"]).open()
    after.wait_connected(60)
    retained = {}
    while (event := after.receive(0.5)) is not None:
        if isinstance(event, Received):
            retained[event.topic] = decode(event.payload)
            after.acknowledge(event)
    after.close()
    before.close()
    parts = {t: m for t, m in retained.items() if "/global/" in t}
    assert sorted(parts) == [topics.global_part(FLEET, i) for i in range(len(parts))]
    assert {m.run for m in parts.values()} == {run}
    assert (retained[topics.round_(FLEET)].run, retained[topics.round_(FLEET)].phase) == (run, "finished")


def test_a_retained_message_at_qos_0_disturbs_no_round(broker: TestBroker, tmp_path: Path) -> None:
    """An ACL lets a device publish so on its own status: the aggregator was thrown out of Mosquitto for ever."""
    host, port = broker.url.removeprefix("mqtt://").split(":")
    for payload in (encode(Status(False, b"instance", 1)), b"garbage"):
        topic = topics.status(FLEET, f"loose-{len(payload)}")
        v5 = {"protocol": paho.mqtt.client.MQTTv5, "client_id": "loose"}
        paho.mqtt.publish.single(topic, payload, qos=0, retain=True, hostname=host, port=int(port), **v5)
    settings = Settings(rounds=2, calibrate=False, min_clients=3, deadline=1.0)
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle, settings)
        talkers = _talkers(broker.url)
        server.join()
        for talker in talkers:
            talker.join(5)
    assert server.error is None
    assert not [event for event in server.events if isinstance(event, LinkDown)]


@pytest.mark.parametrize("seed", range(3))
def test_after_any_cuts_the_rounds_go_on(broker: TestBroker, tmp_path: Path, seed: int) -> None:
    """A connection that is lost anywhere is made again, and hears what it must: a kept session on rumqttd did not."""
    rng = np.random.default_rng(seed)
    proxies = [Proxy(broker.url, cut_after=rng.integers(1, 25, size=2).tolist()) for _ in range(4)]
    settings = Settings(rounds=3, calibrate=False, min_clients=3)
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(proxies[0].url, store, bundle, settings)
        talkers = [Talker(p.url, FLEET, f"d{i}", lambda a, i=i: _make(i, a)) for i, p in enumerate(proxies[1:])]
        for talker in talkers:
            talker.start()
        server.join(60)
        assert server.error is None
        for talker in talkers:
            assert set(talker.sent) == {(1, "fedproto"), (2, "fedproto"), (3, "fedproto")}
            talker.stop()
    for proxy in proxies:
        assert proxy.connections >= 2
        proxy.close()


def test_a_reconnection_sends_no_device_a_state_that_the_broker_still_has(broker: TestBroker, tmp_path: Path) -> None:
    """Whoever could make the aggregator reconnect would otherwise have it send megabytes to every device."""
    proxy, bundle, go = Proxy(broker.url), bundle_file(tmp_path / "f.bundle"), threading.Event()
    settings = Settings(rounds=2, calibrate=False, min_clients=1)
    observer = Link(Address.parse(broker.url), "observer", subscriptions=[topics.global_all(FLEET)]).open()
    observer.wait_connected(60)
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(proxy.url, store, bundle, settings)
        talker = Talker(broker.url, FLEET, "d0", lambda a: means() if a.round == 1 or go.is_set() else None)
        talker.start()
        wait(lambda: any(isinstance(event, RoundClosed) for event in server.events))
        assert _parts(observer) >= 1
        for cuts in (1, 2):
            proxy.cut()
            wait(lambda cuts=cuts: sum(isinstance(event, LinkUp) for event in server.events) > cuts)
            time.sleep(0.3)  # until the announcement has come back, and what would follow it
        assert _parts(observer) == 0
        go.set()
        proxy.cut()  # so that the open round is announced again
        server.join()
        assert server.error is None
        assert _parts(observer) >= 1
        talker.stop()
    observer.close()
    proxy.close()


def _parts(observer: Link) -> int:
    """How many parts of a global state have come."""
    events = list(iter(lambda: observer.receive(0.5), None))
    for event in events:
        assert isinstance(event, Received)
        observer.acknowledge(event)
    return len(events)


def test_a_full_disk_gets_no_receipt_and_the_run_goes_on_once_there_is_room(broker: TestBroker, tmp_path: Path) -> None:
    width = 2_500  # 30 KB a contribution: more than is left in the pages that are there
    settings = Settings(rounds=1, calibrate=False, min_clients=2)
    bundle = bundle_file(tmp_path / "f.bundle", width=width)
    statistic = ClassMeans.from_means(np.random.default_rng(0).normal(size=(3, width)), [5, 6, 7])
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        server = Running(broker.url, store, bundle, settings, width)
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own "database or disk is full"
        talkers = [Talker(broker.url, FLEET, f"d{i}", lambda a: statistic, resend_s=0.5) for i in range(2)]
        for talker in talkers:
            talker.start()
        server.join()
        assert isinstance(server.error, StoreError)
        assert "full" in str(server.error)
        assert any(t.sent for t in talkers)  # the server may be gone before the other one has
        assert not any(t.receipts for t in talkers)
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        again = Running(broker.url, store, bundle, settings, width)
        again.join()
        assert again.error is None
        for talker in talkers:
            talker.join(5)
            receipts = talker.receipts[1, "fedproto"]
            assert receipts[0] == "committed"
            assert set(receipts[1:]) <= {"duplicate"}  # where it sent again before the receipt was here


# ── the command, in a process of its own ────────────────────────────────────────────────────────────────────────────


def _command(tmp_path: Path, url: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "protofleet", "aggregate", "--bundle", str(tmp_path / "f.bundle")]
    command += ["--broker", url, "--store", str(tmp_path / "s.sqlite"), "--fleet", FLEET, *more]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_kill_9_of_the_aggregator_at_any_moment_loses_and_doubles_nothing(broker: TestBroker, tmp_path: Path) -> None:
    """Small messages make FFC's sums travel in chunks; the process is killed a few times while they do."""
    bundle = bundle_file(tmp_path / "f.bundle", width=40)
    rng = np.random.default_rng(5)

    def make(index: int, announcement: Announcement) -> Statistic:
        local = np.random.default_rng([index, announcement.round])
        z, y = unit_rows(local.normal(size=(30, 40))), local.integers(0, 3, 30)
        return FeatureGram.of(z, y, 3) if announcement.method == "ffc" else ClassMeans.of(z, y, 3)

    out = tmp_path / "out.json"
    options = ("--rounds", "8", "--min-clients", "3", "--limit-bytes", "1024", "--json", str(out))
    process = _command(tmp_path, broker.url, *options)
    talkers = [Talker(broker.url, FLEET, f"d{i}", lambda a, i=i: make(i, a), resend_s=0.5) for i in range(3)]
    for talker in talkers:
        talker.start()
    for _ in range(3):
        assert process.stderr is not None
        next((line for line in process.stderr if "round " in line), None)  # it serves, however long that takes
        time.sleep(float(rng.uniform(0.0, 0.8)))
        if out.exists() and json.loads(out.read_text())["finished"]:
            break  # a fast machine: started again it would only wait for who comes late
        process.kill()
        process.communicate()
        process = _command(tmp_path, broker.url, *options)
    assert process.wait(timeout=150) == 0, process.stderr.read()
    process.communicate()
    told = json.loads(out.read_text())
    assert told["finished"]
    assert told["totals"]["committed"] == 27
    with DurableStore(tmp_path / "s.sqlite", bundle, FLEET) as store:
        for talker in talkers:
            talker.join(10)
            assert len(talker.sent) == 9
            assert all(s[-1] in ("committed", "duplicate") for s in talker.receipts.values())
        for round, method in talkers[0].sent:
            messages = [decode(payload) for payload in store.contributions(round, method)]
            kind = method_of(method).statistic
            stored = merge(lambda messages=messages, kind=kind: [m.statistic(kind, 3, 40) for m in messages])
            _same(stored, merge(lambda key=(round, method): [t.sent[key] for t in talkers]))


@pytest.mark.parametrize(
    ("how", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_it_with_one_line(tmp_path: Path, how: signal.Signals, code: int, word: str) -> None:
    bundle_file(tmp_path / "f.bundle")
    broker = make_broker("embedded", tmp_path)
    broker.start()
    process = _command(tmp_path, broker.url)
    line = process.stderr.readline() + process.stderr.readline()
    assert "waiting for devices: 0 online, 1 needed" in line
    process.send_signal(how)
    rest = process.communicate(timeout=60)[1]
    broker.stop()
    assert process.returncode == code
    assert rest.startswith(word)
    assert len(rest.splitlines()) == 1
    assert "--store" in rest


def test_no_broker_is_one_line_and_exit_1(tmp_path: Path) -> None:
    bundle_file(tmp_path / "f.bundle")
    process = _command(tmp_path, f"mqtt://127.0.0.1:{free_port()}", "--patience", "0.5")
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert error.startswith("error: no broker at mqtt://127.0.0.1")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rule", "medain"], "--rule, expected mean, median or trimmed-mean, got medain, try one of median"),
        (["--min-clients", "0"], "--min-clients, expected 1 or more, got 0"),
        (["--deadline", "-1"], "--deadline, expected 0 or more, got -1.0"),
        (["--fraction", "1.5"], "--fraction, expected above 0, up to 1, got 1.5"),
        (["--patience", "nan"], "--patience, expected 0.1 to 1e+06, got nan"),
        (["--encoding", "f31"], "--encoding, expected f64, f32, f16, int8 or int32, got f31, try one of f32"),
        (["--sums-encoding", "int8"], "--sums-encoding, expected factor, f64, f32, f16 or int32, got int8"),
        (["--fleet", "a/b"], "--fleet, expected 1 to 64 of a-z"),
        (["--rounds", "0", "--no-calibrate"], "--rounds, expected 1 or more, got 0"),
        (["--limit-bytes", "100"], "--limit-bytes, expected at least 1024"),
        (["--broker", "http://x"], "broker, expected mqtt://host[:port]"),
        (["--ca", __file__], "a certificate file, expected mqtts://, got mqtt://127.0.0.1:1, try mqtts://127.0.0.1"),
        (["--broker", "mqtts://h", "--ca", __file__], "expected certificates of an authority in PEM"),
        (["--bundle", "missing.bundle"], "cannot read bundle missing.bundle"),
        (["--no-such-option"], "unknown option, expected an option of protofleet aggregate, got --no-such-option"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    tmp_path: Path, options: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from protofleet.cli import main

    bundle_file(tmp_path / "f.bundle")
    given = ["--bundle", str(tmp_path / "f.bundle"), "--broker", "mqtt://127.0.0.1:1", "--store", str(tmp_path / "s")]
    assert main(["aggregate", *given, *options]) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert len(error.splitlines()) == 1


def test_a_store_of_another_bundle_is_one_line_and_exit_2(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from protofleet.cli import main

    DurableStore(tmp_path / "s", bundle_file(tmp_path / "one.bundle"), FLEET).close()
    bundle_file(tmp_path / "f.bundle", version=2)
    given = ["--bundle", str(tmp_path / "f.bundle"), "--broker", "mqtt://127.0.0.1:1", "--store", str(tmp_path / "s")]
    assert main(["aggregate", *given, "--fleet", FLEET]) == 2
    error = capfd.readouterr().err
    assert "is of another bundle, expected sha256" in error
    assert "another --store" in error


def test_a_status_flood_is_bounded_and_a_birth_is_believed(tmp_path: Path) -> None:
    """Births of made-up devices beyond the bound are not followed; the run goes on with those that are."""
    bundle = bundle_file(tmp_path / "f.bundle")
    with DurableStore(tmp_path / "s", bundle, FLEET) as store:
        core = rounds_of(store, manifest(), bundle, SETTINGS, now=0.0)
        birth = encode(Status(True, b"instance", 1))
        assert core.status("d1", birth, 0.0)
        assert not core.status("d1", birth, 0.0)
        assert core.status("d1", encode(Status(False, b"instance", 1)), 0.0)
        assert not core.status("d2", encode(contribution_of(store, bundle)), 0.0)
        core.take([], 0.0)
        assert unassigned(store) == {"malformed": 1}


def contribution_of(store: DurableStore, bundle: bytes) -> Contribution:
    return Contribution.of(means(), run=store.run, round=1, method="fedproto", bundle=bundle)


@pytest.mark.parametrize("standing", [False, True])
def test_a_status_that_is_no_good_is_answered_and_told(tmp_path: Path, standing: bool) -> None:
    """Nine ways to be wrong; before the first round, too, and where a broker has retained it."""
    bundle = bundle_file(tmp_path / "f.bundle")
    broker = Embedded()
    broker.start()
    good = encode(Status(True, b"instance", 1))
    wrong = {
        "noise": b"\xff\x00noise",
        "cut": good[:-2],
        "longer": good + b"x",
        "another": encode(Contribution.of(means(), run=bytes(4), round=1, method="fedproto", bundle=bundle)),
        "floats": good.replace(b"\x48instance", b"\xf9\x3c\x00"),
        "map": b"\xa0",
        "two-classes": encode(Status(True, bytes(8), 1, proposed={"bat": 1, "barn owl,hen": 2})),
        "added-class": encode(Status(True, bytes(8), 1, proposed={"+owl": 2})),
        "escape": encode(Status(True, bytes(8), 1, proposed={"\x1b[2J": 2})),
    }
    words = ["--standing", "--method", "ncm"] if standing else ["--rounds", "1", "--min-clients", "1"]
    command = [sys.executable, "-m", "protofleet", "aggregate", "--bundle", str(tmp_path / "f.bundle"), *words]
    command += ["--broker", broker.url, "--store", str(tmp_path / "s"), "--fleet", FLEET]
    with Listener(broker.url, topics.down(FLEET)) as listener:
        listener.link.publish(topics.status(FLEET, "retained"), b"noise", retain=True)
        with open(tmp_path / "log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            listener.until(lambda m: True)
            for device, payload in wrong.items():
                listener.link.publish(topics.status(FLEET, device), payload)
            wait_for = {topics.down(FLEET, device) for device in (*wrong, "retained")}
            while {topic for topic, _ in listener.heard} != wait_for:
                listener.until(lambda m: True)
        finally:
            process.terminate()
            process.wait(timeout=60)
            broker.stop()
    digests = {topics.down(FLEET, d): digest_of(b"status\0" + p) for d, p in {**wrong, "retained": b"noise"}.items()}
    for topic, receipt in listener.heard:
        assert isinstance(receipt, Receipt)
        assert (receipt.status, receipt.digest) == ("rejected", digests[topic])
        assert receipt.reason.startswith("its status: ")
    log_text = (tmp_path / "log").read_text()
    assert all(f"refused {device}: its status: " in log_text for device in (*wrong, "retained"))
