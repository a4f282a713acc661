"""A device reduced to its manners: it follows rounds, sends what a function gives it, and obeys receipts.

It trains nothing; the fleet tests do that with the real client. Here it makes the aggregator's tests fast, and lets
them misbehave on purpose.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from protofleet.contract.errors import WireError
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire import topics
from protofleet.contract.wire.chunks import in_bitmap, split
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution, GlobalPart, Receipt, Status

Make = Callable[[Announcement], Statistic | None]


class Talker(threading.Thread):
    """One device on a thread of its own, until the run is finished or `stop` is called.

    Attributes:
        receipts: (round, method) → the statuses received, in order.
        sent: (round, method) → the statistic that was sent.
        states: the global states received, by version.
    """

    def __init__(self, url: str | Address, fleet: str, device: str, make: Make, *, resend_s: float = 1.0) -> None:
        super().__init__(name=device, daemon=True)
        self.device, self.receipts, self.sent, self.states = device, {}, {}, {}
        self._fleet, self._make, self._resend_s = fleet, make, resend_s
        self._instance, self._stopping = os.urandom(8), threading.Event()
        self._pending: dict[tuple[int, str], tuple[bytes, Announcement, float]] = {}
        self._collector, self._finished = GlobalCollector(), False
        down, mine = topics.down(fleet, device), topics.status(fleet, device)
        self.link = Link(
            Address.parse(url) if isinstance(url, str) else url,
            f"pf-{fleet}-{device}",
            subscriptions=[topics.round_(fleet), topics.global_all(fleet), down],
            will=(mine, encode(Status(False, self._instance, 1))),
        )

    def run(self) -> None:
        self.link.open()
        self.link.wait_connected(60)
        self._say(online=True)
        while not self._stopping.is_set() and not (self._finished and not self._pending):
            event = self.link.receive(0.1)
            if isinstance(event, Received):
                with contextlib.suppress(WireError):
                    self._hear(decode(event.payload))
                self.link.acknowledge(event)
            elif event is not None:
                self._say(online=True)
            self._send_due()
        self._say(online=False)
        self.link.close()

    def stop(self) -> None:
        self._stopping.set()
        self.join(10)
        if self.is_alive():  # it waits for a broker that has gone, and its link would dial for ever
            self.link.close()

    def _say(self, *, online: bool) -> None:
        self.link.publish(
            topics.status(self._fleet, self.device), encode(Status(online, self._instance, 1)), retain=True
        )

    def _hear(self, message: object) -> None:
        if isinstance(message, Announcement):
            self._finished = message.phase == "finished" and bool(self.sent)  # else it is of a run before us
            key = (message.round, message.method)
            if message.phase == "open" and key not in self.sent:
                statistic = self._make(message)
                if statistic is not None:
                    self.sent[key] = statistic
                    origin = {"run": message.run, "bundle": message.bundle, "extractor": message.extractor}
                    made = Contribution.of(statistic, round=message.round, method=message.method, **origin)
                    self._pending[key] = (encode(made, message.encoding), message, 0.0)
        elif isinstance(message, GlobalPart):
            state = self._collector.add(message)
            if isinstance(state, GlobalState):
                self.states[state.version] = state
        elif isinstance(message, Receipt):
            key = (message.round, message.method)
            self.receipts.setdefault(key, []).append(message.status)
            if message.status == "need-chunks" and key in self._pending:
                self._send(*self._pending[key][:2], message.missing)
            elif message.status != "need-chunks":
                self._pending.pop(key, None)

    def _send_due(self) -> None:
        for key, (payload, announcement, sent_at) in self._pending.items():
            if time.monotonic() - sent_at > self._resend_s:
                self._pending[key] = (payload, announcement, time.monotonic())
                self._send(payload, announcement, None)

    def _send(self, payload: bytes, announcement: Announcement, missing: bytes | None) -> None:
        topic = topics.up(self._fleet, self.device)
        if len(payload) <= announcement.limit_bytes:
            self.link.publish(topic, payload)
            return
        keys = {"run": announcement.run, "round": announcement.round, "method": announcement.method}
        for chunk in split(payload, announcement.limit_bytes, **keys):
            if missing is None or in_bitmap(chunk.index, missing):
                self.link.publish(topic, encode(chunk))
