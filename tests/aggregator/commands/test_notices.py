"""Notices: what is told when, to a webhook, a broker and a mail server that are there, gone, or mean no good."""

from __future__ import annotations

import json
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_string, policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aggregator_samples import BUNDLE
from brokers import Embedded
from commands import one_error_line, run
from hypothesis import given
from hypothesis import strategies as st

from protofleet.aggregator.commands.fleet_status_cli import _looks
from protofleet.aggregator.commands.notices import PACE_S, Notice, Notices, sender_of, senders_of
from protofleet.aggregator.overview.fleet_state import Care, read_state
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.wire.messages import Status

HOSTILE = "\x1b[2J\r\nBcc: everyone@example.org\r\n\r\n\u202e"
NOTICE = Notice(
    1.0,
    "1 of 2 devices need care (1 gone); 1 online.",
    [Care("a", "gone", f"gone {HOSTILE}")],
    [Care("b", "slow", "x")],
)


@contextmanager
def webhook(answers: list[int]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that gives these statuses, then 200; its URL and what came."""
    came = list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = answers.pop(0) if answers else 200
            if status == 200:
                came.append(body)
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "/page-to-sign-in-at")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/secret-path", came
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def mail_server() -> Iterator[tuple[int, list[str]]]:
    """Its port, and the mails that came."""
    mails = list[str]()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            for line in self.rfile:
                word = line.split()[0].upper() if line.split() else b""
                if word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    lines = list[str]()
                    while (text := self.rfile.readline()) != b".\r\n":
                        lines.append(text.decode())
                    mails.append("".join(lines))
                self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1], mails
    finally:
        server.shutdown()
        server.server_close()


def test_a_webhook_gets_json(tmp_path: Path) -> None:
    with webhook([]) as (url, came):
        name, send = sender_of(url)
        send(NOTICE)
    assert "secret" not in name
    (told,) = came
    assert told["schema"] == "protofleet.notice/1"
    assert [(care["device"], care["cause"], care["runbook"]) for care in told["begun"]] == [
        ("a", "gone", "docs/runbook.md#gone")
    ]
    assert "\x1b" not in told["begun"][0]["reason"]
    assert told["over"][0]["device"] == "b"


def test_each_of_several_places_at_one_host_is_told() -> None:
    with webhook([]) as (url, came):
        senders = senders_of([f"{url}/ann", f"{url}/ben", f"{url}/ann"])
        Notices(senders, pytest.fail).turn(NOTICE.begun, "one is gone", 0.0, 1.0)
    assert len(came) == 2  # who is named twice is told once
    assert list(senders) == ["http://127.0.0.1", "http://127.0.0.1 (2)"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_notice_that_is_sent_elsewhere_has_not_arrived(status: int) -> None:
    said = list[str]()
    with webhook([status]) as (url, came):
        notices = Notices(senders_of([url]), said.append)
        notices.turn(NOTICE.begun, "one is gone", 0.0, 1.0)
        assert not came
        notices.turn(NOTICE.begun, "one is gone", PACE_S, 1.0)
    assert len(came) == 1
    assert said == [f"a notice to http://127.0.0.1 was not sent, and is tried again: status {status}"]


def test_a_mail_has_one_head_whatever_a_device_says() -> None:
    with mail_server() as (port, mails):
        _, send = sender_of(f"mailto:ann@example.org?server=127.0.0.1:{port}&from=fleet@example.org")
        send(NOTICE)
    mail = message_from_string(mails[0], policy=policy.default)
    assert (mail["To"], mail["From"], mail["Bcc"]) == ("ann@example.org", "fleet@example.org", None)
    assert mail["Subject"] == "protofleet: 1 thing to look at"
    body = mail.get_content()
    assert "docs/runbook.md#gone" in body
    assert not set(body) & {"\x1b", "\u202e"}


def test_a_broker_gets_json_below_a_topic() -> None:
    broker = Embedded()
    broker.start()
    try:
        link = Link(Address.parse(broker.url), "listener", subscriptions=["house/#"])
        link.open().wait_connected(60)
        time.sleep(0.3)  # the subscription is known
        name, send = sender_of(f"{broker.url}/house/alerts")
        assert name.startswith("house/alerts at mqtt://")
        send(NOTICE)
        deadline, event = time.monotonic() + 30, None
        while not isinstance(event, Received):
            assert time.monotonic() < deadline
            event = link.receive(0.2)
        assert (event.topic, json.loads(event.payload)["begun"][0]["device"]) == ("house/alerts", "a")
        link.close()
    finally:
        broker.stop()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "hush",
        "https://ann:secret@host/x",
        "https:///x",
        "http://host:99999999/",
        "http://ho st/secret",
        "http://secret..b/x",
        "http://%s.b/x" % ("a" * 64),
        "mqtt://ann:secret@host",
        "mqtt://host/pf/v2/fleet/round",
        "mqtt://host/house/+",
        "mailto:",
        "mailto:ann@b.c,bob@b.c",
        "mailto:ann@b.c%0d%0aBcc:%20x@y.z",
        "mailto:ann@b.c?server=h:x",
        "mailto:ann@b.c?server=a..b",
        "mailto:ann@b.c?from=<",
        "mailto:ann@",
        "mailto:a(nn@b.c",
        "mailto:ann@b.c?password=secret",
    ],
)
def test_a_place_that_is_none_is_one_line_without_a_password(url: str, tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet"):
        line = one_error_line(run("watch", "--store", tmp_path / "s", "--notify", url))
    assert "--notify" in line
    assert "secret" not in line


def test_what_could_not_be_sent_is_tried_again_with_what_is_so_then() -> None:
    failed = list[str]()
    gone, slow = Care("a", "gone", "gone"), Care("b", "slow", "slow")
    with webhook([500, 503]) as (url, came):
        notices = Notices(dict([sender_of(url)]), failed.append)
        notices.turn([gone], "s", 0.0, 1.0)
        notices.turn([gone, slow], "s", PACE_S, 2.0)
        assert came == []
        notices.turn([slow], "s", 2 * PACE_S, 3.0)  # what is over meanwhile is never told
        notices.turn([slow], "s", 3 * PACE_S, 4.0)
        notices.turn([], "s", 4 * PACE_S, 5.0)
        notices.turn([gone], "s", 4 * PACE_S + 1, 6.0)  # not yet
        notices.turn([], "s", 5 * PACE_S, 7.0)
    assert [[care["device"] for care in told["begun"]] for told in came] == [["b"], []]
    assert [[care["device"] for care in told["over"]] for told in came] == [[], ["b"]]
    (line,) = failed
    assert line.endswith("was not sent, and is tried again: status 500")
    assert "secret" not in line


@given(st.lists(st.tuples(st.sets(st.sampled_from("abc")), st.booleans(), st.floats(0.1, 200.0)), max_size=30))
def test_each_place_knows_in_the_end_what_needs_care_and_is_told_at_a_pace(
    steps: list[tuple[set[str], bool, float]],
) -> None:
    """Whatever begins and ends, and whenever sending fails: who adds up the notices has what is so."""
    now, known, sent_at, works = 0.0, set[str](), list[float](), True

    def send(notice: Notice) -> None:
        if not works:
            raise OSError("away")
        sent_at.append(now)
        known.difference_update(care.device for care in notice.over)
        assert not known & {care.device for care in notice.begun}
        known.update(care.device for care in notice.begun)

    notices = Notices({"there": send}, lambda line: None)
    for names, works, wait_s in [*steps, (set("b"), True, PACE_S)]:  # noqa: B007  `send` reads it
        now += wait_s
        notices.turn([Care(name, "gone", "") for name in names], "", now, 0.0)
    assert known == {"b"}
    assert all(later >= earlier + PACE_S for earlier, later in pairwise(sent_at))  # added as the pace is, and so exact


def test_a_watch_without_a_terminal_tells_of_a_store_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    birth = Status(
        True, b"instance", 1, "", {"bundle": "2 00aabbcc"}, {"train_step_ms": 9.0, "profile_train_step_ms": 1.0}
    )
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        store.devices.status("a", birth, 1, 1.0)
        store.devices.keep(0.0, 1.0)
    with webhook([]) as (url, came):
        words = ["watch", "--store", str(tmp_path / "s"), "--every", "0.2s", "--notify", url]
        process = subprocess.Popen([sys.executable, "-m", "protofleet", *words], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not came:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=30)[1]
    assert (process.returncode, "Traceback" in said) == (130, False)
    assert {(care["device"], care["cause"]) for care in came[0]["begun"]} == {("", "no-aggregator"), ("a", "slow")}


def test_a_watch_goes_on_while_something_else_stands_in_its_stores_place(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with DurableStore(place, BUNDLE, "fleet"):
        pass
    with webhook([]) as (url, came):
        looks = _looks(place, read_state(place), Notices(senders_of([url]), pytest.fail), 0.0)
        assert next(looks)[1] == ""
        place.rename(tmp_path / "away")
        place.write_bytes(b"")
        assert "store" in next(looks)[1]
        (tmp_path / "away").replace(place)
        assert next(looks)[1] == ""
    assert len(came) == 1  # of the first look: the others come within a minute
