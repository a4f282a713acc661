"""Bytes that a device moves: what a method encodes, and what TLS, MQTT, TCP and the messages around it add.

The encoded contribution and the state that comes back are made and measured here. `wire_bytes.json` says what a real
broker and a real client made of such payloads on the wire, both ways, by `benchmarks/device/wire_bytes.py`: fixed
bytes, plus so many for each byte of payload up and down. It ships with its command and every case that was counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.bundle.uplink_bytes import payload_bytes
from protofleet.contract.methods import Method
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows
from protofleet.hw_profiles.ranges import ZERO, Range

__all__ = ["Traffic", "connection_traffic", "keepalive_traffic", "payload_down", "payload_up", "round_traffic", "table"]

_PART_BYTES = 65_536  # the aggregator's default message limit


@dataclass(frozen=True)
class Traffic:
    """Bytes on the wire, headers included."""

    up: Range = ZERO
    down: Range = ZERO

    def plus(self, other: Traffic, times: float = 1.0) -> Traffic:
        """The sum with `times` of another."""
        return Traffic(self.up.plus(other.up, times), self.down.plus(other.down, times))

    @property
    def both(self) -> Range:
        """Up and down together: what is paid for."""
        return self.up.plus(self.down)


@cache
def table() -> Mapping[str, Any]:
    """The table that ships."""
    text = resources.files("protofleet.hw_profiles.plan").joinpath("wire_bytes.json").read_text(encoding="utf-8")
    found: Mapping[str, Any] = json.loads(text)
    return found


def payload_up(manifest: Manifest, rule: Method) -> int:
    """Bytes of one encoded contribution of a device that has every class."""
    return payload_bytes(manifest, rule)


def payload_down(manifest: Manifest, rule: Method) -> int:
    """Bytes of the state that comes back after a round, encoded as it is published: in parts, as f32."""
    hyper = rule.resolved_in(manifest.hyper)
    every = np.arange(manifest.classes, dtype=np.uint16)
    rows = {
        kind: ClassRows(every, np.zeros((manifest.classes, width), np.float32))
        for kind, width in rule.row_kinds(hyper, manifest.classes, rule.row_width(hyper, manifest.features)).items()
    }
    return sum(len(encode(part, "f32")) for part in GlobalState(bytes(4), 1, 1, rows).parts(_PART_BYTES))


def round_traffic(manifest: Manifest, rule: Method) -> Traffic:
    """One round of a device that stays connected."""
    return _traffic("round", payload_up(manifest, rule), payload_down(manifest, rule))


def connection_traffic(manifest: Manifest, rule: Method) -> Traffic:
    """One connection, with the retained messages that a device receives by it."""
    return _traffic("connection", 0, payload_down(manifest, rule))


def keepalive_traffic(keepalive_s: float, seconds: float) -> Traffic:
    """The pings of so many idle seconds."""
    pings = seconds / keepalive_s
    ping = table()["ping"]
    return Traffic(*(Range(*(pings * float(ping[direction]),) * 3) for direction in ("up", "down")))


def _traffic(what: str, up: int, down: int) -> Traffic:
    """With the largest error of a case that the fit had not seen as the range."""
    ranges = []
    for direction in ("up", "down"):
        value = float(np.dot(_coefficients(what, direction), (1.0, up, down)))
        error = float(table()["worst_left_out"][f"{what}_{direction}"])
        ranges.append(Range(value, value * max(0.0, 1 - error), value * (1 + error)))
    return Traffic(*ranges)


def _coefficients(what: str, direction: str) -> Sequence[float]:
    found: Sequence[float] = table()[what][direction]
    return found
