"""The alerts of `deploy/`: each fires when it should, uses metrics that there are, and has a part of the runbook."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from aggregator_samples import BUNDLE, manifest
from brokers import free_port, wait_for_port
from scraped import text_of

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.metrics.metrics import Counts, Metrics
from protofleet.aggregator.metrics.metrics_server import MetricsServer
from protofleet.aggregator.monitoring.events import AccuracyTold
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.mqtt.certificates import Expiry

ROOT = Path(__file__).parents[2]
RULES, CASES = ROOT / "deploy" / "alerts.yml", Path(__file__).parent / "alerts_test.yml"
GRAFANA = ROOT / "deploy" / "grafana" / "protofleet.json"


def need(tool: str) -> str:
    if shutil.which(tool) is None:
        if "PROTOFLEET_CI" in os.environ:
            pytest.fail(f"{tool} is not installed")
        pytest.skip(f"{tool} is not installed")
    return tool


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def queries() -> list[str]:
    """All that the dashboard and the rules ask."""
    panels = json.loads(GRAFANA.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def fleet_metrics(store: DurableStore) -> Metrics:
    core = rounds_of(store, manifest(), BUNDLE, Settings(rounds=2, calibrate=False), now=0.0)
    counts = Counts()
    counts(AccuracyTold(1, 1, 1, 10, {"all_classes": 0.5}, {}, "a", 0.5))
    metrics = Metrics("fleet", core, store.refused_devices, store=store, counts=counts)
    metrics.broker_certificate = lambda: Expiry("broker's certificate", "b", 0.0, 2e9)
    return metrics


def test_each_alert_fires_when_it_should_and_not_before(tmp_path: Path) -> None:
    cases = CASES.read_text().replace("ALERTS", str(RULES))
    (tmp_path / "cases.yml").write_text(cases)
    done = subprocess.run([need("promtool"), "test", "rules", tmp_path / "cases.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    tested = [
        case["alertname"]
        for test in yaml.safe_load(cases)["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    ]
    assert sorted(tested) == sorted(alert["alert"] for alert in alerts())


def test_each_alert_has_a_part_of_the_runbook_that_names_it() -> None:
    page = (ROOT / "docs" / "runbook.md").read_text()
    parts = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    named = set[str]()
    for alert in alerts():
        place, _, part = alert["annotations"]["runbook"].partition("#")
        assert place == "docs/runbook.md"
        assert f"`{alert['alert']}`" in parts[part], alert["alert"]
        named.add(alert["alert"])
    assert set(re.findall(r"`([A-Z]\w+)`", "".join(re.findall(r"^.*alerts? `.*$", page, re.M)))) == named


def test_every_rule_uses_metrics_and_states_that_there_are(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        text = text_of(fleet_metrics(store))
    known = set(re.findall(r"^(protofleet_\w+)", text, re.M))
    for rule in alerts():
        assert set(re.findall(r"protofleet_\w+", rule["expr"])) <= known, rule["expr"]
        for label, value in re.findall(r'(state|reason)="([^"]+)"', rule["expr"]):
            assert f'{label}="{value}"' in text, rule["expr"]


def test_a_real_prometheus_answers_each_query_of_dashboard_and_rules(tmp_path: Path) -> None:
    need("prometheus")
    port = free_port()
    shutil.copy(RULES, tmp_path)
    with (
        DurableStore(tmp_path / "s", BUNDLE, "fleet") as store,
        MetricsServer("127.0.0.1", 0, fleet_metrics(store)) as it,
    ):
        config = (ROOT / "deploy" / "prometheus.yml").read_text().replace("_interval: 15s", "_interval: 1s")
        at = urllib.parse.urlsplit(it.url).netloc
        (tmp_path / "prometheus.yml").write_text(re.sub(r"targets: .*", f'targets: ["{at}"]', config))
        words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
        command = ["prometheus", *words, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
        process = subprocess.Popen(command)
        try:
            wait_for_port(port, process)
            deadline, left = time.monotonic() + 60, set(queries())
            while left:
                assert time.monotonic() < deadline, left
                time.sleep(0.5)
                left = {query for query in left if not asked(port, query)}
            for rule in rules():
                asked(port, rule["expr"])
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/rules", timeout=60) as answer:
                (group,) = json.load(answer)["data"]["groups"]
            assert [rule["name"] for rule in group["rules"] if rule["health"] == "err"] == []
            assert len(group["rules"]) == len(rules())
        finally:
            process.kill()
            process.wait()


def asked(port: int, query: str) -> list[Any]:
    """The series that a query gives."""
    words = urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{words}", timeout=60) as answer:
        said = json.load(answer)
    assert said["status"] == "success", query
    return said["data"]["result"]
