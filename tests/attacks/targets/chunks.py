"""Devices that send any chunks in any order: nothing but a whole, hashed contribution comes out, memory is bounded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from protofleet.contract.errors import WireError
from protofleet.contract.wire.chunks import OVERHEAD_BYTES, PART_COST_BYTES, Assembler, bitmap, in_bitmap, split
from protofleet.contract.wire.messages import Chunk
from tests.attacks.choices import Choices

LONGEST_BYTES = 1024
CAPACITY = 6 * PART_COST_BYTES
LARGEST = 400
DEVICES, METHODS = ("a", "b", "c"), ("ffc", "ncm")


def run(data: bytes) -> None:
    choices = Choices(data)
    assembler = Assembler(capacity_bytes=CAPACITY, max_contribution_bytes=LARGEST)
    while choices:
        device = choices.one_of(DEVICES)
        try:
            chunk = _honest(choices) if choices.chance() else _hostile(choices)
            whole = assembler.add(device, chunk)
        except WireError:
            continue
        if whole is not None:
            assert len(whole) == chunk.total_bytes
            assert hashlib.sha256(whole).digest()[:8] == chunk.digest
        _check(assembler, device, chunk)
        if choices.below(8) == 0:
            assembler.forget(device, chunk.method)


def _check(assembler: Assembler, device: str, chunk: Chunk) -> None:
    assert 0 <= assembler.held_bytes <= CAPACITY
    assert len(assembler) <= len(DEVICES) * len(METHODS)
    missing = assembler.missing(device, chunk.method)
    if missing is not None and chunk.count <= 16:
        lacking = {index for index in range(chunk.count) if in_bitmap(index, missing)}
        assert lacking, "nothing is missing, and nothing came out"
        assert bitmap(lacking, chunk.count) == missing
    if not len(assembler):
        assert assembler.held_bytes == 0


def _honest(choices: Choices) -> Chunk:
    """One chunk of a contribution that a few bytes describe; the same bytes give the same contribution."""
    salt, size, limit = choices.below(4), choices.below(LARGEST + 50), OVERHEAD_BYTES + 40 + choices.below(200)
    payload = hashlib.shake_256(b"%d" % salt).digest(size)
    pieces = split(payload, limit, run=b"run1", round=1 + salt, method=choices.one_of(METHODS))
    return choices.one_of(pieces)


def _hostile(choices: Choices) -> Chunk:
    count = choices.one_of((choices.below(9), choices.number(2)))
    return Chunk(
        choices.take(4).ljust(4, b"r"),
        choices.number(2),
        choices.one_of((*METHODS, choices.text())),
        choices.number(2),
        count,
        choices.number(2),
        choices.take(8).ljust(8, b"d"),
        choices.take(choices.number()),
    )


def seeds() -> Iterable[bytes]:
    for salt in range(4):
        yield b"".join(bytes([0, 1, salt, 150, 0, 20, 0, n, 1]) for n in range(4))
    yield bytes(64)
    yield bytes(range(1, 200))
