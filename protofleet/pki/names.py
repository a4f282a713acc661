"""Names and roles of certificates, and which names are not allowed.

A name is the certificate's CN. The broker uses it as the user and as the MQTT client id. These are names:

    kitchen              a device, by its id
    aggregator, helper   of the first fleet
    aggregator.pets2     of another fleet
    aggregator.worker-1  one of several that share a fleet's work
    kitchen.answers      a further process beside the one before the dot, which has a connection of its own

Ids have no dot (`contract/wire/topics.py`). So no device can have the name of another device's process.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Literal

from protofleet.contract.errors import UsageError
from protofleet.contract.wire.topics import PREFIX, check_id

__all__ = ["AGGREGATOR", "BROKER", "HELPER", "ROLLOUT", "Role", "check_device", "check_host", "check_other"]
__all__ += ["check_topic", "of_fleet", "process_of"]

Role = Literal["broker", "aggregator", "helper", "device", "other"]
BROKER, AGGREGATOR, HELPER = "broker", "aggregator", "helper"
ROLLOUT = "rollout"  # the aggregator's second connection, to a fleet that devices go over to
LONGEST = 64  # of a common name (RFC 5280, ub-common-name)
_RESERVED = (BROKER, AGGREGATOR, HELPER)
_HOST = re.compile(r"(?=.{1,253}$)(?!-)[a-zA-Z0-9-]{1,63}(?<!-)(\.(?!-)[a-zA-Z0-9-]{1,63}(?<!-))*")


def check_device(name: str) -> str:
    """Check a device's id.

    Raises:
        UsageError: it is not valid, or reserved.
    """
    if name in _RESERVED:
        raise UsageError("device", expected="a device's id", got=f"{name}, which is reserved", hint=f"{name}-1")
    return check_id(name, "device")


def check_other(name: str) -> str:
    """Check the name of another member: like a device's id, or `ID.WORD` for a further process of a device.

    Raises:
        UsageError: it is not valid, or reserved.
    """
    first, dot, process = name.partition(".")
    if first in _RESERVED:
        raise UsageError("name", expected="a name of its own", got=f"{name}: {first} is reserved", hint=f"{first}-1")
    check_id(first, "name")
    if dot:
        check_id(process, f"name {first}.WORD")
    return _short(name)


def of_fleet(role: Literal["aggregator", "helper"], fleet: str, first: str) -> str:
    """The name of a fleet's aggregator or helper.

    Args:
        first: the book's first fleet, whose name is left out.

    Raises:
        UsageError: the name is too long for a certificate.
    """
    return role if fleet == first else _short(f"{role}.{fleet}")


def process_of(name: str, process: str) -> str:
    """The name of a further process."""
    return _short(f"{name}.{process}")


def _short(name: str) -> str:
    if len(name) > LONGEST:
        raise UsageError(f"name {name}", expected=f"at most {LONGEST} characters in a certificate", got=len(name))
    return name


def check_host(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | str:
    """Check an address or a host name by which devices reach the broker.

    Raises:
        UsageError: it is neither.
    """
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    if _HOST.fullmatch(host) is None or re.fullmatch(r"[\d.]+", host):
        expected = "a host name, or an address without a port"
        raise UsageError("--broker", expected=expected, got=repr(host)[:80], hint="--broker broker.local,192.0.2.10")
    return host.lower()


def check_topic(topic: str) -> str:
    """Check a topic filter outside of the fleets' topics, whose first level is no wildcard.

    Raises:
        UsageError: it is not such a filter.
    """
    levels = topic.split("/")
    fits = all(level in ("+", "#") or not set(level) & {"+", "#"} for level in levels) and "#" not in levels[:-1]
    own = levels[0] in ("", PREFIX.split("/")[0], "+", "#") or topic.startswith("$")
    if not fits or own or topic != topic.strip() or not topic.isprintable() or len(topic.encode()) > 1_000:
        raise UsageError("topic", expected="a topic filter outside of pf/, such as answers/+", got=repr(topic)[:80])
    return topic
