"""SphereFed's three hardware claims, beside this model's figures under each reading of them.

The paper (section 5.4, appendix E) claims for a 32x64 array at 100 MHz: up to 10.5 % of memory and 13.6 % of latency
saved in local training against FedAvg, and up to 9.1 % of latency saved by FFC against CCVR.

The paper gives neither the batch size nor the dataflow, nor the base of the percentages. So each claim is computed
under several stated readings. Nothing in the model is adjusted to meet a claim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from protofleet.hw_profiles.accelerator.round_cost import Setting, calibration_cost, round_cost
from protofleet.hw_profiles.accelerator.simulate import Array, Cost
from protofleet.hw_profiles.workload.baselines import (
    ccvr,
    features_width,
    fedavg,
    published_ffc,
    published_spherefed,
    without_classifier,
)
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.model import Workload

__all__ = ["CLAIMS", "Reading", "readings"]

CLAIMS = {
    "memory": (10.5, "memory saved in local training, SphereFed against FedAvg"),
    "latency": (13.6, "latency saved in local training, SphereFed against FedAvg"),
    "calibration": (9.1, "latency saved in calibration, FFC against CCVR"),
}


@dataclass(frozen=True)
class Reading:
    """One reading of a claim.

    Attributes:
        claim: a key of `CLAIMS`.
        assumption: the base of the percentage, in words.
        percent: the result; negative where the cost is higher.
        kind: `arithmetic` for a ratio of counts, `simulated` or `predicted` for the model's figures.
    """

    claim: str
    assumption: str
    percent: float
    kind: str


def readings(forward_at: Callable[[int], Workload], classes: int, array: Array, samples: int = 5_000) -> list[Reading]:
    """All readings for one backbone.

    Args:
        forward_at: the features graph at a batch size.
        samples: local samples, for the calibration.
    """
    all_readings = _memory(forward_at, classes, array)
    for batch in (1, 64):
        all_readings += _latency(forward_at(batch), classes, array)
    return all_readings + _calibration(forward_at(64), classes, array, samples)


def _memory(forward_at: Callable[[int], Workload], classes: int, array: Array) -> list[Reading]:
    forward = forward_at(1)
    head = classes * features_width(forward)
    folded = fold_weights(forward)  # so that a transposed weight counts where it is multiplied
    multiplied = {n for layer in folded.layers if layer.gemms for n in layer.weights}
    dense = sum(folded.tensors[n].elements for n in multiplied if len(folded.tensors[n].shape) > 1)
    memory_readings = [
        Reading(
            "memory", "the head's share of the weights of convolutions and products", _share(head, dense), "arithmetic"
        ),
        Reading(
            "memory", "the head's share of all weights, norms included", _share(head, forward.parameters), "arithmetic"
        ),
        Reading(
            "memory",
            "weights, gradients and momentum, no activations: the head's gradient and momentum go",
            _share(head, forward.parameters) * 2 / 3,
            "arithmetic",
        ),
    ]
    for batch in (1, 64):
        at_batch, setting = forward_at(batch), Setting(batch=batch)
        costs = [
            round_cost(at_batch, as_in(at_batch, classes), array, setting) for as_in in (fedavg, published_spherefed)
        ]
        saved = _saved(*(cost.memory.peak_bytes for cost in costs))
        memory_readings.append(
            Reading("memory", f"peak of one training step, activations included, batch {batch}", saved, "predicted")
        )
    return memory_readings


def _latency(forward: Workload, classes: int, array: Array) -> list[Reading]:
    batch, latency_readings = forward.batch, []
    for mapping in ("per-channel", "packed"):
        machine = replace(array, depthwise=mapping)
        base, frozen, skipped = (
            round_cost(forward, as_in(forward, classes), machine, Setting(batch=batch)).step
            for as_in in (fedavg, published_spherefed, without_classifier)
        )
        how = f"depthwise {mapping}, {array.dataflow}, batch {batch}"
        latency_readings += [
            Reading("latency", f"whole step, {how}", _saved(base.cycles, frozen.cycles), "simulated"),
            Reading(
                "latency", f"array cycles only, {how}", _saved(base.array_cycles, frozen.array_cycles), "simulated"
            ),
        ]
        if mapping == "packed":
            ideal = [_ideal_cycles(cost) for cost in (base, frozen, skipped)]
            full = f"every product at full use of the cells, batch {batch}"
            latency_readings += [
                Reading("latency", f"whole step, {full}", _saved(ideal[0], ideal[1]), "simulated"),
                Reading(
                    "latency",
                    f"whole step, {full}, classifier skipped altogether",
                    _saved(ideal[0], ideal[2]),
                    "simulated",
                ),
            ]
    return latency_readings


def _calibration(forward: Workload, classes: int, array: Array, samples: int) -> list[Reading]:
    calibration_readings, sizes = [], (samples, classes, features_width(forward))
    for mapping in ("per-channel", "packed"):
        machine = replace(array, depthwise=mapping)
        closed = calibration_cost(forward, published_ffc(*sizes), machine, samples)
        how = f"{samples:,} local samples, depthwise {mapping}"
        for epochs in (1, 10):
            drawn = calibration_cost(forward, ccvr(*sizes, epochs=epochs), machine, samples)
            times = "1 epoch" if epochs == 1 else f"{epochs} epochs"
            calibration_readings.append(
                Reading(
                    "calibration",
                    f"one client and a server on the same accelerator, {times} of CCVR's training, {how}",
                    _saved(drawn.total_ms, closed.total_ms),
                    "simulated",
                )
            )
        calibration_readings.append(
            Reading("calibration", f"one client alone, {how}", _saved(drawn.client_ms, closed.client_ms), "simulated")
        )
    return calibration_readings


def _ideal_cycles(cost: Cost) -> int:
    """As `Cost.cycles`, if every product used all cells."""
    cells = cost.array.rows * cost.array.cols
    return sum(max(-(-c.layer.macs // cells), c.vector_cycles, c.dram_cycles) for c in cost.layers)


def _share(part: int, rest: int) -> float:
    return 100 * part / (part + rest)


def _saved(before: float, after: float) -> float:
    return 100 * (1 - after / before)
