"""Protofleet as a library: a device or an aggregator inside your own program, a federation in a notebook.

    import protofleet

    device = protofleet.Device("pets.bundle", broker="mqtt://10.0.0.1", id="kitchen", data="photos/", state="state/")
    done = device.run()
    print(protofleet.Predictor("state/")(images).labels)

`docs/library.md` shows each name in five lines. Only these names are public. The rooms behind them may change.
A name is loaded when it is first used. So `import protofleet` costs nothing, and a device never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protofleet.aggregator.monitoring.events import Event
    from protofleet.contract.bundle.bundle_file import Bundle
    from protofleet.contract.errors import ProtofleetError
    from protofleet.lab.engine.deployed import RoundRecord
    from protofleet.library.aggregator import Aggregator
    from protofleet.library.device import Device
    from protofleet.library.predictor import Predictor
    from protofleet.library.publisher import Publisher
    from protofleet.library.simulation import simulate
    from protofleet.versions import __version__

    from protofleet.contract.bundle.bundle_file import read_bundle as load_bundle  # isort: skip

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
    "Aggregator": "protofleet.library.aggregator",
    "Bundle": "protofleet.contract.bundle.bundle_file",
    "Device": "protofleet.library.device",
    "Event": "protofleet.aggregator.monitoring.events",
    "Predictor": "protofleet.library.predictor",
    "ProtofleetError": "protofleet.contract.errors",
    "Publisher": "protofleet.library.publisher",
    "RoundRecord": "protofleet.lab.engine.deployed",
    "__version__": "protofleet.versions",
    "load_bundle": "protofleet.contract.bundle.bundle_file:read_bundle",
    "simulate": "protofleet.library.simulation",
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
