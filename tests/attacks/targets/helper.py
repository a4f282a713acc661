"""Who asks a helper for sums, in any way: what it opens is what k devices signed, each share once, none finer than k.

Its real ledger and keys; the seeds are devices' own, of several rounds, and damaged ones. It ends and starts anew on
its ledger between any two questions. Its answer is then heard by an aggregator's set.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from blinded_samples import FLEET, KEY, METHOD, PUBLIC, RUN, WORDS, contributed, enrolled, helper, ledger, names

from protofleet.aggregator.blinded.blinded_set import BlindedSet
from protofleet.aggregator.helper.ledger import KIND, Ledger
from protofleet.aggregator.helper.opening import Answer, Helper
from protofleet.aggregator.store.blinded_tables import AskedSet
from protofleet.contract.errors import WireError
from protofleet.contract.files.sqlite import read_only
from protofleet.contract.identity.signatures import inside
from protofleet.contract.privacy.blinding import add_pad
from protofleet.contract.privacy.sealing import unseal
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.helper_messages import Opened, Opening, set_digest
from tests.attacks.choices import Choices
from tests.attacks.guard import scratch
from tests.attacks.promises import is_one_line

LONGEST_BYTES = 256
LEAST, DEVICES, ROUNDS = 2, names(6), 3
_MORE = 5  # what a device may ask for itself
_LISTED = enrolled(*DEVICES[:5])  # the last is of no list


def run(data: bytes) -> None:
    choices = Choices(data)
    with scratch() as folder:
        scene = _Scene(folder / "ledger")
        try:
            while choices:
                scene.next(choices)
        finally:
            scene.ledger.close()


class _Scene:
    def __init__(self, path: Path) -> None:
        self.path, self.opened = path, dict[bytes, tuple[frozenset[str], bytes]]()
        self.start()

    def start(self) -> None:
        self.ledger: Ledger = ledger(self.path)
        self.helper: Helper = helper(self.ledger, _LISTED, LEAST)

    def next(self, choices: Choices) -> None:
        what = choices.below(8)
        if what == 0:
            self.ledger.close()
            self.start()
        elif what == 1:
            self._ask(choices, _any_opening(choices))
        else:
            for part in _openings(choices):
                self._ask(choices, part)

    def _ask(self, choices: Choices, part: Opening | None) -> None:
        if part is None:
            return
        try:
            answer = self.helper.take(part, 1.0)
        except WireError as error:
            is_one_line(error)
            return
        if answer is None:
            return
        if answer.total is not None:
            self._check(answer)
        assert len(answer.reason) <= 200
        assert all(device and len(why) <= 200 for device, why in answer.refused.items())
        _tell(answer, choices)

    def _check(self, answer: Answer) -> None:
        asked, total = answer.asked, answer.total
        assert total is not None
        with read_only(self.path, KIND) as db:
            query = "SELECT device, share.digest FROM share JOIN opened ON opened = opened.id WHERE opened.digest = ?"
            shares = {str(device): bytes(digest) for device, digest in db.execute(query, (asked.digest,))}
            (doubled,) = db.execute("SELECT count(*) - count(DISTINCT digest) FROM share").fetchone()
        devices = frozenset(shares)
        assert len(devices) >= LEAST, "fewer than k devices"
        assert devices <= set(_LISTED), "a device of no list"
        assert not doubled, "a share was opened twice"
        if asked.digest in self.opened:
            assert self.opened[asked.digest] == (devices, total.tobytes()), "told otherwise than before"
            return
        self.opened[asked.digest] = devices, total.tobytes()
        expected = np.zeros(WORDS, np.uint64)
        for device in devices:
            add_pad(expected, _pad_seed(device, asked.round, shares[device], len(devices)))
        assert total.tobytes() == expected.tobytes(), "not the sum of what the devices signed"
        for one, other in itertools.combinations({found for found, _ in self.opened.values()}, 2):
            assert len(one ^ other) >= LEAST, "two sets that differ by fewer than k devices"


def _tell(answer: Answer, choices: Choices) -> None:
    """Its parts reach the aggregator in any order, some twice, between others: one whole sum comes out, or none."""
    a = answer.asked
    key = (a.run, a.round, a.method, a.digest)
    if answer.total is None:
        parts = [Opened(*key, 0, 1, "refused", np.zeros(0, np.uint64), answer.reason, dict(answer.refused))]
    else:
        cuts = [answer.total[n : n + 2] for n in range(0, len(answer.total), 2)]
        parts = [Opened(*key, n, len(cuts), "opened", cut) for n, cut in enumerate(cuts)]
    waiting = BlindedSet(_Asked(AskedSet(a.round, a.method, a.digest, tuple(DEVICES[:2]), 1.0)), a.run)  # type: ignore[arg-type]
    for _ in range(choices.below(6)):
        told = bytearray(encode(choices.one_of(parts)))
        if choices.below(4) == 0:
            told[choices.below(len(told))] = choices.number()
        try:
            message = decode(bytes(told))
        except WireError as error:
            is_one_line(error)
            continue
        if isinstance(message, Opened):
            waiting.hear(message)
            waiting.answer()
    waiting = BlindedSet(_Asked(AskedSet(a.round, a.method, a.digest, tuple(DEVICES[:2]), 1.0)), a.run)  # type: ignore[arg-type]
    for part in (*parts[choices.below(3) :], *parts):
        waiting.hear(decode(encode(part)))  # type: ignore[arg-type]
    found = waiting.answer()
    assert found is not None
    assert (found.total is None) == (answer.total is None)
    assert found.total is None or np.array_equal(found.total, answer.total)  # type: ignore[arg-type]


class _Asked:
    """In place of the store's tables: what was asked for."""

    def __init__(self, asked: AskedSet) -> None:
        self._asked = asked

    def asked(self) -> AskedSet:
        return self._asked


def _pad_seed(device: str, round: int, share: bytes, devices: int) -> bytes:
    """The seed that this device signed for that share, in a set of so many."""
    signed = [_seed(device, round, other) for other in (False, True)]
    if device == DEVICES[0] and devices >= _MORE:
        signed.append(_of_more(round))
    for payload in signed:
        bound = inside(payload)
        if bound.share == share:  # type: ignore[union-attr]
            return unseal(KEY, FLEET, device, bound)  # type: ignore[arg-type]
    raise AssertionError(f"{device} never signed this share")


@functools.cache
def _seed(device: str, round: int, other: bool) -> bytes:
    """What a device signed in a round: one of two shares, since a journal that is lost makes another one."""
    values = np.arange(WORDS, dtype=np.uint64) + np.uint64(round)
    drawn = bytes([round, other]) + device.encode().ljust(30, b"-")
    return contributed(device, values, round=round, seed=drawn, terms=bytes(32), least=LEAST)[1]


@functools.cache
def _of_more(round: int) -> bytes:
    """The first device's, for a set of `_MORE` devices or more."""
    return contributed(DEVICES[0], np.arange(WORDS, dtype=np.uint64), round=round, least=_MORE)[1]


@functools.cache
def _odd_seeds(round: int) -> tuple[bytes, ...]:
    """What nobody should take: by another's key, for other words or terms, of another method, not signed; or in few."""
    device, values = DEVICES[0], np.arange(WORDS, dtype=np.uint64)
    made = [
        contributed(device, values, round=round, by="x")[1],
        contributed(device, values[:3], round=round)[1],
        contributed(device, values, round=round, terms=b"t" * 32)[1],
        _of_more(round),
        contributed(device, values, round=round, method="ffc")[1],
    ]
    return (*made, encode(inside(made[0])))


def _openings(choices: Choices) -> list[Opening]:
    round = 1 + choices.below(ROUNDS)
    chosen = [device for place, device in enumerate(DEVICES) if choices.number() & 1 or place == 0]
    seeds = {device: _seed(device, round, choices.below(8) == 1) for device in chosen}
    if choices.below(4) == 1:
        seeds[choices.one_of(chosen)] = _damaged(choices, round)
    if choices.below(8) == 1:
        seeds[choices.text()[:64] or "x"] = _seed(DEVICES[0], round, False)
    parts = min(1 + choices.below(3), len(seeds))
    digest = set_digest(seeds) if choices.below(8) else bytes(32)
    cuts = [{device: seeds[device] for device in list(seeds)[n::parts]} for n in range(parts)]
    made = [Opening(RUN, round, METHOD, digest, n, parts, cut) for n, cut in enumerate(cuts)]
    return made if choices.below(4) else [choices.one_of(made) for _ in range(4)]


def _damaged(choices: Choices, round: int) -> bytes:
    if choices.chance():
        return choices.one_of(_odd_seeds(round))
    payload = bytearray(_seed(DEVICES[1], round, False))
    for _ in range(1 + choices.below(3)):
        payload[choices.below(len(payload))] = choices.number()
    return bytes(payload)


def _any_opening(choices: Choices) -> Opening | None:
    """A good question of which bytes are others, as they come over the wire."""
    seeds = {device: _seed(device, 1, False) for device in DEVICES[:3]}
    payload = bytearray(encode(Opening(RUN, 1, METHOD, set_digest(seeds), 0, 1, seeds)))
    for _ in range(choices.below(4)):
        payload[choices.below(len(payload))] = choices.number()
    try:
        message = decode(bytes(payload))
    except WireError as error:
        is_one_line(error)
        return None
    return message if isinstance(message, Opening) else None


def seeds() -> Iterable[bytes]:
    assert PUBLIC.seal
    everyone, told = [1] * len(DEVICES), [0, 1, 1, 1, 1, 1, 0]
    usual = [0] * 4 + [0, 0, 0, 1, 1]  # the seeds of four devices, no damage, nobody else, in one part, of this digest
    four = [1, 1, 1, 1, 0, 0]
    for round in range(ROUNDS):
        yield bytes([2, round, *four, *usual, *told, 2, round, *four, *usual, *told, 0, 2, round, *four, *usual, *told])
        yield bytes([2, round, *everyone, *[0] * 6, *usual[4:], *told])
    yield bytes([2, 0, *four, *usual, *told, 2, 1, 1, 1, 1, *[0] * 3, *usual[1:], *told])  # all but one
    yield bytes([2, 0, *four, *usual, *told, 2, 0, *four, 1, *usual[1:], *told])  # another share of one
    for odd in range(6):
        yield bytes([2, 0, *four, *[0] * 4, 1, 0, 1, odd, 0, 0, 1, 1, *told])
    yield bytes([1, 0, 1, 1, 9, 9, 1, 2, 7, 7])
