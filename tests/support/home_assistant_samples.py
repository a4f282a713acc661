"""A client with a camera as a process, a Mosquitto, and who listens there, for the tests of Home Assistant."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from brokers import Mosquitto, make_broker
from edge_samples import FASHION_LABELS, fashion
from PIL import Image

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.edge_client.data.learned import Learned
from protofleet.edge_client.home_assistant.discovery import Topics
from protofleet.edge_client.photos.photo_ring import PhotosBeside

BUNDLE = Path(__file__).parents[2] / "lab" / "demo" / "shipped" / "fleet.bundle"
TOPICS = Topics("fleet", "pi-1")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    found = make_broker("mosquitto", tmp_path / "broker")
    found.start()
    yield found
    found.stop()


class Listener:
    """Whoever listens at the broker, as Home Assistant does; or to all that is said there."""

    def __init__(self, url: str, *topics: str) -> None:
        filters = [(topic, 1) for topic in topics or ("homeassistant/#", "protofleet/#")]
        self.known: dict[str, bytes] = {}
        self.all: list[tuple[str, bytes]] = []
        self._subscribed: queue.Queue[int] = queue.Queue()
        self._client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self._client.on_connect = lambda client, *_: client.subscribe(filters)
        self._client.on_subscribe = lambda *_: self._subscribed.put(1)
        self._client.on_message = self._came
        self._client.connect("127.0.0.1", int(url.rsplit(":", 1)[1]))
        self._client.loop_start()
        self._subscribed.get(timeout=30)

    def _came(self, client: object, data: object, message: mqtt.MQTTMessage) -> None:
        self.known[message.topic] = message.payload
        self.all.append((message.topic, message.payload))

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def say(self, topic: str, payload: object, *, retain: bool = False) -> None:
        given = payload if isinstance(payload, str | bytes) else json.dumps(payload)
        self._client.publish(topic, given, qos=1, retain=retain).wait_for_publish(30)

    @property
    def state(self) -> dict[str, Any]:
        return json.loads(self.known.get(TOPICS.of("state"), b"{}"))

    def teach(self, **choice: object) -> str:
        """Make a choice; what the device says of it."""
        return self.send(json.dumps(choice))

    def flood(self, topic: str, payloads: Sequence[str | bytes]) -> None:
        """Say all of these as fast as the broker takes them."""
        for sent in [self._client.publish(topic, payload, qos=1) for payload in payloads]:
            sent.wait_for_publish(60)

    def count(self, topic: str) -> int:
        """How many messages came there."""
        return sum(each == topic for each, _ in self.all)

    def send(self, payload: str | bytes) -> str:
        """As `teach`, of any bytes."""
        before = self.count(TOPICS.of("state"))
        self.say(TOPICS.of("teach"), payload)
        until(lambda: self.count(TOPICS.of("state")) > before)
        return self.state["said"]


@pytest.fixture
def house(broker: Mosquitto) -> Iterator[Listener]:
    found = Listener(broker.url)
    yield found
    found.close()


class Device:
    """A client with a camera, which is a folder, as a process."""

    def __init__(self, folder: Path, broker: Mosquitto) -> None:
        self.folder, self.broker, self.processes = folder, broker, list[subprocess.Popen[bytes]]()
        (folder / "camera").mkdir()
        (folder / "policy.toml").write_text("answers = true\n")

    def words(self, *more: object, home: str | None = "fleet", bundle: Path = BUNDLE) -> list[object]:
        """Of its command; `home` may stand in a settings file, too."""
        words = ["--bundle", bundle, "--broker", self.broker.url, "--id", "pi-1", "--state", self.folder / "state"]
        words += ["--camera", f"folder:{self.folder / 'camera'}", "--every", "0.1"]
        words += [] if home is None else ["--home-assistant", home]
        return [*words, "--policy", self.folder / "policy.toml", *more]

    def start(self, *more: object, home: str | None = "fleet", bundle: Path = BUNDLE) -> subprocess.Popen[bytes]:
        return self._run("client", *self.words(*more, home=home, bundle=bundle))

    def aggregate(self, *more: object) -> subprocess.Popen[bytes]:
        """The fleet's aggregator as a process, too."""
        store = self.folder / "store.sqlite"
        return self._run("aggregate", "--bundle", BUNDLE, "--broker", self.broker.url, "--store", store, *more)

    def _run(self, name: str, *words: object) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "protofleet", name, *map(str, words)]
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self.processes[-1]

    def show(self, bundle: Bundle, label: str, count: int = 1, seed: int = 3) -> None:
        data = fashion(bundle, count, (FASHION_LABELS.index(label),), seed=seed)
        for row, image in enumerate(data.x):
            Image.fromarray(image[..., 0]).save(self.folder / "camera" / f"{label}-{seed}-{row}.png")

    def said(self) -> str:
        return (self.folder / "client.log").read_text()

    def ids(self) -> list[str]:
        photos = PhotosBeside(self.folder / "state")
        return [photo.id for photo in photos.photos()] if photos.is_there else []


@pytest.fixture
def device(broker: Mosquitto, tmp_path: Path) -> Iterator[Device]:
    found = Device(tmp_path, broker)
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


def until(true: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def labels_in(state: Path) -> list[str]:
    learned = Learned(state)
    learned.look()
    return list(learned.labels)
