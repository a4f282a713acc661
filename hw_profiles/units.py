"""How reports, tables and charts write a figure: bytes (powers of 1000), durations, shares; and a list of names."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["digits", "few", "nice_bytes", "nice_joules", "percent", "seconds_text", "size", "thousands", "time_text"]

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def digits(number: float, most: int = 3) -> str:
    """A number to so many digits, without an exponent: 0.804, 176, 17,600."""
    return f"{float(f'{number:.{most}g}'):,.15g}"


def size(nbytes: float) -> str:
    """Bytes to three digits, where they are compared: 1,234 B, 12.3 kB, 1.23 MB."""
    for unit, scale in _UNITS:
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 100 * scale else f"{nbytes / scale:,.0f} {unit}"
    return f"{nbytes:,.0f} B"


def nice_bytes(nbytes: float) -> str:
    """Bytes in as few digits as tell them apart, for axes, labels and sentences: 5.2 kB, 1.7 MB, 1 GB."""
    for unit, scale in _UNITS:
        if nbytes >= scale:
            scaled = nbytes / scale
            return f"{scaled:.0f} {unit}" if scaled >= 100 or scaled == int(scaled) else f"{scaled:.1f} {unit}"
    return f"{nbytes:.0f} B"


def nice_joules(joules: float) -> str:
    """Energy to three digits: 0.67 J, 136 J, 1.2 kJ."""
    if joules >= 1000:
        return f"{joules / 1000:.3g} kJ"
    return f"{joules:.3g} J" if joules >= 0.01 else f"{joules * 1000:.3g} mJ"


def time_text(milliseconds: float) -> str:
    """A duration for people, to three digits."""
    if milliseconds >= 60_000:
        return f"{milliseconds / 60_000:.3g} min"
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.3g} s"
    return f"{milliseconds:.3g} ms"


def percent(fraction: float, digits: int = 1) -> str:
    """A fraction as percent: 0.125 is 12.5 %. The space does not break."""
    return f"{fraction * 100:.{digits}f}\u00a0%"


def seconds_text(seconds: float) -> str:
    """How long something took, from a tenth of a second."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def thousands(number: float) -> str:
    """A whole number in groups of three, told apart by spaces: 10 000."""
    return f"{number:,.0f}".replace(",", " ")


def few(names: Sequence[str], most: int = 3, *, separator: str = ", ") -> str:
    """The first of some names, and how many more there are: a, b, c and 4 more."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")
