"""What a store knows of its fleet, for the commands of `fleet_cli.py`: read at one moment, and written as text."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from protofleet.aggregator.database import AnyPlace, Connection, read_only
from protofleet.aggregator.enrolment.gate import OF_THE_DEVICE
from protofleet.aggregator.monitoring.class_drift import class_drift_of
from protofleet.aggregator.monitoring.device_table import Device, DeviceEvent, device_events, known_devices
from protofleet.aggregator.monitoring.drift import drift_of
from protofleet.aggregator.monitoring.policy_refusals import policy_words_in
from protofleet.aggregator.rollout.rollout_stages import Rollout
from protofleet.aggregator.store.durable_store import as_written
from protofleet.aggregator.store.enrolment_tables import Intruder, intruders_in, keys_in
from protofleet.aggregator.store.finding_tables import newest_findings, verdicts
from protofleet.aggregator.store.order_table import Order, orders
from protofleet.aggregator.store.rollout_tables import plan_in, said_in
from protofleet.aggregator.store.schema import KIND
from protofleet.aggregator.store.standing_tables import Record, classes_forgotten, fleet_records
from protofleet.contract.drift import WORDS
from protofleet.contract.identity.signatures import key_id
from protofleet.contract.printable import counted, printable
from protofleet.contract.wire.rollout_messages import bundle_tag

__all__ = [
    "Known",
    "NewestRound",
    "beside_record",
    "bundle_version",
    "drift_in_short",
    "drift_in_words",
    "fleet_of",
    "intruder_in_words",
    "key_name",
    "order_in_words",
    "read_known",
    "record_in_words",
    "standing_in_words",
    "when",
]

_EVENTS = 50


class NewestRound(NamedTuple):
    """The newest round, and what it does at the moment, in a word."""

    number: int
    method: str
    word: str


class Known(NamedTuple):
    """What a store knows of its fleet, at one moment.

    Attributes:
        records: of each device.
        orders: all orders, in order.
        drift: the devices' last drift reports.
        said: the devices' reports on a roll-out.
        policies: the devices' last reports of what their owners' policies refuse.
        classes_forgotten: by name.
        classes_drifting: by name, and why.
        findings: the last findings against devices.
        keys: of enrolled devices; None for a revoked key.
        intruders: the senders that were turned away.
        told: the devices that are told that a round left them out, or that they count again.
        devices: what is known of each device.
        events: the newest entries of what happened to them, the newest first.
        newest_round: the newest round; None before the first.
        newest_bundle: the highest version of a bundle that a device runs and another thing confirms, as
            `_newest_bundle` says; 0 where there is none.
        out: the devices that nothing is taken of, and why.
        rollout: the roll-out that was taken up and has not ended, without reports; None for none.
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
    devices: Mapping[str, Device]
    events: Sequence[DeviceEvent]
    newest_round: NewestRound | None
    newest_bundle: int
    out: Mapping[str, str]
    rollout: Rollout | None


def read_known(store: AnyPlace, read: Callable[[Connection], dict[str, Device]] = known_devices) -> Known:
    """What a store knows; `read` gives its devices."""
    with read_only(store, KIND) as db, as_written(store):
        records, devices = dict(fleet_records(db)), read(db)
        out = {device: record.refused for device, record in records.items() if record.refused}
        rollout = plan_in(db)
        return Known(
            records,
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
            devices,
            device_events(db, limit=_EVENTS),
            _newest_round(db),
            _newest_bundle(db, [row.bundle for device, row in devices.items() if device not in out], rollout),
            out,
            rollout,
        )


def fleet_of(store: AnyPlace) -> str:
    """The id of the fleet whose store this is."""
    with read_only(store, KIND) as db:
        row = db.execute("SELECT value FROM meta WHERE name = 'fleet'").fetchone()
    return "" if row is None else printable(memoryview(row[0]).tobytes().decode(errors="replace"))


def _newest_round(db: Connection) -> NewestRound | None:
    row = db.execute("SELECT number, method, closed FROM round ORDER BY number DESC LIMIT 1").fetchone()
    return None if row is None else NewestRound(int(row[0]), str(row[1]), "closed" if row[2] else "open")


def bundle_version(bundle: str) -> int | None:
    """The version in a device's word for what it runs, `3 be73988c`; None where there is none."""
    word = bundle.partition(" ")[0]
    return int(word) if word.isdecimal() and len(word) < 10 else None


def _newest_bundle(db: Connection, bundles: Sequence[str], rollout: Rollout | None) -> int:
    """The highest version that devices run; what one device alone says would make all others look old.

    A version counts which two devices run, which is rolled out, or which is of the bundle that the store is of.
    """
    row = db.execute("SELECT value FROM meta WHERE name = 'bundle'").fetchone()
    own = b"" if row is None else memoryview(row[0]).tobytes()
    versions = [(version, bundle) for bundle in bundles if (version := bundle_version(bundle)) is not None]
    runs = Counter(version for version, _ in versions)
    sure = {version for version, devices in runs.items() if devices > 1}
    sure |= {rollout.plan.version} & runs.keys() if rollout is not None else set()
    of_the_store = sorted(version for version, bundle in versions if own and bundle == bundle_tag(version, own))
    return max((*sure, *of_the_store[:1]), default=0)


def beside_record(known: Known, device: str) -> dict[str, Any]:
    """What is known of a device beside its record, for JSON."""
    parts = {"drift": known.drift, "rollout": known.said, "finding": known.findings, "policy": known.policies}
    return {name: by_device.get(device) for name, by_device in parts.items()}


def standing_in_words(record: Record) -> str:
    """What stands of a device; empty where nothing ever stood, as in a fleet of rounds."""
    if record.present:
        return f"sums {record.generation}"
    return f"none since sums {record.generation}" if record.generation else ""


def record_in_words(record: Record) -> str:
    """What a device has given: what stands of it, where something does, and in how many rounds it was."""
    return ", ".join(filter(None, (standing_in_words(record), counted(record.rounds, "round"))))


def drift_in_short(drift: Mapping[str, Mapping[str, Any]], device: str) -> str:
    suspected = drift.get(device, {}).get("suspected")
    if suspected is None:
        return ""
    return f"{WORDS[suspected['figure']]} {suspected['now']:.2f}, usually {suspected['usual']:.2f}"


def drift_in_words(newest: Mapping[str, Any]) -> str:
    """What a device said last of its newest photos, for a person."""
    line = f"newest {newest['samples']} photos: {WORDS['distance']} {newest['distance']:.2f}, "
    line += f"{WORDS['unlike']} {newest['unlike']:.2f}, {counted(newest['reports'], 'report')} kept"
    if newest["moved"] is not None:
        line += f"; {WORDS['moved']} {newest['moved']:.2f} times what chance makes of them"
    suspected = newest["suspected"]
    if suspected is None:
        return line
    return f"{line}; drift suspected: {WORDS[suspected['figure']]} was usually {suspected['usual']:.2f}"


def key_name(keys: Mapping[str, bytes | None], device: str) -> str | None:
    """The first digits of what a device's key is called, or that it was revoked; None where it was never enrolled."""
    if device not in keys:
        return None
    key = keys[device]
    return "revoked" if key is None else key_id(key).hex()


def intruder_in_words(intruder: Intruder) -> str:
    name = f"intruder as {intruder.device}" if intruder.cause not in OF_THE_DEVICE else intruder.device
    line = f"{name}: {counted(intruder.messages, 'message')}, last at {when(intruder.last_at)}"
    return f"{line}: {printable(intruder.reason)}"


def order_in_words(order: Order) -> str:
    target = "".join(f" {part}" for part in (order.device, order.shown) if part)
    request = f"{order.what}{target}, asked by {order.who} at {when(order.given_at)}"
    if order.done_at is None:
        return f"{request}: NOT yet done"
    between = f", global version {order.version_before}"
    between += f" → {order.version_after}" if order.version_after != order.version_before else ""
    return f"{request}: {order.outcome}{between}"


def when(at: float | None, otherwise: str = "never") -> str:
    if at is None:
        return otherwise
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # no clock has ever said that
        return "an unknown time"
