"""A device in Home Assistant, over a real Mosquitto, with a client that is a process: what is said, and what a choice
there does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from brokers import Mosquitto
from commands import one_error_line, run
from edge_peer import Peer
from edge_samples import FASHION_LABELS
from home_assistant_samples import BUNDLE, TOPICS, Device, Listener, broker, device, house, labels_in, until

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.home_assistant.discovery import Topics, discovery
from protofleet.edge_client.journal.journal import read_kept
from protofleet.edge_client.privacy.ledger import read_ledger

__all__ = ["broker", "device", "house"]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read_bundle(BUNDLE)


def test_what_is_retained_makes_the_entities_and_the_photo_is_none_of_them(
    device: Device, house: Listener, bundle: Bundle
) -> None:
    device.start()
    until(lambda: TOPICS.discovery in house.known)
    message = house.known[TOPICS.discovery]
    expected = discovery(TOPICS, bundle.manifest.labels, bundle=bundle.sha256.hex()[:12], photo=False)
    assert message == expected
    assert len(message) < 3_000
    found = json.loads(message)
    assert set(found["cmps"]) == {"answer", "probability", "unknown", "teach", "right", "said", "bundle", "left"}
    assert found["cmps"]["teach"]["ops"] == list(FASHION_LABELS)
    device.show(bundle, "Bag")
    until(lambda: house.state.get("photo") in device.ids())
    assert house.state["bundle"] == bundle.sha256.hex()[:12]
    assert house.known[TOPICS.of("available")] == b"online"
    assert TOPICS.of("photo") not in house.known


def test_a_choice_is_a_label_in_the_next_round_and_an_old_photo_is_refused(
    device: Device, house: Listener, bundle: Bundle
) -> None:
    device.start()
    device.show(bundle, "Bag")
    until(lambda: house.state.get("photo"))
    first = house.state["photo"]
    assert house.teach(photo=first, label="Bag") == f"photo {first} is Bag"
    assert house.state["teach"] == "Bag"
    assert labels_in(device.folder / "state") == ["Bag"]
    with Peer(device.broker.url, bundle) as peer:
        peer.announce(1, "ncm")
        sent: Contribution = peer.contribution(1)
        assert dict(zip(sent.body.classes.tolist(), sent.counts.tolist(), strict=True)) == {
            FASHION_LABELS.index("Bag"): 1
        }
        peer.answer(1, "ncm")
        peer.give(1, sent, head=True)
        peer.announce(1, "ncm", phase="closed")
        until(lambda: read_kept(device.folder / "state").state is not None)  # no later picture would renew its answer
        device.show(bundle, "Sandal", seed=4)
        until(lambda: house.state.get("answer") == "Bag")  # all that this fleet knows, so another state than before
    second = house.state["photo"]
    assert second != first
    assert house.state["teach"] is None
    assert house.teach(photo=first, label="Sandal").startswith(f"refused: photo {first} is not shown any more")
    assert house.teach(photo=second, label="Cat") == f"refused: photo {second} has no such class"
    assert house.teach(photo="../../etc", label="Bag") == "refused: the choice names no photo"
    assert labels_in(device.folder / "state") == ["Bag"]
    for payload in (b"[" * 3_000, b"\xff{"):
        assert house.send(payload) == "refused: expected JSON with photo and label"
    assert house.teach(photo=second, right=True) == f"photo {second} is Bag"
    assert labels_in(device.folder / "state") == ["Bag", "Bag"]


def test_a_killed_device_is_offline_and_a_house_that_begins_anew_is_told_all(
    device: Device, house: Listener, bundle: Bundle
) -> None:
    process = device.start("--home-assistant-photo")
    device.show(bundle, "Bag")
    until(lambda: TOPICS.of("photo") in house.known)
    assert house.known[TOPICS.of("photo")][:2] == b"\xff\xd8"
    assert "photo" in json.loads(house.known[TOPICS.discovery])["cmps"]
    house.known.clear()
    house.say("homeassistant/status", "online")
    own = {TOPICS.discovery, TOPICS.of("state"), TOPICS.of("available"), TOPICS.of("photo")}
    until(lambda: own <= set(house.known))
    process.kill()
    until(lambda: house.known[TOPICS.of("available")] == b"offline")
    process.wait()
    device.start("--home-assistant-photo")
    until(lambda: house.known[TOPICS.of("available")] == b"online")
    device.processes[-1].send_signal(signal.SIGTERM)
    until(lambda: house.known[TOPICS.of("available")] == b"offline")


def test_a_device_is_taken_out_and_nothing_of_it_is_retained(device: Device, house: Listener, bundle: Bundle) -> None:
    process = device.start()
    device.show(bundle, "Bag")
    until(lambda: house.state.get("photo"))
    os.kill(process.pid, signal.SIGTERM)
    process.wait(60)
    words = ["client", "--bundle", BUNDLE, "--broker", device.broker.url, "--id", "pi-1"]
    words += ["--state", device.folder / "state", "--home-assistant", "fleet", "--remove-home-assistant"]
    assert run(*words).returncode == 0
    until(lambda: not any(house.known[topic] for topic in TOPICS.retained))
    later = Listener(device.broker.url)
    later.say("protofleet/marker", "here")
    until(lambda: "protofleet/marker" in later.known)
    assert set(later.known) == {"protofleet/marker"}
    later.close()


def test_the_houses_own_broker_asks_for_a_password_that_is_written_nowhere(
    device: Device, bundle: Bundle, tmp_path: Path
) -> None:
    passwords = tmp_path / "passwords"
    subprocess.run(["mosquitto_passwd", "-b", "-c", passwords, "protofleet", "s3cret-word"], check=True)
    passwords.chmod(0o644)
    own = Mosquitto(tmp_path / "house", f"user root\npassword_file {passwords}\n")
    own.start()
    try:
        port = own.url.rsplit(":", 1)[1]
        device.start("--verbose", home=f"mqtt://protofleet:s3cret-word@127.0.0.1:{port}")
        listener = Listener(own.url)
        device.show(bundle, "Bag")
        until(lambda: listener.state.get("photo"))
        listener.close()
        assert "s3cret" not in device.said()
        entries, _, _ = read_ledger(tmp_path / "state" / "ledger.sqlite")
        assert [(entry.what, entry.statistic) for entry in entries if entry.what == "answer"] == [
            ("answer", "answers to 127.0.0.1")
        ]
        assert "answers were published for Home Assistant on 1 day" in run("inspect", tmp_path / "state").stdout
    finally:
        own.stop()


def test_the_policy_has_to_allow_it_and_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "camera").mkdir()
    (tmp_path / "page.toml").write_text("page = true\n")
    (tmp_path / "noise.toml").write_text("answers = true\nepsilon = 1.0\ndelta = 1e-6\n")
    words = ["client", "--bundle", BUNDLE, "--broker", "mqtt://127.0.0.1:1", "--id", "pi-1", "--state", tmp_path / "s"]
    camera = ["--camera", f"folder:{tmp_path / 'camera'}", "--home-assistant"]
    allowed = "--home-assistant, expected a --policy with answers = true, got none that allows it"
    for more, said in (
        ([*camera, "fleet"], allowed),
        ([*camera, "fleet", "--policy", tmp_path / "page.toml"], allowed),
        ([*camera, "fleet", "--policy", tmp_path / "noise.toml"], "a broker of your own, since answers have no noise"),
        ([*camera, "me:s3cret@house"], "--home-assistant, expected mqtt://HOST, or fleet, got 15 characters"),
        (["--data", "d", "--home-assistant", "fleet"], "--home-assistant, expected --camera"),
        ([*camera[:2], "--equal-answers", "3"], "expected --home-assistant, its broker, got none"),
    ):
        done = run(*words, *more)
        assert said in one_error_line(done)
        assert done.returncode == 2
    assert not (tmp_path / "s").exists()


def test_two_devices_of_one_house_share_no_entity_and_no_topic() -> None:
    """Home Assistant takes an entity whose id it knows already for the same one, and drops the second."""
    ids: list[str] = []
    topics: list[str] = []
    for own in (Topics("a", "b"), Topics("a", "c"), Topics("b", "b")):
        message = json.loads(discovery(own, ("x",), bundle="0", photo=True))
        ids += [entity["uniq_id"] for entity in message["cmps"].values()]
        topics += [
            own.discovery,
            message["avty_t"],
            message["cmps"]["teach"]["cmd_t"],
            own.of("state"),
            own.of("photo"),
        ]
    assert len(set(ids)) == len(ids) == 3 * 9
    assert len(set(topics)) == len(topics)


def test_names_are_values_and_never_templates() -> None:
    """A class may be called like a template: what Home Assistant takes as templates has no name in it."""
    hostile = ("{{ states('lock.door') }}", '"}] {% raw %}', "x" * 400)
    plain, other = (
        json.loads(discovery(TOPICS, classes, bundle="b", photo=True)) for classes in (("a", "b", "c"), hostile)
    )
    assert other["cmps"]["teach"].pop("ops") == [hostile[0], hostile[1], "x" * 255]
    plain["cmps"]["teach"].pop("ops")
    assert plain == other
