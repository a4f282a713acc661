"""Which devices are refused, and why, in the store."""

from __future__ import annotations

from protofleet.aggregator.database import Connection, Database, upsert

__all__ = ["RefusedDevices", "refuse_device"]


class RefusedDevices:
    """The devices that an open store refuses."""

    def __init__(self, file: Database) -> None:
        self._file = file
        self._db, self._disk, self._transaction = file.connection, file.reading, file.transaction

    def reasons(self) -> dict[str, str]:
        """Why, by device."""
        with self._disk():
            return dict(self._db.execute("SELECT device, reason FROM refused").fetchall())

    def refuse(self, device: str, at: float, reason: str) -> None:
        with self._transaction() as db:
            refuse_device(db, device, at, reason)
            self._file.changed()

    def admit(self, device: str) -> bool:
        """Whether it was refused until now."""
        with self._transaction() as db:
            self._file.changed()
            return db.execute("DELETE FROM refused WHERE device = ?", (device,)).rowcount == 1


def refuse_device(db: Connection, device: str, at: float, reason: str) -> None:
    """Part of the transaction from which on a device is refused."""
    db.execute(upsert("refused", "device", "since", "reason"), (device, at, reason))
