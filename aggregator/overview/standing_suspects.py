"""Where sums stand, devices whose class means contradict the others': found in the store, beside its aggregator.

Standing sums are exactly what all devices sent, so no device is left out of them. An operator can forget a device that
is believed to lie; then the head is as if that device had never been there. Judging reads the standing contribution of
every device a few times, and writes nothing. A gateway's sum is in no comparison: its devices are compared on its site.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from protofleet.aggregator.database import Connection, stream_rows
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.screening.contradictions import Contradicted, contradicted
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.messages import Contribution

__all__ = ["Compared", "mark_of_sums", "standing_suspects", "sums_stand"]


def sums_stand(db: Connection) -> bool:
    """Whether a store is one of sums that stand."""
    return db.execute("SELECT 1 FROM meta WHERE name = 'standing'").fetchone() is not None


def standing_suspects(db: Connection, vouched: Collection[str] = ()) -> tuple[int, list[Contradicted]]:
    """How many devices' sums are compared, and which are contradicted, in a store that is read beside its aggregator.

    Args:
        vouched: the names of devices that do not lie.

    Raises:
        UsageError: no sums stand there.
        ValueError: the store holds something that no aggregator wrote.
    """
    row = db.execute("SELECT value FROM meta WHERE name = 'standing'").fetchone()
    if row is None:
        raise UsageError(
            "this store", expected="standing sums", got="one of rounds, or a new one", hint="protofleet fleet list"
        )
    kind = method(row[0] if isinstance(row[0], str) else bytes(row[0]).decode()).statistic
    devices, classes, width = list[str](), 1, 1
    for device, message in _messages(db):
        devices.append(device)
        classes = max(classes, 1 + int(message.body.classes.max(initial=0)))
        width = max(width, message.body.rows.shape[1])

    def source() -> Iterator[Statistic]:
        for _, message in _messages(db):
            yield message.statistic(kind, classes, width)

    return len(devices), contradicted(source, devices, vouched)


def _messages(db: Connection) -> Iterator[tuple[str, Contribution]]:
    """What stands of devices, not of gateways, ordered by device, one at a time."""
    for device, payload in stream_rows(
        db, "SELECT device, payload FROM standing WHERE payload IS NOT NULL ORDER BY device"
    ):
        message = held_by(payload)
        if not message.devices:
            yield str(device), message


@dataclass(frozen=True)
class Compared:
    """What comparing the standing sums of a store has found.

    Attributes:
        at: when they were read, seconds since the epoch.
        devices: how many were compared. Fewer than three say nothing of each other.
        suspects: who contradicts the others; the accused first.
    """

    at: float
    devices: int
    suspects: Sequence[Contradicted]

    @property
    def accused(self) -> dict[str, str]:
        """Who is contradicted by more devices than may lie, and the reason in words."""
        return {suspect.device: suspect.words() for suspect in self.suspects if suspect.accused}


def mark_of_sums(db: Connection) -> object:
    """Another value once other sums stand; None where none do."""
    if not sums_stand(db):
        return None
    # the moment tells a device that took the place of another one of the same generation
    (mark,) = db.execute(
        "SELECT count(*), sum(generation), max(received_at) FROM standing WHERE payload IS NOT NULL"
    ).fetchall()
    return tuple(mark)
