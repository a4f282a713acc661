"""The retained message by which Home Assistant (2024.12 and newer) makes the entities of one device.

One message on `homeassistant/device/ID/config` names all entities and the topics they read. Their values stand in one
retained JSON object on `protofleet/FLEET/DEVICE/state`. What Home Assistant takes as templates is constant and stands
here: names of devices and classes are only ever values of JSON, which no template engine reads.

A choice names the photo that it is about: the entity has the state's `photo` as an attribute, and its command template
sends that back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["LONGEST", "STATUS", "Topics", "discovery"]

STATUS = "homeassistant/status"  # Home Assistant says `online` there when it has begun
LONGEST = 255  # characters of a state, which Home Assistant takes
_PHOTO = "'photo': this.attributes.get('photo', '')"


@dataclass(frozen=True)
class Topics:
    """Of one device. Ids of fleets and devices have no `_` and no `/`."""

    fleet: str
    device: str

    @property
    def unique(self) -> str:
        """By which Home Assistant knows the device."""
        return f"protofleet_{self.fleet}_{self.device}"

    @property
    def discovery(self) -> str:
        """Where the message of `discovery` is retained."""
        return f"homeassistant/device/{self.unique}/config"

    def of(self, what: str) -> str:
        """A topic of the device's own: `state`, `photo`, `available` or `teach`."""
        return f"protofleet/{self.fleet}/{self.device}/{what}"

    @property
    def retained(self) -> tuple[str, ...]:
        """All that a broker keeps of the device."""
        return (self.discovery, self.of("state"), self.of("available"))


def discovery(topics: Topics, classes: tuple[str, ...], *, bundle: str, photo: bool) -> bytes:
    """The message.

    Args:
        classes: labels of the bundle.
        bundle: the beginning of its hash.
        photo: whether the last photo is an entity, too.
    """
    state = topics.of("state")
    entities: dict[str, dict[str, object]] = {
        "answer": {"p": "sensor", "name": "Answer", "icon": "mdi:eye", "json_attr_t": state},
        "probability": {"p": "sensor", "name": "Probability", "unit_of_meas": "%", "stat_cla": "measurement"},
        "unknown": {"p": "binary_sensor", "name": "Unknown", "icon": "mdi:help-circle"},
        "teach": {
            "p": "select",
            "name": "Teach",
            "icon": "mdi:school",
            "ops": [label[:LONGEST] for label in classes],
            "cmd_t": topics.of("teach"),
            "cmd_tpl": f"{{{{ {{{_PHOTO}, 'label': value}} | to_json }}}}",
            "json_attr_t": state,
        },
        "right": {
            "p": "button",
            "name": "That is right",
            "icon": "mdi:check",
            "cmd_t": topics.of("teach"),
            "cmd_tpl": f"{{{{ {{{_PHOTO}, 'right': true}} | to_json }}}}",
            "json_attr_t": state,
        },
        "said": {"p": "sensor", "name": "Last word", "icon": "mdi:message-text", "ent_cat": "diagnostic"},
        "bundle": {"p": "sensor", "name": "Bundle", "icon": "mdi:package-variant", "ent_cat": "diagnostic"},
        "left": {
            "p": "sensor",
            "name": "Bytes that left",
            "dev_cla": "data_size",
            "unit_of_meas": "B",
            "stat_cla": "total_increasing",
            "ent_cat": "diagnostic",
        },
    }
    for name, entity in entities.items():
        entity["uniq_id"] = f"{topics.unique}_{name}"
        if name != "right":
            entity["stat_t"] = state
            entity["val_tpl"] = f"{{{{ value_json.{name} }}}}"
    if photo:
        entities["photo"] = {
            "p": "image",
            "name": "Last photo",
            "uniq_id": f"{topics.unique}_photo",
            "img_t": topics.of("photo"),
            "content_type": "image/jpeg",
        }
    message = {
        "dev": {
            "ids": [topics.unique],
            "name": topics.device,
            "mf": "Protofleet",
            "mdl": f"device of the fleet {topics.fleet}",
            "sw": f"bundle {bundle}",
        },
        "o": {"name": "protofleet"},
        "avty_t": topics.of("available"),
        "qos": 1,
        "cmps": entities,
    }
    return json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
