"""A fleet without one of its classes: what stays of what devices sent, and what is taken of the class from now on.

    class rows    (NCM, FedCOF) the rows and counts of the class leave every contribution; the others stay, bit for bit
    a triangle    (FFC) is summed over all classes together, so a contribution with samples of the class goes whole; its
                  device reads of the class in the announcement, and sends again without it

A forgotten class stays announced until it is admitted again, so that its samples do not leave devices at all. What
comes nevertheless, on its way when the class was forgotten or from a client that does not heed it, is taken without its
rows, or, with a triangle, refused (docs/decisions/139).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from contract.errors import near_names
from contract.messages import Contribution, Encoding
from contract.methods import method as method_of
from contract.signed import inside
from contract.terminal import counted
from contract.wire import encode

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

_ENCODINGS: dict[int, Encoding] = {2: "f16", 4: "f32", 8: "f64"}


def left_of(message: Contribution, classes: Collection[int]) -> Contribution | None:
    """What stays of a contribution without these classes: itself where it has none of them, None where nothing can."""
    if not classes or not message.holds(classes):
        return message
    return None if message.triangle is not None else message.without(classes)


def as_kept(message: Contribution) -> bytes:
    """A contribution as the store keeps it: encoded so that no number changes. What came as int8 is float32 here."""
    widest = max(rows.dtype.itemsize for rows in (message.body.rows, *message.further))
    return encode(message, _ENCODINGS[widest])


def held_by(payload: bytes) -> Contribution:
    """A contribution as the store holds it, decoded; where it was signed, its signature held when it came."""
    message = inside(payload)
    assert isinstance(message, Contribution)
    return message


def kept_of(payload: bytes, number: int) -> bytes | None:
    """What stays in the store of a contribution, without a class; None for nothing."""
    left = left_of(held_by(payload), (number,))
    return None if left is None else as_kept(left)


def emptied(payload: bytes) -> bytes:
    """A contribution as it would be of no sample: of a device that took part in a round, with nothing that can stay."""
    message = held_by(payload)
    none = replace(message, triangle=None).without(message.body.classes)
    return as_kept(none if message.triangle is None else replace(none, triangle=np.zeros_like(message.triangle)))


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
    """What became of a class that was forgotten, as its order's outcome.

    Args:
        whole: until when sums that went whole are missing; empty where none did.
    """
    if not devices:
        return "done: nobody had sent it"
    outcome = f"done: {counted(len(devices), 'device')} had sent it"
    return f"{outcome}, and what was summed with other classes went whole, {whole}" if whole else outcome


def with_class(forgotten: Sequence[str], name: str) -> tuple[str, ...]:
    """The names of the forgotten classes with one more, the newest last."""
    return (*(each for each in forgotten if each != name), name)


def no_such_class(name: str, labels: Collection[str]) -> str:
    """Why nothing can be done with an order of a class that the bundle has not, as its outcome."""
    return f"refused: the fleet's bundle has no class {name!r}, try {near_names(name, labels)}"
