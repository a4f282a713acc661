"""A fleet whose sums stand, over a `LossyBroker`: as `fleet_model.py`, without rounds.

The aggregator is its own server and store. A device is the client's parts in the client's order, with its real standing
sums, releases, ledger and journal; in place of the network that makes features are a few photos, whose features are
their pixels. A withdrawal is the command's own class, and orders lie in the store as `protofleet fleet` puts them.
"""

from __future__ import annotations

import time
from pathlib import Path
from unittest import mock

import numpy as np
from aggregator_samples import BUNDLE, manifest
from numpy.typing import NDArray

from protofleet.aggregator.coordinators.kinds import standing_sums
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.errors import LinkError
from protofleet.contract.files.sqlite import beside
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.mqtt.link_actions import Connected
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import RoundResult
from protofleet.edge_client.identity.signing_identity import Identity
from protofleet.edge_client.journal.journal import Journal, Pending
from protofleet.edge_client.privacy.ledger import Ledger
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.run import withdrawal
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.standing.standing_sums import StandingSums
from tests.attacks.fleet_model import CLASSES, FLEET, Clock, DeviceProcess, ServerProcess
from tests.attacks.lossy_broker import LossyBroker, ModelLink

__all__ = ["STANDING", "PhotoDevice", "StandingServer", "Withdrawal", "give_order", "photos", "sums_of"]

WIDTH = 4
STANDING = manifest(classes=CLASSES, width=WIDTH, name="ncm")
_ALL = np.random.default_rng(1).integers(1, 255, (8, 2, 2, 1), np.uint8)


def photos(numbers: tuple[int, ...]) -> LocalData:
    """Those of eight photos; each has its class."""
    rows = list(numbers)
    return LocalData(_ALL[rows], np.array(rows, np.int64) % CLASSES)


def sums_of(data: LocalData, rows: NDArray[np.bool_] | None = None) -> UnitMeans:
    """The sums of these photos."""
    chosen = data if rows is None else LocalData(data.x[rows], data.y[rows])
    return UnitMeans.of(unit_rows(chosen.x.reshape(len(chosen), WIDTH).astype(np.float64)), chosen.y, CLASSES)


class _Core:
    """In place of `protofleet.edge_client.device.device.Device`: what is summed."""

    classes = CLASSES

    def __init__(self, samples: LocalData) -> None:
        self.samples = samples

    def stand(self, a: Announcement, generation: int, rows: NDArray[np.bool_]) -> RoundResult:
        key = {"run": a.run, "round": generation, "method": a.method, "bundle": BUNDLE, "extractor": a.extractor}
        made = Contribution.of(sums_of(self.samples, rows), **key, standing="present")  # type: ignore[arg-type]
        return RoundResult(made, None, int(rows.sum()), 0)

    def exposed(self, contribution: Contribution, announcement: Announcement) -> str:
        """Nothing that its owner should hear."""
        return ""


class PhotoDevice(DeviceProcess):
    """One process of a device whose sums stand.

    Attributes:
        sent: whatever any process of it has made, kept by the model.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        broker: LossyBroker,
        clock: Clock,
        instance: bytes,
        data: LocalData,
        sent: set[bytes],
    ) -> None:
        super().__init__(name, folder, broker, clock, instance, manifest=STANDING)
        self._ledger, self.sent = Ledger(folder / name / "ledger.sqlite"), sent
        passes = Releases(Policy(), self._ledger, fleet=FLEET, own=method("ncm"), hyper=STANDING.hyper)
        passes.begin(self.journal)
        self.core = _Core(data)
        self.sums = StandingSums(self.core, self.journal, name, passes)  # type: ignore[arg-type]

    def _settled(self, receipt: Receipt) -> None:
        self.sums.take_receipt(receipt, self._clock.monotonic())

    _told = _settled

    def _work(self) -> None:
        a = self.follower.standing
        made = None if a is None else self.sums.make(a, self._boot, self._clock.monotonic())
        if a is None or made is None:
            return
        for older in made.older:
            self.outbox.answered(older)
        self.sent.add(made.payload)
        self.outbox.add(Pending(made.report.key, made.payload, a.limit_bytes))

    def kill(self) -> None:
        self._ledger.close()
        super().kill()


class Withdrawal:
    """One process of `protofleet client --withdraw`: the command's own class, whose loop is the model's.

    Attributes:
        over: whether it has ended by itself.
        done: whether it says that nothing of its device is in the sums.
    """

    def __init__(self, name: str, folder: Path, broker: LossyBroker, clock: Clock) -> None:
        self.name, self._clock, self.over = name, clock, False
        self.journal = Journal(folder / name, fleet=FLEET, device=name, bundle=BUNDLE)
        settings = ClientSettings(bundle="b", broker="mqtt://model", id=name, state=str(folder), fleet=FLEET)

        def link(address: object, client: str, *, subscriptions: list[str]) -> ModelLink:
            return ModelLink(broker, client, subscriptions)

        with mock.patch.object(withdrawal, "Link", link):
            credentials = withdrawal._Credentials((), Identity())
            self._core = withdrawal._Withdrawal(settings, self.journal, None, credentials)  # type: ignore[arg-type]
        self.link: ModelLink = self._core._link  # type: ignore[assignment]
        self._again_s = float("-inf")

    @property
    def done(self) -> bool:
        return self._core._done

    @property
    def run(self) -> bytes | None:
        """The run that it withdraws from."""
        return None if self._core._key is None else self._core._key[0]

    def step(self) -> None:
        """Once round the command's loop."""
        now, core = self._clock.monotonic(), self._core
        if core._key is not None and now >= self._again_s and self.link.publish(core._up, core._payload):
            self._again_s = now + withdrawal._AGAIN_S
        known = core._key
        try:
            while (event := self.link.receive(0.0)) is not None:
                core._handle(event)
                if isinstance(event, Connected):
                    self._again_s = float("-inf")
        except LinkError:  # refused
            self.over = True
        if core._key != known or known is None:
            self._again_s = float("-inf")
        self.over = self.over or core._done

    def kill(self) -> None:
        self.journal.close()


class StandingServer(ServerProcess):
    """One process of the aggregator."""

    core: StandingCoordinator

    def _made(self, store: DurableStore) -> StandingCoordinator:
        settings = Settings(method="ncm", standing=True, every=30.0, limit_bytes=1024, encoding="f64")
        clock = self._clock
        return standing_sums(store, STANDING, BUNDLE, settings, now=clock.monotonic(), wall=clock.time)


def give_order(store: Path, what: str, device: str) -> None:
    """As `protofleet.aggregator.store.operator_orders.give`, which waits for a process that has the store to let go of
    it."""
    with beside(store, KIND) as db:
        row = (what, device, "its operator", time.time())
        db.execute("INSERT INTO fleet_order (what, device, who, given_at) VALUES (?, ?, ?, ?)", row)
