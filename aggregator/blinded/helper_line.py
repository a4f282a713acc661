"""The aggregator's line to the helper: which set it asks for, how often, and which answers count.

A set is asked for when it is made, when a connection is made, and again until a whole answer is here, each time after
twice as long. The helper signs its answers; anything else on its topic is ignored.
"""

from __future__ import annotations

from collections.abc import Callable

from protofleet.aggregator.blinded.blinded_rounds import BlindedRounds
from protofleet.contract.errors import WireError
from protofleet.contract.identity.signatures import Keyring
from protofleet.contract.mqtt.link import Link
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import Signed
from protofleet.contract.wire.helper_messages import Opened

__all__ = ["HelperLine"]

_FIRST_S, _LONGEST_S = 10.0, 300.0
_AGAIN_S = 1.0
_LARGEST_BYTES = 65_536  # of what is asked: a helper behind a thin line is asked in small messages, too


class HelperLine:
    """Of one fleet.

    Args:
        seal: signs what is asked, where this aggregator signs.
        waits: is told how many devices the sum is over for which the helper was asked in vain.
    """

    def __init__(
        self,
        rounds: BlindedRounds,
        link: Link,
        fleet: str,
        *,
        seal: Callable[[str, bytes], bytes] = lambda topic, payload: payload,
        waits: Callable[[int, int], None] = lambda round, devices: None,
    ) -> None:
        self._rounds, self._link, self._seal, self._waits = rounds, link, seal, waits
        self._ask, self._answer = topics.helper_ask(fleet), topics.helper_answer(fleet)
        self._ring = Keyring([rounds.key.sign])
        self._digest, self._due_s, self._wait_s = b"", 0.0, _FIRST_S

    def hear(self, payload: bytes) -> bool:
        """A message on the helper's topic; False where it is not the helper's."""
        try:
            message = decode(payload)
            if isinstance(message, Signed):
                message = decode(self._ring.payload(message, self._answer))
                if isinstance(message, Opened):
                    self._rounds.hear(message)
                    return True
        except WireError:
            pass
        return False

    def connected(self) -> None:
        """A connection is made: what was asked before may be lost."""
        self._digest = b""

    def wait_s(self, now: float) -> float | None:
        """Seconds until the helper is to be asked; None when it is not."""
        pending = self._rounds.asked
        if pending is None:
            return None
        return 0.0 if pending.digest != self._digest else max(0.0, self._due_s - now)

    def turn(self, now: float, limit_bytes: int) -> None:
        """Ask, if it is time."""
        pending = self._rounds.asked
        if pending is None or self.wait_s(now):
            return
        if pending.digest != self._digest:
            self._digest, self._wait_s = pending.digest, _FIRST_S
        else:
            self._waits(pending.round, len(pending.devices))
            self._wait_s = min(2.0 * self._wait_s, _LONGEST_S)
        self._due_s = now + self._wait_s
        for part in self._rounds.asks(min(limit_bytes, _LARGEST_BYTES)):
            if not self._link.publish(self._ask, self._seal(self._ask, encode(part))):
                self._due_s = now + _AGAIN_S  # no connection; the next one asks at once
                return
