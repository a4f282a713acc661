"""Seconds and joules of a device's work on a board, by the models of `protofleet profile`.

On a CPU the latency model, in fp32 on all cores, with its interval; on a systolic array the accelerator's. Energy is
the board's power while it computes times the time (`hw_profiles/energy.py`), with a range of both. Nothing is measured.
Intervals of the parts are added up end by end: what the model misjudges on a board, it misjudges in all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from hw_profiles.accelerator.simulate import Array, simulate
from hw_profiles.cli import array_of
from hw_profiles.devices.schema import Device as Board
from hw_profiles.devices.schema import load_devices
from hw_profiles.energy import energy
from hw_profiles.latency.predict import coefficients, predict
from hw_profiles.workload.model import Workload
from lab.board_costs.work import Part, Work

__all__ = ["Range", "Spent", "boards", "errors", "run_of", "spent"]


@dataclass(frozen=True)
class Range:
    """A figure between its bounds."""

    value: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def plus(self, other: Range, times: float = 1.0) -> Range:
        """The sum with so many of another."""
        return Range(self.value + times * other.value, self.low + times * other.low, self.high + times * other.high)


@dataclass(frozen=True)
class Spent:
    """What work takes: seconds, and joules; None where the board's file gives no power."""

    seconds: Range = Range()
    joules: Range | None = Range()

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """The sum with so many of another."""
        known = self.joules is not None and other.joules is not None
        joules = self.joules.plus(other.joules, times) if known else None  # type: ignore[union-attr, arg-type]
        return replace(self, seconds=self.seconds.plus(other.seconds, times), joules=joules)


def boards() -> tuple[list[Board], list[Board]]:
    """Every device that ships, but for this machine, whose numbers are another's elsewhere: those that our client can
    train on, and those whose files have neither a CPU nor an array."""
    every = [board for name, board in load_devices().items() if name != "host"]
    able = [board for board in every if board.cpu is not None or board.systolic is not None]
    return able, [board for board in every if board not in able]


def spent(parts: Iterable[Part], board: Board) -> Spent:
    """What these parts take together."""
    total = Spent()
    for part in parts:
        total = total.plus(_once(_as_run(part, board), board), part.times)
    return total


def run_of(work: Work, board: Board) -> tuple[Spent, Spent]:
    """A round, and the whole run with its closing."""
    one = spent(work.round, board)
    return one, spent(work.closing, board).plus(one, work.rounds)


def errors() -> dict[str, dict[str, float]]:
    """How far the latency model was off on networks that it had not seen: steps and inferences of our runtime."""
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
        found = predict(workload, board)
        ms, low, high = found.ms, found.low_ms, found.high_ms
    seconds = Range(ms / 1e3, low / 1e3, high / 1e3)
    power = energy(board, "fp32", ms, low, high)
    return Spent(seconds, None if power is None else Range(power.mj / 1e3, power.low_mj / 1e3, power.high_mj / 1e3))


def _array(board: Board) -> Array:
    return array_of(board, precision="fp32")
