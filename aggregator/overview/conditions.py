"""What a device says of its clock, its disk and its certificate: why it needs care, and in words.

The clock was compared when the message came (`aggregator/monitoring/device_table.py`). The other two are of the last
message, also where the device is gone since: then they often say why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from protofleet.aggregator.monitoring.device_table import CLOCK_AHEAD
from protofleet.contract.conditions import CERTIFICATE_SINCE, CERTIFICATE_UNTIL, DISK_FREE, LEAST_DISK_BYTES
from protofleet.contract.console.durations import in_words
from protofleet.contract.mqtt.certificates import Expiry

__all__ = ["certificate_care", "clock_care", "conditions_in_lines", "disk_care"]

_NOTHING_BYTES = 1e6
CLOCK_S = 300.0  # a message may wait for so long: a device that sleeps, an aggregator that merges


def clock_care(figures: Mapping[str, float]) -> str:
    """Why the clock needs care; empty where it does not, or is not known."""
    ahead_s = figures.get(CLOCK_AHEAD, 0.0)
    return f"its clock is wrong: {_clock(ahead_s)}" if abs(ahead_s) > CLOCK_S else ""


def disk_care(figures: Mapping[str, float], *, online: bool) -> str:
    """Why the disk does."""
    free = figures.get(DISK_FREE)
    if free is None or free >= LEAST_DISK_BYTES:
        return ""
    if free < _NOTHING_BYTES:
        return "its disk is full" if online else "its disk was full when it ended"
    return f"its disk is nearly full: {_size(free)} {'are' if online else 'were'} free"


def certificate_care(figures: Mapping[str, float], now: float) -> str:
    """Why the certificate does."""
    expiry = _certificate(figures)
    if expiry is None or not expiry.is_soon(now):
        return ""
    return f"its certificate {expiry.words(now)}" + ("; the broker lets it in no more" if expiry.until <= now else "")


def conditions_in_lines(figures: Mapping[str, float], now: float) -> Iterator[str]:
    """All three, for a person."""
    if CLOCK_AHEAD in figures:
        yield f"clock {_clock(figures[CLOCK_AHEAD])}"
    if DISK_FREE in figures:
        yield f"disk: {_size(figures[DISK_FREE])} free"
    expiry = _certificate(figures)
    if expiry is not None:
        yield f"certificate {expiry.words(now)}"


def _clock(ahead_s: float) -> str:
    """By how much it differs, to the second, which is about how long a message takes."""
    whole = round(abs(ahead_s))
    return f"{in_words(whole)} {'ahead' if ahead_s > 0 else 'behind'}" if whole > 1 else "right"


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"


def _certificate(figures: Mapping[str, float]) -> Expiry | None:
    """The validity that a device tells; None where it tells none, or one that no calendar has."""
    until = figures.get(CERTIFICATE_UNTIL)
    if until is None:
        return None
    try:
        time.gmtime(until)
    except (OverflowError, ValueError, OSError):
        return None
    return Expiry("certificate", "", figures.get(CERTIFICATE_SINCE, float("-inf")), until)
