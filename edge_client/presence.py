"""One process for each device id: when to announce a birth, and how to notice a second process. No I/O.

Two processes with one id would mix their contributions under one key. They tell each other apart by `instance`, 8
random bytes in the MQTT client id, so that neither throws the other out, and in every birth and death on the device's
own status topic, which each also reads. Once a process has seen its own birth there, a birth of an instance that is
neither its own nor that of an earlier process of its state directory is a second process, and the one that notices
stops. That is the older one: it waits after a reconnection for what the broker retains before it says anything, so that
the newer one, which spoke last, never sees an answer. Where the broker has one session for each certificate, they throw
each other out instead, and know by that (`contract/eviction.py`); there the newcomer stops.

A death of another instance is the last will of a process that is gone, such as our own before a power cut, which the
broker has only now found missing: we say again that we are here. So we do to a death in our own name: the aggregator,
which has heard nothing of us through a whole deadline, asks in this way whether we are there.

Where the device signs, only what its own key has signed is a birth of it (`trusted.py`). One of a start long ago, or
with a lower number than our newest, was recorded by somebody and is sent again: then we say once more that we are here,
as we do, now and then, when something else took the place of our birth; unless our newest comes after it.
"""

from __future__ import annotations

from collections.abc import Callable

from contract.errors import LinkError
from contract.eviction import Eviction
from contract.messages import Status

__all__ = ["Presence"]

_LISTEN_S = 2.0
_MEND_EACH_S = 10.0
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
        self._seen_self = False
        self._eviction = Eviction()
        self._birth_due_s: float | None = None

    def connected(self, now_s: float) -> None:
        """A connection is up: the first birth is due at once, a later one after listening."""
        self._birth_due_s = now_s + (_LISTEN_S if self._seen_self else 0.0)
        self._eviction.connected(now_s)

    def disconnected(self) -> None:
        """The connection is gone."""
        self._birth_due_s, self._mends = None, False

    def born(self, issued: int = 0) -> None:
        """The birth has been published on this connection.

        Args:
            issued: its number, where the device signs.
        """
        self._birth_due_s, self._mends, self._issued = None, False, issued

    def birth_due(self, now_s: float) -> bool:
        """Whether to publish a birth now."""
        return self._birth_due_s is not None and now_s >= self._birth_due_s

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until a birth is due; None when none is."""
        return None if self._birth_due_s is None else max(0.0, self._birth_due_s - now_s)

    def overwritten(self, now_s: float) -> None:
        """Something else stands where our birth stood: say again that we are here, now and then."""
        if self._seen_self and self._birth_due_s is None:
            self._birth_due_s = max(now_s + _LISTEN_S, self._mended_s + _MEND_EACH_S)
            self._mended_s, self._mends = self._birth_due_s, True

    def heard(self, status: Status, now_s: float) -> None:
        """A status on this device's own topic.

        Raises:
            LinkError: another process runs under this device's id.
        """
        strange = status.instance != self._instance and not self._is_own(status.instance)
        self._eviction.heard(strangers_death=strange and not status.online)
        if self._eviction.is_sure:
            raise self._another("one that takes this one's session at the broker, with the same certificate")
        if status.instance == self._instance:
            self._seen_self = True
            if status.online and status.issued < self._issued:
                self.overwritten(now_s)
            elif status.online and self._mends:  # it came after what had taken its place
                self._birth_due_s, self._mends = None, False
            elif not status.online:  # our own last will, or the aggregator that asks whether we are still there
                self._answer(now_s)
            elif self._birth_due_s is not None:  # what is retained of us
                self._birth_due_s = now_s
        elif self._seen_self and not status.online:
            self._answer(now_s)
        elif self._is_signed and (status.boot <= self._boot - _REMEMBERED or self._is_own(status.instance)):
            self.overwritten(now_s)
        elif self._seen_self and strange:
            raise self._another("a second one")

    def _answer(self, now_s: float) -> None:
        """Say that we are here: at once, but not for each of many that ask: a birth that is signed is a write on the
        disk."""
        due_s = max(now_s, self._answered_s + _MEND_EACH_S)
        if self._birth_due_s is None or due_s < self._birth_due_s:
            self._birth_due_s, self._answered_s = due_s, due_s
            self._mends = False

    def _another(self, got: str) -> LinkError:
        return LinkError(
            f"another process runs as device {self._device_id}",
            expected="one process for each id",
            got=got,
            hint="an --id, and a certificate, of its own for each device",
        )
