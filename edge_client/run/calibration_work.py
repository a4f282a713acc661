"""Keeps what a device's probabilities follow from, and reports on its held-out photos where the fleet asks for that.

After each evaluation, and after each announcement that says something new:

1. The journal gets the fleet's calibration, the device's own, and how often it has each class
   (`edge_client/device/calibration.py`).
2. Where a global state came that the held-out photos were not tested with, as it is between rounds and where sums
   stand, they are tested again, at most every `PACE_S` seconds.
3. The report for the status is made again. It differs only where photos, the global state or the fleet's choice do.

Nothing is told where noise protects the photos, or where the owner's policy does not allow it.
"""

from __future__ import annotations

from dataclasses import replace

from protofleet.contract.wire.calibration_messages import AnnouncedCalibration, CalibrationReport
from protofleet.contract.wire.global_state import GlobalState
from protofleet.edge_client.device.calibration import HeldOut, Known
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal

__all__ = ["PACE_S", "CalibrationWork"]

PACE_S = 10.0  # between two tests of held-out photos
_QUIET_S, _PATIENCE_S = 1.0, 5.0


class CalibrationWork:
    """Of one device.

    Args:
        tells: whether reports may be told.

    Attributes:
        report: what is told; None for nothing.
    """

    def __init__(self, device: Device, journal: Journal, *, tells: bool) -> None:
        self._device, self._journal, self._tells = device, journal, tells
        self._known = journal.calibration()
        self._held_out: HeldOut | None = None
        self._announced: AnnouncedCalibration | None = None
        self._tested_s = float("-inf")
        self._changed_s = self._asked_s = 0.0
        self.report: CalibrationReport | None = None
        self._keep(replace(self._known, counts=self._counts()))

    def is_settled(self, now_s: float) -> bool:
        """Whether a device that ends with its run need not wait for the fleet's calibration any more.

        It waits until the fleet has chosen, its own photos are counted at that choice, and nothing has changed for
        `_QUIET_S` seconds; at most `_PATIENCE_S` seconds after its first report.

        Args:
            now_s: seconds of a steady clock.
        """
        if self.report is None or now_s >= self._asked_s + _PATIENCE_S:
            return True
        return bool(self.report.counts) and now_s >= self._changed_s + _QUIET_S

    def turn(self, announced: AnnouncedCalibration | None, now_s: float, *, is_private: bool) -> bool:
        """Take up what is new; whether another report is told from now on.

        Args:
            announced: the fleet's calibration; None where no reports are asked for.
            now_s: seconds of a steady clock.
            is_private: whether nothing may be told that follows from photos.

        Raises:
            StoreError: the disk refused.
        """
        held_out = self._device.held_out
        if held_out is self._held_out and announced == self._announced:
            return False
        known = self._known if held_out is None or held_out is self._held_out else held_out.known()
        fleet = announced if announced is not None and announced.way else self._known.fleet
        self._keep(replace(known, counts=self._counts(), fleet=fleet))
        self._held_out, self._announced = held_out, announced
        before, self.report, self._changed_s = self.report, None, now_s
        if held_out is not None and announced is not None and self._tells and not is_private:
            self.report = held_out.report(announced)
        if before is None:
            self._asked_s = now_s
        return self.report != before

    def wait_s(self, state: GlobalState | None, now_s: float) -> float | None:
        """Seconds until held-out photos are to be tested with this state; None where they need not be."""
        held_out = self._held_out
        if held_out is None or state is None or (state.run, state.version) == (held_out.run, held_out.version):
            return None
        return max(self._tested_s + PACE_S - now_s, 0.0)

    def test(self, state: GlobalState | None, now_s: float) -> bool:
        """Test the held-out photos again if it is time; `turn` then takes up what came of it. False where it is not.

        Args:
            state: the newest global state.
            now_s: seconds of a steady clock.
        """
        wait_s = self.wait_s(state, now_s)
        if wait_s is None or wait_s > 0.0:
            return False
        self._tested_s = now_s
        self._device.evaluate(state)
        held_out = self._device.held_out
        if state is not None and held_out is not None and held_out.version != state.version:  # it cannot be true
            self._device.held_out = replace(held_out, run=state.run, version=state.version)
        return True

    def _counts(self) -> tuple[int, ...]:
        return tuple(map(int, self._device.samples.counts(self._device.classes)))

    def _keep(self, known: Known) -> None:
        if known != self._known:
            self._journal.keep_calibration(known)
            self._known = known
