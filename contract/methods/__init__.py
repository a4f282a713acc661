"""The methods: one file each, and the registry that finds them.

A method is a class over `contract.methods.base.Method`. It is found

- as a file of this folder;
- as an entry point of the group `protofleet.methods` of an installed package: `pip install my-method` is all;
- as `package.module:Class`, wherever a command takes `--method`.

`method(name)` gives the one object of it; `METHODS` lists all. CONTRIBUTING.md walks through a new one.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from contract.errors import MethodError, near_names
from contract.methods.base import Head, Hyper, Local, Method, Value
from contract.methods.guard import guarded
from contract.statistics import Statistic

__all__ = [
    "DEFAULT",
    "LOAD_HELP",
    "METHODS",
    "METHOD_HELP",
    "Head",
    "Hyper",
    "Local",
    "Method",
    "Value",
    "closing_method",
    "last_method",
    "load_method",
    "method",
    "place_of",
    "runs_on",
]

GROUP = "protofleet.methods"
DEFAULT = "fedproto"  # where a person names none
_NOT_METHODS = ("base", "guard")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")  # as it stands in commands, manifests and messages


class _Registry(Mapping[str, Method]):
    """Methods by name, in alphabetical order: this folder's, installed ones, and those that were named by class."""

    def __init__(self) -> None:
        self._known: dict[str, Method] = {}
        for module in pkgutil.iter_modules(__path__):
            if module.name not in _NOT_METHODS:
                self.add(_only_method(importlib.import_module(f"{__name__}.{module.name}")))
        self._installed: dict[str, list[EntryPoint]] | None = None
        self._broken: set[str] = set()

    def add(self, found: Method) -> None:
        """Take up a method.

        Raises:
            MethodError: when another class has its name.
        """
        other = self._known.setdefault(found.name, found)
        if type(other) is not type(found):
            raise MethodError(
                f"method {found.name}",
                expected="a name that no other method has",
                got=f"{place_of(found)}, {place_of(other)}",
            )

    def _entries(self) -> dict[str, list[EntryPoint]]:
        if self._installed is None:
            self._installed = {}
            for entry in entry_points(group=GROUP):
                self._installed.setdefault(entry.name, []).append(entry)
        return self._installed

    def installed(self) -> list[str]:
        """Names that installed packages bring, whether they can be loaded or not."""
        return sorted(self._entries())

    def __getitem__(self, name: str) -> Method:
        if name not in self._known and name in self._entries():
            places = sorted({entry.value for entry in self._entries()[name]})
            if len(places) > 1:
                raise MethodError(f"entry point {name}", expected="one package that has it", got=", ".join(places))
            found = _loaded(places[0])
            if found.name != name:
                raise MethodError(f"entry point {name}", expected=f"a method of that name: {name}", got=found.name)
            self.add(found)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        """Those that can be loaded: a broken package is complained of where its method is named, and only there."""
        for name in self._entries().keys() - self._known.keys() - self._broken:
            try:
                self[name]
            except MethodError:
                self._broken.add(name)
        return iter(sorted(self._known))

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __len__(self) -> int:
        return len(list(iter(self)))


def method(name: str) -> Method:
    """The method of that name, or of the class `package.module:Class`.

    Raises:
        MethodError: when there is none; the line names the nearest.
    """
    if ":" in name:
        return load_method(name)
    try:
        return METHODS[name]
    except KeyError:
        raise MethodError(
            "unknown method", expected="a known method", got=name, hint=near_names(name, METHODS)
        ) from None


def load_method(path: str) -> Method:
    """The method of a class that is named by its place, known by its own name from then on.

    Args:
        path: `package.module:Class`.

    Raises:
        MethodError: when there is no such class, or it is no method.
    """
    found = _loaded(path)
    METHODS.add(found)
    return METHODS[found.name]


def closing_method() -> Method:
    """The method that ends a run of another with one round over the bundle's extractor."""
    return next(found for found in METHODS.values() if found.closes_runs)


def last_method(own: Method) -> Method:
    """The method of a run's last round, as `aggregate` plans it where nothing else is asked for: the one that closes
    runs after rounds that trained; what trains nothing has a result of its own already."""
    return closing_method() if own.trains else own


def runs_on(own: str) -> tuple[str, ...]:
    """The methods whose rounds a device with a bundle of method `own` can take part in: its own, and every one that
    trains nothing, since that needs no more of a bundle than its extractor."""
    return tuple(dict.fromkeys([own, *(name for name, found in METHODS.items() if not found.trains)]))


def _loaded(path: str) -> Method:
    module_name, _, class_name = path.partition(":")
    expected = "package.module:Class, a class over contract.methods.Method"
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # whatever the code of another raises while it is imported
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        raise MethodError(
            f"method {path}",
            expected=expected,
            got=f"{type(error).__name__}: {error}",
            hint="PYTHONPATH=FOLDER, where it lies, or pip install" if absent else None,
        ) from None
    if not (inspect.isclass(found) and issubclass(found, Method) and found is not Method):
        raise MethodError(f"method {path}", expected=expected, got=type(found).__name__)
    missing = [
        name for name in ("name", "title", "source", "summary", "sends", "inference", "way") if not _says(found, name)
    ]
    if missing:
        raise MethodError(f"method {path}", expected=f"a class that says its {missing[0]}", got="none")
    if not _NAME.fullmatch(found.name):
        raise MethodError(
            f"method {path}", expected="a name of 1 to 32 of a-z, 0-9, - and _", got=found.name[:80] or "none"
        )
    kind = found.statistic
    if not (inspect.isclass(kind) and issubclass(kind, Statistic) and kind is not Statistic):
        raise MethodError(f"method {path}", expected="a statistic over contract.statistics.Statistic", got="another")
    try:
        return guarded(found(), path)
    except Exception as error:
        raise MethodError(f"method {path}", expected=expected, got=f"{type(error).__name__}: {error}") from None


def _says(found: type[Method], name: str) -> bool:
    return isinstance(getattr(found, name, None), str)


def _only_method(module: ModuleType) -> Method:
    """The method that a file of this folder defines."""
    (found,) = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == module.__name__
    ]
    return found()


def place_of(found: Method) -> str:
    """`package.module:Class`, by which another process can load it."""
    return f"{type(found).__module__}:{type(found).__name__}"


METHODS = _Registry()
METHOD_HELP = f"{', '.join(METHODS)}, or package.module:Class."
LOAD_HELP = "Of a bundle whose method is not installed: its package.module:Class."
