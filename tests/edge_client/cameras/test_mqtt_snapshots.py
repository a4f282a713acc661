"""edge_client/cameras/mqtt_snapshots.py over a real broker."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest
from brokers import Embedded, free_port
from camera_samples import jpeg, no_reader_is_left

from protofleet.contract.mqtt.link import Address, Connected, Link
from protofleet.edge_client.cameras import mqtt_snapshots
from protofleet.edge_client.cameras.camera import CameraGoneError
from protofleet.edge_client.cameras.sources import camera_of, pictures_of


@pytest.fixture
def broker() -> Iterator[Embedded]:
    made = Embedded()
    made.start()
    yield made
    made.stop()


class _Frigate:
    """Publishes snapshots, some of which the broker keeps."""

    def __init__(self, url: str) -> None:
        self._link = Link(Address.parse(url), "frigate", subscriptions=()).open()
        while not isinstance(self._link.receive(5.0), Connected):
            pass

    def put(self, topic: str, picture: bytes, *, retained: bool = False) -> None:
        while not self._link.publish(topic, picture, retain=retained):
            time.sleep(0.01)

    def close(self) -> None:
        self._link.close(timeout_s=1.0)


def test_snapshots_come_as_they_are_published_and_of_several_the_newest(broker: Embedded) -> None:
    frigate, found = _Frigate(broker.url), []
    frigate.put("frigate/door/person/snapshot", jpeg(9, 9), retained=True)  # of yesterday, for all that is known
    camera = camera_of(f"{broker.url}/frigate/+/person/snapshot")
    pictures = pictures_of(camera, 0.01)
    reader = threading.Thread(target=lambda: found.append(next(pictures)))
    reader.start()
    while reader.is_alive():  # until the subscription stands
        frigate.put("frigate/door/person/snapshot", jpeg(20, 10))
        frigate.put("frigate/door/car/snapshot", jpeg(11, 11))
        reader.join(0.1)
    assert found[0].content == jpeg(20, 10)
    assert abs(time.time() - found[0].taken_s) < 60.0
    for width in range(30, 40):
        frigate.put("frigate/yard/person/snapshot", jpeg(width, 10))
    while found[-1].content != jpeg(39, 10):
        found.append(next(pictures))
    pictures.close()  # type: ignore[attr-defined]
    frigate.close()
    no_reader_is_left()


def test_one_that_is_too_large_is_not_taken(broker: Embedded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker of the standard leaves it out; this one sends it all the same, and the connection is cut."""
    monkeypatch.setattr(mqtt_snapshots, "LARGEST_BYTES", 4096)
    frigate, why = _Frigate(broker.url), []

    def read() -> None:
        with pytest.raises(CameraGoneError) as gone:
            next(iter(camera_of(f"{broker.url}/snapshot").pictures(0.01)))
        why.append(str(gone.value))

    reader = threading.Thread(target=read)
    reader.start()
    while reader.is_alive():
        frigate.put("snapshot", bytes(4096 + 2048))
        reader.join(0.1)
    frigate.close()
    assert re.fullmatch(r"a packet of 6,[0-9]+ bytes, at most 4,352 were asked for", why[0])


def test_a_broker_that_is_away_is_a_camera_that_is_gone() -> None:
    camera = camera_of(f"mqtt://me:hunter2@127.0.0.1:{free_port()}/snapshot")
    with pytest.raises(CameraGoneError) as gone:
        next(iter(camera.pictures(1.0)))
    assert "hunter2" not in f"{gone.value}{camera.shown}"
