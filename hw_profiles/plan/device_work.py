"""What a board does in one round of a way: how long it computes, how sure that is, and whether it fits its memory.

1. A round's parts: steps of the bundle's own training graph where the method trains; passes of the photos through the
   network, as many as the method's contribution and answers take.
2. Each part is predicted by the latency model, in fp32 on ONNX Runtime and all cores, or simulated on an array.
3. The weakest part's support is that of the round. A round without ground has no seconds.
4. The sums over features are not timed. Where their multiply-accumulates are above 5 % of the round's, it is
   extrapolated; above 30 %, it has no ground.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from protofleet.contract.bundle.bundle_file import Manifest, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import Method, method
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.hw_profiles.accelerator.simulate import array_of, simulate
from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.latency.predict import predict
from protofleet.hw_profiles.plan.fleet_file import Way
from protofleet.hw_profiles.ranges import Range
from protofleet.hw_profiles.reports.profile_memory import BundleMemory
from protofleet.hw_profiles.reports.subject import Subject, bundle_subject
from protofleet.hw_profiles.workload.model import Workload

__all__ = ["DeviceWork", "WayWork", "way_work"]

_ORDER = ("simulated", "interpolated", "extrapolated", "no ground")
_SUMS_EXTRAPOLATED, _SUMS_NO_GROUND = 0.05, 0.30


@dataclass(frozen=True)
class DeviceWork:
    """One round on one board.

    Attributes:
        seconds: of computing; None without ground.
        support: `simulated`, `interpolated`, `extrapolated` or `no ground`, with reasons.
        error: of the latency model where it knows as little, in words.
        fits: whether the upper bound of its memory is there.
    """

    seconds: Range | None
    support: str
    reasons: tuple[str, ...]
    error: str
    fits: bool


@dataclass(frozen=True)
class _Part:
    ms: Range
    support: str
    reasons: tuple[str, ...]
    error: str


class WayWork:
    """A way's bundle, read once, and its rounds on any board.

    Raises:
        UsageError: the method trains, and the bundle was exported for another.
        BundleError: the bundle cannot be read.
    """

    def __init__(self, way: Way) -> None:
        bundle = read_bundle(str(way.bundle))
        self.manifest: Manifest = bundle.manifest
        self.method: Method = way.method or method(self.manifest.method)
        if self.method.trains and self.method.name != self.manifest.method:
            raise UsageError(
                f"way {way.name}: method {self.method.name}",
                expected=f"a bundle exported for {self.method.name}, since it trains",
                got=f"{way.bundle.name}, for {self.manifest.method}",
                hint='bundle = "…" in that [[way]]',
            )
        self._subject: Subject = bundle_subject(bundle, batch=1)
        self._memory = BundleMemory(self._subject, self.manifest)

    def on(self, board: Device, samples: int) -> DeviceWork:
        """One round of a device with so many photos."""
        parts = list(self._parts(board, samples))
        support, reasons = self._sums(samples)
        statuses = [support, *(part.support for _, part in parts)]
        worst = max(statuses, key=_ORDER.index)
        why = dict.fromkeys([*(reason for _, part in parts for reason in part.reasons), *reasons])
        total = Range()
        for times, part in parts:
            total = total.plus(part.ms, times / 1e3)
        return DeviceWork(
            seconds=None if worst == "no ground" else total,
            support=worst,
            reasons=tuple(why),
            error="; ".join(dict.fromkeys(part.error for _, part in parts if part.error)),
            fits=self._fits(board, samples),
        )

    def _parts(self, board: Device, samples: int) -> Iterator[tuple[float, _Part]]:
        """How often each workload runs, and one run of it."""
        passes, rule = 1, self.method
        if rule.trains:
            epochs = int(self.manifest.hyper.get("epochs", 1))
            yield float(epochs * -(-samples // self.manifest.batch)), self._step(board)
            sends = rule.statistic is not ClassMeans and bool(rule.statistic.FIELDS)
            passes = int("prototypes" in rule.global_rows or rule.has_personal_head) + int(sends)
        if passes:
            yield float(passes * samples), _once(self._subject.inference, board, None)

    def _step(self, board: Device) -> _Part:
        step = self._subject.step
        if step is None:  # its own method trains, so that it has one
            raise UsageError(self.manifest.backbone, expected="a bundle with a training step", got="none")
        if board.systolic is not None:
            return _once(self._subject.derived_step(self.manifest.batch), board, None)
        return _once(step, board, self._subject.inference)

    def _sums(self, samples: int) -> tuple[str, tuple[str, ...]]:
        """How much of the round's arithmetic is in the sums, which are not timed."""
        if self.method.trains:
            return "simulated", ()
        sums = self._subject.calibration(self.method, samples).device.macs
        share = sums / (sums + samples * self._subject.inference.macs)
        if share <= _SUMS_EXTRAPOLATED:
            return "simulated", ()
        status = "no ground" if share > _SUMS_NO_GROUND else "extrapolated"
        return status, (f"{100 * share:.0f} % of the multiply-accumulates are sums over features, which are not timed",)

    def _fits(self, board: Device, samples: int) -> bool:
        if board.systolic is not None:
            memory = self._memory.on_array(board, 4)
        else:
            memory = self._memory.on_board(board, samples)
        parts = ["training_fits"] if self.method.trains else ["inference_fits", "closing_fits"]
        return all(bool(memory[part]) for part in parts)


@lru_cache(maxsize=256)
def way_work(way: Way) -> WayWork:
    """A cached `WayWork`: reading a bundle's graphs takes a second."""
    return WayWork(way)


@lru_cache(maxsize=4096)
def _once(workload: Workload, board: Device, forward: Workload | None) -> _Part:
    if board.systolic is not None:
        ms = simulate(workload, array_of(board, precision="fp32")).latency_ms
        return _Part(Range(ms, ms, ms), "simulated", (), "")
    if board.cpu is None:
        return _Part(Range(), "no ground", ("its file says nothing of a CPU, which our client runs on",), "")
    entry = predict(workload, board, runtime="onnxruntime", precision="fp32", forward=forward)
    return _Part(
        Range(entry.ms, entry.low_ms, entry.high_ms), entry.support.status, entry.support.reasons, entry.error.as_text()
    )
