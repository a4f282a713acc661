"""Metrics of a running aggregator: what a scraper reads beside the summary, and scrapers that mean no good."""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from aggregator_samples import BUNDLE, bundle_file, contribution, manifest, means
from aggregator_server_samples import FLEET, wait
from brokers import Embedded
from certificates import issue
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.utils import floatToGoString
from scraped import OneGauge, text_of
from talker import Talker

import protofleet
from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.metrics.metrics import Metrics
from protofleet.aggregator.metrics.metrics_server import MOST, MetricsServer
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.settings import Settings, metrics_address
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.mqtt.certificates import Expiry
from protofleet.contract.mqtt.link import Address, Link
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status
from tests.aggregator.merging.test_exact_sums import core_of, message, outcomes

ONE = b"# HELP x x\n# TYPE x gauge\nx 1.0\n"


@pytest.fixture
def url() -> Iterator[str]:
    broker = Embedded()
    broker.start()
    yield broker.url
    broker.stop()


def scraped(url: str) -> dict[str, float]:
    """What Prometheus' text format says, by name and label; each family has its help and its type before it."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name, value = re.fullmatch(r"(\w+(?:\{[^}]+\})?) (\S+)", line).groups()  # type: ignore[union-attr]
            family = name.partition("{")[0]
            assert f"# TYPE {family} {'counter' if family.endswith('_total') else 'gauge'}" in lines
            assert any(each.startswith(f"# HELP {family} ") for each in lines)
            found[name.removeprefix("protofleet_")] = float(value)
    return found


def test_what_is_scraped_is_what_the_summary_says(url: str, tmp_path: Path) -> None:
    bundle_file(tmp_path / "f.bundle")
    aggregator = protofleet.Aggregator(
        tmp_path / "f.bundle", broker=url, store=tmp_path / "s", fleet=FLEET, metrics="0", rounds=1, calibrate=False,
        min_clients=2, max_clients=2, every="1h",
    )  # fmt: skip
    told: list[events.Event] = []
    summary: dict[str, Any] = {}
    serving = threading.Thread(target=lambda: summary.update(aggregator.run(told.append)), daemon=True)
    serving.start()
    wait(lambda: any(isinstance(event, events.MetricsServed) for event in told))
    (served,) = [event for event in told if isinstance(event, events.MetricsServed)]
    assert served.is_local
    talkers = [Talker(url, FLEET, f"d{i}", lambda a, i=i: means(i)) for i in range(2)]
    for talker in talkers:
        talker.start()
    wait(lambda: any(isinstance(event, events.RoundClosed) for event in told))
    stranger = Link(Address.parse(url), "stranger", subscriptions=[]).open()
    stranger.wait_connected(60)
    stranger.publish(topics.up(FLEET, "stranger"), b"no message")
    stranger.publish(
        topics.up(FLEET, "stranger"),
        encode(contribution(run=b"else")),
    )
    stranger.publish(topics.status(FLEET, "stranger"), b"no status")
    wait(lambda: scraped(served.url)['messages_total{outcome="malformed"}'] == 2)
    found = scraped(served.url)
    assert (found['refusals_total{reason="other-run"}'], found['refusals_total{reason="unreadable"}']) == (1, 2)
    assert (found["round"], found["round_open"], found["rounds_closed_total"]) == (1, 0, 1)
    assert (found["round_contributions"], found["global_version"], found["broker_up"]) == (2, 1, 1)
    assert 0 < found["round_age_seconds"] < 60
    assert abs(found["last_turn_timestamp_seconds"] - time.time()) < 5
    assert found['devices{state="online"}'] == len([talker for talker in talkers if talker.is_alive()])
    aggregator.stop()
    serving.join(20)
    stranger.close()
    assert not serving.is_alive()
    totals = summary["totals"]
    for outcome, name in {
        "committed": "committed",
        "duplicate": "duplicates",
        "late": "late",
        "rejected": "rejected",
    }.items():
        assert found[f'messages_total{{outcome="{outcome}"}}'] == totals[name], outcome
    assert totals["malformed"] == 2
    with pytest.raises(OSError, match="refused"):
        scraped(served.url)


def test_when_certificates_expire_is_told_and_read_anew_each_time(tmp_path: Path) -> None:
    issue(tmp_path, "d1", issue(tmp_path, "ca"))
    files = {"ca_file": f"{tmp_path}/ca.pem", "cert_file": f"{tmp_path}/d1.pem", "key_file": f"{tmp_path}/d1.key"}
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        core = core_of(store)
        assert "expiry" not in text_of(Metrics("fleet", core, store.refused_devices, address=Address("b", 1883)))
        metrics = Metrics("fleet", core, store.refused_devices, address=Address.parse("mqtts://b", **files))
        until = issue(tmp_path, "d1", issue(tmp_path, "ca"))[0].not_valid_after_utc.timestamp()
        for of in ("certificate", "authority"):
            assert f'\nprotofleet_expiry_timestamp_seconds{{of="{of}"}} {floatToGoString(until)}\n' in text_of(metrics)
        metrics.broker_certificate = lambda: Expiry("broker's certificate", "b", 0.0, until)
        assert f'{{of="broker_certificate"}} {floatToGoString(until)}\n' in text_of(metrics)


def test_what_happens_between_two_looks_is_in_the_next(tmp_path: Path) -> None:
    now = [1000.0]
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        core = core_of(store)
        metrics = Metrics("fleet", core, store.refused_devices, wall=lambda: now[0])

        def said(*names: str) -> list[float]:
            metrics.look()
            found = dict(line.rsplit(" ", 1) for line in text_of(metrics).splitlines() if not line.startswith("#"))
            return [float(found[f"protofleet_{name}"]) for name in names]

        metrics(events.LinkUp("mqtt://here", 9))
        assert said("broker_up", "broker_connections_total") == [1, 1]
        metrics(events.LinkDown("gone", 1.0))
        assert said("broker_up", "broker_connections_total") == [0, 1]
        outcomes(core, message(core, "a", 1, 1))
        store.refused_devices.refuse("b", 1.0, "why not")
        metrics(events.OrderDone("remove", "b", "me", "done", 0))
        assert said('devices{state="standing"}', 'devices{state="refused"}') == [1, 1]
    with DurableStore(tmp_path / "rounds", BUNDLE, "fleet") as store:
        rounds = rounds_of(store, manifest(), BUNDLE, Settings(rounds=2, calibrate=False), now=0.0)
        metrics = Metrics("fleet", rounds, store.refused_devices, wall=lambda: now[0])
        rounds.status("a", encode(Status(True, b"instance", 1)), 0.0)
        for number in (1, 2):
            rounds.advance(0.0, now[0])
            assert said("round", "round_open", "round_age_seconds") == [number, 1, 0]
            rounds.take([("a", encode(contribution(run=rounds.parts.run, round=number), "f64"))], 0.0)
            rounds.advance(0.0, now[0])
            now[0] += 50.0
            assert said("round_open", "round_age_seconds", "round_contributions") == [0, 50, 1]
        now[0] = 0.0  # the clock was set back
        assert said("round_age_seconds") == [0]


def test_a_scraper_that_dawdles_is_cut_off_and_another_one_is_answered(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("protofleet.aggregator.metrics.metrics_server.ANSWER_S", 0.3)
    with MetricsServer("127.0.0.1", 0, OneGauge()) as server:
        host, port = "127.0.0.1", int(server.url.split(":")[2].split("/")[0])
        slow = [socket.create_connection((host, port)) for _ in range(2)]
        for each in slow:
            each.sendall(b"GET /met")  # and nothing more, or a byte now and then
        with urllib.request.urlopen(server.url, timeout=60) as answer:
            assert answer.read() == ONE
        for each in slow:
            assert each.recv(100) == b""
            each.close()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url.replace("/metrics", "/"), timeout=60)
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("POST", "/metrics", b"x" * 100)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Server"]) == (501, "protofleet")
        connection.close()
    assert capfd.readouterr() == ("", "")  # whoever connects could fill a log


def test_where_metrics_are_served() -> None:
    assert metrics_address("9464") == ("127.0.0.1", 9464)
    assert metrics_address("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert metrics_address("[::1]:9464") == ("::1", 9464)
    for wrong in ("here", "70000", ":1"):
        with pytest.raises(UsageError, match="--metrics, expected HOST:PORT"):
            metrics_address(wrong)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UsageError, match="an address that is free"):
        MetricsServer("127.0.0.1", taken.getsockname()[1], OneGauge())


def test_idle_connections_delay_no_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is answered while all of them are open, and they stay so for far longer than the test."""
    monkeypatch.setattr("protofleet.aggregator.metrics.metrics_server.ANSWER_S", 600.0)
    with MetricsServer("127.0.0.1", 0, OneGauge()) as server, ExitStack() as open_ones:
        idle = [_idle(server, open_ones) for _ in range(18)]
        assert _scraped(server) == ONE
        assert all(map(_is_open, idle))


def test_nor_do_more_of_them_than_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofleet.aggregator.metrics.metrics_server.ANSWER_S", 600.0)
    with MetricsServer("127.0.0.1", 0, OneGauge()) as server, ExitStack() as open_ones:
        idle = [_idle(server, open_ones) for _ in range(MOST + 8)]
        assert _scraped(server) == ONE
        cut, left = idle[:9], idle[9:]  # those who came first, one for the scraper
        assert [each.recv(100) for each in cut] == [b""] * 9
        assert all(map(_is_open, left))


def test_who_has_asked_is_not_cut_off_for_those_who_have_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofleet.aggregator.metrics.metrics_server.ANSWER_S", 600.0)
    asked, may_go_on = threading.Event(), threading.Event()

    def before() -> None:
        asked.set()
        assert may_go_on.wait(60)

    with MetricsServer("127.0.0.1", 0, OneGauge(before)) as server, ExitStack() as open_ones:
        scraper = _idle(server, open_ones)
        scraper.sendall(b"rics HTTP/1.0\r\n\r\n")
        assert asked.wait(60)
        idle = [_idle(server, open_ones) for _ in range(MOST + 8)]
        assert idle[8].recv(100) == b""  # the last that has to go has gone
        may_go_on.set()
        assert b"".join(iter(lambda: scraper.recv(1000), b"")).endswith(ONE)
        assert all(map(_is_open, idle[9:]))


def _idle(server: MetricsServer, open_ones: ExitStack) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", int(server.url.split(":")[2].split("/")[0])), timeout=60)
    made.sendall(b"GET /met")
    return open_ones.enter_context(made)


def _scraped(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(server.url, timeout=60) as answer:
        return bytes(answer.read())


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(100) != b""
    except BlockingIOError:
        return True


def test_who_asks_for_open_metrics_gets_them_and_another_query_changes_nothing(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, 'a "fleet"') as store:
        metrics = Metrics('a "fleet"', core_of(store), store.refused_devices)
        with MetricsServer("127.0.0.1", 0, metrics) as server:
            asked = urllib.request.Request(server.url, headers={"Accept": "application/openmetrics-text;version=1.0.0"})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                families = list(openmetrics.text_string_to_metric_families(answer.read().decode()))
            plain = scraped(server.url)
            assert scraped(f"{server.url}?name[]=nothing").keys() == plain.keys()
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["fleet"] for sample in samples if sample.name == "protofleet_info"} == {'a "fleet"'}
    assert {sample.name.removeprefix("protofleet_") for sample in samples} == {name.partition("{")[0] for name in plain}


def test_nothing_of_an_embedding_programs_registry_is_served_or_changed(tmp_path: Path) -> None:
    """In a process of its own, whose global registry is that of a program of many processes."""
    script = f"""
        import os, sys, urllib.request
        from pathlib import Path
        sys.path[:0] = {sys.path!r}
        from aggregator_samples import BUNDLE
        from protofleet.aggregator.metrics.metrics import Metrics
        from protofleet.aggregator.metrics.metrics_server import MetricsServer
        from protofleet.aggregator.server import service
        from protofleet.aggregator.settings import metrics_address
        from protofleet.aggregator.store.durable_store import DurableStore
        from tests.aggregator.merging.test_exact_sums import core_of
        metrics_address("0")
        assert "prometheus_client" not in sys.modules
        with DurableStore(Path("s"), BUNDLE, "fleet") as store:
            metrics = Metrics("fleet", core_of(store), store.refused_devices)
            assert "prometheus_client" not in sys.modules
            import prometheus_client
            theirs = prometheus_client.Counter("theirs", "of the program that embeds us")
            theirs.inc()
            names = sorted(os.listdir("many"))
            before = {{family.name for family in prometheus_client.REGISTRY.collect()}}
            with MetricsServer("127.0.0.1", 0, metrics) as server:
                served = urllib.request.urlopen(server.url).read().decode().splitlines()
        assert all(line.startswith(("# HELP protofleet_", "# TYPE protofleet_", "protofleet_")) for line in served)
        assert {{family.name for family in prometheus_client.REGISTRY.collect()}} == before
        assert names and sorted(os.listdir("many")) == names
    """
    (tmp_path / "many").mkdir()
    given = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "many")}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, env=given, check=True, timeout=120)


def test_without_its_package_metrics_are_an_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = f"--metrics, expected prometheus_client, got nothing, try {install_command('metrics')}"
    with pytest.raises(UsageError, match=re.escape(line)):
        metrics_address("9464")
