"""How a server begins, and what it runs in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from protofleet.contract.console.service_manager import ServiceManager

__all__ = ["Beginning", "Process"]


@dataclass(frozen=True)
class Beginning:
    """How a server begins.

    Attributes:
        patience_s: how long the broker may be absent; None for 60 s, and for ever where the plan has no end.
        take_over: end another aggregator that serves this fleet, instead of refusing to start.
        is_new_run: whether the store continues as a new run, as its operator has asked by --new-run, or by
            `fleet restore`.
    """

    patience_s: float | None = None
    take_over: bool = False
    is_new_run: bool = False


@dataclass(frozen=True)
class Process:
    """What a server runs in.

    Attributes:
        stopping: ends `Server.run` once it is set.
        manager: of the service, if there is one.
        each_turn: called after each turn of the loop.
    """

    stopping: threading.Event = field(default_factory=threading.Event)
    manager: ServiceManager = field(default_factory=lambda: ServiceManager({}))
    each_turn: Callable[[], None] = lambda: None
