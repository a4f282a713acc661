"""One process for each device id: when to announce a birth, and how to notice a second process. No I/O.

Two processes with one id would mix their contributions under one key. Each process has an `instance` of 8 random bytes.
It is in every birth and death on the device's own status topic. Each process reads this topic, too. The MQTT client ids
of two processes differ, so the broker lets both stay connected.

How a second process is found:

1. A process has seen its own birth on the topic. From then on, a birth of another instance means a second process.
2. The first process answers with a birth that names the other instance (`Rival`). The aggregator reads this, too.
3. A named process ends if it was second: it saw the other's birth before its own, or it has been there for less time.

No process ends without such an answer. So a recorded birth, or the birth of a dead process, ends nobody, and a process
that starts after a power cut runs at once.

Some brokers allow one session for each certificate. There the two processes disconnect each other, and each counts
these evictions (`contract/mqtt/eviction.py`). Again the newcomer stops, and the first process says who it was. If the
newcomer has a copy of the first process's state, it takes the first's death for that of an earlier process of its own.
Then it needs more evictions to be sure. The process that was there before waits for more evictions still.

When the birth is published again:

- A death of another instance came. It is the last will of a process that is gone, for example our own from before a
  power cut, which the broker found missing only now.
- A death in our own name came. The aggregator heard nothing of us through a whole deadline, and asks in this way
  whether we are there.
- Something else took the place of our birth. This is repaired now and then, unless our newest birth comes after it.

Where the device signs, only a status that its own key has signed is its birth (`trust.py`). A signed birth from a start
long ago, or with a lower number than our newest, was recorded by somebody and sent again. It counts as something that
took the place of our birth.
"""

from __future__ import annotations

from collections.abc import Callable

from protofleet.contract.errors import SecondProcessError
from protofleet.contract.mqtt.eviction import Eviction
from protofleet.contract.wire.messages import Rival, Status

__all__ = ["Presence"]

_LISTEN_S = 2.0
_MEND_EACH_S = 10.0
_AT_ONCE_S = 5.0  # between two starts of which none is the first
_PATIENT, _NEVER = 5, 1 << 30  # evictions in a row
_REMEMBERED = 64  # starts whose instances the journal knows


class Presence:
    """The birth of this process, and the watch for another.

    Args:
        device_id: for the error.
        instance: 8 bytes of this process.
        boot: how often the device has started.
        is_signed: whether births come here only if the device's own key has signed them.
        is_own: whether an instance was an earlier process of the same state directory.
    """

    def __init__(
        self,
        device_id: str,
        instance: bytes,
        boot: int = 0,
        *,
        is_own: Callable[[bytes], bool],
        is_signed: bool = False,
    ) -> None:
        self._device_id, self._instance, self._is_own = device_id, instance, is_own
        self._boot, self._is_signed = boot, is_signed
        self._mended_s, self._mends, self._answered_s = float("-inf"), False, float("-inf")
        self._issued = 0  # of our newest birth
        self._heard_self = False
        self._heard_self_s = 0.0
        self._before: bytes | None = None  # whose birth stood there before our own
        self._rival: Status | None = None  # whom we answer
        self._eviction = Eviction(settled=_PATIENT)
        self._by_our_own = Eviction(newcomer=_PATIENT - 1, settled=_NEVER)
        self._birth_due_s: float | None = None

    def connected(self, now_s: float) -> None:
        """A connection is up: the first birth is due at once, a later one after listening."""
        self._birth_due_s = now_s + (_LISTEN_S if self._heard_self else 0.0)
        self._eviction.connected(now_s)
        self._by_our_own.connected(now_s)

    def disconnected(self) -> None:
        """The connection is gone."""
        self._birth_due_s, self._mends = None, False

    def born(self, issued: int = 0) -> None:
        """The birth has been published on this connection.

        Args:
            issued: its number, where the device signs.
        """
        self._birth_due_s, self._mends, self._issued, self._rival = None, False, issued, None

    def rival(self, now_s: float) -> Rival | None:
        """Whom the next birth answers; None for nobody."""
        other = self._rival
        return None if other is None else Rival(other.instance, int(self._age_s(now_s)), other.boot, other.profile)

    def birth_due(self, now_s: float) -> bool:
        """Whether to publish a birth now."""
        return self._birth_due_s is not None and now_s >= self._birth_due_s

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until a birth is due; None when none is."""
        return None if self._birth_due_s is None else max(0.0, self._birth_due_s - now_s)

    def overwritten(self, now_s: float) -> None:
        """Something else is retained where our birth was: publish the birth again, but only now and then."""
        if self._heard_self and self._birth_due_s is None:
            self._birth_due_s = max(now_s + _LISTEN_S, self._mended_s + _MEND_EACH_S)
            self._mended_s, self._mends = self._birth_due_s, True

    def heard(self, status: Status, now_s: float) -> None:
        """A status on this device's own topic.

        Raises:
            SecondProcessError: another process was there first under this device's id.
        """
        strange = status.instance != self._instance and not self._is_own(status.instance)
        throws_out = self._eviction.heard(strangers_death=strange and not status.online)
        self._by_our_own.heard(strangers_death=status.instance != self._instance and not (strange or status.online))
        if self._eviction.is_sure or self._by_our_own.is_sure:
            raise self._second("one that takes this one's session at the broker, with the same certificate", status)
        names_us = status.rival is not None and status.rival.instance == self._instance
        if names_us and self._is_second(status, now_s):
            raise self._second("one that was there before", status)
        if status.instance == self._instance:
            self._heard_ourselves(status, now_s)
        elif self._heard_self and not status.online:
            self._rival = status if throws_out else self._rival
            self._answer(now_s)
        elif not names_us and self._is_recorded(status):
            self.overwritten(now_s)
        elif self._heard_self and (strange or names_us):
            self._rival = status
            self._answer(now_s)
        elif not self._heard_self and status.online:
            self._before = status.instance

    def _heard_ourselves(self, status: Status, now_s: float) -> None:
        if not self._heard_self:
            self._heard_self, self._heard_self_s = True, now_s
        if status.online and status.issued < self._issued:
            self.overwritten(now_s)
        elif status.online and self._mends:  # it came after what had taken its place
            self._birth_due_s, self._mends = None, False
        elif not status.online:  # our own last will, or the aggregator that asks whether we are still there
            self._answer(now_s)
        elif self._birth_due_s is not None:  # what is retained of us
            self._birth_due_s = now_s

    def _is_recorded(self, status: Status) -> bool:
        """Whether it is of a start long ago, sent again by somebody who has recorded it."""
        return self._is_signed and (status.boot <= self._boot - _REMEMBERED or self._is_own(status.instance))

    def _age_s(self, now_s: float) -> float:
        """For how long we have been here."""
        return max(0.0, now_s - self._heard_self_s) if self._heard_self else 0.0

    def _is_second(self, other: Status, now_s: float) -> bool:
        """Whether the process that names us came first.

        Of two that came at the same time, the one with the lower instance ends. So one stays, whatever the delays of
        the messages are.
        """
        assert other.rival is not None
        if not self._heard_self or other.instance == self._before:
            return True
        lead_s = self._age_s(now_s) - other.rival.age_s
        return lead_s < -_AT_ONCE_S or (lead_s <= _AT_ONCE_S and self._instance < other.instance)

    def _answer(self, now_s: float) -> None:
        """Publish a birth at once, but not for each of many that ask: a signed birth is a write on the disk."""
        due_s = max(now_s, self._answered_s + _MEND_EACH_S)
        if self._birth_due_s is None or due_s < self._birth_due_s:
            self._birth_due_s, self._answered_s = due_s, due_s
            self._mends = False

    def _second(self, got: str, other: Status) -> SecondProcessError:
        board = f" on a board {other.profile}" if other.profile else ""
        return SecondProcessError(
            f"another process runs as device {self._device_id}",
            expected="one process for each id",
            got=f"{got}: instance {other.instance.hex()}, start {other.boot}{board}",
            hint="an --id, a --state and a certificate of its own for each device",
        )
