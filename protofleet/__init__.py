"""Protofleet as a library: a device or an aggregator inside your own program, a federation in a notebook.

    import protofleet

    device = protofleet.Device("pets.bundle", broker="mqtt://10.0.0.1", id="kitchen", data="photos/", state="state/")
    done = device.run(log=print)
    print(protofleet.Predictor("state/")(images).labels)

`docs/library.md` shows each name in five lines. These names are the public surface; the rooms behind it may change.
Each is loaded when it is first used, so that `import protofleet` costs nothing, and a device never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aggregator.events import Event
    from contract.bundle import Bundle
    from contract.errors import ProtofleetError
    from lab.engine.deployed import RoundRecord
    from protofleet.aggregator import Aggregator
    from protofleet.device import Device
    from protofleet.predictor import Predictor
    from protofleet.publisher import Publisher
    from protofleet.simulation import simulate
    from protofleet.versions import __version__

    from contract.bundle import read_bundle as load_bundle  # isort: skip

__all__ = [
    "Aggregator",
    "Bundle",
    "Device",
    "Event",
    "Predictor",
    "ProtofleetError",
    "Publisher",
    "RoundRecord",
    "__version__",
    "load_bundle",
    "simulate",
]

_HOMES = {
    "Aggregator": "protofleet.aggregator",
    "Bundle": "contract.bundle",
    "Device": "protofleet.device",
    "Event": "aggregator.events",
    "Predictor": "protofleet.predictor",
    "ProtofleetError": "contract.errors",
    "Publisher": "protofleet.publisher",
    "RoundRecord": "lab.engine.deployed",
    "__version__": "protofleet.versions",
    "load_bundle": "contract.bundle:read_bundle",
    "simulate": "protofleet.simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'protofleet' has no attribute {name!r}")
    module, _, other = _HOMES[name].partition(":")
    value = getattr(import_module(module), other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
