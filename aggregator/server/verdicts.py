"""What devices are told after a closed round: that it left them out, or counts them again, and their joint head."""

from __future__ import annotations

import time
from collections.abc import Collection

from protofleet.aggregator.coordinators.coordinator import Coordinator
from protofleet.aggregator.enrolment.signed_publisher import SignedPublisher
from protofleet.aggregator.ingest.receipts import Receipts
from protofleet.contract.mqtt.link import Link
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode

__all__ = ["Verdicts"]


class Verdicts:
    """Of one fleet."""

    def __init__(
        self, coordinator: Coordinator, link: Link, fleet: str, publisher: SignedPublisher, receipts: Receipts
    ) -> None:
        self._core, self._link, self._fleet = coordinator, link, fleet
        self._publisher, self._receipts = publisher, receipts
        self._joint_told: dict[str, int] = {}  # of which round's joint head a device's process was given
        self._born: set[str] = set()

    def heard(self, device: str, *, is_another: bool) -> None:
        """A device has said a status: it is told with the next turn.

        Args:
            is_another: whether it is another process, or one that was away.
        """
        if is_another:
            self._joint_told.pop(device, None)
        if device in self._core.verdicts:
            self._born.add(device)

    def turn(self, limit_bytes: int) -> None:
        """Tell the devices that were heard since the last turn."""
        self.tell(self._born, limit_bytes)
        self._born.clear()

    def tell(self, devices: Collection[str], limit_bytes: int) -> None:
        """Tell these devices, as far as they are online.

        Args:
            limit_bytes: the largest message that both the broker and this aggregator take.
        """
        for device in devices:
            receipt = self._core.verdicts.get(device)
            if receipt is not None and self._core.rounds.is_online(device):
                self._receipts.answer(device, receipt, time.monotonic(), is_intruder=False)
                self._give_joint(device, limit_bytes)

    def _give_joint(self, device: str, limit_bytes: int) -> None:
        """Send a device the joint head of the devices that agree with it, if any: once to each of its processes."""
        joint = self._core.joint_of(device)
        if joint is None or self._joint_told.get(device) == joint.state.round:
            return
        self._joint_told[device], topic = joint.state.round, topics.down(self._fleet, device)
        for part in joint.parts(limit_bytes - self._publisher.room_bytes):
            self._link.publish(topic, self._publisher.sealed(topic, encode(part, "f32")))
