"""`mqtt://[user:password@]BROKER/TOPIC`: pictures that a program publishes.

Frigate does, on `frigate/DOOR/person/snapshot`.

A thread takes each as it comes, and the newest waits for its turn. One that the broker has kept (a retained message) is
left: nobody knows when it was taken. One of more than 16 MiB is not asked for, and a broker that
sends it is left.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator

from protofleet.contract.errors import UsageError
from protofleet.contract.mqtt.address import Address, topic_of
from protofleet.contract.mqtt.link import Disconnected, Failed, Link, Received
from protofleet.contract.printable import undisclosed
from protofleet.edge_client.cameras.camera import LARGEST_BYTES, Newest, Pace, Picture

__all__ = ["MqttSnapshots"]

_FILTER = re.compile(r"(?:(?:\+|[^+#\0]*)/)*(?:\+|#|[^+#\0]*)")
_LOOK_S = 0.5


class MqttSnapshots:
    """A topic, or a filter of topics, at a broker."""

    ends = False

    def __init__(self, text: str) -> None:
        found = topic_of(text)
        if found is None or not _FILTER.fullmatch(found[1]) or len(found[1].encode()) > 65_535:
            expected = "mqtt[s]://BROKER/TOPIC, with %3F, %23 and %40 for ? # @"
            hint = "mqtt://127.0.0.1/frigate/door/person/snapshot"
            raise UsageError("--camera", expected=expected, got=undisclosed(text), hint=hint)
        self._address, self._topic = Address.parse(found[0]), found[1]
        self.shown = str(self._address)

    def pictures(self, every_s: float) -> Iterator[Picture]:
        """See `Reader`."""
        name = f"pf-camera-{os.urandom(6).hex()}"
        link = Link(self._address, name, subscriptions=[self._topic], largest_bytes=LARGEST_BYTES).open()
        newest, closing, pace = Newest(), threading.Event(), Pace(every_s)
        thread = threading.Thread(target=_follow, args=(link, newest, closing), name="camera", daemon=True)
        thread.start()
        try:
            while True:
                pace.wait()
                yield newest.take()
        finally:
            closing.set()
            thread.join()
            link.close(timeout_s=1.0)


def _follow(link: Link, newest: Newest, closing: threading.Event) -> None:
    while not closing.is_set():
        event = link.receive(_LOOK_S)
        if isinstance(event, Received):
            if not event.retained and len(event.payload) <= LARGEST_BYTES:
                newest.put(Picture(event.payload, time.time()))
            link.acknowledge(event)
        elif isinstance(event, Disconnected | Failed):
            newest.end(event.reason if isinstance(event, Disconnected) else str(event.error))
            return
