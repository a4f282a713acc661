"""Enrolment in the store: each device's public key, the open invitations, and the senders that were turned away.

No token is stored: an invitation holds the public key that is made of the token. With that key the store can check that
a device has the token, but cannot make one. An invitation is used once: the transaction that enrols the device deletes
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protofleet.aggregator.database import Connection, Database, upsert
from protofleet.contract.files.sqlite import typed
from protofleet.contract.wire.envelopes import KEY_BYTES
from protofleet.contract.wire.topics import AGGREGATOR

__all__ = ["EnrolmentTables", "Intruder", "intruders_in", "keys_in"]

_BIRTH = "birth "  # and a topic, in `meta`
_PUT_KEY = upsert("device_key", "device", "key", "since")
MAX_INTRUDERS = 512  # rows, the newest, of known names before others: anyone may invent some


@dataclass(frozen=True)
class Intruder:
    """Messages under a device's name that were turned away for one cause.

    Attributes:
        cause: of `protofleet.aggregator.enrolment.gate.INTRUSIONS`.
        reason: of the newest, in words.
        messages: how many.
        first_at, last_at: seconds since the epoch.
    """

    device: str
    cause: str
    reason: str
    messages: int
    first_at: float
    last_at: float


class EnrolmentTables:
    """These tables of an open store."""

    def __init__(self, file: Database) -> None:
        self._file = file
        self._db, self._disk, self._transaction = file.connection, file.reading, file.transaction

    def keys(self) -> dict[str, bytes | None]:
        """The public key of each device that was ever enrolled; None where it was revoked."""
        with self._disk():
            return keys_in(self._db)

    def invitation(self, device: str) -> tuple[bytes, float] | None:
        """The key of a device's invitation, and until when it holds; None where none is out."""
        with self._disk():
            row = self._db.execute("SELECT key, expires FROM invitation WHERE device = ?", (device,)).fetchone()
            return None if row is None else (_key(row[0]), float(row[1]))

    def invite(self, device: str, key: bytes, expires: float) -> None:
        """Record an invitation, in place of an earlier one of this device."""
        with self._transaction() as db:
            db.execute(upsert("invitation", "device", "key", "expires"), (device, key, expires))

    def enrol(self, device: str, key: bytes, at: float, *, by_token: bool = False) -> bool:
        """Record the device's key. Its invitation is used up, and its turned-away messages are forgotten.

        Args:
            by_token: whether the device enrolled itself; this is then recorded among the orders, too.

        Returns:
            False when another process has used the invitation meanwhile; then nothing has changed.
        """
        with self._transaction() as db:
            used = db.execute("DELETE FROM invitation WHERE device = ?", (device,)).rowcount == 1
            if by_token and not used:
                return False
            if by_token:
                db.execute(
                    "INSERT INTO fleet_order (what, device, who, given_at, detail, done_at, outcome, version_before,"
                    " version_after) VALUES ('enrol', ?, 'the device, by its token', ?, ?, ?, 'done', 0, 0)",
                    (device, at, key.hex(), at),
                )
            db.execute(_PUT_KEY, (device, key, at))
            _unmark(db, device)
            db.execute("DELETE FROM intruder WHERE device = ?", (device,))
            self._file.changed()
        return True

    def revoke(self, device: str, at: float) -> None:
        """Nothing of this device holds any more, until it is enrolled with another key."""
        with self._transaction() as db:
            db.execute(_PUT_KEY, (device, None, at))
            self._file.changed()
            _unmark(db, device)
            db.execute("DELETE FROM invitation WHERE device = ?", (device,))

    def intruders(self) -> list[Intruder]:
        """The senders that were turned away, the newest first."""
        with self._disk():
            return intruders_in(self._db)

    def forget(self, device: str, cause: str) -> None:
        """Delete the notes of a device for one cause."""
        with self._transaction() as db:
            db.execute("DELETE FROM intruder WHERE device = ? AND cause = ?", (device, cause))

    def marks(self) -> dict[str, int]:
        """The number of the newest birth that came on a status topic, by topic."""
        with self._disk():
            rows = self._db.execute("SELECT name, value FROM meta WHERE name LIKE 'birth %'").fetchall()
        return {str(name).removeprefix(_BIRTH): int(memoryview(value).tobytes()) for name, value in rows}

    def keep(self, intruders: Iterable[Intruder], marks: Mapping[str, int]) -> None:
        """Make notes and numbers of births durable; a note replaces an earlier one of the same device and cause."""
        rows = [(i.device, i.cause, i.reason, i.messages, i.first_at, i.last_at) for i in intruders]
        with self._transaction() as db:
            db.executemany(upsert("intruder", "device, cause", "reason", "messages", "first_at", "last_at"), rows)
            db.execute(
                "DELETE FROM intruder WHERE (device, cause) NOT IN (SELECT device, cause FROM intruder ORDER BY"
                " device = ? OR device IN (SELECT device FROM device_key) DESC, last_at DESC LIMIT ?)",
                (AGGREGATOR, MAX_INTRUDERS),
            )
            numbers = [(_BIRTH + topic, str(number).encode()) for topic, number in marks.items()]
            db.executemany(upsert("meta", "name", "value"), numbers)


def _unmark(db: Connection, device: str) -> None:
    """Another key has numbers of its own; ids have no slash."""
    end = f"/{device}"
    db.execute("DELETE FROM meta WHERE name LIKE 'birth %' AND substr(name, length(name) - ?) = ?", (len(end) - 1, end))


def keys_in(db: Connection) -> dict[str, bytes | None]:
    """By device, from an open store; None for a key that was revoked."""
    rows = db.execute("SELECT device, key FROM device_key").fetchall()
    return {str(device): None if key is None else _key(key) for device, key in rows}


def _key(value: object) -> bytes:
    """A public key.

    Raises:
        TypeError, ValueError: it is none.
    """
    (key,) = typed((value,), bytes)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{len(key)} bytes where a key of {KEY_BYTES} belongs")
    return bytes(key)


def intruders_in(db: Connection) -> list[Intruder]:
    """From an open store, the newest first."""
    rows = db.execute(
        "SELECT device, cause, reason, messages, first_at, last_at FROM intruder ORDER BY last_at DESC, device, cause"
    ).fetchall()
    return [Intruder(str(d), str(c), str(r), int(n), float(first), float(last)) for d, c, r, n, first, last in rows]
