"""A state directory that somebody has changed: what cannot be used is refused in one line, whoever opens it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from aggregator_samples import BUNDLE, CLASSES, RUN, WIDTH, contribution
from edge_samples import rounds_done

from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Receipt
from protofleet.edge_client.journal.journal import FILE, Journal, Key, read_kept
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.training.local_samples import OwnMeans
from tests.attacks.choices import Choices
from tests.attacks.damaged_sqlite import write_damaged
from tests.attacks.guard import scratch
from tests.attacks.promises import may_refuse

LONGEST_BYTES = 512
OWNER = {"fleet": "fleet", "device": "pi-1", "bundle": BUNDLE}
KEYS: tuple[Key, ...] = ((RUN, 1, "fedproto"), (RUN, 2, "fedproto"), (b"run2", 1, "ncm"))


def run(data: bytes) -> None:
    with scratch() as folder:
        write_damaged(folder / FILE, good_journal(), Choices(data))
        may_refuse(lambda: read_kept(folder), StoreError, UsageError)
        may_refuse(lambda: _use(folder), StoreError, UsageError)
        may_refuse(lambda: read_kept(folder), StoreError, UsageError)


def _use(folder: Path) -> None:
    """What a client does with it, each step whatever became of the one before."""
    with Journal(folder, **OWNER) as journal:  # type: ignore[arg-type]
        steps: list[Callable[[], object]] = [
            lambda: journal.begin(b"instance"),
            lambda: journal.is_own_instance(b"instance"),
            lambda: _numbers(journal.weights()),
            lambda: [journal.is_done(key) for key in KEYS],
            lambda: [rounds_done(journal, method) for method in (None, "fedproto")],
            lambda: len(journal.secret()) == 32,
            lambda: journal.took_part(RUN),
            lambda: [journal.mark_reported(report.key) for report in journal.unreported()],
            journal.kept_global,
            lambda: _send(journal),
            lambda: [journal.record_receipt(Receipt(*key, "committed"), 10) for key in KEYS],
            lambda: [journal.outcome(key) for key in KEYS],
            journal.outcomes,
            lambda: _standing(journal),
            lambda: journal.keep_global(_state()),
            lambda: journal.commit_round((RUN, 9, "ncm"), weights={}, payload=b"x", limit_bytes=1024, metrics={}),
        ]
        for step in steps:
            may_refuse(step, StoreError, UsageError)


def _numbers(weights: dict[str, np.ndarray]) -> None:
    assert all(isinstance(name, str) and isinstance(value, np.ndarray) for name, value in weights.items())


def _send(journal: Journal) -> None:
    outbox = Outbox(random.Random(0))
    for pending in journal.pending():
        outbox.add(pending)
    outbox.connected(1000)
    outbox.announced(RUN, 1024, 0.0)
    for payload in outbox.due(1.0, idle=True):
        assert isinstance(payload, bytes)
    outbox.waits_for()


def _standing(journal: Journal) -> None:
    marks = journal.standing
    for run_ in (RUN, b"run2"):
        for look in (marks.newest, marks.samples, marks.pending, marks.withdraws):
            look(run_)  # type: ignore[operator]
    marks.may_stand()
    marks.commit((b"run2", 5, "ncm"), samples=b"s", payload=b"p", limit_bytes=1024, metrics={"standing": True})
    marks.keep_samples(b"run2", b"t")
    marks.unsent(b"run2", 7)


def _state() -> GlobalState:
    rows = ClassRows(np.arange(CLASSES, dtype=np.uint16), np.ones((CLASSES, WIDTH), "<f4"))
    return GlobalState(RUN, 1, 1, {"prototypes": rows, "head": rows})


@functools.cache
def good_journal() -> bytes:
    """A journal with something in each of its tables."""
    with scratch() as folder:
        with Journal(folder, **OWNER, bundle_path=folder / "a.bundle") as journal:  # type: ignore[arg-type]
            journal.begin(b"earlier!")
            journal.secret()
            means = OwnMeans(ClassMeans(np.ones((CLASSES, WIDTH)), np.ones(CLASSES, np.int64)), np.ones(CLASSES))
            for key in KEYS[:2]:
                journal.commit_round(
                    key,
                    weights={"backbone.weight": np.ones((2, 2), np.float32)},
                    means=means,
                    payload=encode(contribution(round=key[1])),
                    limit_bytes=1024,
                    metrics={"loss": 0.5, "payload_bytes": 100, "squared_counts": [1, 2]},
                )
            journal.standing.commit(KEYS[2], samples=b"s", payload=b"p", limit_bytes=1024, metrics={"standing": True})
            journal.record_receipt(Receipt(*KEYS[0], "committed"), 100)
            journal.keep_global(_state())
        return (folder / FILE).read_bytes()


def seeds() -> Iterable[bytes]:
    yield b"\0\0"
    for table in range(8):
        for what in (0, 4, 8):
            yield bytes([1, 0, table, what, table, what + 1, 0, 7, 3, 9, 2, 1])
