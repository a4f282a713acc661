"""What is lost, doubled or hung in a simulated month: journals, photos and stores compared. See month.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.living.books import Book, Integers, Naive, Sent, StoreContents, alike, rounds, sent, store_contents

COUNTS = ("committed", "duplicate")


def compare_standing(books: Sequence[Book], store: Path, naive: Naive, last: bool) -> tuple[list[str], StoreContents]:
    """What is wrong, a line each, and what the store holds.

    Args:
        last: whether everybody who is there is up to date.
    """
    found, there, faults = list[Integers](), store_contents(store), list[str]()
    for book in books:
        generation, payload = there.stands.get(book.name, (0, None))
        journal = sent(book.state, there.run) if book.has_journal else Sent(0, {})
        own, wrong = of_device(generation, payload, journal)
        faults += [f"{book.name}: {line}" for line in wrong]
        if own is not None:
            found.append(naive.of_payload(own))
        if book.out and payload is not None:
            faults.append(f"{book.name}: it is out, and generation {generation} stands")
        if last and not book.out and book.leaves > 10**6 and not stands_as_photos(book, there, naive):
            faults.append(f"{book.name}: what stands is not of the photos that it has")
    strangers = set(there.stands) - {book.name for book in books}
    faults += [f"{name}: nobody knows it" for name in sorted(strangers)]
    total = naive.total(found)
    stand = naive.total(naive.of_payload(payload) for _, payload in there.stands.values() if payload is not None)
    if not alike(total, stand):
        faults.append("the integers in the store are not those of the devices' journals")
    if not naive.is_made_of(there.state, stand):
        faults.append("the head is not made of what stands")
    return faults, there


def of_device(generation: int, payload: bytes | None, journal: Sent) -> tuple[bytes | None, list[str]]:
    """What stands of a device by its journal, and what is wrong with it.

    A payload that a newer one took the place of before there was a receipt is not in the journal any more: its size is.
    """
    wrong = []
    counted = max((number for (number, _), (_, _, outcome) in journal.made.items() if outcome in COUNTS), default=0)
    if counted > generation:
        wrong.append(f"lost: generation {counted} has a receipt, the store has {generation}")
    if generation > journal.newest:
        wrong.append(f"doubled: the store has generation {generation}, its newest is {journal.newest}")
    if payload is None:
        return None, wrong
    made = [own for (number, _), own in journal.made.items() if number == generation]
    kept, size, _ = made[0] if made else (None, 0, None)
    if size != len(payload) or kept not in (None, payload):
        wrong.append(f"doubled: generation {generation} is not what it made")
    return payload if kept is None else kept, wrong


def stands_as_photos(book: Book, there: StoreContents, naive: Naive) -> bool:
    """Whether what stands of a device is of the photos that it has, as integers."""
    _, payload = there.stands.get(book.name, (0, None))
    return payload is not None and alike(naive.of_payload(payload), naive.of_photos(tuple(book.rows(naive.world))))


def compare_rounds(books: Sequence[Book], store: Path, hung_s: float) -> list[str]:
    """What is wrong with a store of windows, a line each."""
    opened, contributions = rounds(store)
    run, faults = store_contents(store).run, list[str]()
    *before, newest = opened or [(0, time.time(), 0.0)]
    faults += [f"hung: window {number} never closed" for number, _, seconds in before if seconds is None]
    faults += [
        f"hung: window {number} took {seconds:.0f} s" for number, _, seconds in before if (seconds or 0) > hung_s
    ]
    if newest[2] is None and time.time() - newest[1] > hung_s:
        faults.append(f"hung: window {newest[0]} is open for {time.time() - newest[1]:.0f} s")
    stored = {(number, name, device): payload for number, name, device, payload in contributions}
    for book in books:
        if not book.has_journal:
            continue
        journal = sent(book.state, run)
        own = {payload for payload, _, _ in journal.made.values()}
        for (number, name), (_, _, outcome) in journal.made.items():
            if outcome in COUNTS and (number, name, book.name) not in stored:
                faults.append(f"{book.name}: lost: window {number} has a receipt, and nothing of it")
        faults += [
            f"{book.name}: doubled: what window {number} has of it is not what it made"
            for (number, _, device), payload in stored.items()
            if device == book.name and payload not in own
        ]
    return faults
