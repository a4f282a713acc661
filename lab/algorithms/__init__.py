"""The federations that average weights, one file each: the papers' baselines, and the papers' own as published.

Every module of this folder is looked through for subclasses of `Algorithm` and `WeightRule` with a name of their own;
nothing else has to know of a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TypeVar

from lab.algorithms.base import Algorithm, WeightRule

__all__ = ["ALGORITHMS", "RULES"]

_Part = TypeVar("_Part", Algorithm, WeightRule)


def _named(kind: type[_Part]) -> Iterator[tuple[str, type[_Part]]]:
    for found in iter_modules(__path__):
        module = import_module(f"{__name__}.{found.name}")
        for each in vars(module).values():
            ours = isinstance(each, type) and issubclass(each, kind) and each.__module__ == module.__name__
            if ours and "name" in vars(each):
                yield each.name, each


RULES: Mapping[str, type[WeightRule]] = MappingProxyType(dict(_named(WeightRule)))
ALGORITHMS: Mapping[str, type[Algorithm]] = MappingProxyType(dict(_named(Algorithm)))
