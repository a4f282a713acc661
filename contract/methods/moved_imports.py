"""Where the modules are today that a method written for version 0.2 imports.

In 0.2 each room was a package of its own, `contract`, and `contract.statistics` lay directly in it.
"""

from __future__ import annotations

__all__ = ["new_import"]

_ROOMS = {  # each with an import of today
    "contract": "protofleet.contract.methods import Method",
    "edge_client": "protofleet import Device",
    "aggregator": "protofleet import Aggregator",
    "export": "protofleet.export.objectives.loss_terms import cross_entropy",
    "hw_profiles": "protofleet import hw_profiles",
    "lab": "protofleet import simulate",
}
_MODULES = {
    "protofleet.contract.answers": "protofleet.contract.heads.answers",
    "protofleet.contract.messages": "protofleet.contract.wire.messages",
    "protofleet.contract.ridge": "protofleet.contract.heads.ridge",
    "protofleet.contract.rules": "protofleet.contract.sums.merge_rules",
    "protofleet.contract.sphere": "protofleet.contract.heads.sphere",
    "protofleet.contract.state": "protofleet.contract.wire.global_state",
    "protofleet.contract.statistics": "protofleet.contract.sums.statistics",
    "protofleet.contract.triangle": "protofleet.contract.sums.triangle",
    "protofleet.export.objectives.scene": "protofleet.export.objectives.loss_terms",
}


def new_import(error: BaseException) -> str | None:
    """The hint for an import that failed: today's name of what 0.2 had. None where the error is about another thing."""
    name = str(error.name or "") if isinstance(error, ImportError) else ""
    if name in _MODULES:
        return f"{_MODULES[name]} in the place of {name}"
    room = name.partition(".")[0]
    return f"protofleet.{room} in the place of {room}: from {_ROOMS[room]}" if room in _ROOMS else None
