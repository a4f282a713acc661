"""The methods: one file each, and the registry of all methods.

A method is a class over `protofleet.contract.methods.base.Method`. The registry knows three sources:

- the files of this folder;
- entry points of the group `protofleet.methods` in installed packages: `pip install my-method` is enough;
- a class named as `package.module:Class`, wherever a command takes `--method`.

`method(name)` returns the one object of a method. `METHODS` lists all methods. CONTRIBUTING.md explains, step by step,
how to write a new one.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from protofleet.contract.errors import MethodError, near_names
from protofleet.contract.methods.base import Head, Hyper, Local, Method, Value
from protofleet.contract.methods.moved_imports import new_import
from protofleet.contract.methods.plugin_guard import guarded
from protofleet.contract.sums.statistics import Statistic

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
_NOT_METHODS = ("base", "moved_imports", "optimizers", "plugin_guard")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")  # as it stands in commands, manifests and messages


class _Registry(Mapping[str, Method]):
    """Methods by name, in alphabetical order: those of this folder, of installed packages, and those named by class."""

    def __init__(self) -> None:
        self._known: dict[str, Method] = {}
        for module in pkgutil.iter_modules(__path__):
            if module.name not in _NOT_METHODS:
                self.add(_only_method(importlib.import_module(f"{__name__}.{module.name}")))
        self._installed: dict[str, list[EntryPoint]] | None = None
        self._broken: set[str] = set()

    def add(self, entry: Method) -> None:
        """Add a method.

        Raises:
            MethodError: when another class has its name.
        """
        other = self._known.setdefault(entry.name, entry)
        if type(other) is not type(entry):
            raise MethodError(
                f"method {entry.name}",
                expected="a name that no other method has",
                got=f"{place_of(entry)}, {place_of(other)}",
            )

    def _entries(self) -> dict[str, list[EntryPoint]]:
        if self._installed is None:
            self._installed = {}
            for entry in entry_points(group=GROUP):
                self._installed.setdefault(entry.name, []).append(entry)
        return self._installed

    def installed(self) -> list[str]:
        """Names of the methods of installed packages, whether they can be loaded or not."""
        return sorted(self._entries())

    def of_others(self) -> tuple[str, ...]:
        """The paths `package.module:Class` of the loaded methods that are not Protofleet's, for another process."""
        places = map(place_of, self._known.values())
        return tuple(place for place in places if not place.startswith(f"{__name__}."))

    def __getitem__(self, name: str) -> Method:
        if name not in self._known and name in self._entries():
            places = sorted({entry.value for entry in self._entries()[name]})
            if len(places) > 1:
                raise MethodError(f"entry point {name}", expected="one package that has it", got=", ".join(places))
            loaded = _loaded(places[0])
            if loaded.name != name:
                raise MethodError(f"entry point {name}", expected=f"a method of that name: {name}", got=loaded.name)
            self.add(loaded)
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        """The methods that can be loaded. A broken package raises an error only where its method is named."""
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
    """Load the method of a class `package.module:Class`. Afterwards it is known by its own name, too.

    Args:
        path: `package.module:Class`.

    Raises:
        MethodError: when there is no such class, or it is no method.
    """
    loaded = _loaded(path)
    METHODS.add(loaded)
    return METHODS[loaded.name]


def closing_method() -> Method:
    """The method that ends a run of another with one round over the bundle's extractor."""
    return next(entry for entry in METHODS.values() if entry.closes_runs)


def last_method(own: Method) -> Method:
    """The method of a run's last round, unless `aggregate` is told otherwise.

    After rounds of a method that trains, this is the method that closes runs. A method that trains nothing has a result
    already, and is itself the last method.
    """
    return closing_method() if own.trains else own


def runs_on(own: str) -> tuple[str, ...]:
    """The methods whose rounds a device can take part in, if its bundle is of method `own`.

    These are `own` and every method that trains nothing: such a method needs only the bundle's extractor.
    """
    return tuple(dict.fromkeys([own, *(name for name, entry in METHODS.items() if not entry.trains)]))


def _loaded(path: str) -> Method:
    module_name, _, class_name = path.partition(":")
    expected = "package.module:Class, a class over protofleet.contract.methods.Method"
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # whatever the code of another raises while it is imported
        absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        raise MethodError(
            f"method {path}",
            expected=expected,
            got=f"{type(error).__name__}: {error}",
            hint=new_import(error) or ("PYTHONPATH=FOLDER, where it lies, or pip install" if absent else None),
        ) from None
    if not (inspect.isclass(cls) and issubclass(cls, Method) and cls is not Method):
        raise MethodError(f"method {path}", expected=expected, got=type(cls).__name__)
    missing = [
        name for name in ("name", "title", "source", "summary", "sends", "inference", "way") if not _says(cls, name)
    ]
    if missing:
        raise MethodError(f"method {path}", expected=f"a class that says its {missing[0]}", got="none")
    if not _NAME.fullmatch(cls.name):
        raise MethodError(
            f"method {path}", expected="a name of 1 to 32 of a-z, 0-9, - and _", got=cls.name[:80] or "none"
        )
    kind = cls.statistic
    if not (inspect.isclass(kind) and issubclass(kind, Statistic) and kind is not Statistic):
        raise MethodError(
            f"method {path}", expected="a statistic over protofleet.contract.sums.statistics.Statistic", got="another"
        )
    try:
        return guarded(cls(), path)
    except Exception as error:
        raise MethodError(f"method {path}", expected=expected, got=f"{type(error).__name__}: {error}") from None


def _says(cls: type[Method], name: str) -> bool:
    return isinstance(getattr(cls, name, None), str)


def _only_method(module: ModuleType) -> Method:
    """The method that a file of this folder defines."""
    (cls,) = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Method) and value.__module__ == module.__name__
    ]
    return cls()


def place_of(entry: Method) -> str:
    """The path `package.module:Class` of a method, with which another process can load it."""
    return f"{type(entry).__module__}:{type(entry).__name__}"


METHODS = _Registry()
METHOD_HELP = f"{', '.join(METHODS)}, or package.module:Class."
LOAD_HELP = "The package.module:Class of a method that is not installed."
