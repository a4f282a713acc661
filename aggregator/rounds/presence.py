"""Which devices are online, where there are no rounds: births and deaths only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from protofleet.aggregator.rounds.round_machine import MAX_DEVICES

__all__ = ["NoRounds", "Presence"]


@dataclass
class Presence:
    """By device, the instance of the process that said it was here."""

    _online: dict[str, bytes] = field(default_factory=dict)

    @property
    def online(self) -> int:
        """How many devices are online."""
        return len(self._online)

    def is_online(self, device: str) -> bool:
        return device in self._online

    def birth(self, device: str, instance: bytes) -> bool:
        """A device is online, as process `instance`. False when it was known to be, or there are too many."""
        if self._online.get(device) == instance or (device not in self._online and len(self._online) >= MAX_DEVICES):
            return False
        self._online[device] = instance
        return True

    def death(self, device: str, instance: bytes) -> bool:
        """A device's process ended. A late word about an older process of the same device changes nothing."""
        if self._online.get(device) != instance:
            return False
        del self._online[device]
        return True


@dataclass(frozen=True)
class NoRounds:
    """What `aggregator/server/server.py` asks in place of rounds: which devices are online, and when to look again.

    Attributes:
        due_in_s: seconds until something is due, at this time.
    """

    presence: Presence
    due_in_s: Callable[[float], float]
    contributions: frozenset[str] = frozenset()
    number: int = 0
    phase: str = "standing"
    awaited_count: int = 0
    stays: bool = True

    @property
    def online(self) -> int:
        return self.presence.online

    def is_online(self, device: str) -> bool:
        return self.presence.is_online(device)

    def take_lost(self) -> list[tuple[str, bytes]]:
        """Nobody is awaited."""
        return []
