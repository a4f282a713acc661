"""Who is in a simulated month, and what happens when: drawn from a seed alone. See benchmarks/living/month.py.

Of N devices N/60 are whole processes and N/12 always on; of the others six in nine wake once a day, one twice, and one
each every third and seventh day. An eighth of them come later, a twentieth vanish for good, two are forgotten, two
withdraw (one where they are few), and one of each two is admitted again. The longer bundle reaches the aggregator after
a quarter of the month, and is rolled out from then on; N/100 devices take no part, and are given a copy of it in the
week after. The first device's self-test of it fails. In the last week the aggregator is not killed, so
that its memory is that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.living.books import Book

PATTERNS, SHARES = (0.5, 1.0, 3.0, 7.0), (1 / 9, 6 / 9, 1 / 9, 1 / 9)
KILLS = {"broker": 0.25, "living": 0.25, "windows": 0.15, "worker": 1.0, "whole": 0.4}  # a day


@dataclass(frozen=True, order=True)
class Event:
    """At so many days, the first day beginning at 1.0, something happens to a part or a device."""

    at: float
    what: str
    who: str


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        books: of the fleet whose sums stand; `sleepers` of the one with windows.
        extends: the day on whose morning the aggregator has the longer bundle, and its roll-out begins.
        copied: the day on which a device that takes no part in roll-outs is given it.
    """

    books: list[Book]
    sleepers: list[Book]
    events: list[Event]
    extends: int
    copied: dict[str, int]


def plan(days: int, devices: int, rng: np.random.Generator, folder: Path, bundle: Path, classes: int) -> Plan:
    """A month of so many days.

    Args:
        bundle: that all begin with, of so many classes.
    """
    books = [Book("living", f"d{index:03d}", folder / f"d{index:03d}", bundle) for index in range(devices)]
    sleepers = [
        Book("windows", f"w{index:03d}", folder / f"w{index:03d}", bundle) for index in range(least(devices / 8, 3))
    ]
    for book in [*books, *sleepers]:
        book.pattern = float(rng.choice(PATTERNS, p=SHARES))
        book.classes = tuple(sorted(rng.choice(classes, rng.integers(3, classes - 1), replace=False).tolist()))
    for book in sleepers:
        book.pattern = min(book.pattern, 1.0)
    whole, always = least(devices / 60), least(devices / 12)
    for index, book in enumerate(books[: whole + always]):
        book.whole, book.pattern = index < whole, 0.0
    others = [books[index] for index in rng.permutation(np.arange(whole + always, devices))]
    events = _fates(days, others, rng) + _kills(days, rng)
    extends = min(days, least(days / 4, 2))
    by_hand = [book for book in books[whole:] if book.joins == 1][: least(devices / 100)]
    copied = {book.name: int(rng.integers(extends, min(days, extends + 7) + 1)) for book in by_hand}
    return Plan(books, sleepers, sorted(events), extends, copied)


def least(number: float, one: int = 1) -> int:
    return max(one, round(number))


def _fates(days: int, others: Sequence[Book], rng: np.random.Generator) -> list[Event]:
    """What becomes of sleepers, in whatever order they are given."""
    left = list(others)
    for _ in range(round(len(others) / 8)):
        left.pop().joins = int(rng.integers(2, max(3, 2 * days // 3 + 1)))
    for _ in range(round(len(others) / 20)):
        left.pop().leaves = int(rng.integers(max(1, days // 3), days))
    events = []
    for what, many in (("forget", 2), ("withdraw", 2 if len(left) > 8 else 1)):
        for number in range(many):
            book = left.pop()
            book.pattern = min(book.pattern, 1.0)
            day = int(rng.integers(2, max(3, days - 2)))
            events.append(Event(day + float(rng.random()), what, book.name))
            if number == 0 and (what == "forget" or many > 1):
                events.append(Event(min(day + least(days / 8), days) + 0.999, "admit", book.name))
    return events


def _kills(days: int, rng: np.random.Generator) -> list[Event]:
    quiet = {"living": min(7, days // 3)}
    return [
        Event(float(rng.uniform(1.1, days - quiet.get(part, 0) + 1)), "kill", part)
        for part, rate in KILLS.items()
        for _ in range(least(rate * days))
    ]
