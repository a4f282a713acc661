"""The aggregator's side of the wire, played by a test: it announces, takes, and answers as it is told to.

The real aggregator meets the real client in the fleet tests. This one can also lose receipts, talk nonsense and ask
for chunks, which the real one never does on purpose.
"""

from __future__ import annotations

import hashlib
import os
import time

import numpy as np

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.identity.signatures import Signer, inside
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.chunks import Assembler
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import (
    Announcement,
    Chunk,
    ClassRows,
    Contribution,
    Message,
    Phase,
    Receipt,
    Status,
)

FLEET = "fleet"


class Peer:
    """One run on one fleet; it signs with `signer`, if it has one.

    `uplink` keeps every payload a device published, `statuses` its births and deaths.
    """

    signer: Signer | None = None

    def __init__(self, url: str, bundle: Bundle) -> None:
        self._issued = 0
        self._digests: dict[tuple[int, str], bytes] = {}
        self.run, self.bundle, self.version = os.urandom(4), bundle, 0
        self.uplink: list[bytes] = []
        self.statuses: list[Status] = []
        self._assembler = Assembler()
        self.link = Link(
            Address.parse(url), f"pf-{FLEET}-peer", subscriptions=[topics.up(FLEET), topics.status(FLEET)]
        ).open()
        self.link.wait_connected(60)

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def announce(self, number: int, method: str = "fedproto", phase: Phase = "open", **fields: object) -> None:
        self._issued = max(self._issued + 1, int(time.time() * 1000))
        fields |= {} if self.signer is None else {"issued": self._issued}
        named = {"run": self.run, "round": number, "phase": phase, "method": method, "bundle": self.bundle.sha256}
        message = Announcement(**{**named, "global_version": self.version, **fields})  # type: ignore[arg-type]
        self.publish(topics.round_(FLEET), encode(message), retain=True)

    def answer(self, number: int, method: str = "fedproto", status: str = "committed", **fields: object) -> None:
        fields = {"digest": self._digests.get((number, method), b""), **fields}
        receipt = Receipt(self.run, number, method, status, **fields)  # type: ignore[arg-type]
        self.publish(topics.down(FLEET, "pi-1"), encode(receipt))

    def give(self, number: int, sent: Contribution, *, head: bool = False) -> None:
        """Publish the next global state: the contribution's own rows as prototypes, or unit rows as a head."""
        self.version += 1
        rows = ClassRows(sent.body.classes, sent.body.rows.astype(np.float32))
        state = GlobalState(self.run, self.version, number, {"head" if head else "prototypes": rows})
        for part in state.parts(60_000):
            self.publish(topics.global_part(FLEET, part.part), encode(part), retain=True)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        deadline = time.monotonic() + 60
        payload = payload if self.signer is None else self.signer.sign(topic, payload)
        while not self.link.publish(topic, payload, retain=retain):
            assert time.monotonic() < deadline, "the peer has no connection"
            self.receive()

    def receive(self, timeout_s: float = 0.1) -> Message | None:
        """The next message of a device, if one comes."""
        event = self.link.receive(timeout_s)
        if not isinstance(event, Received):
            return None
        self.link.acknowledge(event)
        message = decode(event.payload)
        if isinstance(message, Status):
            self.statuses.append(message)
        else:
            self.uplink.append(event.payload)
            said = inside(event.payload)
            if isinstance(said, Chunk | Contribution):
                digest = said.digest if isinstance(said, Chunk) else hashlib.sha256(event.payload).digest()[:8]
                self._digests[said.round, said.method] = digest
        return message

    def contribution(self, number: int, *, timeout_s: float = 60.0) -> Contribution:
        """Wait for the whole contribution of a round, in chunks or not."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            message = self.receive()
            if isinstance(message, Chunk):
                payload = self._assembler.add("pi-1", message)
                message = None if payload is None else decode(payload)
            if isinstance(message, Contribution) and (message.run, message.round) == (self.run, number):
                return message
        raise AssertionError(f"no contribution for round {number} within {timeout_s} s")

    def status(self, *, online: bool, timeout_s: float = 60.0) -> Status:
        """Wait until the newest status says so."""
        deadline = time.monotonic() + timeout_s
        while not self.statuses or self.statuses[-1].online != online:
            assert time.monotonic() < deadline, f"no status with online={online}"
            self.receive()
        return self.statuses[-1]
