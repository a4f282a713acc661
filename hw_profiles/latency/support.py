"""Whether a prediction has ground: *interpolated*, *extrapolated* or *no ground*, with the reasons.

The model was fitted on convolutional networks of some sizes, on some runtimes and devices. Each of these is looked at,
and the weakest decides:

    operators   the share of the predicted time in operators that no fitted network has (attention, products over
                tokens, layer normalisation, what is unmodelled): above 5 % extrapolated, above 30 % no ground
    size        multiply-accumulates beside those of the rows of this runtime on this device, or of this runtime:
                beyond 1.5 times either end extrapolated, beyond 15 times no ground
    runtime     the device has no row of it, but it has rows elsewhere: extrapolated; where none is on a processor of
                this kind, and the device has no row either: no ground
    precision   no row on any processor of this kind: no ground
    batch       published rows are of one photo: more are extrapolated

A figure without ground has no interval: nothing was left out that is like it. Decision 270 has the thresholds' reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from protofleet.hw_profiles.calibration.predict_board import OnBoard
from protofleet.hw_profiles.devices.calibrated import Calibration
from protofleet.hw_profiles.latency.hierarchical_fit import kind_of
from protofleet.hw_profiles.latency.intervals import Case
from protofleet.hw_profiles.latency.operator_classes import MACS, LayerDemand
from protofleet.hw_profiles.latency.published_rows import TRAINING_RUNTIME, Setting
from protofleet.hw_profiles.units import digits
from protofleet.hw_profiles.workload.model import Layer, Workload

__all__ = ["Grounds", "Support", "case_of", "status_of_share", "support_of", "support_on_board"]

Status = Literal["interpolated", "extrapolated", "no ground"]
_Priced = Sequence[tuple[LayerDemand, float]]
_ORDER: tuple[Status, ...] = ("interpolated", "extrapolated", "no ground")
_UNSEEN_EXTRAPOLATED, _UNSEEN_NO_GROUND = 0.05, 0.30
_BEYOND_EXTRAPOLATED, _BEYOND_NO_GROUND = 1.5, 15.0
# What the fitted networks' forward passes are made of beside products: see benchmarks/hardware/reference_models.py.
_SEEN = frozenset(
    (
        "Add", "AveragePool", "BatchNormalization", "Clip", "Concat", "Flatten", "GlobalAveragePool", "Gemm",
        "HardSigmoid", "HardSwish", "Identity", "MaxPool", "Mul", "Pad", "ReduceMean", "Relu", "Reshape", "Sigmoid",
        "Slice", "Squeeze", "Unsqueeze", "Sub", "Div", "Cast",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Support:
    """The status of one figure, and one reason for every axis that is not interpolated."""

    status: Status
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grounds:
    """What the rows cover, as `coefficients.json` has it.

    Attributes:
        sizes: fewest and most multiply-accumulates by `runtime` and by `runtime, device`.
        kinds: the kinds of processor with rows, by runtime and by precision.
    """

    sizes: Mapping[str, Sequence[float]]
    kinds: Mapping[str, Sequence[str]]


def status_of_share(share: float) -> Status:
    """The status of a figure of which so much was not fitted, as a fraction of its time."""
    if share <= _UNSEEN_EXTRAPOLATED:
        return "interpolated"
    return "no ground" if share > _UNSEEN_NO_GROUND else "extrapolated"


def case_of(setting: Setting, device: str, rows: int) -> Case:
    """Which check a prediction on `device` is like, made by a fit of `setting` with so many rows."""
    if rows:
        return "family"
    return "runtime" if setting.device == device else "device"


def support_of(
    workload: Workload,
    priced: _Priced,
    setting: Setting,
    case: Case,
    grounds: Grounds,
    device: str,
    operators: tuple[Workload, _Priced] | None = None,
) -> Support:
    """The support of a prediction on `device`, whose fit is `setting`'s.

    Args:
        priced: the demand of each layer of the workload, and its milliseconds.
        setting: of the fit; its device is a stand-in where no row names the device.
        operators: of a training step, its inference graph and that graph's layers, to judge the operators by.
    """
    demands = [demanded for demanded, _ in priced]
    found: list[tuple[Status, str]] = [
        _operators(*(operators or (workload, priced))),
        _size(demands, setting, device, grounds),
        _runtime(setting, case, grounds),
    ]
    if workload.batch > 1 and setting.runtime != TRAINING_RUNTIME:
        found.append(("extrapolated", f"batch {workload.batch}, and rows are of one photo"))
    status = max((status for status, _ in found), key=_ORDER.index)
    return Support(status, tuple(reason for _, reason in found if reason))


def support_on_board(found: OnBoard, calibration: Calibration) -> Support:
    """Of a prediction from a board's own measurements: by the share of time in operators that none of them had, by size
    beside the largest of them, and by what disturbed them."""
    share = sum(found.unseen.values())
    reasons: list[tuple[Status, str]] = []
    if calibration.under_load:
        busy = f"{calibration.board} was calibrated while others took {calibration.others or 0:.2f} processors"
        reasons.append(("extrapolated", busy))
    if calibration.throttled:
        reasons.append(("extrapolated", f"{calibration.board} was held back while it was calibrated"))
    if found.unseen:
        named = ", ".join(list(found.unseen)[:3])
        measured = f"{100 * share:.1f} % of the time in operators that were not measured ({named})"
        reasons.append((status_of_share(share), measured))
    size = _status_beyond(found.macs / found.most_macs)
    if size != "interpolated":
        macs, most = digits(found.macs / 1e6), digits(found.most_macs / 1e6)
        reasons.append((size, f"{macs} M multiply-accumulates; the graphs that were measured have up to {most} M"))
    status = max((status for status, _ in reasons), key=_ORDER.index, default="interpolated")
    return Support(status, tuple(reason for _, reason in reasons))


def _operators(workload: Workload, priced: _Priced) -> tuple[Status, str]:
    """Those of inference; a step's products have other forms, so that of it only what is unmodelled can be told."""
    training = any(layer.phase not in ("forward", "statistic") for layer in workload.layers)
    total = sum(ms for _, ms in priced)
    unseen: dict[str, float] = {}
    for demanded, ms in priced:
        layer = demanded.layer
        if layer.kind == "unmodelled" or not (training or _is_seen(layer, workload.batch)):
            unseen[layer.op] = unseen.get(layer.op, 0.0) + ms
    share = sum(unseen.values()) / total if total else 0.0
    status = status_of_share(share)
    if status == "interpolated":
        return status, ""
    named = ", ".join(sorted(unseen, key=lambda op: -unseen[op])[:3])
    return status, f"{100 * share:.0f} % of the time in operators that no fitted network has ({named})"


def _is_seen(layer: Layer, batch: int) -> bool:
    if layer.gemms and layer.conv is None:  # a classifier's: one row of a photo; not one of tokens or two activations
        return bool(layer.weights) and max(gemm.m * gemm.count for gemm in layer.gemms) <= batch
    return layer.conv is not None or layer.op in _SEEN


def _size(demands: Sequence[LayerDemand], setting: Setting, device: str, grounds: Grounds) -> tuple[Status, str]:
    named = grounds.sizes.get(f"{setting.runtime}, {device}")
    low, high = named or grounds.sizes.get(setting.runtime, (0.0, float("inf")))
    macs = sum(float(demanded.amounts[MACS].sum()) for demanded in demands)
    status = _status_beyond(max(low / macs if macs else float("inf"), macs / high))
    if status == "interpolated":
        return status, ""
    low, high = low / 1e6, high / 1e6
    where = f"{setting.runtime} here" if named else setting.runtime
    return (
        status,
        f"{digits(macs / 1e6)} M multiply-accumulates; rows of {where} have {digits(low)} to {digits(high)} M",
    )


def _status_beyond(times: float) -> Status:
    """The status of a figure so many times beyond what was measured."""
    if times <= _BEYOND_EXTRAPOLATED:
        return "interpolated"
    return "no ground" if times > _BEYOND_NO_GROUND else "extrapolated"


def _runtime(setting: Setting, case: Case, grounds: Grounds) -> tuple[Status, str]:
    kind = kind_of(setting)
    if case == "family":
        return "interpolated", ""
    names = {"cpu": "Arm processors", "x86": "x86 processors", "gpu": "GPUs"}
    if kind not in grounds.kinds.get(setting.precision, ()):
        return "no ground", f"no row in {setting.precision} on {names[kind]}"
    if case == "runtime":
        return "extrapolated", f"no row of {setting.runtime} {setting.precision} on this device"
    if kind not in grounds.kinds.get(setting.runtime, ()):
        return "no ground", f"no row of this device, and none of {setting.runtime} on {names[kind]}"
    return "extrapolated", "no row of this device"
