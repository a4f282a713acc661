"""Seconds and joules of a device's work on a board, by the models of `protofleet profile`.

On a CPU the latency model applies, in fp32 on all cores, with its interval. On a systolic array the accelerator model
applies. Energy is the board's power while it computes, times the time (`hw_profiles/energy.py`), with a range of both.
Nothing is measured. The bounds of the parts' intervals are added, since an error of the model on a board is the same in
all parts.
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
from protofleet.hw_profiles.workload.model import Workload
from protofleet.lab.board_costs.work import Part, Work

__all__ = ["Range", "Spent", "boards", "errors", "run_of", "spent"]


@dataclass(frozen=True)
class Range:
    """A figure with its lower and upper bound."""

    value: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def plus(self, other: Range, times: float = 1.0) -> Range:
        """The sum with `times` of another."""
        return Range(self.value + times * other.value, self.low + times * other.low, self.high + times * other.high)


@dataclass(frozen=True)
class Spent:
    """Seconds and joules of some work. Joules are None where the board's file gives no power."""

    seconds: Range = Range()
    joules: Range | None = Range()

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """The sum with `times` of another."""
        known = self.joules is not None and other.joules is not None
        joules = self.joules.plus(other.joules, times) if known else None  # type: ignore[union-attr, arg-type]
        return replace(self, seconds=self.seconds.plus(other.seconds, times), joules=joules)


def boards() -> tuple[list[Board], list[Board]]:
    """The shipped devices: those that our client can train on, and those whose files have neither a CPU nor an array.

    This machine is left out, since its numbers differ from machine to machine.
    """
    every = [board for name, board in load_devices().items() if name != "host"]
    able = [board for board in every if board.cpu is not None or board.systolic is not None]
    return able, [board for board in every if board not in able]


def spent(parts: Iterable[Part], board: Board) -> Spent:
    """The cost of these parts together."""
    total = Spent()
    for part in parts:
        total = total.plus(_once(_as_run(part, board), board), part.times)
    return total


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
def _once(workload: Workload, board: Board) -> Spent:
    if board.systolic is not None:
        ms = simulate(workload, _array(board)).latency_ms
        low, high = ms, ms
    else:
        prediction = predict(workload, board)
        ms, low, high = prediction.ms, prediction.low_ms, prediction.high_ms
    seconds = Range(ms / 1e3, low / 1e3, high / 1e3)
    power = energy(board, "fp32", ms, low, high)
    return Spent(seconds, None if power is None else Range(power.mj / 1e3, power.low_mj / 1e3, power.high_mj / 1e3))


def _array(board: Board) -> Array:
    return array_of(board, precision="fp32")
