"""One setting: its help, bounds and check beside its type and default; and the class of a command's settings.

    @dataclass(frozen=True, kw_only=True)
    class ClientSettings(CommandSettings, command="client"):
        threads: Annotated[int, Option("Threads for training.", low=1, high=256)] = 1

A value that is not None is checked whenever an object is made, by a command or by a program. A check may return another
form of the value, which is kept: a duration in seconds, a method's name.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Union

from protofleet.contract.errors import UsageError
from protofleet.contract.names import known

__all__ = ["CommandSettings", "Field", "Option", "chosen", "fields_of"]

_VAST = 1e9  # a bound that nobody needs to be told of

Check = Callable[[str, Any], Any]
"""Takes what an error calls the setting, and a value; returns the value to keep, or raises UsageError."""


@dataclass(frozen=True)
class Option:
    """What is known of a setting beside its name, type and default.

    Attributes:
        help: one sentence or two, for the command's help and the documentation.
        low, high: the smallest and the largest value.
        check: see `Check`; of a setting with several values it takes each.
        metavar: what the help calls the value: DURATION, FILE.
        absent: what holds where the setting is not given, in words; for a default that depends on others.
        flags: the option's names on the command line, where they are not `--name`.
        secret: never printed.
        url: may hold a password, which is never printed.
        only_typed: not from a file or the environment: it holds for one start.
        positional: an argument of the command line without a name.
    """

    help: str
    _: dataclasses.KW_ONLY
    low: float | None = None
    high: float | None = None
    check: Check | None = None
    metavar: str | None = None
    absent: str = ""
    flags: tuple[str, ...] = ()
    secret: bool = False
    url: bool = False
    only_typed: bool = False
    positional: bool = False

    def kept(self, label: str, value: Any) -> Any:
        """The value to keep.

        Args:
            label: what an error calls the setting: `--threads`, `threads in client.toml`.

        Raises:
            UsageError: it is out of bounds, or the check refuses it.
        """
        if isinstance(value, list | tuple):
            return tuple(self.kept(label, each) for each in value)
        if (self.low is not None and not value >= self.low) or (self.high is not None and not value <= self.high):
            raise UsageError(label, expected=self.bounds, got=value)  # NaN is neither
        return value if self.check is None else self.check(label, value)

    @property
    def bounds(self) -> str:
        """The bounds in words; empty without any."""
        is_open = self.high is None or self.high >= _VAST
        if self.low is None:
            return "" if is_open else f"at most {self.high:g}"
        return f"{self.low:g} or more" if is_open else f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Field:
    """One setting of a class.

    Attributes:
        name: in Python and in a file.
        kind: its type, without `None`.
        default: None where it is required, too.
        required: whether it has no default.
    """

    name: str
    kind: Any
    default: Any
    required: bool
    option: Option

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    def typed(self, value: Any) -> str:
        """How the setting is typed on a command line, for an error: `--no-rollout` where the value is False."""
        return f"--no-{self.flag[2:]}" if value is False else self.flag

    @property
    def several(self) -> bool:
        """Whether it has any number of values."""
        return typing.get_origin(self.kind) is tuple

    @property
    def default_words(self) -> str:
        """What holds where nothing is given, in words; empty where that is nothing."""
        plain = "" if self.default in (None, False, "", ()) else "yes" if self.default is True else f"{self.default}"
        return self.option.absent or plain


def fields_of(settings: type[CommandSettings]) -> dict[str, Field]:
    """The settings of a class by name: those that are required first, a class's own before those that it inherits."""
    kept: Any = settings  # mypy takes a class of dataclasses for one without a hash
    return _fields_of(kept)


@functools.cache
def _fields_of(settings: Any) -> dict[str, Field]:
    hints, line = typing.get_type_hints(settings, include_extras=True), settings.__mro__
    depth = {name: at for at, each in reversed([*enumerate(line)]) for name in vars(each).get("__annotations__", ())}
    found = []
    for field in dataclasses.fields(settings):
        kind, option = typing.get_args(hints[field.name])
        required = field.default is dataclasses.MISSING
        found.append(Field(field.name, _plain(kind), None if required else field.default, required, option))
    return {field.name: field for field in sorted(found, key=lambda field: (not field.required, depth[field.name]))}


def _plain(kind: Any) -> Any:
    """A type without `None`: of several types any of them, of words text."""
    if typing.get_origin(kind) is Literal:
        return str
    if typing.get_origin(kind) not in (Union, types.UnionType):
        return kind
    named = [each for each in typing.get_args(kind) if each is not type(None)]
    return named[0] if len(named) == 1 else Union[tuple(named)]  # noqa: UP007


@dataclass(frozen=True, kw_only=True, repr=False)
class CommandSettings:
    """The settings of one command. A subclass is such a dataclass, whose fields are `Annotated[type, Option(…)]`.

    Its `repr` has what was given, and no secrets.

    Attributes:
        COMMAND: the command's name.

    Raises:
        UsageError: a value is out of bounds, or two settings exclude each other.
    """

    COMMAND: ClassVar[str] = ""

    def __init_subclass__(cls, command: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.COMMAND = command or cls.COMMAND

    def __post_init__(self) -> None:
        for name, field in fields_of(type(self)).items():
            value = getattr(self, name)
            if value is not None and value is not field.default:
                self.keep(
                    name, field.option.kept(field.flag, (value,) if field.several and isinstance(value, str) else value)
                )
        self.check()

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={'…' if field.option.secret or field.option.url else repr(getattr(self, field.name))}"
            for field in fields_of(type(self)).values()
            if self.is_given(field.name)
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def keep(self, name: str, value: Any) -> None:
        """Put a checked value in place of the given one, while the object is made."""
        object.__setattr__(self, name, value)

    def check(self) -> None:
        """Check settings against each other. A subclass that has such checks calls `super().check()`, too.

        Raises:
            UsageError: two of them exclude each other.
        """

    def is_given(self, name: str) -> bool:
        """Whether a setting differs from its default."""
        return bool(getattr(self, name) != fields_of(type(self))[name].default)

    def exclude(self, name: str, others: tuple[str, ...], why: str) -> None:
        """Refuse every one of `others` that is given beside `name`.

        Raises:
            UsageError: one is; `why` says what is wrong with both.
        """
        for field in (fields_of(type(self))[other] for other in others):
            if self.is_given(field.name):
                label = f"{field.typed(getattr(self, field.name))} with --{name}"
                raise UsageError(label, expected="one of them", got=f"both: {why}")


def chosen(*names: str) -> Check:
    """A check that a text is one of `names`."""

    return lambda label, value: known(names, value, label)
