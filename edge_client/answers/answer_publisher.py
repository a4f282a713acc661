"""Lines to a topic of a broker that may come and go: each line at least once, in order, and only so many wait.

- A line is handed to the broker at QoS 1, and kept until the broker has acknowledged it. A line that a lost connection
  left without an acknowledgement is sent again.
- When more lines wait than there is room for, the oldest are dropped, and one log line says so.
- The network has threads of its own: `put` never waits for it.

The topic is the user's. It may not be one of the fleets' (below `pf/`), because only their messages travel there. The
client id is drawn anew for each publisher, so that it is never equal to a device's.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass

from protofleet.contract.console.logs import Changes
from protofleet.contract.errors import LinkError, UsageError
from protofleet.contract.mqtt.address import Address, topic_of
from protofleet.contract.mqtt.link import Connected, Disconnected, Failed, Link, Noticed
from protofleet.contract.printable import undisclosed
from protofleet.contract.wire import topics

__all__ = ["LinePublisher", "Target"]

logger = logging.getLogger(__name__)

_FLYING = 64  # lines that wait for their acknowledgement
_LOOK_S, _BUSY_S = 0.5, 0.05
_OWN = topics.PREFIX.split("/")[0]
_EXPECTED = "mqtt[s]://BROKER/TOPIC, with %3F, %23 and %40 for ? # @"


@dataclass(frozen=True)
class Target:
    """Where lines go: `mqtt://[user[:password]@]host[:port]/TOPIC`, or `mqtts://…`."""

    address: Address
    topic: str

    @classmethod
    def parse(
        cls, url: str, *, ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
    ) -> Target:
        """The broker and topic that `url` names; files as of `Address.parse`.

        Raises:
            UsageError: it names none, a topic of a fleet's, or one that cannot be published to.
        """
        found = topic_of(url)
        if found is None:
            hint = "mqtt://127.0.0.1/kitchen/answers"
            raise UsageError("--publish", expected=_EXPECTED, got=undisclosed(url), hint=hint)
        broker, topic = found
        if topic.split("/")[0] == _OWN:
            raise UsageError("--publish", expected=f"a topic that is no fleet's, not below {_OWN}/", got=topic)
        if set(topic) & {"+", "#", "\0"} or topic.startswith("$") or len(topic.encode()) > 65_535:
            raise UsageError("--publish", expected="a topic without + and #, not beginning with $", got=topic)
        return cls(Address.parse(broker, ca_file=ca_file, cert_file=cert_file, key_file=key_file), topic)

    def __str__(self) -> str:
        return f"{self.topic} at {self.address}"


class LinePublisher:
    """Publishes lines; may be used from several threads.

    Args:
        most: how many may wait, those included that the broker has not acknowledged.

    Attributes:
        dropped: how many lines were lost, since too many waited.
    """

    def __init__(self, target: Target, *, most: int = 1_000) -> None:
        self.target, self._most = target, max(most, _FLYING)
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._flying: deque[bytes] = deque()
        self._connection, self._delivered = 0, 0  # on which `_flying` went, and how many before these have arrived
        self._closing, self._warned_full, self._changes = False, False, Changes(logger)
        self._error: LinkError | None = None
        self.dropped = 0
        client_id = f"pf-answers-{os.urandom(6).hex()}"  # 23 letters, which every broker takes
        self._link = Link(target.address, client_id, subscriptions=(), content_type="application/json").open()
        self._thread = threading.Thread(target=self._follow, name="publisher", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Have a line published, now or once the broker is there.

        Raises:
            LinkError: the broker has refused us for good.
        """
        if self._error is not None:
            raise self._error
        with self._lock:
            self._waiting.append(line)
            if len(self._waiting) + len(self._flying) > self._most:
                self._waiting.popleft()
                self.dropped += 1
                full, self._warned_full = not self._warned_full, True
            else:
                full = False
            self._push()
        if full:
            logger.warning(f"{self._most:,} answers wait for {self.target}: the oldest are dropped")

    def close(self, patience_s: float = 10.0) -> int:
        """Wait until all is acknowledged, at most so long, and end; gives how many lines were not."""
        deadline = time.monotonic() + patience_s
        while self._error is None and (left := self._left()) and time.monotonic() < deadline:
            time.sleep(_BUSY_S / 2)
        left = self._left()
        self._closing = True
        self._thread.join(timeout=2 * _LOOK_S)
        self._link.close(timeout_s=1.0)
        return left

    def _left(self) -> int:
        with self._lock:
            self._push()
            return len(self._waiting) + len(self._flying)

    def _push(self) -> None:
        """Let go of what has arrived, take back what a lost connection had, and hand over what may follow. Under the
        lock."""
        connection, delivered = self._link.delivered
        self._on(connection)
        for _ in range(delivered - self._delivered):
            self._flying.popleft()
        self._delivered = delivered
        while self._waiting and len(self._flying) < _FLYING:
            try:
                number = self._link.publish(self.target.topic, self._waiting[0])
            except LinkError as error:  # larger than the broker takes
                self._waiting.popleft()
                self.dropped += 1
                self._changes.say(f"an answer is dropped: {error}", level=logging.WARNING)
                continue
            if not number:
                return
            line = self._waiting.popleft()
            self._on(number)
            self._flying.append(line)

    def _on(self, connection: int) -> None:
        """What is on its way is on this connection; what was on another goes again."""
        if connection != self._connection:
            self._waiting.extendleft(reversed(self._flying))
            self._flying.clear()
            self._connection, self._delivered = connection, 0

    def _follow(self) -> None:
        """The thread that hears how the connection goes."""
        while not self._closing:
            event = self._link.receive(_BUSY_S if self._flying else _LOOK_S)
            if isinstance(event, Connected):
                self._warned_full = False
                self._changes.say(f"publishing on {self.target}")
            elif isinstance(event, Disconnected):
                self._changes.say(
                    f"no connection to {self.target.address} ({event.reason}): answers wait", level=logging.WARNING
                )
            elif isinstance(event, Noticed):
                self._changes.say(event.line)
            elif isinstance(event, Failed):
                self._error = event.error
                self._changes.say(str(event.error))
                return
            if self._flying or event is not None:
                with self._lock:
                    self._push()
