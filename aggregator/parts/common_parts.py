"""The parts that a coordinator has whatever it runs: store, terms, gate, statuses, roll-out, orders, numbers.

Each kind of coordinator is given them as one object, and the server, a worker and the metrics use them through it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protofleet.aggregator.enrolment.gate import Gate, Intrusion, read_enrolment
from protofleet.aggregator.ingest.ingest import Decision, View
from protofleet.aggregator.ingest.validation import Terms
from protofleet.aggregator.monitoring.events import ClassDriftSuspected, DriftSuspected, PolicyRefused
from protofleet.aggregator.parts.announcement_numbers import AnnouncementNumbers
from protofleet.aggregator.parts.background_work import Closing
from protofleet.aggregator.parts.device_statuses import DeviceStatuses, Uncounted
from protofleet.aggregator.parts.exclusions import Exclusions
from protofleet.aggregator.parts.fleet_terms import FleetTerms
from protofleet.aggregator.parts.order_desk import OrderDesk
from protofleet.aggregator.parts.rollout_coordinator import RolloutCoordinator
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import Store, as_written
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.methods import Method
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Message, Phase, Receipt
from protofleet.contract.wire.rollout_messages import Request

__all__ = ["Parts"]


@dataclass(frozen=True)
class Parts:
    """Of one run of one fleet.

    Attributes:
        exclusions: of whom, and of which classes, nothing is taken.
        gate: says whose message it is.
        rollouts: the bundle that is being rolled out, if there is one.
        numbers: of announcements.
        uncounted: messages that the next batch counts.
        statuses: what devices say of themselves.
        orders: what operators ask for.
        closing: long work, beside the loop where there is one.
    """

    store: Store
    terms: FleetTerms
    exclusions: Exclusions
    gate: Gate
    rollouts: RolloutCoordinator
    numbers: AnnouncementNumbers
    uncounted: Uncounted
    statuses: DeviceStatuses
    orders: OrderDesk
    closing: Closing[Any] = field(default_factory=Closing)

    @classmethod
    def of(
        cls,
        store: Store,
        manifest: Manifest,
        bundle: bytes,
        settings: Settings,
        *,
        now: float,
        others: tuple[bytes, ...] = (),
        shorter: Mapping[bytes, int] | None = None,
    ) -> Parts:
        """The parts of a store, as it was left.

        Args:
            manifest, bundle, others, shorter: as of `FleetTerms`.
            now: seconds of a steady clock.

        Raises:
            StoreError: the store holds what no aggregator wrote.
        """
        terms = FleetTerms(manifest, bundle, settings, others, shorter or {})
        exclusions, numbers, uncounted = (
            Exclusions(store, manifest.labels),
            AnnouncementNumbers(store.meta),
            Uncounted(),
        )
        with as_written(store.standing.path):
            gate = Gate(store.fleet, store.enrolment, only=settings.enrolled)
            rollouts = RolloutCoordinator(store.rollouts, manifest, bundle, tuple(terms.shorter))
        statuses = DeviceStatuses(store, terms, exclusions, gate, rollouts, numbers, uncounted)
        orders = OrderDesk(store, manifest.labels, exclusions, gate, rollouts, now)
        return cls(store, terms, exclusions, gate, rollouts, numbers, uncounted, statuses, orders)

    @property
    def run(self) -> bytes:
        return self.store.run

    def reload(self) -> None:
        """Read again what another process may have changed: an enrolment, or a device's withdrawal."""
        self.gate.reload()
        self.exclusions.reload()

    def opened(self, device: str, payload: bytes, limit_bytes: int) -> Message:
        """What came on a device's `up` topic, if it is the device's; who poses as it is noted."""
        try:
            return self.gate.opened(device, None, payload, limit_bytes=limit_bytes)
        except Intrusion as intrusion:
            self.gate.note(device, intrusion.cause, str(intrusion), time.time())
            raise

    def enrol(self, device: str, payload: bytes, wall: float) -> Receipt | None:
        """The answer to a device that asks to be enrolled, durable on return; None for another message.

        Args:
            wall: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        enrolment = read_enrolment(payload)
        if enrolment is None:
            return None
        receipt = self.gate.enrol(device, enrolment, payload, self.run, wall)
        if receipt.status == "rejected":
            self.gate.note(device, "token", receipt.reason, wall)
        return receipt

    def gives(self, device: str, request: Request) -> bool:
        """Whether a device gets the piece of the bundle that it asks for."""
        return device not in self.exclusions.refused and self.rollouts.may_have(device, request)

    def decided(self, batch: Sequence[tuple[str, bytes]], decisions: Sequence[Decision]) -> None:
        """Note for the operator what devices sent, and what of it was refused."""
        devices, at, refused = self.store.devices, time.time(), self.exclusions.refused
        for (device, payload), decision in zip(batch, decisions, strict=True):
            if decision.cause == "intruder" or decision.outcome == "malformed":
                continue
            sums = None if decision.accepted is None else decision.accepted.message
            refusal = decision.reason if decision.outcome == "rejected" else ""
            members = None if sums is None else sums.devices
            devices.decided(device, len(payload), at, refusal=refusal, members=members, is_refused=device in refused)

    def forget(self, device: str) -> None:
        """Drop what a forgotten device has said of itself."""
        self.store.drift.forget(device)
        self.store.policies.forget(device)
        self.store.calibration.forget(device)
        self.store.devices.forget(device)
        self.rollouts.forget(device)

    def departures(self, at: float) -> list[DriftSuspected | ClassDriftSuspected | PolicyRefused]:
        """The devices and classes that depart from themselves from now on, and what policies refuse.

        The heard reports are durable on return.

        Args:
            at: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        store = self.store
        store.calibration.commit_heard(at)
        return [*store.drift.commit_heard(at), *store.class_drift.commit_heard(at), *store.policies.commit_heard(at)]

    def view(self, method: Method, **moment: Any) -> View:
        """What is gathered of a method.

        Args:
            moment: the other attributes of `View`, but for its terms; `standing` is one of those.
        """
        terms, settings = self.terms, self.terms.settings
        return View(
            run=self.run,
            bundle=terms.bundle,
            classes=terms.manifest.classes,
            width=terms.width(method),
            method=method.name,
            limit_bytes=settings.limit_bytes,
            others=terms.further,
            terms=Terms(
                encoding=terms.encoding(method),
                min_samples=settings.min_samples,
                max_samples=settings.max_samples,
                noise=method.mechanism(terms.hyper(method)),
                extractor=terms.extractor(method),
                standing=moment.pop("standing", False),
                lists=terms.lists,
                withheld=self.exclusions.withheld,
            ),
            refusal=self.exclusions.refusal,
            opened=self.opened,
            gateways=settings.gateway,
            **moment,
        )

    def announcement(
        self, method: Method, state: GlobalState, phase: Phase, limit_bytes: int | None, **of_round: Any
    ) -> Announcement:
        """What every device should know now.

        Args:
            limit_bytes: the largest message that both the broker and this aggregator take; None for the limit of
                this aggregator.
            of_round: the other attributes of `Announcement`.
        """
        terms, settings, extractor = self.terms, self.terms.settings, self.terms.extractor(method)
        return Announcement(
            run=self.run,
            phase=phase,
            method=method.name,
            bundle=terms.bundle,
            global_version=state.version,
            encoding=terms.encoding(method),
            min_samples=settings.min_samples,
            limit_bytes=settings.limit_bytes if limit_bytes is None else limit_bytes,
            others=terms.further,
            extractor=extractor,
            class_lists=terms.lists.digests if extractor else (),
            offer=self.rollouts.offer,
            withheld=self.exclusions.withheld,
            epoch=self.store.epoch,
            max_samples=settings.samples_told,
            calibration=self.store.calibration.announced,
            factors=terms.factors(method),
            proposals=True,
            **of_round,
        )
