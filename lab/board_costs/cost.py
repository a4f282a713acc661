"""Seconds and joules of a device's work on a board, by the models of `protofleet profile`.

On a CPU the latency model applies, in fp32 on all cores, with its interval. On a systolic array the accelerator model
applies. Energy is the board's power while it computes, times the time (`hw_profiles/energy.py`), with a range of both.
Nothing is measured. The bounds of the parts' intervals are added, since an error of the model on a board is the same in
all parts.

Each cost has a support, that of its weakest part: *simulated*, *interpolated*, *extrapolated* or *no ground*
(`latency/support.py`). Sums over features are judged by their share of the time, since no fitted network has them.
Nothing stands for the bounds of a cost without ground: `Spent.bounded`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from protofleet.hw_profiles.accelerator.simulate import Array, array_of, simulate
from protofleet.hw_profiles.devices.schema import Device as Board
from protofleet.hw_profiles.devices.schema import load_devices
from protofleet.hw_profiles.energy import energy
from protofleet.hw_profiles.latency.predict import coefficients, predict
from protofleet.hw_profiles.latency.support import status_of_share
from protofleet.hw_profiles.ranges import ZERO, Range
from protofleet.hw_profiles.workload.model import Workload
from protofleet.lab.board_costs.work import Part, Work

__all__ = ["Spent", "boards", "errors", "run_of", "spent"]

_ORDER = ("simulated", "interpolated", "extrapolated", "no ground")


@dataclass(frozen=True)
class Spent:
    """Seconds and joules of some work.

    Attributes:
        joules: None where the board's file gives no power.
        support: of the weakest part, with what it lacks in `reasons`.
    """

    seconds: Range = ZERO
    joules: Range | None = ZERO
    support: str = "simulated"
    reasons: tuple[str, ...] = ()

    @property
    def bounded(self) -> bool:
        """Whether anything stands for its bounds."""
        return self.support != "no ground"

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """The sum with `times` of another."""
        known = self.joules is not None and other.joules is not None
        joules = self.joules.plus(other.joules, times) if known else None  # type: ignore[union-attr, arg-type]
        total = replace(self, seconds=self.seconds.plus(other.seconds, times), joules=joules)
        return total.judged(other.support, *other.reasons)

    def judged(self, support: str, *reasons: str) -> Spent:
        """As it is, but no better founded than `support`."""
        worst = max(self.support, support, key=_ORDER.index)
        return replace(self, support=worst, reasons=tuple(dict.fromkeys((*self.reasons, *reasons))))


def boards() -> tuple[list[Board], list[Board]]:
    """The shipped devices: those that our client can train on, and those whose files have neither a CPU nor an array.

    This machine is left out, since its numbers differ from machine to machine.
    """
    every = [board for name, board in load_devices().items() if name != "host"]
    able = [board for board in every if board.cpu is not None or board.systolic is not None]
    return able, [board for board in every if board not in able]


def spent(parts: Iterable[Part], board: Board) -> Spent:
    """The cost of these parts together."""
    total, sums_s = Spent(), 0.0
    for part in parts:
        cost = _once(_as_run(part, board), board, part.forward)
        if part.sums and board.systolic is None:
            sums_s += part.times * cost.seconds.value
            cost = replace(cost, support="simulated", reasons=())
        total = total.plus(cost, part.times)
    share = sums_s / total.seconds.value if sums_s else 0.0
    status = status_of_share(share)
    if status == "interpolated":
        return total
    return total.judged(status, f"{100 * share:.0f} % of the time in sums over features")


def run_of(work: Work, board: Board) -> tuple[Spent, Spent]:
    """The cost of a round, and of the whole run with its closing."""
    one = spent(work.round, board)
    return one, spent(work.closing, board).plus(one, work.rounds)


def errors() -> dict[str, dict[str, float]]:
    """The latency model's error on networks that it had not seen, for steps and inferences of our runtime."""
    checks = coefficients().checks["by model"]
    return {"training": dict(checks["onnxruntime training fp32"]), "inference": dict(checks["onnxruntime fp32"])}


def _as_run(part: Part, board: Board) -> Workload:
    return part.on_array if board.systolic is not None and part.on_array is not None else part.workload


@lru_cache(maxsize=4096)
def _once(workload: Workload, board: Board, forward: Workload | None) -> Spent:
    support: str = "simulated"
    reasons: tuple[str, ...] = ()
    if board.systolic is not None:
        ms = simulate(workload, _array(board)).latency_ms
        low, high = ms, ms
    else:
        prediction = predict(workload, board, forward=forward)
        ms, low, high = prediction.ms, prediction.low_ms, prediction.high_ms
        support, reasons = prediction.support.status, prediction.support.reasons
    seconds = Range(ms / 1e3, low / 1e3, high / 1e3)
    power = energy(board, "fp32", ms, low, high)
    joules = None if power is None else Range(power.mj / 1e3, power.low_mj / 1e3, power.high_mj / 1e3)
    return Spent(seconds, joules, support, reasons)


def _array(board: Board) -> Array:
    return array_of(board, precision="fp32")
