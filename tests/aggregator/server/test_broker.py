"""The embedded broker: what it carries, how it ends, and the manners of rumqttd that the link allows for."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import paho.mqtt.client as mqtt
import psutil
import pytest
from brokers import free_port
from commands import one_error_line, run

from protofleet.aggregator.server.broker import MAX_PAYLOAD_BYTES, EmbeddedBroker
from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.files.passwords import read_passwords
from protofleet.contract.mqtt.address import parse_listen
from protofleet.contract.mqtt.link import Address, Link, Received


def _link(url: str, name: str, *topics: str, **options: object) -> Link:
    link = Link(Address.parse(url), name, subscriptions=topics or [f"to/{name}"], **options).open()
    link.wait_connected(60)
    return link


def test_messages_of_megabytes_pass() -> None:
    with EmbeddedBroker() as broker:
        sender, taker = _link(broker.url, "sender"), _link(broker.url, "taker", "big")
        payload = os.urandom(MAX_PAYLOAD_BYTES - 4096)
        sender.publish("big", payload)
        event = taker.receive(10)
        assert isinstance(event, Received)
        assert event.payload == payload
        sender.close()
        taker.close()


def test_it_listens_on_loopback_only_and_is_gone_after_stop() -> None:
    broker = EmbeddedBroker().start()
    pid = broker.pid
    listening = [c.laddr.ip for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening == ["127.0.0.1"]
    broker.stop()
    assert not psutil.pid_exists(pid)
    assert not broker.running


def test_it_ends_when_its_parent_is_killed() -> None:
    script = (
        "import time\nfrom protofleet.aggregator.server.broker import EmbeddedBroker\nb = EmbeddedBroker().start()\n"
    )
    script += "print(b.pid, flush=True)\ntime.sleep(60)\n"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the broker outlived its parent"
        time.sleep(0.05)


def test_a_process_that_takes_long_to_go_though_it_was_killed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = EmbeddedBroker().start()
    process = psutil.Process(broker.pid)
    wait = subprocess.Popen.wait

    def slow(self: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if self.pid == process.pid and timeout is not None:
            raise subprocess.TimeoutExpired("broker", timeout)
        return wait(self, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", slow)
    broker.stop()
    assert not broker.running
    process.wait(timeout=60)


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match=r"--listen, expected an address that is free, got 127\.0\.0\.1:\d+"):
            EmbeddedBroker("127.0.0.1", taken.getsockname()[1]).start()
    with pytest.raises(UsageError, match="--listen"):
        EmbeddedBroker("no.such.host.invalid", 1883).start()


def test_a_missing_iotcore_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "iotcore", None)
    with pytest.raises(UsageError, match=re.escape(f"expected iotcore, got nothing, try {install_command('broker')}")):
        EmbeddedBroker().start()


def test_listen_addresses() -> None:
    assert parse_listen("127.0.0.1:1883") == ("127.0.0.1", 1883)
    assert parse_listen("[::1]:0") == ("::1", 0)
    for text in ("1883", "host", "host:99999", "host:port", 'ho"st:1'):
        with pytest.raises(UsageError, match="expected HOST:PORT"):
            parse_listen(text)


@pytest.mark.parametrize(
    ("how", "code", "word"), [(signal.SIGINT, 0, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_the_command_warns_off_loopback_and_ends_cleanly(how: signal.Signals, code: int, word: str) -> None:
    command = [sys.executable, "-m", "protofleet", "broker", "--listen", f"0.0.0.0:{free_port()}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    where = process.stderr.readline()
    assert where.startswith("broker on mqtt://127.0.0.1:")
    assert " and every other address of this machine, Ctrl-C" in where
    assert "warning: anyone who reaches it" in process.stderr.readline()
    children = psutil.Process(process.pid).children()
    process.send_signal(how)
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == code
    assert rest == f"{word}: broker stopped\n"
    assert not any(child.is_running() for child in children)


def test_the_command_says_when_its_broker_died() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "protofleet", "broker", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    )
    process.stderr.readline()
    (child,) = psutil.Process(process.pid).children()
    child.kill()
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert error.startswith("error: broker on mqtt://127.0.0.1")


# ── manners of rumqttd ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_that_starts_again_hears_what_is_retained() -> None:
    """rumqttd sends retained messages for new subscriptions only: a kept session has none, a fresh one has."""
    with EmbeddedBroker() as broker:
        sender = _link(broker.url, "sender")
        sender.publish("news", b"retained", retain=True)
        first = _link(broker.url, "device", "news")
        assert _payload(first) == b"retained"
        first.close()
        again = _link(broker.url, "device", "news")
        assert _payload(again) == b"retained"
        for link in (sender, again):
            link.close()


def test_a_client_that_was_killed_with_a_full_window_starts_anew() -> None:
    """rumqttd confirms nothing to a session whose window of 100 is full: a link that began anew must not have it."""
    with EmbeddedBroker() as broker:
        sender = _link(broker.url, "sender")
        script = "import sys, time\nfrom protofleet.contract.mqtt.link import *\n"
        script += "link = Link(Address.parse(sys.argv[1]), 'taker', subscriptions=['many']).open()\n"
        script += "link.wait_connected(60); print('up', flush=True); time.sleep(60)\n"
        killed = subprocess.Popen([sys.executable, "-c", script, broker.url], stdout=subprocess.PIPE, text=True)
        killed.stdout.readline()
        for n in range(300):
            sender.publish("many", str(n).encode())
        time.sleep(0.7)
        killed.kill()
        killed.communicate()
        taker = _link(broker.url, "taker", "many")
        for n in range(300):
            sender.publish("many", str(n).encode())
        got = []
        while len(got) < 300:
            event = taker.receive(8)
            assert isinstance(event, Received), f"stalled after {len(got)}: {event}"
            got.append(int(event.payload))
            taker.acknowledge(event)
        assert got == list(range(300))
        sender.close()
        taker.close()


def _payload(link: Link) -> bytes | None:
    event = link.receive(2)
    if not isinstance(event, Received):
        return None
    link.acknowledge(event)
    return event.payload


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        (None, 0o600, "No such file"),
        ("secret-word\n", 0o600, "another line 1"),
        ("# ours\nuser:\n", 0o600, "another line 2"),
        (":secret-word\n", 0o600, "another line 1"),
        ("a:secret-word\na:secret-word\n", 0o600, "another line 2"),
        ("a:secret\tword\n", 0o600, "another line 1"),
        ("# nobody\n\n", 0o600, "a line USER:PASSWORD or more, got none"),
        ("a:secret-word\n", 0o604, "chmod 600"),
        ("a:secret-word\n" * 100_000, 0o600, "at most 1,048,576 bytes"),
    ],
)
def test_a_password_file_of_another_form_is_one_line_without_its_words(
    tmp_path: Path, text: str | None, mode: int, expected: str
) -> None:
    path = tmp_path / "passwords"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    line = one_error_line(run("broker", "--listen", "127.0.0.1:0", "--password-file", path))
    assert expected in line
    assert "secret" not in line


def test_who_gives_no_password_of_the_file_is_not_let_in(tmp_path: Path) -> None:
    path = tmp_path / "passwords"
    path.write_text('# two\nфлот:a"b\\c=é\nother:x:y\n', encoding="utf-8")
    path.chmod(0o600)
    with EmbeddedBroker(passwords=read_passwords(path, "--password-file")) as broker:
        given = [("флот", 'a"b\\c=é'), ("other", "x:y"), ("other", 'a"b\\c=é'), ("другой", "x:y"), (None, None)]
        assert [_is_let_in(broker.port, *who) for who in given] == [True, True, False, False, False]


def _is_let_in(port: int, user: str | None, password: str | None) -> bool:
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, "one", protocol=mqtt.MQTTv5)
    client.username_pw_set(user, password)
    said: queue.Queue[bool] = queue.Queue()
    client.on_connect = lambda client, data, flags, reason, properties: said.put(not reason.is_failure)
    client.on_disconnect = lambda client, data, flags, reason, properties: said.put(False)
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        return said.get(timeout=20)
    finally:
        client.loop_stop()
