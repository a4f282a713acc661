"""What docs/stability.md promises, as data: `python docs/write_promises.py FILE` writes it, `broken` compares.

A release keeps its file, `tests/golden/promises_1.0.json`, for good. The file of the next minor release is made when
that one is released, and not before. A name that was deprecated for a release leaves both the code and, by hand, the
older file, in one commit that says so.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
import typer.main
from write_api import members

import protofleet
from protofleet.cli import COMMANDS
from protofleet.contract import errors
from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest
from protofleet.contract.methods import METHODS
from protofleet.contract.settings.options import CommandSettings, fields_of
from protofleet.contract.settings.sources import prefix_of
from protofleet.contract.wire.fields import Part, table_of
from protofleet.contract.wire.messages import Message

Promises = dict[str, dict[str, Any]]
REQUIRED = "required"
GIVEN = ("library", "command", "setting")  # by the user; what is sent or stored is read by older releases, too
PAGE = "docs/stability.md"


def promises() -> Promises:
    """What holds today: by room, by the name that a user writes."""
    return {
        "library": dict(sorted(_library())),
        "command": dict(sorted(_commands())),
        "setting": dict(sorted(_settings())),
        "exit code": {name: getattr(errors, name).exit_code for name in errors.__all__ if name.endswith("Error")},
        "message": dict(sorted(_messages())),
        "bundle": {"schema": SCHEMA, "manifest.json": _manifest()},
        "method": dict.fromkeys(sorted(METHODS), True),
    }


def broken(before: Promises, now: Promises) -> list[str]:
    """A line for each promise that is not kept: what, and what was promised of it. What is new breaks none."""
    found = []
    for room, held in before.items():
        for name, was in held.items():
            what, has = f"{room} {name}", now.get(room, {}).get(name)
            if has is None:
                found.append(f"{what} is gone")
            elif isinstance(was, Mapping):
                found += [f"{what}: {line}" for line in _changed(was, has, given=room in GIVEN)]
            elif has != was and not (room in GIVEN and _needs_less(was, has)):
                found.append(f"{what} was {was!r}, is {has!r}")
    return found


def _needs_less(was: object, has: object) -> bool:
    """Whether the user had to give it, and may leave it out now."""
    (how, _, default), (kept, _, other) = (str(each).rpartition(", ") for each in (was, has))
    return how == kept and default == REQUIRED != other


def _changed(was: Mapping[str, Any], has: Mapping[str, Any], *, given: bool) -> Iterator[str]:
    """Of the arguments of one name, or the fields of one message."""
    for part, before in was.items():
        if part not in has:
            yield f"{part} is gone"
        elif has[part] != before and not (given and _needs_less(before, has[part])):
            yield f"{part} was {before!r}, is {has[part]!r}"
    for part in has.keys() - was.keys():
        if REQUIRED in str(has[part]):
            yield f"{part} is new and {REQUIRED}"
    places = [[part for part in each if part in was and part in has and _has_place(was[part])] for each in (was, has)]
    if places[0] != places[1]:
        yield f"the order was {', '.join(places[0])}, is {', '.join(places[1])}"


def _has_place(said: object) -> bool:
    return str(said).startswith("by place")


# ── each room ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _library() -> Iterator[tuple[str, dict[str, str]]]:
    for name in protofleet.__all__:
        found = getattr(protofleet, name)
        if name[0] == "_":
            continue
        for each in get_args(found) or (found,):
            yield each.__name__ if get_args(found) else name, _arguments(each)
            if inspect.isclass(each):
                for member, value in members(each):
                    yield f"{each.__name__}.{member}", _arguments(value) if inspect.isfunction(value) else {}


def _arguments(found: Any) -> dict[str, str]:
    """By name, whether it has a place, and its default: `by place, required`, `by name, 5.0`."""
    said = {}
    for name, each in inspect.signature(found).parameters.items():
        if name in ("self", "cls"):
            continue
        how = "by name" if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD) else "by place"
        plain = each.default is None or isinstance(each.default, bool | int | float | str | bytes | tuple)
        default = repr(each.default) if plain else "a default"
        many = each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        said[name] = f"{how}, {'any' if many else REQUIRED if each.default is each.empty else default}"
    return said


def _commands() -> Iterator[tuple[str, dict[str, str]]]:
    for name, command in COMMANDS.items():
        yield from _below(name, _click_of(command.target))
        for below, target in command.below.items():
            yield from _below(f"{name} {below}", _click_of(target))


def _click_of(target: str) -> Any:
    module, attribute = target.split(":")
    found = getattr(importlib.import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command()(found)
        found = app
    return typer.main.get_command(found)


def _below(name: str, command: Any) -> Iterator[tuple[str, dict[str, str]]]:
    yield name, dict(_options(command))
    for below, inner in getattr(command, "commands", {}).items():
        yield from _below(f"{name} {below}", inner)


def _options(command: Any) -> Iterator[tuple[str, str]]:
    """Each spelling of each option, and each argument by its place: whether it takes a value, and its default."""
    for parameter in command.params:
        value = "a switch" if getattr(parameter, "is_flag", False) else "a value"
        value += ", several times" if getattr(parameter, "multiple", False) or parameter.nargs != 1 else ""
        default = REQUIRED if parameter.required else repr(parameter.default)
        if parameter.param_type_name == "argument":
            yield parameter.name, f"by place, {REQUIRED if parameter.required else 'may be left out'}"
        for spelling in [*parameter.opts, *parameter.secondary_opts] * (parameter.param_type_name == "option"):
            yield spelling, f"{value}, {default}"


def _settings() -> Iterator[tuple[str, str]]:
    """As the environment names them; a file has the same names, and so have the arguments in Python."""
    for settings in _below_class(CommandSettings):
        if settings.COMMAND:
            for name, field in fields_of(settings).items():
                default = REQUIRED if field.required else repr(field.default)
                yield f"{prefix_of(settings)}{name.upper()}", f"{'several' if field.several else 'one'}, {default}"


def _manifest() -> dict[str, str]:
    fields = msgspec.structs.fields(Manifest)
    return {field.encode_name: REQUIRED if field.required else "optional" for field in fields}


def _messages() -> Iterator[tuple[str, dict[str, str]]]:
    for part in (each for each in _below_class(Part) if each is not Message):
        number = [f"message {part.number}"] if issubclass(part, Message) else ["a map"]
        fields = {
            str(slot.key): f"{slot.name}, {slot.kind.what}, {'optional' if slot.optional else REQUIRED}"
            for slot in table_of(part).slots
            if slot.key is not None
        }
        yield part.__name__, {"type": number[0], **fields}


def _below_class(cls: type) -> Iterator[Any]:
    """Ours that derive from it, those of tests left out."""
    for each in cls.__subclasses__():
        if each.__module__.startswith("protofleet."):
            yield each
            yield from _below_class(each)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(promises(), indent=1, ensure_ascii=False) + "\n")
