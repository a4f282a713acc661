"""The outbox policy: nothing is dropped, nothing ends twice, and a thin link is not buried."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protofleet.aggregator.server.ending import GRACE_S, LATECOMERS_S
from protofleet.contract.errors import WireError
from protofleet.contract.wire.chunks import Assembler, bitmap
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.messages import Chunk, Receipt
from protofleet.edge_client.journal.journal import Pending
from protofleet.edge_client.messages.outbox import MAX_CHUNK_BYTES, Outbox
from protofleet.edge_client.rounds.waiting_notice import Waits

RUN = b"run1"
BIG = 1 << 20


def pending(number: int = 1, size: int = 100, method: str = "fedproto", limit: int = BIG) -> Pending:
    payload = number.to_bytes(4, "big") + random.Random(number).randbytes(size - 4)
    return Pending((RUN, number, method), payload, limit)


def outbox(seed: int = 0) -> Outbox:
    return Outbox(random.Random(seed), first_wait_s=10.0, max_wait_s=300.0)


def ready(*items: Pending, limit: int = BIG) -> Outbox:
    box = outbox()
    box.connected(limit)
    for item in items:
        box.add(item)
    return box


def digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()[:8]


def indices(messages: list[bytes]) -> list[int]:
    chunks = [decode(message) for message in messages]
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    return [chunk.index for chunk in chunks]  # type: ignore[union-attr]


def test_nothing_goes_out_without_a_connection() -> None:
    box = outbox()
    box.add(pending())
    assert box.due(0.0, idle=True) == []
    assert box.wait_s(0.0) is None
    box.connected(BIG)
    assert box.wait_s(0.0) == 0.0
    assert box.due(0.0, idle=True) == [pending().payload]
    box.disconnected()
    assert box.due(1e9, idle=True) == []


def test_waits_grow_with_jitter_and_are_capped() -> None:
    box, now, waits = ready(pending()), 0.0, []
    for _ in range(12):
        assert len(box.due(now, idle=True)) == 1
        wait = box.wait_s(now)
        assert wait is not None
        assert box.due(now + wait - 0.01, idle=True) == []
        waits.append(wait)
        now += wait
    for attempt, wait in enumerate(waits):
        longest = min(10.0 * 2**attempt, 300.0)
        assert 0.5 * longest <= wait <= longest
    assert len(set(waits)) == len(waits)


def test_two_devices_do_not_wait_alike() -> None:
    waits = set()
    for seed in range(5):
        box = outbox(seed)
        box.connected(BIG)
        box.add(pending())
        box.due(0.0, idle=True)
        waits.add(box.wait_s(0.0))
    assert len(waits) == 5


def test_a_slow_link_does_not_count_as_a_lost_receipt() -> None:
    box = ready(pending())
    box.due(0.0, idle=True)
    for second in range(1, 600):
        assert box.due(float(second), idle=False) == []  # the bytes are still on their way to the broker
    assert box.due(600.0, idle=True) == []
    assert len(box.due(620.0, idle=True)) == 1


def test_a_reconnection_sends_again_at_once() -> None:
    box = ready(pending())
    box.due(0.0, idle=True)
    box.disconnected()
    box.connected(BIG)
    assert box.due(0.1, idle=True) == [pending().payload]


def test_chunks_fit_the_smallest_of_all_limits() -> None:
    for link, announced in ((2000, BIG), (BIG, 2000), (BIG, BIG)):
        box = ready(pending(size=200_000, limit=announced), limit=link)
        sent = box.due(0.0, idle=True)
        assert max(len(message) for message in sent) <= min(link, announced, MAX_CHUNK_BYTES)
        while len(sent) < decode(sent[0]).count:  # type: ignore[union-attr]
            sent += box.due(0.0, idle=True)
        assembler = Assembler()
        whole = [assembler.add("pi", decode(message)) for message in sent]  # type: ignore[arg-type]
        assert whole[-1] == pending(size=200_000).payload


def test_what_fits_one_message_is_not_cut() -> None:
    assert ready(pending(size=2000), limit=2000).due(0.0, idle=True) == [pending(size=2000).payload]
    assert len(ready(pending(size=2001), limit=2000).due(0.0, idle=True)) == 2


def test_a_window_at_a_time() -> None:
    box = ready(pending(size=2_000_000))
    first = box.due(0.0, idle=True)
    assert 200_000 < sum(len(message) for message in first) < 400_000
    assert box.due(0.0, idle=False) == []
    second = box.due(0.0, idle=True)
    assert indices(second)[0] == indices(first)[-1] + 1


def test_only_missing_chunks_are_sent_again() -> None:
    box = ready(pending(size=10_000), limit=2000)
    assert indices(box.due(0.0, idle=True)) == [0, 1, 2, 3, 4, 5]
    box.need_chunks(
        Receipt(
            RUN, 1, "fedproto", "need-chunks", missing=bitmap({1, 4}, 6), digest=digest(pending(size=10_000).payload)
        )
    )
    assert indices(box.due(0.1, idle=True)) == [1, 4]
    assert box.due(0.2, idle=True) == []


def test_silence_is_answered_with_the_last_chunk_and_sometimes_with_all() -> None:
    box, now, sent = ready(pending(size=10_000), limit=2000), 0.0, []
    for _ in range(5):
        sent.append(indices(box.due(now, idle=True)))
        now += box.wait_s(now) or 0.0
    assert sent == [[0, 1, 2, 3, 4, 5], [5], [5], [0, 1, 2, 3, 4, 5], [5]]


def test_chunked_contributions_go_one_after_the_other_and_small_ones_pass() -> None:
    big, bigger, small = pending(1, 10_000, "ffc"), pending(2, 10_000, "ffc"), pending(3, 50)
    box = ready(big, bigger, small, limit=2000)
    messages = [decode(m) if m != small.payload else None for m in box.due(0.0, idle=True)]
    assert [m if m is None else m.round for m in messages] == [1] * 6 + [None]  # type: ignore[union-attr]
    assert (box.wait_s(0.0) or 0.0) >= 5.0  # what waits for its turn keeps nobody awake
    box.answered(big.key)
    assert {decode(m).round for m in box.due(0.0, idle=True)} == {2}  # type: ignore[union-attr]


def test_foreign_receipts_change_nothing() -> None:
    box = ready(pending())
    box.due(0.0, idle=True)
    box.need_chunks(Receipt(b"else", 1, "fedproto", "need-chunks", missing=b"\xff"))
    box.answered((RUN, 9, "fedproto"))
    assert len(box) == 1
    assert box.due(0.1, idle=True) == []


def test_bytes_are_counted_with_repetitions() -> None:
    box = ready(pending())
    box.due(0.0, idle=True)
    box.due(100.0, idle=True)
    assert box.sent_bytes(pending().key) == 200
    assert box.sent_bytes((RUN, 9, "ffc")) == 0


def test_a_limit_without_room_is_an_error() -> None:
    box = outbox()
    box.add(pending(size=1000))
    with pytest.raises(WireError, match="a limit of 100 bytes"):
        box.connected(100)


class Fleet(RuleBasedStateMachine):
    """An outbox and a journal on one side, an aggregator's idea of a store on the other, and a bad network between.

    Messages and receipts are lost, doubled and reordered, the connection and both processes come and go. Whatever the
    order, a contribution is pending until exactly one final receipt settles it, and what was admitted is what was sent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.rng = random.Random(0)
        self.journal: dict[tuple[bytes, int, str], Pending] = {}  # durable: survives a restart of the device
        self.outcomes: dict[tuple[bytes, int, str], list[str]] = {}
        self.store: dict[tuple[bytes, int, str], bytes] = {}  # durable: survives a restart of the aggregator
        self.assembler = Assembler()
        self.uplink: list[bytes] = []
        self.downlink: list[Receipt] = []
        self.online = False
        self.box = outbox()

    @rule(size=st.sampled_from([4, 500, 1999, 2000, 5000, 60_000]), method=st.sampled_from(["fedproto", "ffc"]))
    def contribute(self, size: int, method: str) -> None:
        item = pending(len(self.journal) + 1, size, method)
        self.journal[item.key] = item
        self.box.add(item)

    @rule(limit=st.sampled_from([500, 2000, 10_000]))
    def connect(self, limit: int) -> None:
        self.online = True
        self.box.connected(limit)

    @rule()
    def disconnect(self) -> None:
        self.online = False
        self.box.disconnected()
        self.uplink.clear()

    @rule()
    def restart_device(self) -> None:
        self.box, self.online = outbox(self.rng.randrange(1000)), False
        for key, item in self.journal.items():
            if key not in self.outcomes:
                self.box.add(item)

    @rule()
    def restart_aggregator(self) -> None:
        self.assembler = Assembler()

    @rule(idle=st.booleans(), seconds=st.sampled_from([0.0, 1.0, 30.0, 1000.0]))
    def send(self, idle: bool, seconds: float) -> None:
        self.now += seconds
        self.uplink += self.box.due(self.now, idle=idle)

    @precondition(lambda self: self.uplink)
    @rule(fate=st.sampled_from(["deliver", "deliver", "lose", "double", "later"]))
    def network_up(self, fate: str) -> None:
        message = self.uplink.pop(0)
        if fate == "later":
            self.uplink.append(message)
        elif fate != "lose":
            for _ in range(2 if fate == "double" else 1):
                self.arrive(message)

    @precondition(lambda self: self.downlink)
    @rule(fate=st.sampled_from(["deliver", "deliver", "lose", "double"]))
    def network_down(self, fate: str) -> None:
        receipt = self.downlink.pop(0)
        for _ in range({"lose": 0, "double": 2}.get(fate, 1)):
            self.receive(receipt)

    def arrive(self, message: bytes) -> None:
        key, payload = self.whole(message)
        if key in self.store:
            self.downlink.append(Receipt(*key, "duplicate"))
        elif payload is not None:
            self.store[key] = payload
            self.downlink.append(Receipt(*key, "committed"))
        else:
            missing = self.assembler.missing("pi", key[2])
            named = digest(self.journal[key].payload)
            self.downlink.append(Receipt(*key, "need-chunks", missing=missing or b"", digest=named))

    def whole(self, message: bytes) -> tuple[tuple[bytes, int, str], bytes | None]:
        for key, item in self.journal.items():
            if item.payload == message:
                return key, message
        chunk = decode(message)
        assert isinstance(chunk, Chunk)
        key = (chunk.run, chunk.round, chunk.method)
        return key, None if key in self.store else self.assembler.add("pi", chunk)

    def receive(self, receipt: Receipt) -> None:
        key = (receipt.run, receipt.round, receipt.method)
        if receipt.status == "need-chunks":
            self.box.need_chunks(receipt)
            return
        if key not in self.outcomes:
            self.outcomes[key] = [receipt.status]
        self.box.answered(key)

    @invariant()
    def nothing_is_lost_or_altered(self) -> None:
        assert len(self.box) == len(self.journal) - len(self.outcomes)
        for key, payload in self.store.items():
            assert payload == self.journal[key].payload
        assert set(self.outcomes) <= set(self.store)

    def teardown(self) -> None:
        """Once the network is good again, everything ends, and once."""
        self.box.connected(2000)
        for _ in range(60 * (len(self.journal) + 1)):
            self.now += 400.0
            self.uplink += self.box.due(self.now, idle=True)
            while self.uplink or self.downlink:
                if self.uplink:
                    self.arrive(self.uplink.pop(0))
                if self.downlink:
                    self.receive(self.downlink.pop(0))
            if not len(self.box):
                break
        assert len(self.box) == 0
        assert set(self.outcomes) == set(self.store) == set(self.journal)
        assert all(len(outcome) == 1 for outcome in self.outcomes.values())


Fleet.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestFleet = Fleet.TestCase


def test_an_announcement_of_its_run_asks_again_soon_and_not_only_after_a_long_wait() -> None:
    box, now = ready(pending()), 0.0
    for _ in range(6):  # silence: the waits have grown to minutes
        box.due(now, idle=True)
        now += box.wait_s(now) or 0.0
    box.due(now, idle=True)
    assert (box.wait_s(now) or 0.0) > 100
    box.announced(b"run2", BIG, now)
    assert (box.wait_s(now) or 0.0) > 100  # of another run
    box.announced(RUN, BIG, now)
    assert (box.wait_s(now) or 0.0) <= 2.0
    assert box.due(now + 2.0, idle=True) == [pending().payload]
    assert (box.wait_s(now + 2.0) or 0.0) <= 20.0  # and it waits as at the beginning, not as at the end


@pytest.mark.parametrize("seed", range(20))
def test_three_lost_receipts_at_the_end_of_a_run_fit_the_aggregators_grace(seed: int) -> None:
    """Asked on the announcement and twice more before the aggregator leaves; the client's patience is longer still."""
    box = outbox(seed)
    box.connected(BIG)
    box.add(pending())
    box.due(0.0, idle=True)
    box.announced(RUN, BIG, 1.0)
    now, asked = 1.0, []
    while now < 60.0:
        now += box.wait_s(now) or 0.0
        asked += [now] * len(box.due(now, idle=True))
    assert sum(at <= 1.0 + GRACE_S - 2.0 for at in asked) >= 3
    assert GRACE_S < 60.0 <= LATECOMERS_S


def test_what_else_is_on_its_way_does_not_undo_an_announcement() -> None:
    """A birth, or a receipt of another round: the link is busy for a moment, with nothing of this contribution."""
    box = ready(pending())
    box.due(0.0, idle=True)
    box.due(0.1, idle=True)  # all of it has reached the broker
    box.announced(RUN, BIG, 1.0)
    for now in (1.0, 1.9, 2.9):
        box.due(now, idle=False)
    assert (box.wait_s(1.0) or 0.0) <= 2.0
    assert box.due(3.0, idle=True) == [pending().payload]


def test_announcement_after_announcement_does_not_put_it_off() -> None:
    box = ready(pending())
    box.due(0.0, idle=True)
    box.due(0.1, idle=True)
    for tenth in range(10, 31):
        box.announced(RUN, BIG, tenth / 10)
    assert box.due(3.0, idle=True) == [pending().payload]


def test_an_announcement_during_a_slow_upload_asks_soon_after_its_end() -> None:
    box = ready(pending())
    box.due(0.0, idle=True)
    box.announced(RUN, BIG, 1.0)
    assert box.due(100.0, idle=False) == []
    assert box.due(102.0, idle=True) == [pending().payload]


def test_what_was_never_sent_is_not_held_back_by_an_announcement() -> None:
    box = ready(pending())
    box.announced(RUN, BIG, 0.0)
    assert box.wait_s(0.0) == 0.0


@pytest.mark.parametrize("size", [900, 100_000])
def test_a_smaller_announced_limit_cuts_anew_and_sends_at_once(size: int) -> None:
    box = ready(pending(size=size, limit=60_000))
    box.due(0.0, idle=True)
    box.announced(RUN, 1_024, 1.0)
    messages = box.due(1.0, idle=True) if size > 1_024 else box.due(3.0, idle=True)
    assert max(map(len, messages)) <= 1_024
    assert (len(messages) > 1) == (size > 1_024)
    whole = messages[0] if size < 1_024 else b"".join(decode(m).data for m in messages)  # type: ignore[union-attr]
    assert whole == pending(size=size).payload


def test_what_is_waited_for_is_told_once_for_each_change_and_only_when_it_lasts() -> None:
    waits = Waits()
    told = [waits.line(what, float(now)) for now, what in enumerate(["a", "a", "a", "b", "a", "", "b", "b", "a", "a"])]
    assert told == ["", "a", "", "", "", "", "", "b", "", "a"]
