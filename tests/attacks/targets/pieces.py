"""Pieces of a bundle from anybody, a process that ends at any moment, a part that somebody changed on the disk.

What is taken for whole is what was offered, to the byte; nothing longer is ever kept, and a download that is answered
honestly from anywhere on comes to its end.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from pathlib import Path

from protofleet.contract.wire.rollout_messages import MAX_PIECES, Offer, Piece, Request
from protofleet.edge_client.rollout.download import Download
from tests.attacks.choices import Choices
from tests.attacks.guard import scratch

LONGEST_BYTES = 512
RUN = b"run1"
BLOB = random.Random(1).randbytes(700)
OFFER = Offer(hashlib.sha256(BLOB).digest(), 2, len(BLOB))


def run(data: bytes) -> None:
    choices = Choices(data)
    with scratch() as folder:
        scene = _Scene(folder / "bundles" / "part")
        try:
            while choices:
                scene.next(choices)
            scene.comes_to_its_end()
        finally:
            scene.found.close()


class _Scene:
    def __init__(self, path: Path) -> None:
        self.path, self.now = path, 0.0
        self.asked: Request | None = None
        self.start()

    def start(self) -> None:
        self.found = Download(self.path, OFFER, random.Random(0))

    def next(self, choices: Choices) -> None:
        what = choices.below(8)
        self.now += choices.one_of((0.0, 1.0, 6.0, 700.0))
        if what == 0:
            self.found.close()
            if choices.chance():
                self._somebody_changes_it(choices)
            self.start()
        elif what == 1:
            self.found.connected()
        elif what in (2, 3):
            self._ask()
        elif what == 4:
            self._whole()
        else:
            self.found.take(self._piece(choices), self.now)
        size = self.path.stat().st_size
        assert self.found.have == size <= len(BLOB), "more is kept than was offered"
        wait_s = self.found.wait_s(self.now)
        assert (wait_s is None) == self.found.is_whole
        assert wait_s is None or wait_s <= 1.25 * 600.0, "it never asks again"

    def _ask(self) -> None:
        asked = self.found.request(RUN, self.now)
        if asked is None:
            return
        assert asked.offset == self.found.have
        assert 0 < asked.wanted_bytes <= len(BLOB) - asked.offset
        self.asked = asked
        self.found.asked(asked, self.now)

    def _whole(self) -> None:
        if self.found.is_whole:
            right = self.found.is_right()
            assert right == (self.path.read_bytes() == BLOB), "taken for what was offered, or thrown away"
            if not right:
                self.found.begin_again()

    def _piece(self, choices: Choices) -> Piece:
        what, at = choices.below(4), choices.below(len(BLOB))
        if what == 0:
            return Piece(RUN, choices.take(8).ljust(8, b"d"), at, choices.block() or b"x")
        start = self.found.have if what > 1 else at
        if what == 3:
            return Piece(RUN, OFFER.digest, start, choices.take(choices.number()) or b"x" * 300)
        return Piece(RUN, OFFER.digest, start, BLOB[start : start + 1 + choices.number()] or b"beyond")

    def _somebody_changes_it(self, choices: Choices) -> None:
        data = bytearray(self.path.read_bytes()[: choices.below(len(BLOB) + 1)])
        if data and choices.chance():
            data[choices.below(len(data))] ^= 1
        self.path.write_bytes(bytes(data) + choices.take(choices.below(256)) * (1 + choices.below(8)))

    def comes_to_its_end(self) -> None:
        for _ in range(20):
            if self.found.is_whole and not self.found.is_right():
                self.found.begin_again()
            if self.found.is_whole:
                return
            self.now += self.found.wait_s(self.now) or 0.0
            asked = self.found.request(RUN, self.now)
            assert asked is not None, "it waits for nothing"
            self.found.asked(asked, self.now)
            end = asked.offset + asked.wanted_bytes
            for at in range(asked.offset, end, 100)[:MAX_PIECES]:
                self.found.take(Piece(RUN, OFFER.digest, at, BLOB[at : min(at + 100, end)]), self.now)
        raise AssertionError("an honest aggregator never got it through")


def seeds() -> Iterable[bytes]:
    yield bytes([2, 0, 5, 0, 2, 0, 0, 200, 5, 0, 2, 0, 0, 255, 4, 0])
    yield bytes([5, 0, 3, 0, 0, 50, *range(50), 0, 0, 1, 9, 0, 1, 3, 4, 9, 9, 9, 9, 1])
    yield bytes([5, 0, 2, 0, 0, 255, 5, 0, 3, 0, 0, 0, 4, 0, 5, 0, 3, 0, 0, 0, 5, 0, 3, 0, 0, 0, 4, 0])
    yield bytes([5, 1, 0, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8, 3, 0, 1, 2, 3])
    yield bytes([5, 0, 1, 100, 0, 9, 1, 2, 2, 1, 2, 3, 0, 0, 0])
