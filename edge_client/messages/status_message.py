"""What a device says of itself: the status message, with what it measured since it started, accuracy and drift."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import cbor2

from protofleet.contract.wire.calibration_messages import CalibrationReport
from protofleet.contract.wire.envelopes import REFUSED
from protofleet.contract.wire.fields import write_map
from protofleet.contract.wire.joint_heads import JOINT
from protofleet.contract.wire.messages import Status
from protofleet.contract.wire.rollout_messages import APART
from protofleet.edge_client.device.drift_watch import DriftWatch
from protofleet.edge_client.hardware import process_metrics

__all__ = ["Health"]


class Health:
    """The health of one process of a device.

    Args:
        instance: 8 bytes of this process.
        boot: how often the device has started.
        profiled: figures of `profile --measure`.
        is_private: tells whether nothing may be said that follows from samples, not even how much memory they take.

    Attributes:
        accuracy: what the fleet is told of the newest round's accuracy; empty where it is told nothing.
        drift: what the fleet is told of its newest photos; empty where it is told nothing.
        calibration: what the fleet is told of the calibration of its answers; None where it is told nothing.
        step_ms: the time of a training step; None before the first round that trains.
        samples_new: how many photos came or went since the last contribution; None where that is not told.
        refused: what the owner's policy refused last; empty for nothing.
        apart: why the device takes no part in what is announced; empty where it does.
        joint_head: whether its owner allows a joint head, with those that agree with it.
        unsigned: how many messages came that no trusted key has signed.
    """

    def __init__(
        self,
        instance: bytes,
        boot: int,
        profiled: Mapping[str, float],
        *,
        is_private: Callable[[], bool] = lambda: False,
    ) -> None:
        self._instance, self._boot, self._profiled = instance, boot, dict(profiled)
        self._is_private = is_private
        self.accuracy: Mapping[str, float] = {}
        self.drift: Mapping[str, float] = {}
        self.calibration: CalibrationReport | None = None
        self._bundle: Mapping[str, str] = {}
        self.step_ms: float | None = None
        self.samples_new: int | None = None
        self.refused = self.apart = ""
        self.joint_head = False
        self.unsigned = 0

    def measure(self, drift: DriftWatch | None) -> bool:
        """Measure how unlike earlier photos the new ones are; returns whether there is a new figure."""
        measured = None if drift is None else drift.measure()
        if measured is not None:
            self.drift = measured.metrics()
        return measured is not None

    def tell_bundle(self, versions: Mapping[str, str]) -> bool:
        """What the fleet is told of the bundle that runs, and of roll-outs, by name; whether that is news."""
        before, self._bundle = self._bundle, versions
        return before != versions

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the next birth that are computed from samples."""
        if self._is_private():
            return {}
        new = {} if self.samples_new is None else {"samples_new": float(self.samples_new)}
        return {**self.accuracy, **self.drift, **new}

    @property
    def released(self) -> dict[str, float | str]:
        """All of the next birth that is computed from samples: the figures, and the report on calibration in hex."""
        if self._is_private() or self.calibration is None:
            return dict(self.figures)
        written = cbor2.dumps(write_map(self.calibration, "f32"))
        return {**self.figures, "calibration_report": written.hex()}

    def death(self) -> Status:
        """This process is gone."""
        return Status(False, self._instance, self._boot, process_metrics.board_name())

    def birth(self) -> Status:
        """This process is here."""
        metrics: dict[str, float] = {**self._profiled, **self.figures}
        if not self._is_private():
            metrics["peak_rss_bytes"] = float(process_metrics.peak_rss_bytes())
            metrics["rss_bytes"] = float(process_metrics.rss_bytes())
            metrics |= {} if self.step_ms is None else {"train_step_ms": self.step_ms}
        metrics |= {REFUSED: float(self.unsigned)} if self.unsigned else {}
        versions = {**process_metrics.versions(), **self._bundle, **({"policy": self.refused} if self.refused else {})}
        versions |= {APART: self.apart} if self.apart else {}
        versions |= {JOINT: "allowed"} if self.joint_head else {}
        calibration = None if self._is_private() else self.calibration
        return Status(
            True, self._instance, self._boot, process_metrics.board_name(), versions, metrics, calibration=calibration
        )
