"""A server in a thread of the test's own process, and what its tests ask of a broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from aggregator_samples import manifest

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.server.beginning import Beginning, Process
from protofleet.aggregator.server.server import Server
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import Store
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import ProtofleetError
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.messages import Message

FLEET, WIDTH = "test", 4
SETTINGS = Settings(rounds=2, calibrate=True, min_clients=3)


class Running:
    """A server in a thread of this process; `error` is what ended it."""

    def __init__(
        self,
        url: str | Address,
        store: Store,
        bundle: bytes,
        settings: Settings = SETTINGS,
        width: int = WIDTH,
        *,
        take_over: bool = False,
        is_new_run: bool = False,
        signer: Signer | None = None,
        made: Manifest | None = None,
        shorter: Mapping[bytes, int] | None = None,
    ) -> None:
        self.events: list[object] = []
        self.error: Exception | None = None
        made = manifest(width=width) if made is None else made
        self.core = rounds_of(store, made, bundle, settings, now=time.monotonic(), shorter=shorter)
        self._stopping = threading.Event()
        self.server = Server(
            self.core,
            url if isinstance(url, Address) else Address.parse(url),
            FLEET,
            listener=self.events.append,
            on_round=lambda finished: None,
            signer=signer,
            beginning=Beginning(10, take_over, is_new_run),
            process=Process(self._stopping),
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._close_store, store.close = store.close, self._stop  # no store is closed under a server that uses it

    def _stop(self) -> None:
        self._stopping.set()
        self._thread.join(10)
        self._close_store()

    def _run(self) -> None:
        try:
            self.server.run()
        except ProtofleetError as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float = 60.0) -> None:
        self._thread.join(timeout_s)
        assert self.ended, "the server did not end"

    def told(self, kind: type) -> list[object]:
        return [event for event in self.events if isinstance(event, kind)]


def wait(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)


class Listener:
    """A bystander on some topics; `heard` keeps (topic, message), newest last. It may publish anything."""

    def __init__(self, url: str, *topics: str, name: str = "bystander") -> None:
        self.heard: list[tuple[str, Message]] = []
        self.link = Link(Address.parse(url), name, subscriptions=list(topics)).open()
        self.link.wait_connected(60)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def until(self, condition: Callable[[Message], bool], timeout_s: float = 60.0) -> Message:
        """The next message for which `condition` holds."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            event = self.link.receive(0.1)
            if isinstance(event, Received):
                self.link.acknowledge(event)
                if event.payload:
                    self.heard.append((event.topic, decode(event.payload)))
                    if condition(self.heard[-1][1]):
                        return self.heard[-1][1]
        raise AssertionError(f"it was not heard: {self.heard[-5:]}")
