"""Published latency rows, read into one vocabulary: which device, runtime, precision, threads, model, milliseconds.

The CSV has `device,cpu,runtime,threads,precision,model,input,ms,source`, each in its publisher's words. `read_rows`
translates the known rows, and counts the others by reason: a model that is no classifier of torchvision or timm, a
runtime or a precision that is not named, a device without a file. Only the fit and its checks read rows. The product
contains only the fitted coefficients.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError
from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.latency.datasheet import Precision, Processor, Threads
from protofleet.hw_profiles.latency.operator_classes import CLASSES
from protofleet.hw_profiles.latency.precisions import ON_PROCESSORS

__all__ = ["Row", "Setting", "family", "read_own_rows", "read_rows", "reference_demands"]

# The publisher's words -> (our name, processor). What differs only in version keeps its version in the variant.
_RUNTIMES: tuple[tuple[str, str, Processor], ...] = (
    (r"ncnn-cpu", "ncnn", "cpu"),
    (r"ncnn-vulkan", "ncnn-vulkan", "gpu"),
    (r"TFLite [\d.]+ ruy", "tflite", "cpu"),
    (r"ArmNN [\d.]+ neon", "armnn", "cpu"),
    (r"XNNPACK end2end_bench", "xnnpack", "cpu"),
    (r"ExecuTorch XNNPACK\+KleidiAI", "executorch", "cpu"),
    (r"OpenCV DNN CPU", "opencv", "cpu"),
    (r"OpenCV DNN CUDA", "opencv-cuda", "gpu"),
    (r"PyTorch CUDA", "pytorch-cuda", "gpu"),
    (r"TensorRT.*", "tensorrt", "gpu"),
)
OWN_DEVICE = "x86-server"
ANY_DEVICE, ANY_X86 = "*", "*x86"  # what stands for a device that no row names
TRAINING_RUNTIME = "onnxruntime training"  # the same runtime, but a graph of another kind, with effects of its own
_POWER_MODES = {"MaxN": "uncapped (MaxN)", "MaxQ": "power-capped (MaxQ)"}
_FAMILIES = (
    ("mobilenetv1", r"mobilenet[-_]?v1"),
    ("mobilenetv2", r"mobilenet[-_]?v2"),
    ("mobilenetv3", r"mobilenet[-_]?v3"),
    ("efficientnet-lite", r"efficientnet-lite"),
    ("efficientnet-b0", r"efficientnet[-_]b0"),
    ("vgg", r"vgg"),
    ("resnet18/34", r"resnet(18|34)"),
    ("resnet50", r"resnet50(?!-2)"),
    ("squeezenet", r"squeezenet"),
)


@dataclass(frozen=True, order=True)
class Setting:
    """Where and how a model ran. `variant` tells apart what the other fields do not (a version, a power mode)."""

    device: str
    processor: Processor
    runtime: str
    precision: Precision
    threads: Threads
    variant: str = ""


@dataclass(frozen=True)
class Row:
    """One published measurement of batch 1.

    Attributes:
        model: `name|HxW`, a key of the reference models.
        demand: (K,) what that model asks for.
        clock_ghz: where the row ran at another clock than the device file says.
    """

    setting: Setting
    model: str
    demand: NDArray[np.float64]
    ms: float
    source: str
    clock_ghz: float | None = None


def reference_demands() -> dict[str, NDArray[np.float64]]:
    """`name|HxW` -> (K,) demand of each model of the rows, as shipped."""
    text = (
        resources.files("protofleet.hw_profiles.latency").joinpath("reference_models.json").read_text(encoding="utf-8")
    )
    table = json.loads(text)
    if tuple(table["classes"]) != CLASSES:
        raise DataError(
            "reference_models.json",
            expected=f"the classes {CLASSES}",
            got="others",
            hint="benchmarks/hardware/reference_models.py",
        )
    return {key: np.array(model["demand"]) for key, model in table["models"].items()}


def family(model: str) -> str:
    """The architecture family of a row's model: what is left out together in the stricter check."""
    name = model.split("|")[0].lower()
    return next((label for label, pattern in _FAMILIES if re.search(pattern, name)), name)


def read_rows(path: str | Path, devices: Mapping[str, Device]) -> tuple[list[Row], Counter[str]]:
    """The usable rows of a CSV, and how many were left out for which reason.

    Raises:
        DataError: the file cannot be read or lacks a column.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            table = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read rows {path}", expected="a CSV file", got=error) from None
    needed = {"device", "cpu", "runtime", "threads", "precision", "model", "input", "ms", "source"}
    if not table or not needed <= set(table[0]):
        raise DataError(f"rows {path}", expected=f"the columns {', '.join(sorted(needed))}", got="others")
    demands, named = reference_demands(), {device.rows: device for device in devices.values() if device.rows}
    rows, left_out = [], Counter[str]()
    for line in table:
        row = _row(line, demands, named)
        if isinstance(row, str):
            left_out[row] += 1
        else:
            rows.append(row)
    return rows, left_out


def read_own_rows(path: str | Path) -> list[Row]:
    """Rows that `benchmarks/hardware/host_latency.py` measured with our own client: ONNX Runtime, inference and
    training steps.

    They belong to the device `x86-server`, the machine they were measured on, whatever machine this is.

    Raises:
        DataError: the file cannot be read, or was made for other operator classes.
    """
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        classes, lines = tuple(table["classes"]), table["rows"]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(
            f"cannot read own rows {path}", expected="JSON of benchmarks/hardware/host_latency.py", got=error
        ) from None
    if classes != CLASSES:
        raise DataError(
            f"own rows {path}", expected="this version's operator classes", got="others", hint="measuring anew"
        )
    names = {"inference": "onnxruntime", "training_step": TRAINING_RUNTIME}
    source = f"measured with our own client, {table['cpu']}, onnxruntime {table['versions']['onnxruntime']}"
    return [
        Row(
            Setting(OWN_DEVICE, "cpu", names[line["phase"]], "fp32", "1"), line["model"], np.array(line["demand"]),
            line["ms"], source,
        )
        for line in lines
    ]  # fmt: skip


def _row(line: Mapping[str, str], demands: Mapping[str, NDArray[np.float64]], named: Mapping[str, Device]) -> Row | str:
    """The row, or the reason for leaving it out."""
    key = f"{line['model']}|{line['input']}"
    if key not in demands:
        return "a model without a torchvision or timm counterpart (detection heads)"
    if line["device"] not in named:
        return "a device without a file (ARM1176: no vector unit)"
    runtime = next(((name, kind) for text, name, kind in _RUNTIMES if re.fullmatch(text, line["runtime"])), None)
    precision = next((p for p in ON_PROCESSORS if line["precision"].startswith(p)), None)
    if runtime is None or precision is None:
        return "a runtime or a precision that its publisher does not name"
    device = named[line["device"]]
    threads: Threads = "1" if line["threads"] == "1" and runtime[1] == "cpu" else "all"
    setting = Setting(device.name, runtime[1], runtime[0], precision, threads, _variant(line))  # type: ignore[arg-type]
    try:
        ms = float(line["ms"])
    except ValueError:
        return "a time that is no number"
    return Row(setting, key, demands[key], ms, line["source"], _clock_ghz(line, device))


def _variant(line: Mapping[str, str]) -> str:
    version = re.search(r"TFLite ([\d]+\.[\d]+)", line["runtime"])
    mode = next((power_mode for name, power_mode in _POWER_MODES.items() if name in line["runtime"]), "")
    architecture = "armv7" if "armv7" in line["cpu"] else ""
    return " ".join(filter(None, (version[1] if version else "", mode, architecture)))


def _clock_ghz(line: Mapping[str, str], device: Device) -> float | None:
    """The clock that the row states for its CPU, where the device file has another."""
    stated = re.search(r"([\d.]+) ?GHz", line["cpu"])
    if stated is None or device.cpu is None or float(stated[1]) == device.cpu.clock_ghz:
        return None
    return float(stated[1])
