"""One process's part in a shared store: chunks of other processes, commits beside theirs, and what they committed.

take      puts chunks where all processes find them, reads the chunks of others, decides, commits beside others
stalled   asks a device for chunks only when no process has them
catch_up  for the leader: who is enrolled, whoever took the token
learn     for the leader: which devices have contributed to the open round, or what stands now, by any process
beat      for the leader: records that it is alive
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from protofleet.aggregator.coordinators.coordinator import Coordinator
from protofleet.aggregator.database.postgres_members import BEAT_S, StaleError
from protofleet.aggregator.ingest.ingest import MAX_IN_PROGRESS, Decision
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.contract.wire.messages import Chunk

__all__ = ["LEARN_S", "Sharing"]

LEARN_S, SELDOM_S = 0.25, 2.0  # between the leader's looks, at least and at most
_SETTLED = ("committed", "duplicate", "late", "rejected", "need-chunks")  # the last: what came is of no use
_Message = tuple[str, bytes]
_Whole = tuple[str, str, bytes]  # device, method, digest


class Sharing:
    """The part of one process.

    Args:
        core: decides.
        store: commits.
    """

    def __init__(self, core: Coordinator, store: SharedStore) -> None:
        self._core, self._store = core, store
        self._fed: OrderedDict[_Whole, tuple[Chunk, set[int]]] = OrderedDict()  # which chunks the core has been given
        self._learn_at = self._beat_at = float("-inf")
        self._swept = 0

    def take(self, batch: Sequence[_Message], now: float) -> list[Decision]:
        """As `Coordinator.take`.

        Raises:
            StaleError: what the core knows has changed since; nothing was committed.
            StoreError: the server refuses; nothing was committed.
        """
        self._core.look({device for device, _ in batch})
        whole = self._with_others(batch)
        try:
            decisions = self._core.take(whole, now)
        except StaleError:
            self._core.decide_again()
            self._fed.clear()
            raise
        for device, payload in whole[: len(whole) - len(batch)]:  # who got these chunks has counted them
            self._store.devices.counted_elsewhere(device, len(payload))
        self._let_go(decisions)
        return decisions

    def take_as_leader(self, batch: Sequence[_Message], now: float) -> list[Decision]:
        """`take` of the leader, after `catch_up`."""
        while True:
            self.catch_up()
            try:
                return self.take(batch, now)
            except StaleError:
                continue

    def catch_up(self) -> None:
        """For the leader: read again who is enrolled, the only change that other processes record.

        A device may have enrolled itself with a token that another process took. Its next birth, which the leader alone
        hears, is signed with that key.

        Raises:
            StoreError: the server refuses.
        """
        changes = self._store.changes()
        if changes != self._store.based_on:
            self._core.reload()
            self._store.based_on = changes

    def stalled(self, now: float) -> list[Decision]:
        """As `Coordinator.stalled`, after a check whether other processes have the missing chunks or took the whole.

        Raises:
            StaleError: as `take`; never where this process leads.
            StoreError: the server refuses.
        """
        questions, messages = (
            [question for question in self._core.stalled(now) if not self._is_taken(question)],
            list[_Message](),
        )
        for (device, method, digest), (chunk, fed) in list(self._fed.items()):
            if any(d.device == device and d.receipt is not None and d.receipt.digest == digest for d in questions):
                others = self._store.other_chunks(device, chunk, fed)
                messages += [(device, payload) for payload in others]
                self._fed.pop((device, method, digest))
        if not messages:
            return questions
        devices = {device for device, _ in messages}
        take = self.take_as_leader if self._store.leads else self.take
        return [d for d in questions if d.device not in devices] + take(messages, now)

    def check_leads(self) -> None:
        """Record that this process is alive and leads.

        Raises:
            LedError: another process leads.
            StoreError: the server refuses.
        """
        self._store.beat()

    def learn(self, now: float) -> bool:
        """Read what other processes committed; returns whether anything of it is new here.

        Raises:
            LedError, StoreError: as `check_leads`, which this calls now and then.
        """
        if now >= self._beat_at:
            self.check_leads()
            self._beat_at = now + BEAT_S
        if now < self._learn_at:
            return False
        number = self._core.rounds.number
        if number > self._swept:  # what nobody has put together is of no round any more
            self._store.drop_chunks((), "", number)
            self._swept = number
        began = time.monotonic()
        news = self._core.learn(now)
        self._learn_at = now if self._core.lags else now + _wait_s(self._core.rest * (time.monotonic() - began))
        return news

    def _with_others(self, batch: Sequence[_Message]) -> list[_Message]:
        """A batch, and before it what others got of the contributions that its chunks are of."""
        chunks = [(d, chunk, payload) for d, payload in batch if (chunk := self._core.chunk_of(d, payload)) is not None]
        if not chunks:
            return list(batch)
        self._store.put_chunks(chunks)
        others = list[_Message]()
        for device, chunk, _ in chunks:
            key = (device, chunk.method, chunk.digest)
            _, fed = self._fed.setdefault(key, (chunk, set()))
            fed.add(chunk.index)
        for key in dict.fromkeys((device, chunk.method, chunk.digest) for device, chunk, _ in chunks):
            chunk, fed = self._fed[key]
            for payload in self._store.other_chunks(key[0], chunk, fed):
                further = self._core.chunk_of(key[0], payload)
                if further is not None:
                    fed.add(further.index)
                    others.append((key[0], payload))
            self._fed.move_to_end(key)
        while len(self._fed) > MAX_IN_PROGRESS:
            self._fed.popitem(last=False)
        return others + list(batch)

    def _is_taken(self, question: Decision) -> bool:
        return question.receipt is not None and self._core.has_taken(question.device, question.receipt)

    def _let_go(self, decisions: Sequence[Decision]) -> None:
        """Chunks of what was decided on are needed no longer, nor are those of which one is forged or damaged."""
        done = {d.device for d in decisions if d.outcome in _SETTLED}
        keys = [key for key in self._fed if key[0] in done]
        for method in {key[1] for key in keys}:
            self._store.drop_chunks({key[0] for key in keys if key[1] == method}, method, self._core.rounds.number)
        for key in keys:
            del self._fed[key]


def _wait_s(wanted_s: float) -> float:
    """Until the next look. One that took long may have been stopped in its middle: little follows from that."""
    return min(max(LEARN_S, wanted_s), SELDOM_S)
