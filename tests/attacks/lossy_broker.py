"""A broker between cores, without sockets: what MQTT 5 at QoS 1 with clean sessions may do to messages, and no more.

    link.publish ──▶ on its way up ──`take`──▶ retained, and on its way down to who listens ──`deliver`──▶ link.receive

On each topic messages keep their order; between topics any order is possible. A message is lost with the connection
that it was on its way on, or where a queue overflows (`drop`, on the topics of contributions and receipts: who misses
its own announcement or birth leaves such a broker, see `contract/mqtt/connection.py`). It may come twice. A broker
that is killed may forget what it retained. The will is published when a connection breaks, or is lost with the broker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from protofleet.contract.mqtt.link import Will
from protofleet.contract.mqtt.link_actions import Connected, Disconnected, Event, Received

__all__ = ["Killed", "LossyBroker", "ModelLink"]

LIMIT_BYTES = 1 << 20
_LOSSY = ("up", "down")


class Killed(BaseException):
    """kill -9 of the process that uses a link, just before the link does what it was asked for."""


class ModelLink:
    """What `protofleet.contract.mqtt.link.Link` is to its owner, over a `LossyBroker`.

    Attributes:
        number: of the connection; 0 before the first.
        up: whether there is one.
        dies_after: how many publications and acknowledgements its owner lives for; None for ever.
    """

    def __init__(
        self,
        broker: LossyBroker,
        client: str,
        subscriptions: Sequence[str],
        will: Will | Callable[[], Will] | None = None,
    ) -> None:
        self.broker, self.client, self.subscriptions, self.made_will = broker, client, tuple(subscriptions), will
        self.will: Will | None = None  # of the connection
        self.number, self.up, self.dies_after = 0, False, None
        self.outgoing: dict[str, deque[tuple[bytes, bool]]] = {}
        self.coming: dict[str, deque[tuple[bytes, bool]]] = {}
        self.events: deque[Event] = deque()
        self._mid = 0
        self.dropped, self.still_s = 0, 0.0
        broker.links.append(self)

    def open(self) -> ModelLink:
        return self

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> int:
        self._live()
        if not self.up:
            return 0
        self.outgoing.setdefault(topic, deque()).append((payload, retain))
        return self.number

    def acknowledge(self, received: Received) -> None:
        self._live()

    def wake(self) -> None:
        """Nothing here ever waits."""

    def receive(self, timeout_s: float) -> Event | None:
        return self.events.popleft() if self.events else None

    def close(self, timeout_s: float = 0.0) -> None:
        """Without a goodbye, as everything here ends."""

    @property
    def idle(self) -> bool:
        return not any(self.outgoing.values())

    @property
    def outstanding(self) -> int:
        return sum(map(len, self.outgoing.values()))

    def _live(self) -> None:
        if self.dies_after is not None:
            if self.dies_after == 0:
                raise Killed
            self.dies_after -= 1

    def arrive(self, topic: str, payload: bytes, retained: bool) -> None:
        """The network hands the owner a message."""
        self._mid = self._mid % 65_535 + 1
        self.events.append(Received(topic, payload, retained, self._mid, self.number))


class LossyBroker:
    """Attributes:
    links: of the processes that run.
    retained: by topic.
    """

    def __init__(self) -> None:
        self.links: list[ModelLink] = []
        self.retained: dict[str, bytes] = {}

    def connect(self, link: ModelLink) -> None:
        """A connection, and what is retained for it."""
        link.number, link.up = link.number + 1, True
        link.will = link.made_will() if callable(link.made_will) else link.made_will
        link.outgoing, link.coming = {}, {}
        link.events.append(Connected(LIMIT_BYTES))
        for topic, payload in self.retained.items():
            if _listens(link, topic):
                link.coming.setdefault(topic, deque()).append((payload, True))

    def cut(self, link: ModelLink, *, will: bool = True) -> None:
        """The connection breaks; all that was on its way on it is lost."""
        if not link.up:
            return
        link.up = False
        link.outgoing, link.coming = {}, {}
        link.events.append(Disconnected("cut", 0.5))
        if will and link.will is not None:
            self._publish(*link.will, True)

    def gone(self, link: ModelLink, *, will: bool) -> None:
        """The process of a link was killed."""
        self.cut(link, will=will)
        self.links.remove(link)

    def killed(self, *, forgets: bool) -> None:
        """kill -9 of the broker: no wills; what it retained is there again, or not."""
        for link in self.links:
            self.cut(link, will=False)
        if forgets:
            self.retained.clear()

    def take(self, link: ModelLink, topic: str, *, drop: bool = False) -> None:
        """The first message of a link on a topic reaches the broker."""
        payload, retain = link.outgoing[topic].popleft()
        if not link.outgoing[topic]:
            del link.outgoing[topic]
        if not (drop and topic.split("/")[3] in _LOSSY):
            self._publish(topic, payload, retain)

    def deliver(self, link: ModelLink, topic: str, *, twice: bool = False, drop: bool = False) -> None:
        """The first message for a link on a topic reaches it."""
        payload, retained = link.coming[topic][0] if twice else link.coming[topic].popleft()
        if not link.coming[topic]:
            del link.coming[topic]
        if not (drop and topic.split("/")[3] in _LOSSY):
            link.arrive(topic, payload, retained)

    def flow(self) -> None:
        """Everything that is on its way arrives."""
        for link in list(self.links):
            while link.outgoing:
                self.take(link, next(iter(link.outgoing)))
        for link in self.links:
            while link.coming:
                self.deliver(link, next(iter(link.coming)))

    def _publish(self, topic: str, payload: bytes, retain: bool) -> None:
        if retain and payload:
            self.retained[topic] = payload
        elif retain:
            self.retained.pop(topic, None)
        for link in self.links:
            if link.up and _listens(link, topic):
                link.coming.setdefault(topic, deque()).append((payload, False))


def _listens(link: ModelLink, topic: str) -> bool:
    parts = topic.split("/")
    for each in link.subscriptions:
        wanted = each.split("/")
        if len(wanted) == len(parts) and all(w in ("+", p) for w, p in zip(wanted, parts, strict=True)):
            return True
    return False
