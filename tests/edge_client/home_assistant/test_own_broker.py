"""The house's own broker: TLS and a password, a broker that refuses for a while, and one that is hostile."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import Mosquitto, free_port
from browser import Visitor
from certificates import issue
from commands import one_error_line, run
from home_assistant_samples import BUNDLE, TOPICS, Device, Listener, broker, device, house, labels_in, until

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from tests.attacks.hostile_broker import FakeBroker, accept, packet, publish, say

__all__ = ["broker", "device", "house"]

PASSWORD = "s3cret-word"
TEACH = TOPICS.of("teach").encode()


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read_bundle(BUNDLE)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Mosquitto, str, Path]]:
    """A broker with a listener for TLS: the broker, an address there with its password, and its authority's file."""
    issue(tmp_path, "server", issue(tmp_path, "house-ca"))
    issue(tmp_path, "fleet-ca")
    write_password(tmp_path / "passwords", PASSWORD)
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    tmp_path.chmod(0o755)
    port, at = free_port(), tmp_path
    own = Mosquitto(
        tmp_path / "house",
        f"user root\npassword_file {at}/passwords\nlistener {port} 127.0.0.1\n"
        f"certfile {at}/server.pem\nkeyfile {at}/server.key\n",
    )
    own.start()
    yield own, f"mqtts://protofleet:{PASSWORD}@127.0.0.1:{port}", tmp_path / "house-ca.pem"
    own.stop()


def write_password(path: Path, password: str) -> None:
    subprocess.run(["mosquitto_passwd", "-b", "-c", path, "protofleet", password], check=True)
    path.chmod(0o644)


def test_a_house_with_its_own_authority_and_a_password_from_a_file_that_is_written_nowhere(
    device: Device, bundle: Bundle, guarded: tuple[Mosquitto, str, Path], tmp_path: Path
) -> None:
    own, url, ca_file = guarded
    settings, port = tmp_path / "house.toml", free_port()
    settings.write_text(f'home_assistant = "{url}"\nhome_assistant_ca = "{ca_file}"\nverbose = true\npage = "{port}"\n')
    settings.chmod(0o600)
    (tmp_path / "policy.toml").write_text("answers = true\npage = true\n")
    everything = [Listener(own.url, "#"), Listener(device.broker.url, "#")]
    process = device.start("--config", settings, home=None)
    at_home = everything[0]
    device.show(bundle, "Bag")
    until(lambda: at_home.state.get("photo"))
    photo = at_home.state["photo"]
    assert at_home.teach(photo=photo, label="Bag") == f"photo {photo} is Bag"
    assert f"shown to Home Assistant at mqtts://127.0.0.1:{url.rsplit(':', 1)[1]}" in device.said()
    visitor = Visitor(port)
    seen = [json.dumps(visitor.open()), *visitor.ask("GET", "/")[2].decode()]
    printed = run("client", *device.words("--config", settings, home=None), "--print-config")
    assert printed.returncode == 0
    assert "home_assistant_ca" in printed.stdout
    seen += [printed.stdout, printed.stderr, run("inspect", tmp_path / "state").stdout]
    seen += [Path(f"/proc/{process.pid}/cmdline").read_text()]
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    seen += [device.said()]
    said = [payload for listener in everything for _, payload in listener.all]
    kept = [path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file()]
    for listener in everything:
        listener.close()
    assert len(said) > 5
    assert not [each for each in seen if PASSWORD in each]
    assert not [each for each in (*said, *kept) if PASSWORD.encode() in each]
    taken = run("client", *device.words("--config", settings, home=None), "--remove-home-assistant")
    assert taken.returncode == 0


def test_a_house_of_another_authority_is_not_connected_to(
    device: Device, guarded: tuple[Mosquitto, str, Path], tmp_path: Path
) -> None:
    own, url, _ = guarded
    listener = Listener(own.url)
    process = device.start("--home-assistant-ca", tmp_path / "fleet-ca.pem", home=url)
    until(lambda: "no connection to Home Assistant's broker mqtts://127.0.0.1" in device.said())
    assert process.poll() is None
    assert not listener.known
    listener.close()
    for more, said in (
        (["--home-assistant-ca", tmp_path / "none.pem", "--home-assistant", url], "none.pem, expected a PEM file"),
        (["--home-assistant-ca", tmp_path / "house-ca.pem", "--home-assistant", "mqtt://h"], "expected mqtts://"),
        (["--home-assistant-ca", tmp_path / "house-ca.pem", "--home-assistant", "fleet"], "--home-assistant-ca, expec"),
        (["--home-assistant-ca", tmp_path / "house-ca.pem"], "expected --home-assistant, its broker, got none"),
    ):
        done = run("client", *device.words(*more, home=None))
        assert said in one_error_line(done)
        assert done.returncode == 2


def test_a_broker_that_refuses_the_password_is_asked_again(
    device: Device, guarded: tuple[Mosquitto, str, Path], tmp_path: Path
) -> None:
    """As Home Assistant's own add-on refuses everybody until Home Assistant has begun."""
    own, url, ca_file = guarded
    write_password(tmp_path / "passwords", "another")
    own.stop()
    own.start()
    process = device.start("--home-assistant-ca", ca_file, home=url)
    until(lambda: "not shown to Home Assistant: broker mqtts://127.0.0.1" in device.said())
    assert "trying again" in device.said()
    write_password(tmp_path / "passwords", PASSWORD)
    own.stop()
    own.start()
    listener = Listener(own.url)
    until(lambda: listener.known.get(TOPICS.of("available")) == b"online")
    assert process.poll() is None
    assert PASSWORD not in device.said()
    process.kill()
    until(lambda: listener.known[TOPICS.of("available")] == b"offline")
    listener.close()


def test_a_flood_of_choices_and_of_beginnings_changes_little(device: Device, house: Listener, bundle: Bundle) -> None:
    process = device.start()
    device.show(bundle, "Bag")
    until(lambda: house.state.get("photo"))
    photo = house.state["photo"]
    began, lines = time.monotonic(), len(device.said().splitlines())
    choices = [json.dumps({"photo": photo, "label": ("Bag", "Coat")[number % 2]}) for number in range(3_000)]
    house.flood(TOPICS.of("teach"), choices)
    until(lambda: str(house.state.get("said")).startswith("refused: more than 20 choices in 10 s"))
    house.flood("homeassistant/status", ["online"] * 1_000)
    windows = (time.monotonic() - began) / 10 + 1  # that may have begun
    assert labels_in(device.folder / "state") in (["Bag"], ["Coat"])
    assert house.count(TOPICS.of("state")) <= 25 * windows
    assert house.count(TOPICS.discovery) <= 2 + 2 * windows
    assert len(device.said().splitlines()) - lines <= 25 * windows
    assert process.poll() is None
    time.sleep(10.0)
    assert house.teach(photo=photo, label="Dress") == f"photo {photo} is Dress"
    assert labels_in(device.folder / "state") == ["Dress"]


def test_wrong_types_and_what_is_too_large_teach_nothing(device: Device, house: Listener, bundle: Bundle) -> None:
    process = device.start()
    device.show(bundle, "Bag")
    until(lambda: house.state.get("photo"))
    photo = house.state["photo"]
    no_photo, no_class = "refused: the choice names no photo", f"refused: photo {photo} has no such class"
    no_choice = "refused: expected JSON with photo and label"
    for payload, said in (
        *((each, no_choice) for each in ("null", "[]", '"Bag"', "NaN", "1e999", "9" * 4_000, "")),
        *((each, no_photo) for each in ({"photo": 1, "label": "Bag"}, {"photo": {photo: 1}, "label": "Bag"})),
        *((each, no_photo) for each in ({"label": "Bag"}, {"photo": f"{photo}\n", "label": "Bag"}, {"right": True})),
        ({"photo": [photo], "label": "Bag"}, no_photo),
        *(({"photo": photo, **more}, no_class) for more in ({"label": {"Bag": 1}}, {"label": None}, {"right": "true"})),
        *(({"photo": photo, **more}, no_class) for more in ({"right": 1}, {"label": ["Bag"]}, {"label": "\ud800"})),
    ):
        assert house.send(payload if isinstance(payload, str) else json.dumps(payload)) == said
    house.say(TOPICS.of("teach"), json.dumps({"photo": photo, "label": "Bag", "more": "x" * 2_000_000}))
    house.say(TOPICS.of("teach"), json.dumps({"photo": photo, "label": "Bag"}), retain=True)  # not so to who listens
    until(lambda: house.state.get("said") == f"photo {photo} is Bag")  # the last that the first process says
    assert labels_in(device.folder / "state") == ["Bag"]
    process.kill()
    process.wait()
    house.known.clear()
    device.start()
    until(lambda: house.known.get(TOPICS.of("available")) == b"online")
    device.show(bundle, "Coat", seed=9)
    until(lambda: house.state.get("photo"))
    assert house.state["said"] is None  # what the broker has kept is no choice
    assert process.poll() is not None


def _mute(connection: socket.socket) -> None:
    """It accepts, and goes on in the middle of a packet that never ends."""
    accept(connection)
    connection.sendall(b"\x32\xff\xff\xff\x7f")
    while connection.recv(4096):
        pass


def _no_connack(connection: socket.socket) -> None:
    packet(connection)
    connection.sendall(b"\x20\xff\xff\xff\x7f" + bytes(10_000))
    time.sleep(0.1)


def test_a_hostile_broker_takes_neither_memory_nor_the_client(device: Device, bundle: Bundle) -> None:
    retained = publish(TEACH, b'{"photo": "000000000000", "label": "Bag"}', first=0x33)
    large = [publish(TEACH, bytes(3_000_000), number) for number in range(1, 4)]
    many = b"".join(publish(TEACH, b"[" * 3_000, number) for number in range(1, 2_000))
    fake = FakeBroker(_no_connack, _mute, say(*large), say(many), say(publish(b"lock/door", b"open")), say(retained))
    process = device.start(home=fake.url)
    try:
        until(lambda: fake.connections >= 6, 120)
        device.show(bundle, "Bag")
        until(device.ids)
        time.sleep(1.0)
        peak = int(_status(process.pid, "VmHWM")) / 1000
        assert process.poll() is None
        assert peak < 150
        assert labels_in(device.folder / "state") == []
        assert "connected to mqtt://127.0.0.1" in device.said()
        assert len(device.said()) < 10_000
    finally:
        fake.close()


def _status(pid: int, name: str) -> str:
    return next(line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if name in line)


def test_no_answer_leaves_that_the_ledger_does_not_say(device: Device, house: Listener, bundle: Bundle) -> None:
    device.start()
    until(lambda: house.known.get(TOPICS.of("available")) == b"online")
    ledger = device.folder / "state" / "ledger.sqlite"

    def named(now: str, then: str) -> None:
        with sqlite3.connect(ledger) as db:
            db.execute(f"ALTER TABLE {now} RENAME TO {then}")
        db.close()

    named("release", "elsewhere")
    device.show(bundle, "Bag")
    until(device.ids)
    until(lambda: "Home Assistant: " in device.said())
    house.say(TOPICS.of("teach"), {"photo": device.ids()[0], "label": "Bag"})
    time.sleep(1.5)
    assert TOPICS.of("state") not in house.known
    named("elsewhere", "release")
    until(lambda: house.state.get("photo") == device.ids()[0])
    assert "answers were published for Home Assistant on 1 day" in run("inspect", device.folder / "state").stdout
