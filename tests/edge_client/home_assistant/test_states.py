"""When the state in Home Assistant changes, and when discovery is sent again: real clients over a real Mosquitto."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from edge_samples import FASHION_LABELS, fashion
from home_assistant_samples import BUNDLE, TOPICS, Device, Listener, broker, device, house, until
from rollout_peer import SEED, RolloutPeer, trusted

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.edge_client.answers.camera_answers import Answered
from protofleet.edge_client.home_assistant.flood import Flood
from protofleet.edge_client.home_assistant.steady import Steady
from protofleet.edge_client.photos.kept_photo import KeptPhoto
from protofleet.edge_client.photos.photo_ring import PhotosBeside
from protofleet.export.bundles.extend import extend_bundle

__all__ = ["broker", "device", "house"]

TWO = (FASHION_LABELS.index("Trouser"), FASHION_LABELS.index("Sandal"))


def kept(device: Device) -> list[KeptPhoto]:
    """The photos that are kept, the one that came last first."""
    photos = PhotosBeside(device.folder / "state")
    return sorted(photos.photos() if photos.is_there else [], key=lambda photo: -photo.last_s)


def taken(device: Device) -> int:
    return sum(photo.times for photo in kept(device))


def test_a_state_changes_once_three_photos_agree(device: Device, house: Listener) -> None:
    bundle = read_bundle(BUNDLE)
    data = fashion(bundle, 200, TWO)
    np.savez(device.folder / "data.npz", x=data.x, y=data.y)
    device.start("--data", device.folder / "data.npz", "--equal-answers", "3")
    device.aggregate("--rounds", 1, "--min-clients", 1, "--max-share", 1)
    until(lambda: "it can name 2 classes now" in device.said())
    shown: list[str] = []
    for number, label in enumerate(["Trouser"] * 3 + ["Sandal", "Sandal", "Trouser", "Sandal", "Sandal", "Sandal"]):
        before = taken(device)
        device.show(bundle, label, seed=50 + number)
        until(lambda before=before: taken(device) > before)
        assert kept(device)[0].answer == label
        if number in (2, 8):
            until(lambda label=label: house.state.get("answer") == label)
        time.sleep(1.0)  # twice as long as what is due takes to be said
        shown.append(house.state.get("answer", ""))
    assert shown == ["", "", *["Trouser"] * 6, "Sandal"]
    states = [json.loads(payload)["answer"] for topic, payload in house.all if topic == TOPICS.of("state")]
    assert states == ["Trouser", "Sandal"]


@pytest.mark.slow
def test_a_house_learns_of_the_classes_that_a_roll_out_brings(
    device: Device, house: Listener, mnist_like_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    old, new = mnist_like_bundle("ffc", private_key=SEED), tmp_path / "new.bundle"
    extend_bundle(old, ["hamster"], new, private_key=SEED)
    first, second = read_bundle(old), read_bundle(new)

    def classes() -> list[str]:
        return json.loads(house.known.get(TOPICS.discovery, b'{"cmps":{"teach":{"ops":[]}}}'))["cmps"]["teach"]["ops"]

    device.start("--trust", trusted(tmp_path), bundle=old)
    until(lambda: classes() == list(first.manifest.labels))
    with RolloutPeer(device.broker.url, first) as peer:
        peer.offer(new)
        peer.announce(1, phase="closed", others=(second.sha256,))
        peer.wait_for(lambda: classes() == [*first.manifest.labels, "hamster"], 90)
        peer.wait_for(lambda: house.known[TOPICS.of("available")] == b"online")
    device.show(second, "Bag")
    until(lambda: house.state.get("photo"))
    assert house.teach(photo=house.state["photo"], label="hamster") == f"photo {house.state['photo']} is hamster"
    assert json.loads(house.known[TOPICS.discovery])["dev"]["sw"] == f"bundle {second.sha256.hex()[:12]}"


def test_three_equal_answers_before_another_is_shown() -> None:
    steady = Steady(3)
    door, cat = (Answered("0" * 12, name, None, False) for name in ("door", "cat"))
    assert [steady.take(door) for _ in range(3)] == [None, None, door]
    assert [steady.take(one) for one in (cat, door, cat, cat, cat)] == [door, door, door, door, cat]
    assert Steady(1).take(cat) == cat


def test_an_answer_waits_for_no_agreement_about_unknown() -> None:
    steady = Steady(3)

    def shown(answer: str, unknown: str) -> list[bool | None]:
        found = [steady.take(Answered("0" * 12, answer, None, each == "u")) for each in unknown]
        return [None if each is None or each.answer != answer else each.is_unknown for each in found]

    assert shown("door", "kuu") == [None, None, True]  # as most of the three
    assert shown("door", "kukkukk") == [True] * 7
    assert shown("door", "kuk") == [False] * 3  # with the two before
    assert shown("cat", "ukk") == [None, None, False]
    assert shown("door", "uu") == [None, None]
    assert shown("cat", "uu") == [False, False]
    assert shown("cat", "u") == [True]


def test_so_many_in_each_stretch_of_time_and_no_more() -> None:
    flood = Flood(2, 10.0)
    assert [flood.lets(now) for now in (0.0, 1.0, 2.0, 9.9, 10.0, 10.5, 11.0, 20.0)] == [
        True, True, False, False, True, False, True, True,
    ]  # fmt: skip
