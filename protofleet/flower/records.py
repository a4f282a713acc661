"""A round in Flower's records: the messages of our own wire, as bytes in one ConfigRecord, either way.

Flower moves every array of an ArrayRecord as an object of its own, each with a header and a request, which for
prototypes costs more than they do (docs/decisions/195); and bytes that `contract.wire` wrote are checked by what reads
them. Down goes what a bundle and an announcement tell a device of ours; up goes a contribution.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from contract.errors import UsageError, WireError
from contract.messages import Announcement, Contribution, Encoding, GlobalPart
from contract.messages import Message as OurMessage
from contract.methods import Method, Value
from contract.methods import method as method_of
from contract.state import GlobalCollector, GlobalState
from contract.wire import MAX_MESSAGE_BYTES, decode, encode

__all__ = [
    "Reply",
    "Task",
    "arrays_of",
    "carried",
    "extractor_id",
    "travelled",
]

MAX_CLASSES = 1 << 16  # whose numbers a message has room for
_PREFIX = "protofleet."  # of our keys, among whatever else a ConfigRecord holds
_ANNOUNCEMENT, _STATE, _FLEET = f"{_PREFIX}announcement", f"{_PREFIX}state", f"{_PREFIX}fleet"
_CONTRIBUTION, _NAME = f"{_PREFIX}contribution", f"{_PREFIX}name"
_RECORD = "protofleet"


class _Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the manifest of a bundle says of a fleet, as far as a round asks."""

    classes: int
    width: int
    hyper: dict[str, int | float | str]


@dataclass(frozen=True, eq=False)
class Task:
    """What a server asks of a client in a round.

    Attributes:
        announcement: which round of which method, over which extractor.
        method: the announced one.
        classes, width: C and D.
        hyper: the method's, settled.
        state: what has come of the rounds before; empty before the first.
    """

    announcement: Announcement
    method: Method
    classes: int
    width: int
    hyper: Mapping[str, Value]
    state: GlobalState

    def write(self, record: ConfigRecord) -> None:
        """Put it into a record, beside what is there."""
        fleet = _Fleet(self.classes, self.width, dict(self.hyper))
        record[_ANNOUNCEMENT] = encode(self.announcement)
        record[_FLEET] = msgspec.json.encode(fleet)
        record.pop(_STATE, None)  # of the round before
        if self.state.version:  # an empty list has no type in Flower's messages
            record[_STATE] = _parts(self.state)

    @classmethod
    def read(cls, content: RecordDict) -> Task | None:
        """Of a message's content; None where it has none of ours, and so is not for us.

        Raises:
            WireError: it is not whole, or not what we write.
            MethodError: its method is not installed here, or the hyper-parameters are none of it.
            UsageError: its method adds noise (`carried`).
        """
        record = next((found for found in content.config_records.values() if _ANNOUNCEMENT in found), None)
        if record is None:
            return None
        announcement = _decoded(record[_ANNOUNCEMENT], Announcement)
        assert isinstance(announcement, Announcement)
        try:
            fleet = msgspec.json.decode(_bytes(record.get(_FLEET)), type=_Fleet)
        except msgspec.MsgspecError as error:
            raise WireError("the round's fleet", expected="classes, width and hyper-parameters", got=error) from None
        found = method_of(announcement.method)
        hyper = carried(found, fleet.hyper, fleet.classes, fleet.width)
        state = _joined(record[_STATE]) if _STATE in record else GlobalState(announcement.run, 0, 0)
        return cls(announcement, found, fleet.classes, fleet.width, hyper, state)


@dataclass(frozen=True, eq=False)
class Reply:
    """What a client answers.

    Attributes:
        name: of the client, by which contributions are put in order; empty where it has none but Flower's node id.
        contribution: the statistic.
    """

    name: str
    contribution: Contribution

    def content(self, encoding: Encoding) -> RecordDict:
        """As a message carries it."""
        written = encode(self.contribution, encoding)
        return RecordDict({_RECORD: ConfigRecord({_CONTRIBUTION: written, _NAME: self.name})})

    @classmethod
    def read(cls, message: Message) -> Reply:
        """Of a message.

        Raises:
            WireError: it carries no contribution of ours.
        """
        record = message.content.config_records.get(_RECORD)
        if record is None or _CONTRIBUTION not in record:
            raise WireError(
                "a reply", expected="a contribution", got="none", hint="method_mod or bundle_mod in its ClientApp"
            )
        contribution, name = _decoded(record[_CONTRIBUTION], Contribution), record.get(_NAME)
        assert isinstance(contribution, Contribution)
        return cls(name if isinstance(name, str) else "", contribution)


def carried(found: Method, given: Mapping[str, object], classes: int, width: int) -> dict[str, Value]:
    """The hyper-parameters of a method in a round over Flower, settled.

    Raises:
        UsageError: it adds noise: a client of Flower keeps no books of what it has told before, so no ε can be stated.
        MethodError: hyper-parameters that it does not have, or that do not fit C classes and width D.
    """
    if not (1 <= classes <= MAX_CLASSES and width >= 1):
        raise UsageError("a fleet", expected=f"1 to {MAX_CLASSES} classes, 1 feature at least", got=(classes, width))
    hyper = found.settle(given)
    found.check(hyper, classes, width)
    if found.mechanism(hyper) is not None:
        raise UsageError(
            f"{found.name} over Flower",
            expected="a method that adds no noise",
            got="one whose ε needs a ledger of all that has left the device",
            hint="a fleet of `protofleet client`",
        )
    return hyper


def extractor_id(extractor: str | ArrayRecord) -> bytes:
    """32 bytes that stand for an extractor: of its name, or of a model's arrays by their names, types and bytes."""
    digest = hashlib.sha256()
    if isinstance(extractor, str):
        digest.update(extractor.encode())
        return digest.digest()
    for name, array in sorted(extractor.items()):
        digest.update(repr((name, array.dtype, tuple(array.shape), array.stype, len(array.data))).encode())
        digest.update(array.data)
    return digest.digest()


def travelled(state: GlobalState) -> GlobalState:
    """A state as clients have it: rounded to what travels."""
    return _joined(_parts(state)) if state.version else state


def arrays_of(state: GlobalState) -> ArrayRecord:
    """A state as Flower's users look at one: of each kind the rows (K, W) float32, and whose they are, classes (K,)."""
    arrays = {}
    for kind, rows in travelled(state).rows.items():
        arrays[kind] = Array(np.ascontiguousarray(rows.rows, dtype=np.float32))
        arrays[f"{kind}.classes"] = Array(np.ascontiguousarray(rows.classes))
    return ArrayRecord(arrays)


def _parts(state: GlobalState) -> list[bytes]:
    return [encode(part) for part in state.parts(MAX_MESSAGE_BYTES)]


def _joined(parts: object) -> GlobalState:
    collector, state = GlobalCollector(), None
    for written in parts if isinstance(parts, list) else ():
        part = _decoded(written, GlobalPart)
        assert isinstance(part, GlobalPart)
        state = collector.add(part)
    if state is None:
        raise WireError("the round's global state", expected="all its parts", got="some, or none")
    return state


def _decoded(written: object, kind: type[OurMessage]) -> OurMessage:
    message = decode(_bytes(written))
    if not isinstance(message, kind):
        raise WireError("message", expected=kind.__name__.lower(), got=type(message).__name__.lower())
    return message


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise WireError("record", expected="bytes", got=type(value).__name__)
    return value
