"""The cost of one backbone on one accelerator, as one versioned value: what `protofleet cost --json` writes.

    subject       what was costed, and how it was read
    array         the accelerator, each assumption in words
    inference     one forward pass at batch B                                  simulated; memory predicted
    methods       one training step and one round, by method and phase:        simulated; memory predicted
                  FedAvg as the baseline, then every method that trains
    calibration   one round of every method that trains nothing, then CCVR's   simulated
    layers        every layer of the step: products, cycles, bound, traffic     simulated
    memory        peak by use, and the largest batch that fits                  predicted
    claims        the paper's figures beside ours, by reading; for its own networks alone
    sentence      what a step and a round take, and the largest batch, for the first screen
    step_graph    the bundle's own train_step.onnx: products by phase           counted

Every block names its `kind`. See docs/hardware.md.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from protofleet.contract.errors import UsageError
from protofleet.contract.methods import METHODS
from protofleet.hw_profiles.accelerator.paper_claims import CLAIMS, readings
from protofleet.hw_profiles.accelerator.round_cost import Calibration, RoundCost, Setting, calibration_cost, round_cost
from protofleet.hw_profiles.accelerator.simulate import (
    Array,
    Cost,
    LayerCost,
    assumptions,
    buildable_precisions,
    simulate,
)
from protofleet.hw_profiles.latency.precisions import PRECISIONS
from protofleet.hw_profiles.memory.liveness import LARGEST_SEARCHED, largest_batch, peak_memory
from protofleet.hw_profiles.reports.subject import Subject
from protofleet.hw_profiles.reports.which_board import what_it_takes
from protofleet.hw_profiles.workload.baselines import ccvr, features_width
from protofleet.hw_profiles.workload.calibration_step import Calibrating
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.model import PHASES, Workload
from protofleet.hw_profiles.workload.training import Training

__all__ = ["SCHEMA", "cost_report", "step_cost"]

SCHEMA = 1


def step_cost(subject: Subject, array: Array) -> Cost:
    """One training step of the baseline, layer by layer; for int8, which no one trains in, the forward pass."""
    if not PRECISIONS[array.precision].trains:
        return simulate(subject.inference, array)
    return simulate(subject.derived_step(subject.batch, subject.baseline()), array)


def cost_report(
    subject: Subject, array: Array, *, device: str, setting: Setting, capacity_bytes: int
) -> dict[str, Any]:
    """Everything `protofleet cost` knows, as JSON-ready values.

    Args:
        device: the device's name.
        setting: of a round.
        capacity_bytes: the memory behind the array.

    Raises:
        UsageError: when batch B does not fit the device's memory; the largest that does is named.
    """
    forward = subject.forward_at(setting.batch)
    trains = PRECISIONS[array.precision].trains
    fits = _largest_batches(subject, array, capacity_bytes)
    _check_fits(setting.batch, fits["training" if trains else "inference"], capacity_bytes, device)
    trained = subject.trained_at(setting.batch)
    rounds = [round_cost(trained, each, array, setting) for each in _trainings(subject)] if trains else []
    calibrations = [
        calibration_cost(forward, each, array, setting.samples) for each in _calibratings(subject, setting.samples)
    ]
    width = features_width(forward)
    report = {
        "schema": SCHEMA,
        "command": "cost",
        "subject": {
            "name": subject.name,
            "source": subject.source,
            "batch": setting.batch,
            "classes": subject.classes,
            "features": width,
            "parameters": forward.parameters,
            "head_parameters": subject.classes * width,
            "forward_macs": forward.macs,
            "unmodelled": forward.unmodelled,
        },
        "device": device,
        "array": dict(asdict(array).items()) | {"peak_gflops": array.peak_gflops},
        "buildable": list(buildable_precisions(array)),
        "assumptions": list(assumptions(array)) + _training_assumptions(subject, setting, trains),
        "inference": _inference(simulate(fold_weights(forward), array)),
        "methods": [_round(cost, rounds[0]) for cost in rounds],
        "calibration": [_calibration(c, calibrations[-1]) for c in calibrations] if trains else [],
        "memory": {"kind": "predicted", "capacity_bytes": capacity_bytes, "largest_batch": fits},
        "claims": _claims(subject, array, setting) if trains and subject.published else [],
        "step_graph": _step_graph(subject.step),
        "layers": [_layer(c) for c in step_cost(subject, array).layers if c.layer.kind != "view"],
    }
    return report | {"sentence": what_it_takes(report)}


def _trainings(subject: Subject) -> list[Training]:
    """The baseline, then every method that trains."""
    return [subject.baseline(), *(subject.training(method) for method in METHODS.values() if method.trains)]


def _calibratings(subject: Subject, samples: int) -> list[Calibrating]:
    """Every method that trains nothing, then what they are compared with."""
    methods = [subject.calibration(method, samples) for method in METHODS.values() if not method.trains]
    return [*methods, ccvr(samples, subject.classes, features_width(subject.forward_at(1)))]


def _largest_batches(subject: Subject, array: Array, capacity_bytes: int) -> dict[str, int]:
    def inference(size: int) -> int:
        return peak_memory(fold_weights(subject.forward_at(size)), float_bytes=array.float_bytes).peak_bytes

    baseline = subject.baseline()

    def training(size: int) -> int:
        return peak_memory(subject.derived_step(size, baseline), float_bytes=array.float_bytes).peak_bytes

    return {
        "inference": largest_batch(inference, capacity_bytes, limit=LARGEST_SEARCHED),
        "training": largest_batch(training, capacity_bytes, limit=LARGEST_SEARCHED),
    }


def _check_fits(batch: int, largest: int, capacity_bytes: int, device: str) -> None:
    if largest < min(batch, LARGEST_SEARCHED):
        raise UsageError(
            f"batch {batch} does not fit {device}",
            expected=f"at most {largest} in {capacity_bytes / 2**20:,.0f} MiB" if largest else "a smaller network",
            got=batch,
            hint=f"--batch {largest}" if largest else "another device or --precision bf16",
        )


def _training_assumptions(subject: Subject, setting: Setting, trains: bool) -> list[str]:
    if not trains:
        return [
            "int8 covers inference only: gradients are not representable in it, and sums over features are taken in "
            "floating point, so no method's figures are given"
        ]
    return [
        f"a round is {setting.steps:,} steps: {setting.samples:,} local samples, {setting.epochs} epochs, batch "
        f"{setting.batch} (the last batch of an epoch counts as a full one)",
        *_tail_assumptions(subject, setting),
        "each method trains with its own optimizer: the bundle's as it was exported, others by their defaults, FedAvg "
        "as the bundle's or, where none trains, by SGD with momentum; gradients are kept until the backward pass is "
        "over, then every tensor is updated once",
        "input gradients of strided convolutions are stride^2 dense products, so that no zeros are multiplied",
        "CCVR's server draws 500 features per class (1,000 for 200 classes) and trains one epoch on them; server work "
        "is timed on the same accelerator, as the paper does not name its server",
        "memory: peak of one step by liveness, packed greedily by size, from the batch in its buffers to the last "
        "update",
    ]


def _tail_assumptions(subject: Subject, setting: Setting) -> list[str]:
    if subject.trunk is None or subject.manifest is None:
        return []
    kept = setting.samples * subject.manifest.activation_bytes
    return [
        f"every method trains the bundle's tail; the frozen trunk, {subject.trunk.macs / 1e6:,.1f} M "
        f"multiply-accumulates a photo, runs once for each, outside the rounds; {kept / 1e6:,.1f} MB are kept of it"
    ]


def _inference(cost: Cost) -> dict[str, Any]:
    memory = peak_memory(cost.workload, float_bytes=cost.array.float_bytes)
    return {"kind": "simulated", **_totals(cost), "memory": _memory(memory.by_use(), memory.peak_bytes)}


def _totals(cost: Cost) -> dict[str, Any]:
    return {
        "latency_ms": cost.latency_ms,
        "cycles": cost.cycles,
        "array_cycles": cost.array_cycles,
        "utilisation": cost.utilisation,
        "macs": cost.workload.macs,
        "dram_bytes": cost.dram_bytes,
        "sram_reads": sum(c.sram_reads for c in cost.layers),
        "sram_writes": sum(c.sram_writes for c in cost.layers),
    }


def _memory(parts: dict[str, int], peak_bytes: int) -> dict[str, Any]:
    return {"kind": "predicted", "peak_bytes": peak_bytes, **{f"{name}_bytes": size for name, size in parts.items()}}


def _round(cost: RoundCost, base: RoundCost) -> dict[str, Any]:
    return {
        "kind": "simulated",
        "method": cost.method,
        "head": cost.head,
        "step_ms": cost.step_ms,
        "round_s": cost.round_s,
        "steps": cost.steps,
        "phases_ms": cost.phase_ms(),
        "macs": {p: cost.step.workload.phase(p).macs for p in PHASES if p != "statistic"},
        "array_cycles": cost.step.array_cycles,
        "dram_bytes": cost.step.dram_bytes,
        "uplink_bytes": cost.uplink_bytes,
        "memory": _memory(cost.memory.by_use(), cost.memory.peak_bytes),
        "saved_percent": {
            "latency": 100 * (1 - cost.step_ms / base.step_ms),
            "memory": 100 * (1 - cost.memory.peak_bytes / base.memory.peak_bytes),
            "uplink": 100 * (1 - cost.uplink_bytes / base.uplink_bytes),
        },
    }


def _calibration(cost: Calibration, base: Calibration) -> dict[str, Any]:
    return {
        "kind": "simulated",
        **asdict(cost),
        "client_ms": cost.client_ms,
        "total_ms": cost.total_ms,
        "saved_percent": 100 * (1 - cost.total_ms / base.total_ms),
    }


def _claims(subject: Subject, array: Array, setting: Setting) -> list[dict[str, Any]]:
    return [
        {**asdict(r), "claim_text": CLAIMS[r.claim][1], "paper_percent": CLAIMS[r.claim][0]}
        for r in readings(subject.forward_at, subject.classes, array, setting.samples)
    ]


def _step_graph(step: Workload | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "kind": "counted",
        "batch": step.batch,
        "macs": {p: step.phase(p).macs for p in PHASES if p != "statistic"},
        "vector_ops": {p: sum(x.vector_ops for x in step.phase(p).layers) for p in PHASES if p != "statistic"},
        "unmodelled": step.unmodelled,
        "memory": _memory(peak_memory(step).by_use(), peak_memory(step).peak_bytes),
    }


def _layer(cost: LayerCost) -> dict[str, Any]:
    layer = cost.layer
    return {
        "name": layer.name,
        "op": layer.op,
        "kind": layer.kind,
        "phase": layer.phase,
        "products": [
            {"m": p.m, "n": p.n, "k": p.k, "count": p.count, "channels": p.channels, "cycles": p.cycles}
            for p in cost.placed
        ],
        "macs": layer.macs,
        "vector_ops": layer.vector_ops,
        "cycles": cost.cycles,
        "array_cycles": cost.array_cycles,
        "vector_cycles": cost.vector_cycles,
        "dram_cycles": cost.dram_cycles,
        "stall_cycles": cost.stall_cycles,
        "bound": cost.bound,
        "sram_reads": cost.sram_reads,
        "sram_writes": cost.sram_writes,
        "dram_bytes": cost.traffic.total,
        "dram_spilled_bytes": cost.traffic.spilled,
    }
