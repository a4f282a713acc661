"""A device in the real Home Assistant: its discovery makes entities, an automation there chooses a class, and that is a
label here.

It runs where `PROTOFLEET_HASS` is the `hass` of an environment with `homeassistant==2025.4.4`,
`home-assistant-frontend==20250411.0`, `hassil==2.2.3`, `home-assistant-intents==2025.3.28` and `paho-mqtt==2.1.0`, on
Python 3.13.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import Mosquitto
from home_assistant_samples import BUNDLE, TOPICS, Device, Listener, broker, device, house, labels_in, until

from protofleet.contract.bundle.bundle_file import read_bundle

__all__ = ["broker", "device", "house"]

HASS = os.environ.get("PROTOFLEET_HASS", "")
CONFIGURATION = """\
homeassistant:
  name: Home
http:
  server_host: 127.0.0.1
  server_port: 18123
mqtt_statestream:
  base_topic: protofleet/seen
automation:
  - alias: an answer is right
    triggers:
      - trigger: state
        entity_id: sensor.pi_1_answer
        to: Bag
    actions:
      - action: select.select_option
        target: {entity_id: select.pi_1_teach}
        data: {option: Bag}
      - action: button.press
        target: {entity_id: button.pi_1_that_is_right}
"""


@pytest.fixture
def hass(tmp_path: Path, broker: Mosquitto) -> Iterator[subprocess.Popen[bytes]]:
    """Home Assistant at that broker, which says every state of an entity below `protofleet/seen`."""
    config = tmp_path / "hass"
    (config / ".storage").mkdir(parents=True)
    (config / "configuration.yaml").write_text(CONFIGURATION)
    entry = {
        "created_at": "2025-01-01T00:00:00+00:00", "modified_at": "2025-01-01T00:00:00+00:00",
        "data": {"broker": "127.0.0.1", "port": broker.port, "protocol": "5"}, "disabled_by": None,
        "discovery_keys": {}, "domain": "mqtt", "entry_id": "01", "minor_version": 1, "options": {},
        "pref_disable_new_entities": False, "pref_disable_polling": False, "source": "user", "subentries": [],
        "title": "broker", "unique_id": None, "version": 1,
    }  # fmt: skip
    stored = {"version": 1, "minor_version": 5, "key": "core.config_entries", "data": {"entries": [entry]}}
    (config / ".storage" / "core.config_entries").write_text(json.dumps(stored))
    with (tmp_path / "hass.log").open("wb") as log:
        process = subprocess.Popen([HASS, "-c", str(config), "--skip-pip"], stdout=log, stderr=log)
    yield process
    process.terminate()
    process.wait(60)


def choices(house: Listener) -> list[object]:
    """What Home Assistant sent to the device."""
    return [json.loads(message) for topic, message in house.all if topic == TOPICS.of("teach")]


@pytest.mark.slow
@pytest.mark.skipif(not HASS, reason="PROTOFLEET_HASS names no Home Assistant")
@pytest.mark.timeout(600)
def test_an_automation_of_the_real_home_assistant_teaches(
    hass: subprocess.Popen[bytes], device: Device, house: Listener
) -> None:
    bundle = read_bundle(BUNDLE)
    device.start()
    until(lambda: house.known.get("protofleet/seen/sensor/pi_1_answer/state") == b"unknown", 240)
    device.show(bundle, "Bag")
    until(lambda: house.state.get("photo"))
    photo = house.state["photo"]
    seen = {name.removeprefix("protofleet/seen/") for name in house.known if name.startswith("protofleet/seen/")}
    wanted = ("sensor/pi_1_answer", "sensor/pi_1_probability", "binary_sensor/pi_1_unknown", "select/pi_1_teach")
    wanted += (
        "button/pi_1_that_is_right",
        "sensor/pi_1_last_word",
        "sensor/pi_1_bundle",
        "sensor/pi_1_bytes_that_left",
    )
    assert {f"{name}/state" for name in wanted} <= seen
    state = json.dumps({**house.state, "answer": "Bag"})  # as if the fleet knew bags by now
    house.say(TOPICS.of("state"), state, retain=True)
    until(lambda: labels_in(device.folder / "state") == ["Bag"], 120)
    until(lambda: {"photo": photo, "label": "Bag"} in choices(house))
    until(lambda: house.known.get("protofleet/seen/select/pi_1_teach/state") == b"Bag")
    until(lambda: {"photo": photo, "right": True} in choices(house))
    device.processes[-1].kill()
    until(lambda: house.known["protofleet/seen/sensor/pi_1_answer/state"] == b"unavailable")
