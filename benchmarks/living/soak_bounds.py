"""What a soak's samples come to, and which of its bounds do not hold.

Memory is compared once the ring of photos has been full, since it grows until then: the median of the first quarter of
what follows with that of the last, and the slope of a straight line through all of it (Theil and Sen: the median of the
slopes between any two samples, which a peak does not move). The line is through the second half: what grows does so
there, too, and what is made once, at the first of something, does not. It is RSS that is judged: PSS rises when another
process that shares Python's libraries ends.

The journal keeps what was sent, up to 16 MiB (`edge_client/journal/retention.py`). So it grows by design, to a limit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bounds", "Sample", "Soak", "broken", "table"]

_SCHEMA = "protofleet.benchmark.soak/1"
_FULL = 0.9  # of its limit: the ring is full, since another photo needs room, too
_SOME = 300  # samples that a slope is taken from


@dataclass(frozen=True)
class Sample:
    """What was looked at once.

    Attributes:
        at_s: since the soak began.
        life: how often the client had been started.
        pictures: it had answered about by then.
        ring_bytes, journal_bytes, ledger_bytes, state_bytes: of the files; of the whole directory.
        log_bytes: of the largest of SQLite's logs, which goes to 1,000 pages before it is written over.
        trouble: what was wrong just then; empty for nothing.
    """

    at_s: float
    life: int
    pictures: int
    rss_kb: int
    pss_kb: int
    files: int
    threads: int
    ring_bytes: int
    journal_bytes: int
    ledger_bytes: int
    log_bytes: int
    state_bytes: int
    trouble: str = ""


@dataclass(frozen=True)
class Bounds:
    """What has to hold.

    Attributes:
        ring_bytes: the ring's limit, at every sample.
        memory_kb: the last quarter's median may be so much above the first one's.
        memory_slope_kb: for 1,000 pictures, of the second half.
        files, threads: as memory_kb; of the largest.
        journal_bytes: at every sample.
        log_bytes: at every sample.
        ledger_slope_bytes: for 1,000 pictures that were looked at.
        back_s: until there are new pictures after a trouble.
    """

    ring_bytes: int
    memory_kb: int = 2_000
    memory_slope_kb: float = 100.0
    files: int = 2
    threads: int = 2
    journal_bytes: int = 17 << 20
    log_bytes: int = 5 << 20
    ledger_slope_bytes: float = 10_000.0
    back_s: float = 90.0


@dataclass(frozen=True)
class Soak:
    """One run.

    Attributes:
        back_s: by the name of a trouble, seconds from its end to the next picture, each time; infinity for never.
        ends: exit codes of the client where it ended by itself while nobody expected it.
        labels: confirmed; labels_lost: of these, not among the learned ones, or with another class.
        taps, refused, unanswered: of the page.
        rounds: with a contribution of the device; late_rounds: of these, after the broker was last away.
    """

    seconds: float
    pictures: int
    samples: Sequence[Sample]
    back_s: dict[str, list[float]]
    ends: Sequence[int]
    labels: int
    labels_lost: int
    taps: int
    refused: int
    unanswered: int
    events: int
    images: int
    rounds: int
    late_rounds: int

    def json(self) -> str:
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1)

    @classmethod
    def read(cls, text: str) -> Soak:
        """What `json` wrote."""
        found = json.loads(text)
        if found.pop("schema", "") != _SCHEMA:
            raise SystemExit(f"error: --of, expected {_SCHEMA}, got another file, try one of --json")
        return cls(**{**found, "samples": [Sample(**one) for one in found["samples"]]})


@dataclass(frozen=True)
class _Course:
    """Of one quantity: medians of the first and the last quarter, the largest, and slopes for 1,000 pictures."""

    first: float
    last: float
    most: float
    slope: float
    late_slope: float


def _steady(soak: Soak, bounds: Bounds) -> list[Sample]:
    """The samples of the client's longest life, from when the ring was full; at the latest from a third of it."""
    lives = [[one for one in soak.samples if one.life == life] for life in {one.life for one in soak.samples}]
    longest = max(lives, key=len, default=[])
    full = next((row for row, one in enumerate(longest) if one.ring_bytes >= _FULL * bounds.ring_bytes), len(longest))
    return longest[min(full, len(longest) // 3) :]


def _course(samples: Sequence[Sample], what: str) -> _Course:
    values = np.array([getattr(one, what) for one in samples], float)
    at = np.array([one.pictures for one in samples], float) / 1000.0
    quarter, half = max(len(values) // 4, 1), len(values) // 2
    quarters = float(np.median(values[:quarter])), float(np.median(values[-quarter:]))
    return _Course(*quarters, float(values.max()), _slope(at, values), _slope(at[half:], values[half:]))


def _slope(at: NDArray[np.float64], values: NDArray[np.float64]) -> float:
    """Of the line of Theil and Sen."""
    some = np.linspace(0, len(values) - 1, min(len(values), _SOME)).astype(int)
    one, other = np.triu_indices(len(some), 1)
    apart = at[some][other] - at[some][one]
    slopes = (values[some][other] - values[some][one])[apart > 0] / apart[apart > 0]
    return float(np.median(slopes)) if len(slopes) else 0.0


def broken(soak: Soak, bounds: Bounds) -> list[str]:
    """A line for each bound that does not hold."""
    steady = _steady(soak, bounds)
    if len(steady) < 8:
        return ["too few samples of one life of the client"]
    rss, ledger = _course(steady, "rss_kb"), _course(steady, "ledger_bytes")
    most = {name: max(getattr(one, f"{name}_bytes") for one in soak.samples) for name in ("ring", "journal", "log")}
    limits = {"ring": bounds.ring_bytes, "journal": bounds.journal_bytes, "log": bounds.log_bytes}
    lines = [
        *(
            (most[name] > limit, f"{name}: {most[name]:,} bytes, its limit is {limit:,}")
            for name, limit in limits.items()
        ),
        (rss.last - rss.first > bounds.memory_kb, f"memory: {rss.first:,.0f} kB first, {rss.last:,.0f} kB last"),
        (rss.late_slope > bounds.memory_slope_kb, f"memory: {rss.late_slope:,.0f} kB more for 1,000 pictures"),
        (ledger.slope > bounds.ledger_slope_bytes, f"ledger: {ledger.slope:,.0f} bytes for 1,000 pictures"),
        (bool(soak.ends), f"the client ended by itself: {', '.join(map(str, soak.ends))}"),
        (soak.labels_lost > 0, f"labels: {soak.labels_lost} of {soak.labels} lost"),
        (soak.labels == 0, "labels: none was confirmed"),
        (soak.late_rounds == 0, "rounds: none after the broker was away"),
    ]
    for what in ("files", "threads"):
        quarter = max(len(steady) // 4, 1)
        first, last = (max(getattr(one, what) for one in part) for part in (steady[:quarter], steady[-quarter:]))
        lines.append((last - first > getattr(bounds, what), f"{what}: {first} at most first, {last} last"))
    for name, back in soak.back_s.items():
        lines.append((max(back) > bounds.back_s, f"{name}: {max(back):.0f} s until there was a picture"))
    return [line for is_broken, line in lines if is_broken]


_ROWS = (
    ("RSS, kB", "rss_kb"),
    ("PSS, kB", "pss_kb"),
    ("open files", "files"),
    ("threads", "threads"),
    ("ring, bytes", "ring_bytes"),
    ("journal, bytes", "journal_bytes"),
    ("ledger, bytes", "ledger_bytes"),
    ("largest log of SQLite's, bytes", "log_bytes"),
    ("state directory, bytes", "state_bytes"),
)


def table(soak: Soak, bounds: Bounds) -> str:
    """What was found, as Markdown."""
    steady = _steady(soak, bounds)
    facts: list[tuple[str, Any]] = [
        ("pictures", f"{soak.pictures:,} in {soak.seconds / 60:.0f} minutes"),
        (
            "ring, at most",
            f"{max((one.ring_bytes for one in soak.samples), default=0):,} of {bounds.ring_bytes:,} bytes",
        ),
        *(
            (f"{name}, {len(back)} times: next picture after", f"{max(back):.0f} s at most")
            for name, back in soak.back_s.items()
        ),
        ("client ended unexpectedly", f"{len(soak.ends)} times"),
        ("page: events, photos fetched", f"{soak.events:,}, {soak.images:,}"),
        ("taps, refused, without an answer", f"{soak.taps}, {soak.refused}, {soak.unanswered}"),
        ("labels confirmed, lost", f"{soak.labels}, {soak.labels_lost}"),
        ("rounds, after the last time without a broker", f"{soak.rounds}, {soak.late_rounds}"),
    ]
    lines = ["| | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in facts), ""]
    lines += [
        "| once the ring was full | first quarter, median | last quarter, median | largest | for 1,000 pictures "
        "| second half |"
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, what in _ROWS if steady else ():
        course = _course(steady, what)
        sizes = f"{course.first:,.0f} | {course.last:,.0f} | {course.most:,.0f}"
        lines.append(f"| {name} | {sizes} | {course.slope:+,.1f} | {course.late_slope:+,.1f} |")
    tenths = np.array_split([one.rss_kb for one in steady], 10) if len(steady) >= 10 else []
    lines += ["", f"RSS in tenths of that, medians, kB: {', '.join(f'{np.median(tenth):,.0f}' for tenth in tenths)}"]
    return "\n".join(lines)
