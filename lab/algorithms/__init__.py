"""The federations that average weights, one file each: the papers' baselines, and the papers' own as published.

Every module of this folder is searched for subclasses of `Algorithm` and `WeightRule` that define `name`. A new one
needs no registration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TypeVar

from protofleet.lab.algorithms.base import RULES, Algorithm, WeightRule

__all__ = ["ALGORITHMS", "RULES"]

_Part = TypeVar("_Part", Algorithm, WeightRule)


def _named(kind: type[_Part]) -> Iterator[tuple[str, type[_Part]]]:
    for info in iter_modules(__path__):
        module = import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            ours = isinstance(value, type) and issubclass(value, kind) and value.__module__ == module.__name__
            if ours and "name" in vars(value):
                yield value.name, value


RULES.update(_named(WeightRule))
ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType(dict(_named(Algorithm)))
