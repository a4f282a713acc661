"""The compose file of `deploy/`, and what is watched through it: it fits together, and works as processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from aggregator_samples import BUNDLE, bundle_file, manifest, means
from brokers import free_port, wait_for_port
from pki_samples import Authority, GuardedMosquitto
from postgres_server import need_postgres
from scraped import text_of
from talker import Talker

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.ingest.ingest import Outcome
from protofleet.aggregator.metrics.metrics import Metrics
from protofleet.aggregator.settings import AggregateSettings, Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.mqtt.certificates import Expiry
from protofleet.pki.authority import Office

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
WORKERS = ("worker-1", "worker-2")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def queries() -> list[str]:
    """All that the dashboard asks Prometheus."""
    panels = json.loads((DEPLOY / "grafana" / "protofleet.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def names(text: str) -> set[str]:
    return set(re.findall(r"\bprotofleet_[a-z_]+", text))


def test_every_query_of_the_dashboard_uses_metrics_and_labels_that_there_are(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        core = rounds_of(store, manifest(), BUNDLE, Settings(rounds=2, calibrate=False), now=0.0)
        metrics = Metrics("fleet", core, store.refused_devices, store=store)
        metrics.broker_certificate = lambda: Expiry("broker's certificate", "b", 0.0, 2e9)
        text = text_of(metrics)
        follower = text_of(Metrics("fleet", core, store.refused_devices, leads=False))
    assert "\nprotofleet_leads 1.0\n" in text
    assert float(re.findall(r"^protofleet_store_bytes (\S+)$", text, re.M)[0]) > 4_096
    known = names("\n".join(line for line in text.splitlines() if not line.startswith("#")))
    for query in queries():
        used = names(query)
        assert used <= known, query
        assert used or "up{" in query
        for label, how, value in re.findall(r'(\w+)(=~|=)"([^"]+)"', query):
            values = {
                "job": {"protofleet"},
                **{each: set(re.findall(rf'{each}="([^"]+)"', text)) for each in ("state",)},
            }
            values["outcome"] = set(Outcome.__args__)
            assert set(value.split("|") if how == "=~" else [value]) <= values[label], query
        for label in re.findall(r"by \((\w+)\)", query):
            assert any(re.search(rf'^{name}\{{{label}="', text, re.M) for name in used), query
    assert "\nprotofleet_leads 0.0\n" in follower
    alone = {"protofleet_devices", "protofleet_epoch", "protofleet_store_bytes", "protofleet_round_contributions"}
    assert not alone & names(follower)


def test_the_compose_file_names_what_there_is_and_opens_nothing_else(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {name: service.get("ports", []) for name, service in services.items() if service.get("ports")} == {
        "mosquitto": ["8883:8883"],
        "grafana": ["127.0.0.1:3000:3000"],
        "page": ["127.0.0.1:8080:8080"],
    }
    commands = (ROOT / "docs" / "commands.md").read_text()
    options = set(re.findall(r"--[a-z][a-z-]+", commands.split("\n## protofleet aggregate\n")[1].split("\n## ")[0]))
    first, second = (services[name]["command"] for name in WORKERS)
    for name, command in zip(WORKERS, (first, second), strict=True):
        assert {word.partition("=")[0] for word in command[1:]} <= options
        assert f"--cert=/etc/protofleet/aggregator/aggregator.{name}.pem" in command
    assert [word for word in first if word not in second] == [
        "--cert=/etc/protofleet/aggregator/aggregator.worker-1.pem"
    ]
    watching = set(re.findall(r"--[a-z][a-z-]+", commands.split("\n## protofleet watch\n")[1].split("\n## ")[0]))
    assert {word.partition("=")[0] for word in services["page"]["command"][1:]} <= watching
    assert "--page=0.0.0.0:8080" in services["page"]["command"]
    variables = {"PROTOFLEET_AGGREGATE_" + name.upper() for name in AggregateSettings.__dataclass_fields__}
    for name in WORKERS:
        given = {word for word in services[name]["environment"] if word.startswith("PROTOFLEET_")}
        assert given == {"PROTOFLEET_AGGREGATE_ENROLLED"}
        assert given <= variables
    for name, service in services.items():
        assert "privileged" not in service
        assert service.get("security_opt") == ["no-new-privileges:true"] or name == "postgres"
        assert ":" in service["image"] or service["image"] == "protofleet-aggregator"
        assert not service["image"].endswith(":latest")
        assert set(service["networks"]) <= compose["networks"].keys()
        assert set(service.get("secrets", ())) <= compose["secrets"].keys()
        for place in service["volumes"]:
            source = place.partition(":")[0]
            made = source in compose["volumes"] or re.match(r"\./(state|pki)/|\./fleet\.bundle$", source)
            assert made or (DEPLOY / source).is_file(), place
    for name in (*WORKERS, "mosquitto", "page"):
        assert services[name]["read_only"]
        assert services[name]["user"].startswith("${PF_USER:?")
        assert services[name]["cap_drop"] == ["ALL"]
    assert compose["networks"]["store"]["internal"]
    assert compose["networks"]["watch"]["internal"]
    assert services["postgres"]["networks"] == ["store"]
    assert services["mosquitto"]["networks"] == ["fleet"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"{name}:9464" for name in WORKERS]
    source = yaml.safe_load((DEPLOY / "grafana" / "datasource.yml").read_text())["datasources"][0]
    assert (source["uid"], source["url"]) == ("protofleet-prometheus", "http://prometheus:9090")
    assert '"uid": "protofleet-prometheus"' in (DEPLOY / "grafana" / "protofleet.json").read_text()


def test_prometheus_takes_its_configuration() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(["promtool", "check", "config", DEPLOY / "prometheus.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def asked_of_prometheus(folder: Path, ports: list[int]) -> dict[str, int]:
    """How many series each query of the dashboard gives, of a Prometheus that has scraped both workers."""
    text, port = (DEPLOY / "prometheus.yml").read_text().replace("_interval: 15s", "_interval: 1s"), free_port()
    for name, at in zip(WORKERS, ports, strict=True):
        text = text.replace(f"{name}:9464", f"127.0.0.1:{at}")
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(DEPLOY / "alerts.yml", folder)
    places = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb"]
    command = ["prometheus", *places, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(command)
    try:
        wait_for_port(port, process)
        deadline, found = time.monotonic() + 60, dict[str, int]()
        while time.monotonic() < deadline and not (found and min(found.values())):
            time.sleep(1.0)
            for query in queries():
                words = urllib.parse.urlencode({"query": query})
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{words}", timeout=60) as answer:
                    said = json.load(answer)
                assert said["status"] == "success", query
                found[query] = len(said["data"]["result"])
        return found
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_what_the_compose_file_starts_works_as_processes(compose: dict[str, Any], tmp_path: Path) -> None:
    """Mosquitto with the files of `pki`, a PostgreSQL, and both workers with their very words, but for places."""
    server = need_postgres()
    authority = Authority(tmp_path / "pki", {f"d{i}": ("fleet",) for i in range(5)})
    with Office.open(authority.folder) as office:
        assert office.add_workers("fleet", 2) == ["aggregator.worker-1", "aggregator.worker-2"]
    bundle_file(tmp_path / "fleet.bundle")
    broker, place = GuardedMosquitto(authority), server.new_place()
    ports = [free_port() for _ in WORKERS]
    processes, talkers = list[subprocess.Popen[bytes]](), list[Talker]()
    try:
        for name, port in zip(WORKERS, ports, strict=True):
            words = "\n".join(compose["services"][name]["command"])
            for there, here in (
                ("/etc/protofleet/aggregator", str(authority.folder / "aggregator")),
                ("/etc/protofleet/fleet.bundle", str(tmp_path / "fleet.bundle")),
                ("mqtts://mosquitto:8883", authority.url),
                ("postgresql://protofleet@postgres/protofleet", place),
                ("0.0.0.0:9464", f"127.0.0.1:{port}"),
            ):
                assert there in words
                words = words.replace(there, here)
            command = [sys.executable, "-m", "protofleet", *words.split("\n"), "--max-clients=5", "--quiet"]
            alive = {**os.environ, "PROTOFLEET_ALIVE": str(tmp_path / name)}
            processes.append(subprocess.Popen(command, env=alive))
        for i in range(5):
            talkers.append(Talker(authority.address(f"d{i}"), "fleet", f"d{i}", lambda a, i=i: means(i)))
            talkers[-1].start()
        deadline = time.monotonic() + 120
        while sum(bool(talker.receipts) for talker in talkers) < 5:
            assert time.monotonic() < deadline
            assert [process.poll() for process in processes] == [None, None]
            time.sleep(0.2)
        texts = [""]
        while "protofleet_rounds_closed_total 1\n" not in "".join(texts):
            assert time.monotonic() < deadline
            time.sleep(0.5)
            texts = [scraped(port) for port in ports]
        assert sum("protofleet_leads 1.0\n" in text for text in texts) == 1
        done = [float(n) for text in texts for n in re.findall(r'messages_total\{outcome="committed"\} (\S+)', text)]
        assert sum(done) == 5
        assert set().union(*map(names, queries())) <= set().union(*map(names, texts))
        assert all((tmp_path / name).exists() for name in WORKERS)
        if shutil.which("prometheus") is not None:
            given = asked_of_prometheus(tmp_path, ports)
            assert [query for query, series in given.items() if not series] == []
        assert "already connected" not in broker.log  # neither throws the other out
    finally:
        for talker in talkers:
            talker.stop()
        for process in processes:
            process.terminate()
        ended = [process.wait(60) for process in processes]
        broker.close()
    assert ended == [143, 143]
