"""Parts of global states from anybody, in any order: a state is whole and of one version, or there is none."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from protofleet.contract.errors import WireError
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import ClassRows, GlobalPart
from tests.attacks.choices import Choices

LONGEST_BYTES = 1024
RUNS, KINDS = (b"run1", b"run2"), ("prototypes", "head", "soft")


def run(data: bytes) -> None:
    choices, collector = Choices(data), GlobalCollector()
    newest: tuple[bytes, int] = (b"", 0)
    while choices:
        try:
            part = _part(choices)
            state = collector.add(part)
        except WireError:
            continue
        if part.run != newest[0]:  # a collector is of one run, and forgets what was of another
            newest = part.run, 0
        if state is None:
            continue
        assert (state.run, state.version, state.round) == (part.run, part.version, part.round)
        assert state.version >= newest[1], "an older version came out after a newer one"
        newest = state.run, state.version
        _use(state, choices.below(8))


def _part(choices: Choices) -> GlobalPart:
    parts = 1 + choices.below(4)
    count, width = choices.below(4), choices.below(4)
    numbers = np.cumsum([choices.below(3) for _ in range(count)], dtype=np.int64).astype(np.uint16)
    rows = np.frombuffer(choices.take(4 * count * width).ljust(4 * count * width, b"\1"), "<f4").reshape(count, width)
    return GlobalPart(
        run=choices.one_of(RUNS),
        version=choices.below(4),
        round=choices.below(4),
        part=choices.below(parts + 1),
        parts=parts,
        kind=choices.one_of(KINDS),
        body=ClassRows(numbers, rows),
    )


def _use(state: GlobalState, classes: int) -> None:
    """As a device does with a state that is whole."""
    state.below(classes).filled()
    for kind, rows in state.rows.items():
        try:
            _, present = state.dense(kind, 8, rows.rows.shape[1])
            assert int(present.sum()) == len(rows.classes)
            again = GlobalCollector()
            for part in state.parts(1024):
                found = again.add(part)
            assert found is not None
            np.testing.assert_array_equal(found.rows[kind].rows, rows.rows)
        except WireError:  # rows of a class twice, in two parts
            continue


def seeds() -> Iterable[bytes]:
    one = bytes([0, 2, 2, 0, 1]) + np.ones(4, "<f4").tobytes() + bytes([0, 1, 1, 0, 0])
    yield one
    yield one * 3
    two = bytes([1, 1, 2, 0]) + np.ones(2, "<f4").tobytes()
    yield b"".join(two + bytes([0, 1, 1, part, part]) for part in range(2))
