"""The time of a workload on a board that was calibrated: its layers' amounts times what the board's file says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.calibration.amounts import AMOUNTS, MULTIPLY, is_step, layer_amounts
from protofleet.hw_profiles.calibration.suite import cases
from protofleet.hw_profiles.devices.calibrated import BoardFit, Calibration
from protofleet.hw_profiles.workload.model import Workload

__all__ = ["OnBoard", "predict_on_board"]

_MULTIPLY = [AMOUNTS.index(name) for name in MULTIPLY]


@dataclass(frozen=True, eq=False)
class OnBoard:
    """A prediction.

    Attributes:
        layers_ms: of each layer of the workload; they add up to the whole, the call with the first.
        half_width: of the 80 % interval, in natural logarithms.
        unseen: operators that no measured graph had, by their share of the time, largest first.
        macs, most_macs: multiply-accumulates of the workload, and of the suite's largest graph of its part.
    """

    layers_ms: NDArray[np.float64]
    half_width: float
    fit: BoardFit
    unseen: dict[str, float]
    macs: float
    most_macs: float

    @property
    def ms(self) -> float:
        """The whole."""
        return float(self.layers_ms.sum())


def predict_on_board(workload: Workload, calibration: Calibration, threads: str) -> OnBoard:
    """Predict one run of an inference graph, or of a training step.

    Raises:
        UsageError: the file has costs of other amounts than this version knows.
    """
    training = is_step(workload)
    fit = calibration.fit("training" if training else "inference", threads)
    if set(fit.costs_ns) != set(AMOUNTS):
        raise UsageError(
            f"calibration of {calibration.board}", expected="costs of this version's amounts",
            got=", ".join(sorted(set(fit.costs_ns) ^ set(AMOUNTS))), hint="profile --calibrate anew",
        )  # fmt: skip
    costs = np.array([fit.costs_ns[name] for name in AMOUNTS]) / 1e6  # ms
    amounts = np.array(layer_amounts(workload, training=training))
    layers_ms = amounts @ costs
    known = set(calibration.operators[fit.part])
    unseen: dict[str, float] = {}
    for layer, ms in zip(workload.layers, layers_ms, strict=True):
        if layer.op not in known:
            unseen[layer.op] = unseen.get(layer.op, 0.0) + float(ms) / float(layers_ms.sum())
    ordered = dict(sorted(unseen.items(), key=lambda item: -item[1]))
    most = max(_macs(case.amounts) for case in cases() if case.part == fit.part)
    return OnBoard(layers_ms, fit.half_width, fit, ordered, _macs(amounts.sum(axis=0)), most)


def _macs(amounts: NDArray[np.float64]) -> float:
    """Multiply-accumulates among the amounts (K,), as the blocks of channels make them up."""
    return float(amounts[_MULTIPLY].sum())
