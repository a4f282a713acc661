"""What a store knows of its fleet, for the commands of `fleet_cli.py`: read at one moment, and put into words."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from aggregator.class_drift import class_drift_of
from aggregator.database import AnyPlace, read_only
from aggregator.drift import drift_of
from aggregator.enrolment import OF_THE_DEVICE
from aggregator.enrolment_store import Intruder, intruders_in, keys_in
from aggregator.findings import newest_findings, verdicts
from aggregator.policy_words import policy_words_in
from aggregator.rollout_store import said_in
from aggregator.standing_store import Order, Record, classes_forgotten, fleet_records, orders
from aggregator.store import as_written
from aggregator.store_schema import KIND
from contract.drift import WORDS
from contract.signed import key_id
from contract.terminal import counted, printable

__all__ = [
    "Known",
    "beside_record",
    "drift_in_short",
    "drift_in_words",
    "intruder_in_words",
    "key_name",
    "order_in_words",
    "read_known",
    "standing_in_words",
    "when",
]


class Known(NamedTuple):
    """What a store knows of its fleet, at one moment.

    Attributes:
        records: of each device.
        orders: all that was asked, in order.
        drift: what devices said of their newest photos.
        said: what devices said of a roll-out.
        policies: what they said last that their owners' policies refuse.
        classes_forgotten: by name.
        classes_drifting: by name, and why.
        findings: what spoke last against devices.
        keys: of devices that are enrolled; None where it was revoked.
        intruders: who was turned away.
        told: who is told that a round left it out, or that it counts again.
    """

    records: dict[str, Record]
    orders: list[Order]
    drift: dict[str, dict[str, Any]]
    said: Mapping[str, str]
    policies: Mapping[str, str]
    classes_forgotten: Sequence[str]
    classes_drifting: Mapping[str, Mapping[str, Any]]
    findings: Mapping[str, Mapping[str, Any]]
    keys: Mapping[str, bytes | None]
    intruders: Sequence[Intruder]
    told: Collection[str]


def read_known(store: AnyPlace) -> Known:
    with read_only(store, KIND) as db, as_written(store):
        return Known(
            dict(fleet_records(db)),
            orders(db),
            drift_of(db),
            said_in(db),
            policy_words_in(db),
            classes_forgotten(db),
            class_drift_of(db),
            newest_findings(db),
            keys_in(db),
            intruders_in(db),
            verdicts(db, bytes(4)).keys(),
        )


def beside_record(known: Known, device: str) -> dict[str, Any]:
    """What is known of a device beside its record, for JSON."""
    found = {"drift": known.drift, "rollout": known.said, "finding": known.findings, "policy": known.policies}
    return {name: of.get(device) for name, of in found.items()}


def standing_in_words(record: Record) -> str:
    if record.present:
        return f"sums {record.generation}"
    return f"none since sums {record.generation}" if record.generation else "none"


def drift_in_short(drift: Mapping[str, Mapping[str, Any]], device: str) -> str:
    why = drift.get(device, {}).get("suspected")
    return "" if why is None else f"{WORDS[why['figure']]} {why['now']:.2f}, usually {why['usual']:.2f}"


def drift_in_words(told: Mapping[str, Any]) -> str:
    """What a device said last of its newest photos, for a person."""
    line = f"newest {told['samples']} photos: {WORDS['distance']} {told['distance']:.2f}, "
    line += f"{WORDS['unlike']} {told['unlike']:.2f}, {counted(told['reports'], 'report')} kept"
    why = told["suspected"]
    return line if why is None else f"{line}; drift suspected: {WORDS[why['figure']]} was usually {why['usual']:.2f}"


def key_name(keys: Mapping[str, bytes | None], device: str) -> str | None:
    """The first digits of what a device's key is called, or that it was revoked; None where it was never enrolled."""
    if device not in keys:
        return None
    key = keys[device]
    return "revoked" if key is None else key_id(key).hex()


def intruder_in_words(each: Intruder) -> str:
    who = f"intruder as {each.device}" if each.cause not in OF_THE_DEVICE else each.device
    return f"{who}: {counted(each.messages, 'message')}, last at {when(each.last_at)}: {printable(each.reason)}"


def order_in_words(order: Order) -> str:
    of = "".join(f" {word}" for word in (order.device, order.shown) if word)
    asked = f"{order.what}{of}, asked by {order.who} at {when(order.given_at)}"
    if order.done_at is None:
        return f"{asked}: NOT yet done"
    between = f", global version {order.version_before}"
    between += f" → {order.version_after}" if order.version_after != order.version_before else ""
    return f"{asked}: {order.outcome}{between}"


def when(at: float | None, otherwise: str = "never") -> str:
    if at is None:
        return otherwise
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # no clock has ever said that
        return "an unknown time"
