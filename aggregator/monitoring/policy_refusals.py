"""The releases that the policies of devices' owners refuse: the newest text of each device, for an operator.

A device reports it in its status, under `policy`, among the versions: `round 12 (ffc): method ffc`. The text has at
most 64 characters, and does not depend on any sample. After the device has released something again, it reports no
such text.
"""

from __future__ import annotations

from collections.abc import Mapping

from protofleet.aggregator.database import Connection, Database, upsert
from protofleet.aggregator.monitoring.events import PolicyRefused
from protofleet.aggregator.rounds.round_machine import MAX_DEVICES

__all__ = ["PolicyWords", "policy_words_in"]

_NAME = "policy"  # among the versions of a status


class PolicyWords:
    """This table of an open store."""

    def __init__(self, file: Database) -> None:
        self._disk, self._transaction = file.guard, file.transaction
        with self._disk():
            self._words = dict(policy_words_in(file.connection))
        self._heard: dict[str, str] = {}

    def hear(self, device: str, versions: Mapping[str, str]) -> None:
        """What a status says, which is kept with the next `commit_heard`; a last will says nothing."""
        if not versions:
            return
        word = versions.get(_NAME, "")
        has_room = device in self._words or len(self._words) + len(self._heard) < MAX_DEVICES
        if word != self._words.get(device, "") and has_room:
            self._heard[device] = word
        else:
            self._heard.pop(device, None)

    def commit_heard(self, at: float) -> list[PolicyRefused]:
        """Make durable what was heard, and give what is new of it.

        Args:
            at: seconds since the epoch.

        Raises:
            StoreError: when the disk refuses.
        """
        heard, self._heard = self._heard, {}
        if not heard:
            return []
        with self._transaction() as db:
            cleared = [(device,) for device, word in heard.items() if not word]
            db.executemany("DELETE FROM policy_word WHERE device = ?", cleared)
            newer = [(device, word, at) for device, word in heard.items() if word]
            db.executemany(upsert("policy_word", "device", "word", "told_at"), newer)
        self._words = {device: word for device, word in (self._words | heard).items() if word}
        return [PolicyRefused(device, word) for device, word, _ in newer]

    def forget(self, device: str) -> None:
        """Its row was removed."""
        self._words.pop(device, None)
        self._heard.pop(device, None)


def policy_words_in(db: Connection) -> Mapping[str, str]:
    """The newest word of each device of a store that has one."""
    rows = db.execute("SELECT device, word FROM policy_word").fetchall()
    return {device: word if isinstance(word, str) else repr(word) for device, word in rows}
