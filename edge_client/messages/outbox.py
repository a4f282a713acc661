"""When to send what: the outbox's policy, without sockets, disk or clock.

The journal keeps contributions. The outbox decides which bytes go out now.

When a contribution is sent:

1. When it is added and a connection is there.
2. After a reconnection.
3. When no receipt came in time. The wait grows each time, up to hours, with jitter.
4. Soon after an announcement of its run, if it was sent before and has no receipt. The announcement says that the
   aggregator is here, perhaps again, and the aggregator may leave before the usual wait is over.

A contribution ends with a final receipt and with nothing else. It is never given up, dropped or replaced.

A contribution that does not fit one message travels in chunks (`protofleet.contract.wire.chunks`):

- Some chunks are sent at a time, so that a thin link is not flooded.
- When the aggregator names the chunks that it lacks, those are sent.
- When it says nothing, the last chunk alone is sent as a question: the aggregator answers it with what is missing.
  Every third time all chunks are sent.
- Chunked contributions go one after the other, the oldest first, because the aggregator joins one at a time for a
  device and method.

An announcement also names the largest message that the aggregator takes now. After a restart it may be smaller than
when the contribution was made.

The wait for a receipt begins when the link has handed everything to the broker. On a slow uplink that may be minutes
after `due` returned the bytes, and to send them again meanwhile would only make it slower.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from protofleet.contract.wire.chunks import in_bitmap, split
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.envelopes import ENVELOPE_BYTES
from protofleet.contract.wire.messages import LEAST_LIMIT_BYTES, Chunk, Receipt
from protofleet.edge_client.journal.journal import Key, Pending

__all__ = ["MAX_CHUNK_BYTES", "Outbox"]

MAX_CHUNK_BYTES = 64 << 10
_WINDOW_BYTES = 256 << 10  # handed to the link at a time
_EVERYTHING_EACH = 3
_SOON_S = 2.0  # a fleet does not answer an announcement in step


@dataclass
class _Item:
    pending: Pending
    parts: list[Chunk] = field(default_factory=list)  # empty when it fits one message
    queue: deque[int] = field(default_factory=deque)  # indices of what to send next
    attempt: int = 0  # times that the queue ran empty, that is: times sent
    waits: int = 0  # times that it was waited for a receipt, since it was last worth asking at once
    wait_s: float = 0.0
    leaving: bool = False  # whether the link may still hold some of what was sent last
    due_s: float = float("-inf")  # when to send again; only meaningful while the queue is empty
    sent_bytes: int = 0


class Outbox:
    """Contributions on their way to a receipt.

    Args:
        rng: for the jitter.
        first_wait_s: how long to wait for the first receipt; doubled each time.
        max_wait_s: but never longer than this.
        seal: signs a chunk; None where nothing is signed. A contribution that is sent whole is signed already.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        first_wait_s: float = 10.0,
        max_wait_s: float = 4 * 3600.0,
        seal: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._seal, self._envelope_bytes = seal or (lambda payload: payload), 0 if seal is None else ENVELOPE_BYTES
        self._rng, self._first_wait_s, self._max_wait_s = rng, first_wait_s, max_wait_s
        self._items: dict[Key, _Item] = {}
        self._limit_bytes: int | None = None  # what the broker takes; None while there is no connection
        self._announced: dict[bytes, int] = {}  # run → what its aggregator takes now

    def __len__(self) -> int:
        return len(self._items)

    def add(self, pending: Pending) -> None:
        """A contribution to send; of no effect when it is here already."""
        if pending.key not in self._items:
            item = self._items[pending.key] = _Item(pending)
            self._cut(item)

    def connected(self, limit_bytes: int) -> None:
        """A connection is up whose broker takes payloads of `limit_bytes`. What went out before may be lost.

        Raises:
            WireError: when the limit leaves no room for a chunk.
        """
        self._limit_bytes = limit_bytes
        for item in self._items.values():
            item.leaving = False
            item.queue.clear()
            item.attempt, item.waits, item.due_s = min(item.attempt, 1), min(item.waits, 1), float("-inf")
            self._cut(item)

    def announced(self, run: bytes, limit_bytes: int, now_s: float) -> None:
        """The aggregator of `run` is here and takes messages of `limit_bytes`."""
        recut = self._announced.get(run, limit_bytes) != limit_bytes
        self._announced = {run: limit_bytes}
        for item in self._items.values():
            if item.pending.key[0] != run:
                continue
            if recut or limit_bytes < item.pending.limit_bytes:
                self._recut(item)
            if item.attempt and not item.queue:
                item.attempt, item.waits, item.wait_s = 1, 0, self._rng.uniform(0.0, _SOON_S)
                item.due_s = min(item.due_s, now_s + item.wait_s)

    def disconnected(self) -> None:
        """The connection is gone."""
        self._limit_bytes = None

    def due(self, now_s: float, *, idle: bool) -> list[bytes]:
        """The messages to publish now, in order.

        Args:
            now_s: a monotonic clock.
            idle: whether the broker has acknowledged all that was handed to the link before.
        """
        if self._limit_bytes is None:
            return []
        if not idle:
            for item in self._items.values():
                if item.leaving:  # nothing else that is on its way holds a contribution back
                    item.due_s = max(item.due_s, now_s + item.wait_s)
            return []
        for item in self._items.values():
            item.leaving = False
        out: list[bytes] = []
        room = _WINDOW_BYTES
        for item in self._active():
            if not item.queue and now_s >= item.due_s:
                self._fill(item)
            while item.queue and room > 0:
                message = self._message(item, item.queue.popleft())
                out.append(message)
                item.sent_bytes += len(message)
                room -= len(message)
                if not item.queue:
                    self._await_receipt(item, now_s)
        return out

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until `due` has something, 0 when it has now; None when nothing is to be sent."""
        if self._limit_bytes is None or not self._items:
            return None
        return min(0.0 if item.queue else max(0.0, item.due_s - now_s) for item in self._active())

    def waits_for(self) -> str:
        """What the oldest contribution here waits for, for a person; empty when nothing is here."""
        if not self._items or self._limit_bytes is None:
            return ""
        _, number, method = next(iter(self._items))
        more = f" and {len(self._items) - 1} more" if len(self._items) > 1 else ""
        return f"waiting for the receipt of round {number} ({method}){more}"

    def need_chunks(self, receipt: Receipt) -> None:
        """The aggregator lacks some chunks: send those at once. Of no effect for what is not here."""
        item = self._items.get((receipt.run, receipt.round, receipt.method))
        if item is None or item.queue or not self.is_answered(receipt):
            return
        missing = [part.index for part in item.parts if in_bitmap(part.index, receipt.missing)]
        item.queue.extend(missing or self._indices(item))
        item.attempt, item.waits = 0, 0

    def sent_bytes(self, key: Key) -> int:
        """Payload bytes handed out for `key` so far, repetitions included; 0 for what is not here."""
        item = self._items.get(key)
        return 0 if item is None else item.sent_bytes

    def holds(self, key: Key) -> bool:
        """Whether a contribution is here that waits for its receipt."""
        return key in self._items

    def is_answered(self, receipt: Receipt) -> bool:
        """Whether a receipt is for the contribution that is here, and not for other bytes under its key.

        Such other bytes are somebody else's, or a recorded receipt that is sent again was for them.
        """
        item = self._items.get((receipt.run, receipt.round, receipt.method))
        return item is not None and receipt.digest == hashlib.sha256(item.pending.payload).digest()[:8]

    def answered(self, key: Key) -> None:
        """A final receipt for `key` is in the journal: forget it."""
        self._items.pop(key, None)

    def _active(self) -> list[_Item]:
        """Everything that fits one message, and the oldest of what does not."""
        chunked = [item for item in self._items.values() if item.parts]
        return [item for item in self._items.values() if not item.parts or item is chunked[0]]

    def _cut(self, item: _Item) -> None:
        if self._limit_bytes is None:
            return
        run, number, method = item.pending.key
        announced = max(self._announced.get(run, item.pending.limit_bytes), LEAST_LIMIT_BYTES)
        limit = min(self._limit_bytes, announced, MAX_CHUNK_BYTES)
        whole = len(item.pending.payload) <= limit
        room = limit - self._envelope_bytes
        item.parts = [] if whole else split(item.pending.payload, room, run=run, round=number, method=method)

    def _recut(self, item: _Item) -> None:
        """Cut for another limit; what was on its way in the old size starts anew, if the size has changed."""
        before = [len(part.data) for part in item.parts]
        self._cut(item)
        if [len(part.data) for part in item.parts] != before:
            item.queue.clear()
            item.attempt, item.waits, item.due_s = 0, 0, float("-inf")

    def _fill(self, item: _Item) -> None:
        indices = self._indices(item)
        asking = item.attempt % _EVERYTHING_EACH != 0
        item.queue.extend(indices[-1:] if asking else indices)

    @staticmethod
    def _indices(item: _Item) -> list[int]:
        return list(range(max(len(item.parts), 1)))

    def _message(self, item: _Item, index: int) -> bytes:
        return self._seal(encode(item.parts[index])) if item.parts else item.pending.payload

    def _await_receipt(self, item: _Item, now_s: float) -> None:
        longest = min(self._first_wait_s * 2.0 ** min(item.waits, 16), self._max_wait_s)
        item.attempt, item.waits, item.leaving = item.attempt + 1, item.waits + 1, True
        item.wait_s = longest * self._rng.uniform(0.5, 1.0)
        item.due_s = now_s + item.wait_s
