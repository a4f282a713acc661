"""MQTT topics and the ids in them. See docs/wire.md.

    pf/v2/{fleet}/round             aggregator → devices   announcement, retained
    pf/v2/{fleet}/global/{i}        aggregator → devices   part i of the global state, retained
    pf/v2/{fleet}/up/{device}       device → aggregator    contributions, whole or in chunks; requests
    pf/v2/{fleet}/down/{device}     aggregator → device    receipts, and pieces of a bundle that is rolled out
    pf/v2/{fleet}/status/{device}   device → aggregator    birth and death, retained, last will
    pf/v2/{fleet}/helper/ask        aggregator → helper    sets whose sums are to be opened
    pf/v2/{fleet}/helper/answer     helper → aggregator    their sums

Ids match `[a-z0-9][a-z0-9-]{0,63}`; a wildcard or a slash in an id is refused here, not only by the broker. No device
is called `aggregator`: the aggregator says on that status topic that it is there.
"""

from __future__ import annotations

import re

from protofleet.contract.errors import UsageError, WireError
from protofleet.contract.printable import undisclosed_if_url

__all__ = [
    "AGGREGATOR",
    "ID_PATTERN",
    "PREFIX",
    "check_device",
    "check_id",
    "device_of",
    "down",
    "global_all",
    "global_part",
    "helper_answer",
    "helper_ask",
    "is_id",
    "round_",
    "shared",
    "status",
    "unshared",
    "up",
]

PREFIX = "pf/v2"
AGGREGATOR = "aggregator"  # whose status topic is the seat of a fleet's aggregator
ID_PATTERN = "[a-z0-9][a-z0-9-]{0,63}"
_ID = re.compile(ID_PATTERN)


def is_id(value: str) -> bool:
    """Whether `value` may stand in a topic."""
    return _ID.fullmatch(value) is not None


def check_id(value: str, what: str = "id") -> str:
    """`value` when it may stand in a topic.

    Raises:
        UsageError: when it may not.
    """
    if not is_id(value):
        got = undisclosed_if_url(repr(value)[:80])
        raise UsageError(what, expected="1 to 64 of a-z, 0-9 and -, not beginning with -", got=got)
    return value


def check_device(value: str, what: str = "device") -> str:
    """`value` when it may be a device's id.

    Raises:
        UsageError: when it may not stand in a topic, or is reserved.
    """
    if value == AGGREGATOR:
        raise UsageError(what, expected="a device's id", got=f"{value}, which is reserved", hint=f"{value}-1")
    return check_id(value, what)


def round_(fleet: str) -> str:
    """Where rounds are announced."""
    return f"{PREFIX}/{check_id(fleet, 'fleet')}/round"


def global_part(fleet: str, part: int) -> str:
    """Where part `part` of the global state is retained."""
    return f"{PREFIX}/{check_id(fleet, 'fleet')}/global/{part:d}"


def global_all(fleet: str) -> str:
    """The filter for every part of the global state."""
    return f"{PREFIX}/{check_id(fleet, 'fleet')}/global/+"


def up(fleet: str, device: str | None = None) -> str:
    """Where a device publishes contributions and requests; without a device, the filter for all."""
    return _of("up", fleet, None if device is None else check_device(device))


def down(fleet: str, device: str | None = None) -> str:
    """Where a device gets its receipts and pieces; without a device, the filter for all."""
    return _of("down", fleet, None if device is None else check_device(device))


def status(fleet: str, device: str | None = None) -> str:
    """Where a device's birth and death stand, or the aggregator's; without a device, the filter for all."""
    return _of("status", fleet, device)


def helper_ask(fleet: str) -> str:
    """Where the helper is asked to open a sum."""
    return f"{PREFIX}/{check_id(fleet, 'fleet')}/helper/ask"


def helper_answer(fleet: str) -> str:
    """Where the helper answers."""
    return f"{PREFIX}/{check_id(fleet, 'fleet')}/helper/answer"


def shared(fleet: str, topic_filter: str) -> str:
    """The filter under which each message goes to one of all who subscribe so (MQTT 5's shared subscriptions)."""
    return f"$share/{PREFIX.replace('/', '-')}-{check_id(fleet, 'fleet')}/{topic_filter}"


def unshared(topic_filter: str) -> str:
    """The filter that topics are matched with."""
    return topic_filter.split("/", 2)[2] if topic_filter.startswith("$share/") else topic_filter


def device_of(topic: str) -> str:
    """The device that an `up` or `status` topic belongs to; `AGGREGATOR` on its own status topic.

    Raises:
        WireError: when the topic is not one of ours.
    """
    parts = topic.split("/")
    if (
        len(parts) != 5
        or "/".join(parts[:2]) != PREFIX
        or not _ID.fullmatch(parts[4])
        or (parts[4] == AGGREGATOR and parts[3] != "status")
    ):
        raise WireError("topic", expected=f"{PREFIX}/FLEET/up/DEVICE", got=repr(topic)[:120])
    return parts[4]


def _of(kind: str, fleet: str, device: str | None) -> str:
    return f"{PREFIX}/{check_id(fleet, 'fleet')}/{kind}/{'+' if device is None else check_id(device, 'device')}"
