"""What a device says of itself: the status message, with what it measured since it started, accuracy and drift,
what was proposed, and under which conditions it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import cbor2

from protofleet.contract.wire.calibration_messages import CalibrationReport
from protofleet.contract.wire.envelopes import REFUSED
from protofleet.contract.wire.fields import write_map
from protofleet.contract.wire.joint_heads import JOINT
from protofleet.contract.wire.messages import MAX_ENTRIES, Status
from protofleet.contract.wire.rollout_messages import APART
from protofleet.edge_client.device.drift_watch import DriftWatch
from protofleet.edge_client.hardware import process_metrics
from protofleet.edge_client.hardware.conditions import Conditions

__all__ = ["Health"]

_OF_SAMPLES = "profile_memory_"


class Health:
    """The health of one process of a device.

    Args:
        instance: 8 bytes of this process.
        boot: how often the device has started.
        profiled: figures of `profile --measure`.
        is_private: tells whether nothing may be said that follows from samples, not even how much memory they take.
        conditions: its clock, disk and certificate; None for one that tells nothing of them.

    Attributes:
        accuracy: what the fleet is told of the newest round's accuracy; empty where it is told nothing.
        drift: what the fleet is told of its newest photos; empty where it is told nothing.
        calibration: what the fleet is told of the calibration of its answers; None where it is told nothing.
        step_ms: the time of a training step; None before the first round that trains.
        proposed: the classes that the fleet is told were proposed, and for how many photos; None for none.
        unknown_share: of kept photos, that the fleet is told, 0 to 1; None where that is not told.
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
        conditions: Conditions | None = None,
    ) -> None:
        self._instance, self._boot, self._profiled = instance, boot, dict(profiled)
        self._is_private, self._conditions = is_private, conditions
        self.accuracy: Mapping[str, float] = {}
        self.drift: Mapping[str, float] = {}
        self.calibration: CalibrationReport | None = None
        self._bundle: Mapping[str, str] = {}
        self.step_ms: float | None = None
        self.samples_new: int | None = None
        self.proposed: Mapping[str, int] | None = None
        self.unknown_share: float | None = None
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
        unknown = {} if self.unknown_share is None else {"unknown_share": self.unknown_share}
        return {**self.accuracy, **self.drift, **new, **unknown}

    @property
    def released(self) -> dict[str, float | str]:
        """All of the next birth that follows from samples: the figures, the report on calibration in hex, and the
        proposed classes as JSON."""
        released: dict[str, float | str] = dict(self.figures)
        if self._is_private():
            return released
        if self.calibration is not None:
            released["calibration_report"] = cbor2.dumps(write_map(self.calibration, "f32")).hex()
        if self.proposed is not None:
            released["proposed_classes"] = json.dumps(self.proposed, sort_keys=True)
        return released

    def has_changed(self, now_s: float) -> bool:
        """Whether the clock was set, or the disk was filled or emptied, since the last birth was made."""
        return self._conditions is not None and not self._is_private() and self._conditions.is_news(now_s)

    def death(self, *, tells: bool = False) -> Status:
        """This process is gone.

        Args:
            tells: whether to say that the disk is full where it is.
        """
        said = {} if self._conditions is None or not tells or self._is_private() else self._conditions.disk()
        return Status(False, self._instance, self._boot, process_metrics.board_name(), metrics=said)

    def birth(self) -> Status:
        """This process is here."""
        metrics: dict[str, float] = {**self._profiled, **self.figures}
        if self._is_private():  # the prediction is for a number of photos
            metrics = {name: value for name, value in metrics.items() if not name.startswith(_OF_SAMPLES)}
        else:
            metrics["peak_rss_bytes"] = float(process_metrics.peak_rss_bytes())
            metrics["rss_bytes"] = float(process_metrics.rss_bytes())
            metrics |= {} if self.step_ms is None else {"train_step_ms": self.step_ms}
        metrics |= {REFUSED: float(self.unsigned)} if self.unsigned else {}
        if self._conditions is not None and not self._is_private():
            told = list(self._conditions.figures().items())
            metrics |= dict(told[: MAX_ENTRIES - len(metrics)])
        versions = {**process_metrics.versions(), **self._bundle, **({"policy": self.refused} if self.refused else {})}
        versions |= {APART: self.apart} if self.apart else {}
        versions |= {JOINT: "allowed"} if self.joint_head else {}
        is_told = not self._is_private()
        return Status(
            True,
            self._instance,
            self._boot,
            process_metrics.board_name(),
            versions,
            metrics,
            calibration=self.calibration if is_told else None,
            proposed=self.proposed if is_told else None,
        )
