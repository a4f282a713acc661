"""The operator's page, of an aggregator that is a process: what it tells, what it takes, and who may come in."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import TestBroker, make_broker
from browser import Visitor
from commands import one_error_line, run
from fleets import EVIL, ORCHARD, SHIPPED_BUNDLE, TOKEN, Served, stocked
from postgres_server import need_postgres

from protofleet.aggregator.database import is_taken
from protofleet.aggregator.overview.fleet_state import _REASONS
from protofleet.aggregator.page.fleet_content import runbook_part
from protofleet.aggregator.store.schema import KIND

ROOT = SHIPPED_BUNDLE.parents[3]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestBroker]:
    found = make_broker("embedded", tmp_path_factory.mktemp("broker"))
    found.start()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def served(broker: TestBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An aggregator whose page takes no orders."""
    folder = tmp_path_factory.mktemp("page")
    found = Served.aggregator(folder, broker, stocked(folder / "store"))
    yield found
    found.end()


@pytest.fixture
def controlled(broker: TestBroker, tmp_path: Path) -> Iterator[Served]:
    """An aggregator whose page takes orders of anna's."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# who may\nanna:{TOKEN}\n")
    tokens.chmod(0o600)
    store = stocked(tmp_path / "store", fleet=fleet_in(tmp_path))
    found = Served.aggregator(tmp_path, broker, store, "--allow-control", tokens, fleet=fleet_in(tmp_path))
    yield found
    found.end()


def fleet_in(folder: Path) -> str:
    """A fleet of this test's own, on the broker of all."""
    return folder.name.replace("_", "-").lower()[:64]


def rows_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {cells[0]: dict(zip(state["columns"], cells, strict=True)) for cells in state["rows"]}


# ── what it tells ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_first_screen_says_who_needs_care_and_each_cause_has_its_runbook(served: Served) -> None:
    visitor = served.visitor()
    state = visitor.open()
    rows = rows_of(state)
    assert state["fleet"] == ORCHARD
    assert set(rows) == {"d0", "d1", "d2", "d3", "d4", EVIL}
    assert "need care" in state["top"]["sentence"]
    assert not state["top"]["well"]
    assert state["top"]["runs"]
    figures = ("step_ms", "profiled_ms", "predicted_ms", "peak_bytes", "profiled_bytes", "most_bytes")
    assert [rows["d0"][name] for name in figures] == [30.0, 10.0, 11.0, 9e7, 5e7, 8e7]
    expected = {"d0": ["slow", "memory"], "d1": ["old-bundle"], "d2": ["gone"], "d3": ["refused", "left-out"], "d4": []}
    assert {name: rows[name]["causes"] for name in expected} == expected
    assert rows["d2"]["presence"] == "gone"
    assert time.time() - rows["d2"]["since"] > 86_400
    for cause in {*_REASONS, *state["top"]["counts"], "intruder", "expiry", "no-aggregator"}:
        code, _, body = visitor.ask("GET", f"/runbook?part={cause}")
        assert (code, json.loads(body)) == (200, runbook_part(cause))
        assert [line for line in json.loads(body)["lines"] if line.startswith("**Do**")]
    text = (ROOT / "docs" / "runbook.md").read_text()
    assert (ROOT / "aggregator" / "page" / "runbook.md").read_text() == text


def test_rounds_have_their_accuracy_and_its_spread_and_a_device_its_history(served: Served) -> None:
    visitor = served.visitor()
    state = visitor.open()
    assert [one["round"] for one in state["rounds"]] == [2, 1]
    spread = {"devices": 4, "mean": 0.65, "least": 0.5, "most": 0.8, "low": 0.6, "high": 0.7}
    assert {k: round(v, 6) for k, v in state["rounds"][0]["accuracy"].items()} == spread
    assert state["rounds"][0]["left_out"] == 1
    assert state["compared"] is None  # no sums stand here
    assert state["named"][0][0] == "d3"
    assert "it contradicts 2 of 3" in state["named"][0][1]
    code, _, body = visitor.ask("GET", "/device?name=d2")
    found = json.loads(body)
    assert code == 200
    assert [each[1] for each in found["events"]] == ["gone", "first seen"]
    assert [each[:2] for each in found["accuracy"]] == [[2, 0.7], [1, 0.7]]
    assert found["cares"][0][0] == "gone"
    assert visitor.ask("GET", "/device?name=nobody")[0] == 404


def test_proposed_classes_are_told_with_their_devices_and_so_is_the_share_of_unknown_photos(served: Served) -> None:
    visitor = served.visitor()
    state = visitor.open()
    owl, evil = ["barn owl", 9, 2, [["d4", 7], ["d3", 2]]], [EVIL, 3, 1, [["d3", 3]]]
    assert state["classes"] == {"forgotten": [], "drifting": [], "proposed": [owl, evil]}
    assert [rows_of(state)[name]["unknown"] for name in ("d3", "d4")] == [None, 0.4]
    found = json.loads(visitor.ask("GET", "/device?name=d3")[2])
    assert {"proposed class barn owl: 2 photos", f"proposed class {EVIL}: 3 photos"} <= set(found["lines"])


def test_what_changes_is_told_and_what_stays_is_not(served: Served) -> None:
    visitor = served.visitor()
    version = visitor.open()["version"]
    store = str(served.processes.folder / "store")
    assert run("fleet", "remove", "d4", "--store", store).returncode == 0
    told: list[set[str]] = []

    def holds(parts: dict[str, Any], rows: dict[str, Any]) -> bool:
        told.append({cells[0] for cells in parts["rows"]})
        return any(order[1:3] == ["remove", "d4"] and order[5] for order in parts.get("orders", []))

    parts = served.until(visitor, holds, since=version)
    assert not parts["whole"]
    assert not any("d2" in names for names in told)  # it is away, and nothing was sent to it
    assert any("d4" in names for names in told)


@pytest.mark.parametrize("kind", ["file", "server"])
def test_watch_serves_the_same_page_and_knows_that_nobody_runs(tmp_path: Path, kind: str) -> None:
    store = stocked(tmp_path / "store" if kind == "file" else need_postgres().new_place())
    served = Served(tmp_path, "watch", "watch", "--store", store, "--page", "0")
    try:
        visitor = served.visitor()
        state = visitor.open()
        assert state["fleet"] == ORCHARD
        assert (state["top"]["runs"], state["control"]) == (False, False)
        assert {row["presence"] for row in rows_of(state).values()} == {"unknown"}
        assert visitor.ask("POST", "/control", {"token": TOKEN}, X_Protofleet_Token=visitor.token)[0] == 404
        assert not is_taken(store, KIND)  # it only looks
    finally:
        served.end()


# ── orders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_the_option_there_is_no_control_at_all(served: Served) -> None:
    visitor = served.visitor()
    assert visitor.open()["control"] is False
    for path in ("/control", "/order", "/leave"):
        body = {"what": "pause", "token": TOKEN}
        assert visitor.ask("POST", path, body, X_Protofleet_Token=visitor.token)[0] == 404
    log = json.loads(run("fleet", "log", "--store", served.processes.folder / "store", "--json", "-").stdout)
    assert "pause" not in {order["what"] for order in log["orders"]}


def order(visitor: Visitor, **given: object) -> tuple[int, str]:
    code, _, body = visitor.ask("POST", "/order", given, X_Protofleet_Token=visitor.token)
    return code, body.decode()


def test_an_order_from_the_page_is_the_commands_row_and_says_who_gave_it(controlled: Served) -> None:
    visitor = controlled.visitor()
    state = visitor.open()
    assert state["control"] is True
    code, said = order(visitor, what="forget", device="d0", typed="d0")
    assert (code, "a token first" in said) == (409, True)
    assert visitor.post("/control", {"token": TOKEN}) == {"operator": "anna"}
    for typed in ("", "d1", "D0"):
        code, said = order(visitor, what="forget", device="d0", typed=typed)
        assert (code, "cannot be undone" in said) == (409, True)
    assert order(visitor, what="forget", device="nobody", typed="nobody")[0] == 409
    assert order(visitor, what="drop")[0] == 409
    assert order(visitor, what="rollout-stage", share="nan")[0] == 409
    assert order(visitor, what="forget", device="d0", typed="d0") == (200, '{"said": "forget d0: recorded"}')
    assert order(visitor, what="pause")[0] == 200

    def done(parts: dict[str, Any], rows: dict[str, Any]) -> bool:
        orders = parts.get("orders", [])
        return len(orders) == 2 and all(order[5] for order in orders)

    controlled.until(visitor, done)
    store = controlled.processes.folder / "store"
    log = json.loads(run("fleet", "log", "--store", store, "--json", "-").stdout)["orders"]
    assert [(each["what"], each["device"], each["who"], each["outcome"]) for each in log] == [
        ("forget", "d0", "anna (page, 127.0.0.1)", log[0]["outcome"]),
        ("pause", "", "anna (page, 127.0.0.1)", "done"),
    ]
    assert log[0]["outcome"].startswith("done")
    assert "d0" not in rows_of(controlled.visitor().open())
    assert order(controlled.visitor(), what="resume")[0] == 403  # another browser
    visitor.post("/leave", {})
    assert order(visitor, what="resume")[0] == 409
    assert TOKEN not in controlled.said()
    assert "ordered on the page by anna from 127.0.0.1" in controlled.said()


def test_wrong_tokens_are_followed_by_pauses(controlled: Served) -> None:
    visitor = controlled.visitor()
    visitor.open()

    def enter(token: str) -> tuple[int, str]:
        code, _, body = visitor.ask("POST", "/control", {"token": token}, X_Protofleet_Token=visitor.token)
        return code, body.decode()

    assert enter("correct-horse-batterx")[0] == 409
    assert "patience" in enter(TOKEN)[1]  # also for the right one
    assert "patience" in enter(TOKEN)[1]
    time.sleep(1.1)
    assert "another" in enter("")[1]
    time.sleep(1.1)
    assert "patience" in enter(TOKEN)[1]  # the second pause is longer
    time.sleep(1.0)
    assert enter(TOKEN)[0] == 200
    said = controlled.said()
    assert "a wrong control token from 127.0.0.1, the 2. in a row" in said
    assert "batter" not in said


def test_looking_and_ordering_leave_the_aggregators_lock_alone(controlled: Served, broker: TestBroker) -> None:
    visitor = controlled.visitor()
    visitor.open()
    visitor.post("/control", {"token": TOKEN})
    order(visitor, what="pause")
    controlled.until(visitor, lambda parts, rows: any(each[5] for each in parts.get("orders", [])))
    store = controlled.processes.folder / "store"
    assert is_taken(store, KIND)
    about = ("--bundle", SHIPPED_BUNDLE, "--broker", broker.url, "--fleet", fleet_in(store.parent))
    done = run("aggregate", *about, "--store", store)
    assert "another process that runs on it" in one_error_line(done)


def test_a_token_file_is_made_for_its_owner_alone_and_not_said(broker: TestBroker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    store = stocked(tmp_path / "store", fleet=fleet_in(tmp_path))
    served = Served.aggregator(tmp_path, broker, store, "--allow-control", tokens, fleet=fleet_in(tmp_path))
    try:
        name, token = tokens.read_text().strip().split(":")
        assert tokens.stat().st_mode & 0o777 == 0o600
        assert len(token) >= 32
        assert str(tokens) in served.said()
        assert token not in served.said()
        visitor = served.visitor()
        visitor.open()
        assert visitor.post("/control", {"token": token}) == {"operator": name}
    finally:
        served.end()


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    words = ("aggregate", "--bundle", SHIPPED_BUNDLE, "--broker", "mqtt://127.0.0.1:1", "--store", tmp_path / "s")
    tokens = tmp_path / "tokens"
    for more, text, mode, said in (
        (("--allow-control", tokens), "", 0o600, "--allow-control, expected --page beside it"),
        (
            ("--page", "0.0.0.0:0", "--allow-control", tokens),
            "",
            0o600,
            "--page-cert beside it, or --page PORT",
        ),
        (("--page", "x:1"), "", 0o600, "--page, expected [ADDRESS:]PORT"),
        (("--page", "0", "--page-cert", "a"), "", 0o600, "--page-cert, expected --page and --page-key beside it"),
        (("--page", "0", "--allow-control", tokens), f"anna:{TOKEN}\n", 0o644, "a file that others may not read"),
        (("--page", "0", "--allow-control", tokens), "anna:short\n", 0o600, "tokens of 16 characters or more"),
        (("--page", "0", "--allow-control", tokens), "anna\n", 0o600, "expected NAME:TOKEN, each name once"),
        (("--page", "0", "--allow-control", tokens), "", 0o600, "expected a line NAME:TOKEN or more"),
    ):
        tokens.write_text(text)
        tokens.chmod(mode)
        done = run(*words, *more)
        assert said in one_error_line(done)
        assert done.returncode == 2
        assert f"{tokens} {tokens}" not in done.stderr
        assert TOKEN not in done.stderr
        assert "short" not in done.stderr.replace("shorter", "")


# ── who may come in ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_order_needs_the_token_of_this_page_and_comes_from_it(controlled: Served) -> None:
    visitor = controlled.visitor()
    visitor.open()
    visitor.post("/control", {"token": TOKEN})
    good, pause = {"X_Protofleet_Token": visitor.token}, {"what": "pause"}
    assert visitor.ask("POST", "/order", pause)[0] == 403
    assert visitor.ask("POST", "/order", pause, X_Protofleet_Token="x" * 43)[0] == 403
    for origin in ("http://evil.example", "null"):
        assert visitor.ask("POST", "/order", pause, Origin=origin, **good)[0] == 403
    other = controlled.visitor()
    other.open()
    assert other.ask("POST", "/order", pause, **good)[0] == 403
    assert other.ask("POST", "/order", pause, X_Protofleet_Token=other.token)[0] == 409  # it has given no token
    for host in ("evil.example", "localhost.evil.example", ""):
        visitor.host = host
        assert visitor.ask("POST", "/order", pause, **good)[0] == 421
        assert visitor.ask("GET", "/")[0] == 421
        assert visitor.ask("GET", "/events")[0] == 421
    log = run("fleet", "log", "--store", controlled.processes.folder / "store", "--json", "-")
    assert json.loads(log.stdout)["orders"] == []


def test_no_path_leads_to_a_file_and_what_is_no_order_is_refused(controlled: Served) -> None:
    visitor = controlled.visitor()
    visitor.open()
    for path in (
        *(
            "/../../../../etc/passwd",
            "//etc/passwd",
            "/page.html",
            "/runbook.md",
            "/fleet_page.py",
            "/%2e%2e/",
            "/store",
        ),
        *("/runbook?part=../../etc/passwd", "/runbook?part=", "/runbook", "/device?name=%2e%2e", "/device", "/tokens"),
    ):
        code, _, body = visitor.ask("GET", path)
        assert (code, b"root:" in body, b"SQLite" in body) == (404, False, False), path
    for path, body, expected in (
        *(("/order", b"no json", 400), ("/order", b"[1]", 400), ("/order", b"{}", 409), ("/order", b"[" * 60_000, 400)),
        *(("/control", b"{}", 400), ("/control", b'{"token": 1}', 409), ("/else", b"{}", 404)),
        *(("/order", b"x" * 70_000, 413), ("/order?what=pause", b"{}", 404)),
    ):
        assert visitor.ask("POST", path, body, X_Protofleet_Token=visitor.token)[0] == expected, (path, body[:20])


def test_script_in_names_is_text(served: Served) -> None:
    visitor = served.visitor()
    visitor.open()
    _, heads, body = visitor.ask("GET", "/")
    assert b"<img" not in body
    assert body.count(b"</script>") == 3
    assert "default-src 'none'" in heads["content-security-policy"]
    assert "unsafe" not in heads["content-security-policy"]
    script = (ROOT / "aggregator" / "page" / "page.js").read_text()
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|outerHTML\s*=[^=]", script)
    others = re.findall(r"https?://[^\s\"'`]+", script + body.decode())
    assert set(others) <= {"http://www.w3.org/2000/svg"}  # a name, which nothing fetches


def test_a_flood_of_streams_is_refused_and_slow_browsers_hold_up_nobody(served: Served) -> None:
    visitors = [served.visitor() for _ in range(8)]
    for visitor in visitors:
        visitor.open()
    with contextlib.ExitStack() as streams:
        began: list[bytes] = []
        for visitor in visitors:
            for _ in range(5):
                stream = streams.enter_context(socket.create_connection(("127.0.0.1", served.port), timeout=30))
                ask = f"GET /events?since=-1 HTTP/1.1\r\nHost: {visitor.host}\r\nCookie: {visitor.cookie}\r\n\r\n"
                stream.sendall(ask.encode())
                began.append(stream.recv(12))  # and reads no further
        codes = Counter(began)
        assert 1 <= codes[b"HTTP/1.1 200"] <= 8  # one of an earlier test may still be there
        assert codes.total() - codes[b"HTTP/1.1 200"] == codes[b"HTTP/1.1 503"]
        assert rows_of(served.visitor().open())
    idle = [socket.create_connection(("127.0.0.1", served.port), timeout=30) for _ in range(60)]
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if served.visitor().ask("GET", "/page.css")[0] == 200:
                break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for connection in idle:
        connection.close()
    process: subprocess.Popen[bytes] = served.processes.processes["aggregator"]
    assert process.poll() is None
