"""A round in Flower's records: the messages of our own wire, as bytes in one ConfigRecord, in both directions.

The server sends what a bundle and an announcement tell one of our devices. The client sends a contribution.

There are two reasons for bytes. Flower moves every array of an ArrayRecord as a separate object with a header and a
request, which costs more than the prototypes themselves (docs/decisions/195). And the reader of
`protofleet.contract.wire.codec` checks the bytes that it reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from protofleet.contract.errors import UsageError, WireError
from protofleet.contract.methods import Method, Value
from protofleet.contract.methods import method as method_of
from protofleet.contract.wire.codec import MAX_MESSAGE_BYTES, decode, encode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution, Encoding, GlobalPart
from protofleet.contract.wire.messages import Message as OurMessage

__all__ = [
    "Reply",
    "Task",
    "arrays_of",
    "carried",
    "extractor_id",
    "travelled",
]

MAX_CLASSES = 1 << 16  # the class numbers that fit into a message
_PREFIX = "protofleet."  # of our keys; a ConfigRecord may hold others
_ANNOUNCEMENT, _STATE, _FLEET = f"{_PREFIX}announcement", f"{_PREFIX}state", f"{_PREFIX}fleet"
_CONTRIBUTION, _NAME = f"{_PREFIX}contribution", f"{_PREFIX}name"
_RECORD = "protofleet"


class _Fleet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a bundle's manifest that a round needs."""

    classes: int
    width: int
    hyper: dict[str, int | float | str]


@dataclass(frozen=True, eq=False)
class Task:
    """What the server asks of a client in one round.

    Attributes:
        announcement: the round, its method and its extractor.
        method: the announced method.
        classes, width: C and D.
        hyper: the method's resolved hyper-parameters.
        state: the result of the rounds before; empty before the first.
    """

    announcement: Announcement
    method: Method
    classes: int
    width: int
    hyper: Mapping[str, Value]
    state: GlobalState

    def write(self, record: ConfigRecord) -> None:
        """Write the task into a record, beside its other entries."""
        fleet = _Fleet(self.classes, self.width, dict(self.hyper))
        record[_ANNOUNCEMENT] = encode(self.announcement)
        record[_FLEET] = msgspec.json.encode(fleet)
        record.pop(_STATE, None)  # of the round before
        if self.state.version:  # an empty list has no type in Flower's messages
            record[_STATE] = _parts(self.state)

    @classmethod
    def read(cls, content: RecordDict) -> Task | None:
        """Read the task from a message's content; None where the message is not one of ours.

        Raises:
            WireError: the task is incomplete, or not as `write` writes it.
            MethodError: the method is not installed here, or does not have these hyper-parameters.
            UsageError: the method adds noise (`carried`).
        """
        record = next((entry for entry in content.config_records.values() if _ANNOUNCEMENT in entry), None)
        if record is None:
            return None
        announcement = _decoded(record[_ANNOUNCEMENT], Announcement)
        assert isinstance(announcement, Announcement)
        try:
            fleet = msgspec.json.decode(_bytes(record.get(_FLEET)), type=_Fleet)
        except msgspec.MsgspecError as error:
            raise WireError("the round's fleet", expected="classes, width and hyper-parameters", got=error) from None
        method = method_of(announcement.method)
        hyper = carried(method, fleet.hyper, fleet.classes, fleet.width)
        state = _joined(record[_STATE]) if _STATE in record else GlobalState(announcement.run, 0, 0)
        return cls(announcement, method, fleet.classes, fleet.width, hyper, state)


@dataclass(frozen=True, eq=False)
class Reply:
    """What a client answers.

    Attributes:
        name: the client's name, by which contributions are ordered; empty where it has only Flower's node id.
        contribution: the statistic.
    """

    name: str
    contribution: Contribution

    def content(self, encoding: Encoding) -> RecordDict:
        """The reply as the content of a message."""
        written = encode(self.contribution, encoding)
        return RecordDict({_RECORD: ConfigRecord({_CONTRIBUTION: written, _NAME: self.name})})

    @classmethod
    def read(cls, message: Message) -> Reply:
        """Read the reply from a message.

        Raises:
            WireError: the message has no contribution of ours.
        """
        record = message.content.config_records.get(_RECORD)
        if record is None or _CONTRIBUTION not in record:
            raise WireError(
                "a reply", expected="a contribution", got="none", hint="method_mod or bundle_mod in its ClientApp"
            )
        contribution, name = _decoded(record[_CONTRIBUTION], Contribution), record.get(_NAME)
        assert isinstance(contribution, Contribution)
        return cls(name if isinstance(name, str) else "", contribution)


def carried(method: Method, given: Mapping[str, object], classes: int, width: int) -> dict[str, Value]:
    """The resolved hyper-parameters of a method for rounds over Flower.

    Raises:
        UsageError: the method adds noise. A Flower client keeps no ledger of its releases, so no ε can be stated.
        MethodError: the method does not have these hyper-parameters, or they do not fit C classes and width D.
    """
    if not (1 <= classes <= MAX_CLASSES and width >= 1):
        raise UsageError("a fleet", expected=f"1 to {MAX_CLASSES} classes, 1 feature at least", got=(classes, width))
    hyper = method.resolve(given)
    method.check(hyper, classes, width)
    if method.mechanism(hyper) is not None:
        raise UsageError(
            f"{method.name} over Flower",
            expected="a method that adds no noise",
            got="one whose ε needs a ledger of all that has left the device",
            hint="a fleet of `protofleet client`",
        )
    return hyper


def extractor_id(extractor: str | ArrayRecord) -> bytes:
    """32 bytes that identify an extractor: a hash of its name, or of a model's arrays (names, types and bytes)."""
    digest = hashlib.sha256()
    if isinstance(extractor, str):
        digest.update(extractor.encode())
        return digest.digest()
    for name, array in sorted(extractor.items()):
        digest.update(repr((name, array.dtype, tuple(array.shape), array.stype, len(array.data))).encode())
        digest.update(array.data)
    return digest.digest()


def travelled(state: GlobalState) -> GlobalState:
    """The state as clients have it: rounded as on the wire."""
    return _joined(_parts(state)) if state.version else state


def arrays_of(state: GlobalState) -> ArrayRecord:
    """The state for Flower's users: for each kind its rows (K, W) float32, and the classes (K,) of the rows."""
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
