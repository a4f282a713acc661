"""How each kind of coordinator is told of: to the listener as events, and in the summary of its run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from protofleet.aggregator.monitoring.events import Listener
from protofleet.aggregator.parts.steps import CoordinatorStep
from protofleet.aggregator.server.run_events import RunEvents
from protofleet.aggregator.server.run_report import Summary
from protofleet.aggregator.server.standing_events import StandingEvents
from protofleet.aggregator.server.standing_report import StandingSummary
from protofleet.aggregator.store.durable_store import DurableStore

__all__ = ["KINDS", "Kind", "Reporter", "RunSummary"]


class Reporter(Protocol):
    """Turns a coordinator's steps and state into events."""

    def resumed(self) -> None:
        """What the store holds goes on."""

    def committed(self) -> None:
        """Contributions have become durable."""

    def step(self, step: CoordinatorStep) -> None:
        """A step was done and is durable."""

    def accuracy(self, *, last: bool = False) -> None:
        """Devices may have reported their accuracy."""

    def silent(self, devices: Sequence[str]) -> None:
        """These are not awaited any more."""

    def waits(self, now: float) -> None:
        """What is waited for, if that has changed, or has not for long."""


class RunSummary(Protocol):
    """A run as JSON, from the store alone."""

    def content(self, *, finished: bool, global_version: int) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Kind:
    """What is told of one kind.

    Attributes:
        events: makes a reporter of a coordinator of this kind.
        summary: makes a summary of a store, the fleet's id, and the bundle's sha256.
    """

    events: Callable[[Any, Listener], Reporter]
    summary: Callable[[DurableStore, str, bytes], RunSummary]


KINDS = {"rounds": Kind(RunEvents, Summary), "standing": Kind(StandingEvents, StandingSummary)}
"""By `Coordinator.kind`."""
