"""A bundle on a fleet of devices, as one versioned value: what `protofleet profile --json` writes.

    subject       the bundle: method, input, classes, features, parameters, multiply-accumulates
    uplink        bytes of one contribution, encoded for the wire: of the bundle's method       measured
                  in a round, and of the one that closes runs
                  beside them what FedAvg would send: counted; and every way that trains nothing
    devices       for each:
      inference       one entry for each runtime, precision and threads, the first is the main one   predicted
      training_step   a step by phase, the bundle's own, derived on an array; a round              predicted
      memory          peaks and the upper bound, does it fit, the largest batch that does            predicted
      layers          milliseconds of every layer of the main inference entry
      roofline        peaks and the layers' place under them
    sentence      which board fits, slowest and fastest, for the first screen
    measured      what --measure found on this machine, or a record read back
    comparison    measured beside predicted
    operators     of an inference, measured beside predicted, with --per-operator
    assumptions   what all this rests on

A systolic array's entries are `simulated` by the accelerator model instead. See docs/hardware.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.bundle.uplink_bytes import rungs, uplink_bytes
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import last_method, method
from protofleet.hw_profiles.accelerator.simulate import Cost, array_of, assumptions, simulate
from protofleet.hw_profiles.devices.host import cpu_name
from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.energy import energy
from protofleet.hw_profiles.latency.datasheet import Precision, Threads, device_rates
from protofleet.hw_profiles.latency.precisions import PRECISIONS
from protofleet.hw_profiles.latency.predict import Prediction, coefficients, predict, settings_of
from protofleet.hw_profiles.memory.process_rss import load_model
from protofleet.hw_profiles.reports.profile_memory import BundleMemory
from protofleet.hw_profiles.reports.subject import Subject, bundle_subject
from protofleet.hw_profiles.reports.which_board import which_board
from protofleet.hw_profiles.workload.model import PHASES, Workload

__all__ = ["SCHEMA", "Choice", "profile_report"]

SCHEMA = 1


@dataclass(frozen=True)
class Choice:
    """What the caller asked for: None leaves it to the device. `samples` is N of a round."""

    batch: int = 1
    samples: int = 1000
    runtime: str | None = None
    precision: Precision | None = None
    threads: Threads = "all"


@dataclass(frozen=True)
class _Asked:
    """What is asked of every device."""

    manifest: Manifest
    subject: Subject
    memory: BundleMemory
    choice: Choice


def profile_report(
    bundle: Bundle, devices: Sequence[Device], choice: Choice, measured: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Everything `protofleet profile` knows, as JSON-ready values.

    Args:
        devices: in the order of the report.
        measured: a record of `measure`, from here or read back.

    Raises:
        BundleError: a graph cannot be read, or keeps a dynamic shape.
        UsageError: a runtime or precision that cannot be predicted on a device.
    """
    subject = bundle_subject(bundle, batch=choice.batch)
    asked = _Asked(bundle.manifest, subject, BundleMemory(subject, bundle.manifest), choice)
    report = {
        "schema": SCHEMA,
        "command": "profile",
        "subject": _about(subject, bundle),
        "uplink": _uplink(bundle),
        "samples": choice.samples,
        "devices": [_device(asked, device) for device in devices],
        "measured": dict(measured) if measured else None,
        "assumptions": _assumptions(subject, devices),
        "model_checks": _checks(),
    }
    report["sentence"] = which_board(report)
    report["comparison"] = _comparison(report, subject, devices, measured) if measured else []
    report["operators"] = _operators(subject, devices, measured) if measured else []
    return report


def _about(subject: Subject, bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "backbone": manifest.backbone,
        "method": manifest.method,
        "head": manifest.head,
        "bundle_sha256": bundle.sha256.hex(),
        "input_shape": list(manifest.input_shape),
        "classes": manifest.classes,
        "features": manifest.features,
        "parameters": manifest.parameter_count,
        "batch": subject.batch,
        "training_batch": manifest.batch if subject.step else None,
        "inference_macs": subject.inference.macs,
        "training_step_macs": subject.step.macs if subject.step else None,
        "unmodelled": dict(subject.inference.unmodelled) | (subject.step.unmodelled if subject.step else {}),
    }


def _uplink(bundle: Bundle) -> dict[str, Any]:
    """Bytes up with every class present, encoded: of the bundle's method, of a run's last round (the same method where
    nothing is trained); FedAvg's are counted."""
    own, up = method(bundle.manifest.method), uplink_bytes(bundle.manifest)
    closing = last_method(own)
    return {
        "kind": "measured",
        "method": own.name,
        "statistic": own.statistic.NAME,
        "contribution_bytes": up[own.name],
        "closing_method": closing.name,
        "closing_statistic": closing.statistic.NAME,
        "closing_bytes": up[closing.name],
        "fedavg_bytes": up["fedavg"],
        "without_training": [rung.as_json() for rung in rungs(bundle.manifest)],
    }


def _device(asked: _Asked, device: Device) -> dict[str, Any]:
    subject, choice = asked.subject, asked.choice
    about = {
        "name": device.name,
        "title": device.title,
        "note": device.note,
        "processors": list(device.processors),
        "sources": dict(device.sources),
    }
    if device.systolic is not None:
        return about | _on_array(asked, device)
    main = predict(
        subject.inference, device, runtime=choice.runtime, precision=choice.precision, threads=choice.threads
    )
    others = [predict(subject.inference, device, runtime=r, precision=p, threads=t) for r, p, t in settings_of(device)]
    entries = [main, *(other for other in others if other.setting != main.setting)]
    return about | {
        "inference": [_latency(device, entry, subject.batch) for entry in entries],
        "training_step": _training(asked, device),
        "memory": asked.memory.on_board(device, choice.samples),
        "layers": _layers(subject.inference, [float(ms) for ms in main.layers_ms]),
        "roofline": _roofline(device, main),
    }


def _latency(device: Device, entry: Prediction, batch: int) -> dict[str, Any]:
    setting = entry.setting
    low, high = (None, None) if entry.support.status == "no ground" else (entry.low_ms, entry.high_ms)
    spent = energy(device, setting.precision, entry.ms, low, high)
    return {
        "kind": "predicted",
        "runtime": setting.runtime,
        "variant": setting.variant,
        "processor": setting.processor,
        "precision": setting.precision,
        "threads": setting.threads,
        "batch": batch,
        "latency_ms": entry.ms,
        "low_ms": low,
        "high_ms": high,
        "interval": None if low is None else 0.8,
        "support": entry.support.status,
        "support_reasons": list(entry.support.reasons),
        "error": {**vars(entry.error), "text": entry.error.as_text()},
        "rows": entry.rows,
        "basis": entry.basis,
        "energy": None if spent is None else {"kind": "predicted", **vars(spent)},
    }


def _training(asked: _Asked, device: Device) -> dict[str, Any] | None:
    """The bundle's own step on our own runtime, in fp32 on the CPU, and a round of it."""
    step = asked.subject.step
    if step is None or device.cpu is None:
        return None
    entry = predict(step, device, threads=asked.choice.threads, forward=asked.subject.inference)
    phases = _by_phase(step, [float(ms) for ms in entry.layers_ms])
    trunk = asked.subject.trunk
    trunk_ms = None if trunk is None else predict(trunk, device, threads=asked.choice.threads).ms
    return _latency(device, entry, asked.manifest.batch) | _round(asked, entry.ms, trunk_ms) | {"phases_ms": phases}


def _round(asked: _Asked, step_ms: float, trunk_ms: float | None) -> dict[str, Any]:
    """A round; beside it what a frozen trunk takes of a photo, and of all of them once, None where there is none."""
    manifest = asked.manifest
    epochs = int(manifest.hyper.get("epochs", 1))
    steps = epochs * -(-asked.choice.samples // manifest.batch)
    once = None if trunk_ms is None else asked.choice.samples * trunk_ms / 1e3
    local_round = {"round_steps": steps, "round_epochs": epochs, "round_s": steps * step_ms / 1e3}
    return local_round | {"trunk_ms": trunk_ms, "trunk_once_s": once}


def _on_array(asked: _Asked, device: Device) -> dict[str, Any]:
    subject, choice = asked.subject, asked.choice
    precision = PRECISIONS[choice.precision or "fp32"].on_arrays
    array = array_of(device, precision=precision)
    forward = simulate(subject.inference, array)
    entry = _simulated(device, forward, precision, subject.batch)
    training = None
    if subject.step is not None and PRECISIONS[precision].trains:
        batch = asked.manifest.batch
        derived = subject.derived_step(batch)
        step = simulate(derived, array)
        phases = _by_phase(derived, [c.cycles / array.mhz / 1e3 for c in step.layers])
        entry_step = _simulated(device, step, precision, batch)
        trunk_ms = None if subject.trunk is None else simulate(subject.trunk, array).latency_ms
        training = entry_step | _round(asked, step.latency_ms, trunk_ms) | {"phases_ms": phases}
    assert device.systolic is not None
    points = [
        {
            "name": c.layer.name,
            "macs_per_byte": c.layer.macs / c.traffic.total,
            "gmacs": c.layer.macs / c.cycles * array.mhz / 1e3,
        }
        for c in forward.layers
        if c.layer.macs and c.traffic.total
    ]
    return {
        "inference": [entry],
        "training_step": training,
        "memory": asked.memory.on_array(device, array.float_bytes),
        "layers": _layers(subject.inference, [c.cycles / array.mhz / 1e3 for c in forward.layers]),
        "roofline": {
            "peak_gmacs": array.peak_gflops / 2,
            "memory_gb_s": array.dram_bytes_per_s / 1e9,
            "points": points,
        },
        "assumptions": list(assumptions(array)),
    }


def _simulated(device: Device, cost: Cost, precision: str, batch: int) -> dict[str, Any]:
    spent = energy(device, precision, cost.latency_ms)
    return {
        "kind": "simulated",
        "runtime": f"systolic array, {cost.array.dataflow}, depthwise {cost.array.depthwise}",
        "variant": "",
        "processor": "systolic",
        "precision": precision,
        "threads": "",
        "batch": batch,
        "latency_ms": cost.latency_ms,
        "low_ms": None,
        "high_ms": None,
        "interval": None,
        "support": None,
        "support_reasons": [],
        "error": None,
        "rows": 0,
        "basis": "accelerator model, compute cycles equal to SCALE-Sim's; protofleet cost tells more",
        "utilisation": cost.utilisation,
        "energy": None if spent is None else {"kind": "predicted", **vars(spent)},
    }


def _by_phase(workload: Workload, layers_ms: Sequence[float]) -> dict[str, float]:
    by_phase = dict.fromkeys(PHASES, 0.0)
    for layer, ms in zip(workload.layers, layers_ms, strict=True):
        by_phase[layer.phase] += ms
    return {phase: ms for phase, ms in by_phase.items() if ms > 0}


def _layers(workload: Workload, layers_ms: Sequence[float]) -> list[dict[str, Any]]:
    return [
        {"name": layer.name, "op": layer.op, "kind": layer.kind, "macs": layer.macs, "ms": ms}
        for layer, ms in zip(workload.layers, layers_ms, strict=True)
        if layer.kind != "view" and ms > 0
    ]


def _roofline(device: Device, main: Prediction) -> dict[str, Any]:
    """The data sheet's roof, and where each product lies under it by the prediction."""
    setting = main.setting
    rates = device_rates(device, setting.processor, setting.precision, setting.threads)
    points = [
        {"name": name, "macs_per_byte": macs / (elements * rates.element_bytes), "gmacs": macs / ms / 1e6}
        for name, macs, elements, ms in main.products()
    ]
    return {"peak_gmacs": rates.macs / 1e6, "memory_gb_s": rates.bytes / 1e6, "points": points}


def _comparison(
    report: Mapping[str, Any], subject: Subject, devices: Sequence[Device], measured: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Measured runs beside what is predicted for the device they ran on, where that is one of `devices`.

    Raises:
        UsageError: it is another bundle that was measured.
    """
    theirs, ours = str(measured["bundle"]["sha256"]), str(report["subject"]["bundle_sha256"])
    if theirs != ours:
        raise UsageError(
            "the measurement is of another bundle",
            expected=f"sha256 {ours[:12]}…",
            got=f"{theirs[:12]}…",
            hint="--measure",
        )
    device = _measured_device(devices, measured["host"])
    lines = []
    for run in measured["runs"]:
        line = dict(run) | {"kind": "measured", "device": device.name if device else None, "predicted_ms": None}
        workload = subject.step if run["phase"] == "training_step" else subject.inference
        fits = workload is not None and (run["phase"] == "training_step" or run["batch"] == subject.batch)
        if device is not None and device.cpu is not None and fits and run["threads"] in (1, device.cpu.cores):
            threads: Threads = "1" if run["threads"] == 1 else "all"
            forward = subject.inference if workload is subject.step else None
            ran = cast(Workload, workload)
            entry = predict(ran, device, runtime="onnxruntime", precision="fp32", threads=threads, forward=forward)
            line |= {"predicted_ms": entry.ms, "low_ms": entry.low_ms, "high_ms": entry.high_ms}
            line |= {"support": entry.support.status, "inside": entry.low_ms <= run["median_ms"] <= entry.high_ms}
            if entry.support.status == "no ground":
                line |= {"low_ms": None, "high_ms": None, "inside": None}
        lines.append(line)
    return lines


def _operators(subject: Subject, devices: Sequence[Device], measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each kind of operator took of an inference, beside what is predicted for it on the device that measured.

    ONNX Runtime runs an activation as part of the product before it (`FusedConv`), as the prediction does.
    """
    traced = measured.get("operators")
    if not traced:
        return []
    predicted: dict[str, float] = {}
    device = _measured_device(devices, measured["host"])
    if device is not None and device.cpu is not None and traced["batch"] == subject.batch:
        threads: Threads = "1" if traced["threads"] == 1 else "all"
        entry = predict(subject.inference, device, runtime="onnxruntime", precision="fp32", threads=threads)
        for layer, ms in zip(subject.inference.layers, entry.layers_ms, strict=True):
            if ms > 0:
                predicted[layer.op] = predicted.get(layer.op, 0.0) + float(ms)
    found: dict[str, tuple[int, float]] = {}
    for row in traced["rows"]:
        op = str(row["op"]).removeprefix("Fused")
        nodes, ms = found.get(op, (0, 0.0))
        found[op] = nodes + row["nodes"], ms + row["ms"]
    names = sorted({*found, *predicted}, key=lambda op: -max(found.get(op, (0, 0.0))[1], predicted.get(op, 0.0)))
    return [
        {
            "op": op,
            "nodes": found.get(op, (0, 0.0))[0],
            "measured_ms": found[op][1] if op in found else None,
            "predicted_ms": predicted.get(op),
        }
        for op in names
    ]


def _measured_device(devices: Sequence[Device], ran_on: Mapping[str, Any]) -> Device | None:
    """The device whose title begins the board's own name; `host` when the processor is this machine's."""
    for device in devices:
        is_this_host = device.name == "host" and ran_on["cpu"] == cpu_name()
        if is_this_host or str(ran_on["board"]).startswith(device.title.split(" (")[0]):
            return device
    return None


def _assumptions(subject: Subject, devices: Sequence[Device]) -> list[str]:
    known = coefficients()
    lines = [
        "predicted: demand by operator class x data sheet x departure learned from "
        f"{known.provenance['rows_used']} published rows and {known.provenance['own_rows_used']} of our own; intervals "
        "are those that hold 8 of 10 rows where an architecture family, a runtime or a device was left out",
        "interpolated: rows of this runtime on this device, of networks like this in operators and size; extrapolated: "
        "beyond one of these; no ground: nothing like it was left out and predicted, so that no interval is given",
        "a runtime is taken to fold normalisation and activations into the product before them and to use Winograd for "
        "dense 3x3 convolutions of stride 1; published rows are batch 1, larger batches scale with their demand",
        "energy: the board's power while computing times the latency; waiting is not in it",
        "memory: resident bytes of our client (ONNX Runtime, fp32) with its samples, over rounds and the closing one, "
        "from its graphs by liveness and coefficients measured on x86-64; at most is "
        f"{load_model().margin:.2f} times the central estimate, which held for all networks that were left out, and "
        "decides what fits; no board's was measured; on an array, what lives at once",
    ]
    if subject.step is not None:
        lines.append(
            "training on a board is predicted from what its processor does elsewhere (published inference rows) and "
            "what ONNX Runtime does with training steps on the one x86 machine we measured; no board's was measured"
        )
    if subject.trunk is not None and subject.manifest is not None:
        lines.append(
            f"only the tail is trained: a photo goes through the frozen trunk once ({subject.trunk.macs / 1e6:,.1f} M "
            f"multiply-accumulates), {subject.manifest.activation_bytes / 1e3:,.1f} kB of it are kept on disk, and "
            "steps and rounds are those of the tail"
        )
    unmodelled = dict(subject.inference.unmodelled) | (subject.step.unmodelled if subject.step else {})
    if unmodelled:
        named = ", ".join(f"{name} x{count}" for name, count in sorted(unmodelled.items()))
        lines.append(f"unmodelled operators, priced as element-wise work on their elements: {named}")
    lines += [f"{device.name}: {device.note}" for device in devices if device.note]
    return lines


def _checks() -> dict[str, Any]:
    """How well the latency model did on models it had not seen, as the fit wrote it down."""
    return {name: table["all published"] for name, table in coefficients().checks.items()}
