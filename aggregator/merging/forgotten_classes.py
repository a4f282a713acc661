"""A fleet without one of its classes: what remains of contributions, and what is taken of the class from now on.

    class rows    (NCM, FedCOF) the rows and counts of the class are removed from every contribution; the others stay,
                  bit for bit
    a triangle    (FFC) is summed over all classes together, so a contribution with samples of the class is removed as a
                  whole; its device reads of the class in the announcement, and sends again without it

A forgotten class stays announced until it is admitted again, so that its samples do not leave devices at all. A
contribution with the class may still come: it was on its way when the class was forgotten, or its client ignores the
announcement. It is taken without the rows of the class, or, with a triangle, refused (docs/decisions/139).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from protofleet.contract.errors import near_names
from protofleet.contract.identity.signatures import inside
from protofleet.contract.methods import method as method_of
from protofleet.contract.printable import counted
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.encodings import encoding_of
from protofleet.contract.wire.messages import Contribution

__all__ = [
    "as_kept",
    "cannot_forget",
    "emptied",
    "had_sent",
    "held_by",
    "kept_of",
    "left_of",
    "no_such_class",
    "with_class",
]


def left_of(message: Contribution, classes: Collection[int]) -> Contribution | None:
    """What remains of a contribution without these classes.

    That is the contribution itself if it has none of them, and None if nothing can remain.
    """
    if not classes or not message.holds(classes):
        return message
    return None if message.has_products else message.without(classes)


def as_kept(message: Contribution) -> bytes:
    """A contribution encoded for the store, so that no number changes. What came as int8 is float32 here."""
    widest = max((message.body.rows, *message.further), key=lambda rows: rows.dtype.itemsize)
    return encode(message, encoding_of(widest))


def held_by(payload: bytes) -> Contribution:
    """The decoded contribution from the store. A signature was checked when it came."""
    message = inside(payload)
    assert isinstance(message, Contribution)
    return message


def kept_of(payload: bytes, number: int) -> bytes | None:
    """The payload that remains in the store of a contribution without a class; None for nothing."""
    reduced = left_of(held_by(payload), (number,))
    return None if reduced is None else as_kept(reduced)


def emptied(payload: bytes) -> bytes:
    """The contribution with no sample: for a device that took part in a round, and of which nothing can stay."""
    message = held_by(payload)
    triangle = None if message.triangle is None else np.zeros_like(message.triangle)
    factor = None if message.factor is None else message.factor[:0]
    none = replace(message, triangle=None, factor=None, factor_bits=0).without(message.body.classes)
    return as_kept(replace(none, triangle=triangle, factor=factor))


def cannot_forget(methods: Collection[str]) -> str:
    """Why a fleet of these methods cannot forget a class, as an order's outcome; empty where it can."""
    trained = sorted(name for name in methods if method_of(name).trains)
    if not trained:
        return ""
    return (
        f"refused: in rounds of {', '.join(trained)} devices train on all their classes, and no network unlearns one, "
        "try a bundle without it and a new --store, or a fleet that trains nothing"
    )


def had_sent(devices: Collection[str], *, whole: str) -> str:
    """The outcome of an order to forget a class, in words.

    Args:
        whole: until when the sums that were removed as a whole are missing; empty when there were none.
    """
    if not devices:
        return "done: nobody had sent it"
    outcome = f"done: {counted(len(devices), 'device')} had sent it"
    return f"{outcome}, and what was summed with other classes went whole, {whole}" if whole else outcome


def with_class(forgotten: Sequence[str], name: str) -> tuple[str, ...]:
    """The names of the forgotten classes with one more, the newest last."""
    return (*(other for other in forgotten if other != name), name)


def no_such_class(name: str, labels: Collection[str]) -> str:
    """The outcome of an order about a class that the bundle does not have."""
    return f"refused: the fleet's bundle has no class {name!r}, try {near_names(name, labels)}"
