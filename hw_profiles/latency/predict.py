"""Predicts the time of a workload on a board's CPU or GPU, with an interval and the basis of the prediction.

    demand (operator_classes)  x  data sheet (datasheet)  x  learned departure (coefficients.json)

1. Pick the setting: runtime, precision, threads.
2. Look up its fitted offsets, or those of the nearest setting that has some.
3. Price the demand class by class.
4. Give it the interval (`intervals`) that left-out rows ask for where a prediction rests on as little as this one.
5. Say how well that does (`error`), and whether there is ground for it (`support`).

A device whose file has a calibration (`profile --calibrate`) is predicted from that where our own runtime is asked for.

The interval should hold 8 times out of 10. Every figure is `predicted`.
`python -m protofleet.hw_profiles.latency.fit` makes the coefficients, with their provenance inside. See
docs/hardware.md.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import UsageError, near_names
from protofleet.hw_profiles.calibration.predict_board import predict_on_board
from protofleet.hw_profiles.devices.calibrated import Calibration
from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.latency.datasheet import Precision, Threads, device_rates, log_cost_ms
from protofleet.hw_profiles.latency.intervals import CASES, Case, Widths
from protofleet.hw_profiles.latency.operator_classes import CLASSES, LayerDemand, layer_demands
from protofleet.hw_profiles.latency.published_rows import ANY_DEVICE, ANY_X86, OWN_DEVICE, TRAINING_RUNTIME, Setting
from protofleet.hw_profiles.latency.support import Grounds, Support, case_of, support_of, support_on_board
from protofleet.hw_profiles.units import digits
from protofleet.hw_profiles.workload.model import Workload

__all__ = [
    "Coefficients",
    "ModelError",
    "Prediction",
    "coefficients",
    "default_runtime",
    "predict",
    "runtimes",
    "settings_of",
]


@dataclass(frozen=True, eq=False)
class Fit:
    """The learned departure of one setting: `offsets` (K,) and their `covariance` (K, K), in natural logarithms."""

    setting: Setting
    rows: int
    offsets: NDArray[np.float64]
    covariance: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Coefficients:
    """`coefficients.json`: all fits, the noise of a row, the widths of intervals, the errors of each case by runtime,
    and what the rows cover."""

    fits: Mapping[tuple[str, str, str, str], Fit]
    noise: float
    widths: Mapping[Case, Widths]
    errors: Mapping[str, Mapping[str, Mapping[str, float]]]
    grounds: Grounds
    provenance: Mapping[str, object]
    checks: Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class ModelError:
    """How wrong the model was on rows left out as this prediction's lack: median and 90th percentile, and whose."""

    median: float
    p90: float
    rows: int
    left_out: Case | Literal["graph"]
    of: str

    def as_text(self) -> str:
        """One line beside a figure."""
        return (
            f"off by {100 * self.median:.0f} % in the median, {100 * self.p90:.0f} % in one of ten, on {self.rows} "
            f"rows of {self.of}, each {self.left_out} left out"
        )


@dataclass(frozen=True, eq=False)
class Prediction:
    """Milliseconds on one setting.

    Attributes:
        ms, low_ms, high_ms: the prediction and its 80 % interval, which means nothing where there is no ground.
        layers_ms: one entry for each layer of the workload, fused ones 0; they add up to `ms`.
        rows: number of published rows of exactly this setting; 0 for shared effects and the data sheet only.
        basis: the basis of the prediction, in words.
        support: whether it is interpolated, extrapolated or without ground.
        error: of the model where it knows as little.
        unmodelled: operators unknown to the model, with their number. They are priced as plain element-wise work.
    """

    setting: Setting
    ms: float
    low_ms: float
    high_ms: float
    layers_ms: NDArray[np.float64]
    rows: int
    basis: str
    support: Support
    error: ModelError
    unmodelled: Mapping[str, int]
    demands: tuple[LayerDemand, ...] = ()

    def interval_text(self) -> str:
        """The interval in words; of a figure without ground there is none."""
        if self.support.status == "no ground":
            return f"no interval: {'; '.join(self.support.reasons)}"
        return f"80 % within {digits(self.low_ms)} to {digits(self.high_ms)} ms"

    def products(self) -> list[tuple[str, int, float, float]]:
        """Layers that multiply: (name, multiply-accumulates, elements read and written, ms)."""
        traffic = CLASSES.index("traffic")
        return [
            (demanded.layer.name, demanded.layer.macs, float(demanded.amounts[traffic]), float(ms))
            for demanded, ms in zip(self.demands, self.layers_ms, strict=True)
            if demanded.layer.macs and ms > 0
        ]


@cache
def coefficients() -> Coefficients:
    """The coefficients that ship with Protofleet."""
    text = resources.files("protofleet.hw_profiles.latency").joinpath("coefficients.json").read_text(encoding="utf-8")
    table = json.loads(text)
    if tuple(table["classes"]) != CLASSES:
        raise UsageError(
            "coefficients.json", expected="this version's operator classes", got="others", hint="refitting"
        )
    fits: dict[tuple[str, str, str, str], Fit] = {}
    for entry in table["fits"]:
        fit = _read_fit(entry)
        s = fit.setting
        key = (s.device, s.runtime, s.precision, s.threads)
        if key not in fits or _standing(fit) > _standing(fits[key]):
            fits[key] = fit
    widths = {case: Widths(**table["intervals"][case]) for case in CASES}
    grounds = Grounds(table["sizes"], table["kinds"])
    return Coefficients(fits, table["noise"], widths, table["errors"], grounds, table["provenance"], table["checks"])


def runtimes(device: Device) -> dict[str, int]:
    """The runtimes that can be predicted on a device, with their number of published rows there, most first."""
    rows: dict[str, int] = {}
    for (name, runtime, _, _), fit in coefficients().fits.items():
        if (
            runtime != TRAINING_RUNTIME
            and name in (device.name, _stand_in(device))
            and fit.setting.processor in device.processors
        ):
            rows[runtime] = rows.get(runtime, 0) + fit.rows
    return dict(sorted(rows.items(), key=lambda item: -item[1]))


def settings_of(device: Device) -> list[tuple[str, Precision, Threads]]:
    """Every (runtime, precision, threads) that can be predicted on a device, those with published rows first.

    A device that no row names gets the runtimes that shared effects allow.
    """
    fits = coefficients().fits
    own = {key[1:]: fit for key, fit in fits.items() if key[0] == device.name}
    shared = {key[1:]: fit for key, fit in fits.items() if key[0] == _stand_in(device)}
    own = {key: fit for key, fit in own.items() if key[0] != TRAINING_RUNTIME}
    shared = {key: fit for key, fit in shared.items() if key[0] != TRAINING_RUNTIME}
    keys = [(key, fit.rows) for key, fit in (own or shared).items() if fit.setting.processor in device.processors]
    if not own and device.cpu is not None and device.cpu.fp16_macs_per_cycle is None:
        keys = [(key, rows) for key, rows in keys if key[1] != "fp16" or shared[key].setting.processor == "gpu"]
    keys.sort(key=lambda item: (item[1] == 0, item[0]))
    return [(runtime, precision, threads) for (runtime, precision, threads), _ in keys]  # type: ignore[misc]


def default_runtime(device: Device) -> str:
    """The default runtime of a device: our client's, wherever there is a CPU."""
    return "tensorrt" if device.cpu is None else "onnxruntime"


def default_precision(device: Device, runtime: str) -> Precision:
    """The default precision of a runtime on this device: ncnn takes fp16 where the CPU has it."""
    if device.cpu is not None and runtime == "ncnn" and device.cpu.fp16_macs_per_cycle:
        return "fp16"
    return "fp16" if device.cpu is None or runtime in ("tensorrt", "ncnn-vulkan", "pytorch-cuda") else "fp32"


def predict(
    workload: Workload,
    device: Device,
    *,
    runtime: str | None = None,
    precision: Precision | None = None,
    threads: Threads = "all",
    forward: Workload | None = None,
) -> Prediction:
    """Predict the time of one run of `workload`: an inference graph, or a training step.

    Args:
        runtime: None for the device's default; for a training step `TRAINING_RUNTIME`, the only one there is.
        precision: None for the runtime's default on this device.
        threads: `1` or `all` cores; without effect on a GPU.
        forward: of a training step, the inference graph of the same network, by which its operators are judged.

    Raises:
        UsageError: the device has no such processor, or runtime or precision cannot be predicted there.
    """
    if any(layer.phase not in ("forward", "statistic") for layer in workload.layers):
        runtime, precision = TRAINING_RUNTIME, "fp32"
    if device.calibration is not None and runtime in (None, *_OWN) and precision in (None, "fp32"):
        return _calibrated(workload, device, device.calibration, runtime or "onnxruntime", threads)
    runtime = runtime or default_runtime(device)
    precision = precision or default_precision(device, runtime)
    fit = _fit_for(device, runtime, precision, threads)
    processor = fit.setting.processor
    rates = device_rates(device, processor, precision, fit.setting.threads)
    unit_ms = np.exp(log_cost_ms(rates, processor) + fit.offsets)  # (K,)
    demands = layer_demands(workload)
    parts = np.array([layer_demand.amounts for layer_demand in demands]) * unit_ms  # (layers, K)
    total = parts.sum()
    share = parts.sum(axis=0) / total
    known = coefficients()
    variance = float(share @ fit.covariance @ share) + known.noise**2
    layers_ms = parts.sum(axis=1)
    case = case_of(fit.setting, device.name, fit.rows)
    half = known.widths[case].half(fit.setting, float(np.sqrt(variance)))
    setting = Setting(device.name, processor, runtime, precision, fit.setting.threads, fit.setting.variant)
    return Prediction(
        setting=setting,
        ms=float(total),
        low_ms=float(total * np.exp(-half)),
        high_ms=float(total * np.exp(half)),
        layers_ms=layers_ms,
        rows=fit.rows,
        basis=_basis(fit, device),
        support=_support(workload, forward, list(zip(demands, layers_ms.tolist(), strict=True)), fit, case, device),
        error=_error(case, setting),
        unmodelled=workload.unmodelled,
        demands=tuple(demands),
    )


def _calibrated(
    workload: Workload, device: Device, calibration: Calibration, runtime: str, threads: Threads
) -> Prediction:
    """On a board that was measured, from what its file says."""
    found = predict_on_board(workload, calibration, threads)
    fit, ms = found.fit, found.ms
    support = support_on_board(found, calibration)
    counted = f"{fit.threads} thread{'s' * (fit.threads > 1)}"
    return Prediction(
        setting=Setting(device.name, "cpu", runtime, "fp32", threads, f"{counted}, calibrated"),
        ms=ms,
        low_ms=float(ms * np.exp(-found.half_width)),
        high_ms=float(ms * np.exp(found.half_width)),
        layers_ms=found.layers_ms,
        rows=fit.graphs,
        basis=f"{fit.graphs} small graphs measured on {calibration.board}, {counted}, {calibration.runtime}",
        support=support,
        error=ModelError(fit.median, fit.p90, fit.graphs, "graph", f"this board, {counted}"),
        unmodelled=workload.unmodelled,
        demands=tuple(layer_demands(workload)),
    )


def _support(
    workload: Workload,
    forward: Workload | None,
    priced: list[tuple[LayerDemand, float]],
    fit: Fit,
    case: Case,
    device: Device,
) -> Support:
    operators = None
    if forward is not None:
        rates = device_rates(device, fit.setting.processor, fit.setting.precision, fit.setting.threads)
        unit_ms = np.exp(log_cost_ms(rates, fit.setting.processor) + fit.offsets)  # (K,)
        operators = forward, [(one, float(one.amounts @ unit_ms)) for one in layer_demands(forward)]
    return support_of(workload, priced, fit.setting, case, coefficients().grounds, device.name, operators)


def _error(case: Case, setting: Setting) -> ModelError:
    """That of the runtime on this device where enough rows were left out, else of the runtime, else of all."""
    errors = coefficients().errors[case]
    names = (f"{setting.runtime}, {setting.device}", setting.runtime, "")
    name = next(name for name in names if name in errors)
    of = {names[0]: f"{setting.runtime} on this device", names[1]: setting.runtime}.get(name, "all runtimes")
    return ModelError(errors[name]["median"], errors[name]["p90"], int(errors[name]["rows"]), case, of)


def _fit_for(device: Device, runtime: str, precision: str, threads: str) -> Fit:
    fits = coefficients().fits
    named = any(key[0] == device.name and key[1] == runtime for key in fits)
    for name in (device.name,) if named else (_stand_in(device),):
        for count in dict.fromkeys((threads, "all")):
            fit = fits.get((name, runtime, precision, count))
            if fit is not None and fit.setting.processor in device.processors:
                return fit
    known = runtimes(device)
    if runtime not in known:
        raise UsageError(
            f"{device.name}: runtime {runtime}", expected="one that can be predicted there", got=runtime,
            hint=near_names(runtime, known) if known else "a device with [cpu] or [gpu]",
        )  # fmt: skip
    names = {key[2] for key in fits if key[1] == runtime and key[0] in (device.name, _stand_in(device))}
    raise UsageError(
        f"{device.name}, {runtime}: precision", expected=f"one of {', '.join(sorted(names))}", got=precision
    )


def _stand_in(device: Device) -> str:
    """What stands for a device that no row names: x86 for the host where it is one, else a board."""
    return ANY_X86 if device.name == "host" and platform.machine() in ("x86_64", "AMD64") else ANY_DEVICE


def _standing(fit: Fit) -> tuple[bool, bool, str]:
    """Of several fits for one question, that with rows, of a 64-bit system, of the latest version stands for it."""
    return fit.rows > 0, "armv7" not in fit.setting.variant, fit.setting.variant


def _basis(fit: Fit, device: Device) -> str:
    s = fit.setting
    if fit.rows:
        return f"{fit.rows} rows of {s.runtime} {s.variant}".rstrip() + f" {s.precision} on this device"
    if s.device == device.name:
        if s.runtime in _OWN:
            return f"no row of {s.runtime} on this board: rows of other runtimes here, and {s.runtime} on {OWN_DEVICE}"
        return (
            f"no row of {s.runtime} {s.precision} on this board: its other rows, {s.runtime} elsewhere, the data sheet"
        )
    return f"no row of this device: its data sheet, and {s.runtime} on other devices"


_OWN = ("onnxruntime", TRAINING_RUNTIME)


def _read_fit(entry: Mapping[str, object]) -> Fit:
    names = ("device", "processor", "runtime", "precision", "threads", "variant")
    setting = Setting(**{name: entry[name] for name in names})  # type: ignore[arg-type]
    size = len(CLASSES)
    covariance = np.zeros((size, size))
    covariance[np.triu_indices(size)] = entry["covariance"]  # type: ignore[assignment]
    covariance = covariance + np.triu(covariance, 1).T
    return Fit(setting, int(entry["rows"]), np.array(entry["offsets"]), covariance)  # type: ignore[arg-type, call-overload]
