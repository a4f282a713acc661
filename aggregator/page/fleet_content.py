"""What the operator's page shows, made of one look at the store: a row for each device, and the parts beside it.

Names and texts of devices are hostile: they are `printable` here, and put into the page as text by its script. Nothing
here follows from a photo but what devices report anyway, and what is told of a device is no more than `fleet show` has.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from protofleet.aggregator.database import AnyPlace, Connection, read_only
from protofleet.aggregator.enrolment.gate import OF_THE_DEVICE
from protofleet.aggregator.monitoring.device_table import CLOCK_AHEAD, EVENTS_OF_ONE, Device, accuracy_of, device_events
from protofleet.aggregator.overview.conditions import conditions_in_lines
from protofleet.aggregator.overview.fleet_state import RUNBOOK, Care, FleetState, gateway_in_words
from protofleet.aggregator.overview.fleet_text import (
    drift_in_short,
    drift_in_words,
    key_name,
    order_in_words,
    record_in_words,
)
from protofleet.aggregator.overview.standing_suspects import Compared, sums_stand
from protofleet.aggregator.store.durable_store import as_written
from protofleet.aggregator.store.finding_tables import found_in_words
from protofleet.aggregator.store.order_table import Order, orders
from protofleet.aggregator.store.rollout_tables import rollout_in
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.conditions import CONDITIONS
from protofleet.contract.mqtt.certificates import Expiry
from protofleet.contract.printable import counted, printable

__all__ = ["COLUMNS", "KeptRows", "Look", "device_content", "look_at", "runbook_part"]

COLUMNS = (
    *("name", "presence", "since", "heard", "board", "bundle", "boot", "step_ms", "profiled_ms", "predicted_ms"),
    *("peak_bytes", "profiled_bytes", "most_bytes", "new", "up", "down", "refused", "members", "accuracy", "unknown"),
    *("rollout", "causes", "first_seen"),
)
_LEAVING = 20  # devices that are gone for a moment
_WHY_GONE = {"certificate", "disk"}  # what says more than that one is gone
_PROPOSERS = 8  # devices of a proposed class
_ROUNDS, _ORDERS, _CARES, _NAMED, _EVENTS = 60, 30, 3, 50, 30
_STILL_MOVE = 3  # the newest rounds, of which devices may report yet
_UNKNOWN = "unknown_share"  # a figure that a device may tell
_FIGURES = ("train_step_ms", "profile_train_step_ms", "profile_train_step_predicted_ms")
_CONDITIONS = (CLOCK_AHEAD, *CONDITIONS)  # which are told in words
_MEMORY = ("peak_rss_bytes", "profile_train_step_peak_rss_bytes", "profile_memory_at_most_bytes")


@dataclass(frozen=True)
class Look:
    """What one look at the store gives.

    Attributes:
        rows: of each device, a cell for each of `COLUMNS`, as JSON.
        parts: what stands beside the table, by name, as JSON.
        names: of the devices that orders may be about.
    """

    rows: Mapping[str, str]
    parts: Mapping[str, str]
    names: frozenset[str]


@dataclass
class RoundRows:
    """Rounds as they are shown; those that do not change any more are read once."""

    _known: dict[int, dict[str, Any]] = field(default_factory=dict)

    def read(self, db: Connection) -> list[dict[str, Any]]:
        """The newest rounds, the newest first."""
        found = db.execute(
            f"SELECT number, method, opened_at, closed, seconds FROM round ORDER BY number DESC LIMIT {_ROUNDS}"
        ).fetchall()
        newest = int(found[0][0]) if found else 0
        shown = []
        for number, method, opened_at, closed, seconds in found:
            row = self._known.get(int(number))
            if row is None or number > newest - _STILL_MOVE or not row["closed"]:
                row = {"round": int(number), "method": printable(str(method)), "opened": float(opened_at)}
                row |= {"closed": bool(closed), "seconds": seconds} | _of_round(db, int(number))
            shown.append(row)
        self._known = {row["round"]: row for row in shown}
        return shown


def _of_round(db: Connection, number: int) -> dict[str, Any]:
    """How many contributed and were left out, and how right the devices say that they are: mean, least and most."""
    (count,) = db.execute("SELECT count(DISTINCT device) FROM contribution WHERE round = ?", (number,)).fetchone()
    (left_out,) = db.execute(
        "SELECT count(DISTINCT device) FROM finding WHERE round = ? AND verdict = 'left out'", (number,)
    ).fetchone()
    shares = sorted(
        float(share) for (share,) in db.execute("SELECT all_classes FROM accuracy WHERE round = ?", (number,))
    )
    spread: dict[str, Any] = {"devices": len(shares)}
    if shares:
        quarter = len(shares) // 4
        spread |= {"mean": round(sum(shares) / len(shares), 4), "least": shares[0], "most": shares[-1]}
        spread |= {"low": shares[quarter], "high": shares[-1 - quarter]}
    return {"contributions": int(count), "left_out": int(left_out), "accuracy": spread}


@dataclass
class KeptRows:
    """What one look leaves to the next."""

    rounds: RoundRows = field(default_factory=lambda: RoundRows())
    devices: DeviceRows = field(default_factory=lambda: DeviceRows())


def look_at(
    store: AnyPlace,
    state: FleetState,
    kept: KeptRows,
    expiring: Sequence[Expiry] = (),
    *,
    compared: Compared | None = None,
    is_served: bool = False,
) -> Look:
    """Everything that the page shows, at one moment.

    Args:
        kept: what the looks before have made.
        expiring: the certificates of the aggregator's connection.
        compared: what comparing the standing sums has found; None where they were not compared yet.
        is_served: whether this is the aggregator's own process, which knows them.

    Raises:
        StoreError, UsageError: as `read_only`.
    """
    with read_only(store, KIND) as db, as_written(store):
        newest = kept.rounds.read(db)
        accuracy = _newest_accuracy(db)
        rollout, stands = rollout_in(db), sums_stand(db)
        invitations = [
            (str(name), float(until))
            for name, until in db.execute("SELECT device, expires FROM invitation ORDER BY expires LIMIT 50")
        ]
    cares, causes = state.cares, dict[str, list[str]]()
    for care in cares:
        if care.device:
            causes.setdefault(care.device, []).append(care.cause)
    findings = state.known.findings.items()
    leaving = [
        [printable(name), round(row.since)]
        for name, row in state.just_gone.items()
        if not _WHY_GONE & set(causes.get(name, ()))
    ]
    parts: dict[str, Any] = {
        "top": {
            "sentence": printable(state.sentence),
            "well": not cares,
            "runs": state.runs,
            "leaving": leaving[:_LEAVING],
            "away": len(leaving),
            "counts": Counter(care.cause for care in cares),
            "cares": [[printable(care.device), care.cause, printable(care.reason)] for care in _first_of_each(cares)],
        },
        "rounds": newest,
        "rollout": None if rollout is None else _rollout(rollout),
        "named": [[printable(name), found_in_words(found)] for name, found in findings][:_NAMED],
        "compared": _compared(compared) if stands else None,
        "gateways": [[printable(name), members] for name, members in list(state.gateways.items())[:_NAMED]],
        "behind": [len(state.gateways), sum(state.gateways.values())],
        "intruders": [
            [printable(each.device), each.messages, each.last_at, printable(each.reason)]
            for each in state.known.intruders
            if each.cause not in OF_THE_DEVICE
        ][:_NAMED],
        "orders": [_order(order) for order in state.known.orders[: -_ORDERS - 1 : -1]],
        "expiring": [
            *([each.what, printable(each.name), each.until, each.is_soon(state.at), each.help] for each in expiring),
            *(["invitation", printable(name), until, False, "protofleet fleet invite"] for name, until in invitations),
        ],
        "sees_certificates": is_served,
        "classes": {
            "forgotten": list(map(printable, state.known.classes_forgotten)),
            "drifting": list(map(printable, state.known.classes_drifting)),
            "proposed": [_proposed(name, by) for name, by in list(state.proposed.items())[:_NAMED]],
        },
        "events": [
            [event.at, printable(event.device), printable(event.what), printable(event.detail)]
            for event in state.known.events[:_EVENTS]
        ],
    }
    return Look(
        kept.devices.make(state, accuracy, causes),
        {name: json.dumps(part, separators=(",", ":")) for name, part in parts.items()},
        frozenset(state.known.records),
    )


def _compared(compared: Compared | None) -> dict[str, Any]:
    if compared is None:
        return {"at": None, "devices": 0, "suspects": []}
    suspects = [[printable(each.device), each.accused, printable(each.words())] for each in compared.suspects]
    return {"at": compared.at, "devices": compared.devices, "suspects": suspects[:_NAMED]}


def _proposed(name: str, devices: Mapping[str, int]) -> list[Any]:
    """A class of `FleetState.proposed`: for how many photos of how many devices, and the first of these."""
    first = [[printable(device), photos] for device, photos in list(devices.items())[:_PROPOSERS]]
    return [printable(name), sum(devices.values()), len(devices), first]


def _first_of_each(cares: Sequence[Care]) -> list[Care]:
    """The first few of each cause, so that many of one do not hide another."""
    seen: Counter[str] = Counter()
    first = []
    for care in cares:
        seen[care.cause] += 1
        if seen[care.cause] <= _CARES:
            first.append(care)
    return first


def _newest_accuracy(db: Connection) -> dict[str, float]:
    """What each device said of itself last."""
    rows = db.execute(
        "SELECT a.device, a.all_classes FROM accuracy a JOIN"
        " (SELECT device, max(round) AS newest FROM accuracy GROUP BY device) n"
        " ON n.device = a.device AND n.newest = a.round"
    )
    return {str(device): float(share) for device, share in rows.fetchall()}


@dataclass
class DeviceRows:
    """The devices' rows as JSON; one of which nothing has changed is made once."""

    _made: dict[str, tuple[tuple[Any, ...], str]] = field(default_factory=dict)

    def make(self, state: FleetState, accuracy: Mapping[str, float], causes: Mapping[str, list[str]]) -> dict[str, str]:
        """A row for each device, by name."""
        out, said, runs = state.known.out, state.known.said, state.runs
        before, self._made = self._made, {}
        for name, row in state.devices.items():
            presence = "out" if name in out else _presence(row, runs)
            beside = (row, presence, accuracy.get(name), said.get(name, ""), causes.get(name, []))
            known = before.get(name)
            if known is None or known[0][0] is not row or known[0][1:] != beside[1:]:
                known = (beside, json.dumps(_row(name, *beside), separators=(",", ":")))
            self._made[name] = known
        return {name: text for name, (_, text) in self._made.items()}


def _presence(row: Device, runs: bool) -> str:
    if not runs:
        return "unknown"
    return "gone" if not row.online else "online" if row.confirmed else "online?"


def _row(name: str, row: Device, presence: str, accuracy: float | None, said: str, causes: Sequence[str]) -> list[Any]:
    step, profiled, predicted = (_figure(row, figure) for figure in _FIGURES)
    peak, profiled_peak, predicted_peak = (_figure(row, figure) for figure in _MEMORY)
    return [
        *(printable(name), presence, round(row.since), None if row.heard_at is None else round(row.heard_at)),
        *(row.board, row.bundle, row.boot, step, profiled, predicted, peak, profiled_peak, predicted_peak),
        *(_figure(row, "samples_new"), row.up_bytes, row.down_bytes, row.refused, row.members),
        *(None if accuracy is None else round(accuracy, 4), _figure(row, _UNKNOWN)),
        *(printable(said), causes, round(row.first_seen)),
    ]


def _figure(row: Device, name: str) -> float | None:
    """What a device says, in as many digits as one reads."""
    value = row.figures.get(name)
    return None if value is None else float(f"{value:.4g}")


def _rollout(rollout: Any) -> dict[str, Any]:
    plan = rollout.plan
    wrong = [
        [printable(device), told.word, printable(told.reason)]
        for device, told in rollout.told.items()
        if told is not None and told.word in ("failed", "refused")
    ]
    return {
        "version": plan.version,
        "sha256": plan.sha256.hex()[:12],
        "bytes": plan.size_bytes,
        "fleet": printable(plan.fleet),
        "state": rollout.state,
        "reason": printable(rollout.reason),
        "fraction": rollout.fraction,
        "stages": list(rollout.stages),
        "since": rollout.since,
        "healthy": plan.healthy,
        "counts": {word: number for word, number in rollout.counts().items() if number},
        "wrong": wrong[:_NAMED],
    }


def _order(order: Order) -> list[Any]:
    outcome = None if order.done_at is None else printable(order.outcome or "")
    target = " ".join(part for part in (order.device, order.shown) if part)
    return [order.id, printable(order.what), printable(target), printable(order.who), order.given_at, outcome]


def device_content(store: AnyPlace, state: FleetState, device: str) -> dict[str, Any] | None:
    """What is known of one device, and its history; None where the store does not know it."""
    known = state.known
    if device not in known.records and device not in state.devices:
        return None
    with read_only(store, KIND) as db, as_written(store):
        events, accuracy = device_events(db, device, EVENTS_OF_ONE), accuracy_of(db, device, 60)
        log = orders(db, "WHERE device = ?", (device,))
    record, row = known.records.get(device), state.devices.get(device)
    lines = []
    if record is not None:
        lines.append(record_in_words(record))
        lines += [f"nothing is taken of it: {record.refused}"] if record.refused else []
    lines += [drift_in_words(known.drift[device])] if device in known.drift else []
    lines += [found_in_words(known.findings[device], told=device in known.told)] if device in known.findings else []
    lines += [gateway_in_words(row.members)] if row is not None and row.members else []
    lines += [f"key {key}" for key in [key_name(known.keys, device)] if key]
    lines += [f"a roll-out: version {known.said[device]}"] if known.said.get(device) else []
    lines += [f"refused by its policy, {known.policies[device]}"] if device in known.policies else []
    proposed = {} if row is None else row.proposed
    lines += [f"proposed class {name}: {counted(photos, 'photo')}" for name, photos in proposed.items()]
    lines += [f"refused: {row.refusal}"] if row is not None and row.refusal else []
    software = {} if row is None else {printable(name): printable(text) for name, text in row.software.items()}
    given = {} if row is None else row.figures
    lines += conditions_in_lines(given, state.at)
    figures = {printable(name): float(f"{value:.5g}") for name, value in given.items() if name not in _CONDITIONS}
    return {
        "name": printable(device),
        "lines": list(map(printable, lines)),
        "drift": printable(drift_in_short(known.drift, device)),
        "software": software,
        "figures": figures,
        "accuracy": [[each["round"], each["all_classes"], each["samples"]] for each in accuracy],
        "cares": [[care.cause, printable(care.reason)] for care in state.cares if care.device == device],
        "events": [[event.at, printable(event.what), printable(event.detail)] for event in events],
        "orders": [printable(order_in_words(order)) for order in log[:-51:-1]],
    }


@cache
def _runbook() -> Mapping[str, list[str]]:
    text = files(__package__).joinpath("runbook.md").read_text("utf-8")
    parts = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].strip(): [line for line in part.splitlines()[1:] if line.strip()] for part in parts}


def runbook_part(cause: str) -> dict[str, Any] | None:
    """The lines of a part of the runbook; None where there is none."""
    lines = _runbook().get(cause)
    return None if lines is None else {"title": cause, "lines": lines, "at": f"{RUNBOOK}#{cause}"}
