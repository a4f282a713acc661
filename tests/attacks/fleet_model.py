"""A fleet of real cores over a `LossyBroker`: the aggregator's server on its store, devices on their journals.

The server, its coordinator and its SQLite store are those that run; only its link and its clock are the model's. A
device is the client's parts (inbox, follower, outbox, presence, journal) in the client's order, without photos: what it
sends for a round is drawn from its name and the round, as a round that is repeated after a crash comes to the same.
Processes end by kill -9 alone: between two things that they do, or at any publication or acknowledgement.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
from aggregator_samples import BUNDLE, manifest
from contract_samples import empty_graph

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.server import server as server_module
from protofleet.aggregator.server.server import Server
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.console.logs import Changes
from protofleet.contract.errors import LinkError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.mqtt.link import Address, Link
from protofleet.contract.mqtt.link_actions import Connected, Disconnected, Received
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram, Statistic
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt, Status
from protofleet.edge_client.identity.enrolment import Enrolling
from protofleet.edge_client.identity.signing_identity import Identity
from protofleet.edge_client.identity.trust import Trust
from protofleet.edge_client.journal.journal import Journal, Key, Pending
from protofleet.edge_client.messages import inbox as inbox_module
from protofleet.edge_client.messages.inbox import Hearing, Inbox
from protofleet.edge_client.messages.membership import Membership
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.messages.presence import Presence
from protofleet.edge_client.rounds.round_follower import Follower, largest_message_bytes
from tests.attacks.lossy_broker import LossyBroker, ModelLink

__all__ = ["FLEET", "MANIFEST", "ROUNDS", "Clock", "DeviceProcess", "ServerProcess", "statistic_of"]

FLEET, CLASSES, WIDTH = "fleet", 6, 44  # class means take three chunks, sums nine, a global state two parts
ROUNDS = 5
SETTINGS = Settings(
    rounds=ROUNDS - 1,
    calibrate=True,
    encoding="f64",
    limit_bytes=1024,
    max_share=1.0,
    min_clients=2,
    deadline=30,
)
MANIFEST = manifest(classes=CLASSES, width=WIDTH)
_CENTRES = 2.0 * np.random.default_rng(0).normal(size=(CLASSES, WIDTH))


class Clock:
    """The time of a whole fleet, in place of the module `time` where that is asked for it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def time(self) -> float:
        return 1e9 + self.now


def statistic_of(device: str, key: Key) -> Statistic:
    """What a device has to say in a round: always the same, and plausible beside the others', who have the same classes
    (means drawn alone look, in one run of two hundred, like labels that were swapped, and their device is left out)."""
    rng = np.random.default_rng([*device.encode(), *key[0], key[1]])
    labels = rng.integers(0, CLASSES, 30) if key[2] == "ffc" else np.arange(CLASSES)
    features = unit_rows(_CENTRES[labels] + rng.normal(size=(len(labels), WIDTH)))
    if key[2] == "ffc":
        return FeatureGram.of(features, labels, CLASSES)
    return ClassMeans.from_means(features, [10] * CLASSES)


class DeviceProcess:
    """One process of a device, on its state directory.

    Args:
        broker: of the model; None for a real one at `url`.
        clock: the model's, or the module `time`.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        broker: LossyBroker | None,
        clock: Clock | ModuleType,
        instance: bytes,
        *,
        url: str = "",
        manifest: Manifest = MANIFEST,
    ) -> None:
        self.name, self._clock = name, clock
        self.journal = Journal(folder / name, fleet=FLEET, device=name, bundle=BUNDLE)
        self._boot = self.journal.begin(instance)
        self._instance, self._topic = instance, topics.status(FLEET, name)
        listens = [topics.round_(FLEET), topics.global_all(FLEET), topics.down(FLEET, name), self._topic]
        will = self._topic, encode(Status(False, instance, self._boot))
        self.link: Link | ModelLink
        if broker is None:
            largest = largest_message_bytes(manifest)
            self.link = Link(
                Address.parse(url),
                name,
                subscriptions=listens,
                will=will,
                largest_bytes=largest,
                echo_topic=self._topic,
            )
        else:
            self.link = ModelLink(broker, name, listens, will)
        bundle = Bundle(manifest, BUNDLE, empty_graph(), empty_graph(), {"backbone.weight": np.ones((2, 2), "<f4")})
        self.outbox = Outbox(random.Random(name))
        for pending in self.journal.pending():
            self.outbox.add(pending)
        self.follower = Follower(name, bundle, is_done=self.journal.is_done, took_part=self.journal.took_part)
        self.presence = Presence(name, instance, is_own=self.journal.is_own_instance)
        self.inbox = Inbox(
            Membership(Address.parse("mqtt://127.0.0.1:1"), FLEET, name, bundle, stays=False),
            self.journal,
            self.follower,
            self.outbox,
            self.presence,
            Trust((), Identity(), self.journal.issued, fleet=FLEET, device_id=name),
            Enrolling(FLEET, name, None, None),
            Changes(logging.getLogger(__name__)),
        )
        self.inbox.hearing = Hearing(settled=self._settled, news=self._told)

    @property
    def done(self) -> set[Key]:
        """The rounds that are, as the journal says."""
        rows = self.journal._db.execute("SELECT run, round, method FROM rounds").fetchall()
        return {(bytes(run), number, method) for run, number, method in rows}

    def step(self) -> None:
        """Send what is due, take in what has come, and do a round if one is to be done: once round the client's loop.

        Raises:
            Killed: at one of its publications or acknowledgements.
        """
        now = self._clock.monotonic()
        if self.presence.birth_due(now) and self.link.publish(self._topic, encode(self._status()), retain=True):
            self.presence.born()
        for payload in self.outbox.due(now, idle=self.link.idle):
            self.link.publish(topics.up(FLEET, self.name), payload)
        with mock.patch.object(inbox_module, "time", self._clock):
            while (event := self.link.receive(0.0)) is not None:
                self._handle(event, now)
        self._work()

    def _settled(self, receipt: Receipt) -> None:
        """A contribution is over."""

    def _told(self, receipt: Receipt) -> None:
        """What answers no contribution."""

    def _work(self) -> None:
        """What there is to do beside sending and hearing."""
        task = self.follower.task()
        if task is not None:
            self._do_round(task.announcement)

    def _status(self) -> Status:
        return Status(True, self._instance, self._boot)

    def _handle(self, event: object, now: float) -> None:
        if isinstance(event, Received):
            self.inbox.take(event)
            self.link.acknowledge(event)
        elif isinstance(event, Connected):
            self.outbox.connected(event.limit_bytes)
            self.presence.connected(now)
        elif isinstance(event, Disconnected):
            self.outbox.disconnected()
            self.presence.disconnected()

    def _do_round(self, a: Announcement) -> None:
        key = (a.run, a.round, a.method)
        made = Contribution.of(
            statistic_of(self.name, key),
            run=a.run,
            round=a.round,
            method=a.method,
            bundle=BUNDLE,
            extractor=a.extractor,
        )
        payload = encode(made, a.encoding)
        self.journal.commit_round(key, weights={}, payload=payload, limit_bytes=a.limit_bytes, metrics={})
        self.outbox.add(Pending(key, payload, a.limit_bytes))

    def kill(self) -> None:
        """What was committed stays; the lock goes, as the system takes it from a dead process."""
        self.journal.close()


class ServerProcess:
    """One process of the aggregator, on its store.

    Args:
        broker, clock, url: as of `DeviceProcess`.

    Attributes:
        over: why it ended by itself; None while it runs.
    """

    def __init__(
        self, path: Path, broker: LossyBroker | None, clock: Clock | ModuleType, *, url: str = "mqtt://model"
    ) -> None:
        self.store = DurableStore(path, BUNDLE, FLEET)
        self._clock, self.over = clock, None
        self.core = self._made(self.store)

        def link(address: Address, client: str, *, subscriptions: Any, will: Any, **options: Any) -> Link | ModelLink:
            if broker is None:
                return Link(address, client, subscriptions=subscriptions, will=will, **options)
            return ModelLink(broker, client, subscriptions, will)

        with mock.patch.object(server_module, "Link", link), mock.patch.object(server_module, "time", clock):
            self._server = Server(
                self.core, Address.parse(url), FLEET, listener=lambda event: None, on_round=lambda finished: None
            )
        self.core.parts.closing.patience_s = None  # no thread, so that what happens depends on the order of steps alone
        self.link: Link | ModelLink = self._server._link

    def _made(self, store: DurableStore) -> RoundCoordinator:
        """What decides."""
        clock = self._clock
        return rounds_of(store, MANIFEST, BUNDLE, SETTINGS, now=clock.monotonic(), wall=clock.time())

    def step(self) -> None:
        """Once round the server's loop.

        Raises:
            Killed: at one of its publications or acknowledgements.
        """
        with mock.patch.object(server_module, "time", self._clock):
            try:
                self._server._turn()
            except LinkError as error:  # another aggregator, it believes: whoever runs it starts it again
                self.over = error

    def kill(self) -> None:
        self.store.close()
