"""The engines that a store can be on: each is a module of this folder, which is all that a further one needs.

`engine.py` says what an engine is. A module of this folder that has an `ENGINE` is one, found by its being here.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType

from protofleet.aggregator.database.engines.engine import Engine, Place, ServerPlace, Watch
from protofleet.contract.errors import UsageError
from protofleet.contract.printable import undisclosed

__all__ = ["ENGINES", "PLACE", "AnyPlace", "Engine", "Place", "Watch", "engine_of", "place_of"]

PLACE = "FILE|URL"  # what a command's help calls a store's place
AnyPlace = str | os.PathLike[str] | ServerPlace


def _found() -> Mapping[str, Engine]:
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {module.__name__.rpartition(".")[2]: module.ENGINE for module in modules if hasattr(module, "ENGINE")}


ENGINES: Mapping[str, Engine] = MappingProxyType(_found())


def engine_of(place: Place) -> Engine:
    """The engine of a place.

    Raises:
        TypeError: no engine has places of its type.
    """
    for engine in ENGINES.values():
        if isinstance(place, engine.place):
            return engine
    raise TypeError(f"no engine for a place of type {type(place).__name__}")


def place_of(given: AnyPlace) -> Place:
    """The place that a command or a program names.

    Raises:
        UsageError: a URL of a server that can be read in more than one way, or text that looks like one and is none.
    """
    if not isinstance(given, str | os.PathLike):
        engine_of(given)
        return given
    text = os.fspath(given)
    for engine in ENGINES.values():
        place = engine.read(text)
        if place is not None:
            return place
    expected = ", or ".join(engine.expected for engine in ENGINES.values())
    raise UsageError("--store", expected=expected, got=undisclosed(text))
