"""The cost of one round of a method on an accelerator: time, memory, and bytes up.

- A round is the local training: steps of batch B over the local samples, for some epochs.
- For a method that calibrates instead of training, a round is a forward pass over the local samples, the statistic, and
  the server's share.
- `simulate` gives each figure (`simulated`), over workloads of `training_step` and `calibration_step`. Memory is
  `liveness.peak_memory` of one step.
- A value says what is trained or summed. It comes from a method (`training.method_training`,
  `calibration_step.method_calibration`) or from a paper's baseline (`baselines`).

See docs/hardware.md; settings of SphereFed, Tab. 16.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofleet.hw_profiles.accelerator.simulate import Array, Cost, simulate
from protofleet.hw_profiles.memory.liveness import Memory, peak_memory
from protofleet.hw_profiles.workload.calibration_step import Calibrating
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.model import Phase, Workload
from protofleet.hw_profiles.workload.training import HeadUse, Training
from protofleet.hw_profiles.workload.training_step import training_step

__all__ = ["Calibration", "RoundCost", "Setting", "calibration_cost", "round_cost"]


@dataclass(frozen=True)
class Setting:
    """The local work of a round: N samples, E epochs, batch B. The defaults are CIFAR-100 over 10 clients."""

    samples: int = 5_000
    epochs: int = 10
    batch: int = 64

    @property
    def steps(self) -> int:
        """Training steps in a round."""
        return self.epochs * -(-self.samples // self.batch)


@dataclass(frozen=True)
class RoundCost:
    """A round of local training with one way of treating the classifier."""

    method: str
    head: HeadUse
    step: Cost
    memory: Memory
    steps: int
    uplink_bytes: int

    @property
    def step_ms(self) -> float:
        """Milliseconds of one training step."""
        return self.step.latency_ms

    @property
    def round_s(self) -> float:
        """Seconds of all steps of a round."""
        return self.step.latency_ms * self.steps / 1e3

    def phase_ms(self) -> dict[Phase, float]:
        """Milliseconds of one step by phase."""
        return {phase: cycles / self.step.array.mhz / 1e3 for phase, cycles in self.step.phase_cycles().items()}


@dataclass(frozen=True)
class Calibration:
    """Calibrating the classifier once: forward over the local data, the statistic, the server."""

    method: str
    statistic: str
    forward_ms: float
    statistic_ms: float
    server_ms: float
    uplink_bytes: int
    memory_bytes: int

    @property
    def client_ms(self) -> float:
        """Milliseconds of the device's share."""
        return self.forward_ms + self.statistic_ms

    @property
    def total_ms(self) -> float:
        """Milliseconds of the device's share and the server's together, as in the paper (section 5.4)."""
        return self.client_ms + self.server_ms


def round_cost(forward: Workload, training: Training, array: Array, setting: Setting) -> RoundCost:
    """Cost of one round of training; `forward` is the features graph at the setting's batch."""
    work = training_step(forward, training)
    memory = peak_memory(work, float_bytes=array.float_bytes)
    cost = simulate(work, array)
    return RoundCost(training.name, training.head, cost, memory, setting.steps, training.uplink_bytes)


def calibration_cost(
    forward: Workload, calibrating: Calibrating, array: Array, samples: int, *, server: Array | None = None
) -> Calibration:
    """Cost of calibrating over N local samples; the server's share runs on `server` (default: the same accelerator)."""
    forward = fold_weights(forward)
    batches = -(-samples // forward.batch)
    peak = peak_memory(forward, float_bytes=array.float_bytes).peak_bytes
    return Calibration(
        calibrating.method,
        calibrating.statistic,
        forward_ms=simulate(forward, array).latency_ms * batches,
        statistic_ms=simulate(calibrating.device, array).latency_ms,
        server_ms=simulate(calibrating.server, server or array).latency_ms,
        uplink_bytes=calibrating.uplink_bytes,
        memory_bytes=peak + calibrating.uplink_bytes,
    )
