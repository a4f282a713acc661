"""Where settings come from: a TOML file, then the environment, then the command line. The later one wins.

A file has the options' names as keys, without the dashes in front and with _ for -:

    bundle = "fashion.bundle"
    broker = "mqtts://broker.example:8883"
    id     = "pi-3"

The environment has them as `PROTOFLEET_<COMMAND>_<NAME>`: `PROTOFLEET_CLIENT_THREADS=2`. Commas separate several
values. Whoever lists processes sees no password that is in it.

A name that is no option is refused, and the nearest are told: a misspelt key that is silently ignored is a device that
does something else than its owner thinks.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.files.atomic_files import read_toml
from protofleet.contract.printable import undisclosed_if_url
from protofleet.contract.settings.options import CommandSettings, Field, fields_of

__all__ = ["prefix_of", "read_settings", "values_of"]

S = TypeVar("S", bound=CommandSettings)
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def read_settings(
    settings: type[S],
    given: Mapping[str, Any],
    *,
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> S:
    """The settings of a command.

    Args:
        given: from the command line or a program, by name; None for what was not given.
        file: the TOML file of `--config`.
        environment: variables, such as `os.environ`.

    Raises:
        UsageError: the file cannot be read, a name is unknown, a value is of the wrong kind, out of bounds or missing.
    """
    return settings(**values_of(settings, given, file=file, environment=environment))


def values_of(
    settings: type[CommandSettings],
    given: Mapping[str, Any],
    *,
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The values that `read_settings` makes settings of, as they were given; each is of its kind and within bounds."""
    known, command = fields_of(settings), f"protofleet {settings.COMMAND}"
    values: dict[str, Any] = {}

    def take(field: Field, label: str, value: Any, *, is_text: bool = False) -> None:
        values[field.name] = _of_kind(field, label, value, is_text=is_text)
        field.option.kept(label, values[field.name])

    for name, value in ({} if file is None else read_toml(file, f"--config {file}")).items():
        if isinstance(value, Mapping):
            raise UsageError(
                f"--config {file}", expected="NAME = VALUE lines", got=f"the table [{name}]", hint="no table"
            )
        field = _known(name, known, f"--config {file}: unknown key")
        if field.option.only_typed:
            expected = f"{field.flag} on the command line, once"
            raise UsageError(f"--config {file}", expected=expected, got=f"{name} in the file")
        take(field, f"{field.flag} in {file}", value)
    prefix = prefix_of(settings)
    for variable, value in sorted((environment or {}).items()):
        _check_command(variable, settings)
        if variable.startswith(prefix):
            field = _known(variable.removeprefix(prefix).lower(), known, f"{variable}: unknown variable")
            if field.option.only_typed:
                raise UsageError(
                    variable, expected=f"{field.flag} on the command line, once", got="it in the environment"
                )
            take(field, variable, value.split(",") if field.several else value, is_text=True)
    for name, value in given.items():
        if value is not None:
            field = _known(name, known, f"{command}: unknown option")
            take(field, field.flag, value)
    missing = [field.flag for field in known.values() if field.required and field.name not in values]
    if missing:
        where = command if file is None else f"{command} with {file}"
        raise UsageError(where, expected=" and ".join(missing), got="none", hint="--help")
    return values


def prefix_of(settings: type[CommandSettings]) -> str:
    """What the variables of a command begin with: `PROTOFLEET_CLIENT_`."""
    return f"PROTOFLEET_{settings.COMMAND.upper()}_"


def _check_command(variable: str, settings: type[CommandSettings]) -> None:
    """Refuse a variable whose command is nearly this one: `PROTOFLEET_AGGREGATOR_STORE`."""
    start, _, rest = variable.partition("_")
    command, separator, name = rest.partition("_")
    own = settings.COMMAND.upper()
    is_near = command != own and bool(difflib.get_close_matches(command, [own], cutoff=0.75))
    if start == "PROTOFLEET" and separator and is_near:
        hint = f"{prefix_of(settings)}{name}"
        raise UsageError(variable, expected="a variable of this command", got=command, hint=hint)


def _known(name: str, known: Mapping[str, Field], what: str) -> Field:
    if name not in known:
        raise UsageError(what, expected="an option's name", got=undisclosed_if_url(name), hint=near_names(name, known))
    return known[name]


def _of_kind(field: Field, label: str, value: Any, *, is_text: bool) -> Any:
    """A value of the field's type. Text from the environment is read as what it should be: `2`, `true`."""
    if field.several and isinstance(value, str | os.PathLike):
        value = (value,)
    value = tuple(map(_as_text, value)) if field.several and isinstance(value, list | tuple) else _as_text(value)
    try:
        return value if field.kind is Any else msgspec.convert(value, field.kind, strict=not is_text)
    except msgspec.ValidationError:
        words = "text, or a list of texts" if field.several else _WORDS.get(field.kind, "text or a number")
        hidden = field.option.secret or field.option.url or not isinstance(value, str | int | float)
        got = f"a value of type {type(value).__name__}" if hidden else undisclosed_if_url(str(value))
        got = f"the text {got}" if not (hidden or is_text) and isinstance(value, str) else got
        raise UsageError(label, expected=words, got=got) from None


def _as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value
