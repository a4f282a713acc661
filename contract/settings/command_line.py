"""A command line from a class of settings: its options, `--config`, the environment and `--print-config`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from protofleet.contract.settings.options import CommandSettings, Field, fields_of
from protofleet.contract.settings.sources import prefix_of, values_of
from protofleet.contract.settings.toml_text import toml_text

__all__ = ["command_of"]

S = TypeVar("S", bound=CommandSettings)


def command_of(settings: type[S]) -> Callable[[Callable[[S], int | None]], Callable[..., int | None]]:
    """Make a function of settings the function of a command, whose options are those settings.

    Options that are not given come from the environment, then from the file of `--config`.
    """

    def decorate(run: Callable[[S], int | None]) -> Callable[..., int | None]:
        def command(**given: Any) -> int | None:
            file, is_printed = given.pop("config"), given.pop("print_config")
            values = values_of(settings, given, file=file, environment=os.environ)
            made = settings(**values)
            if is_printed:
                print(toml_text(settings, values), end="")
                return 0
            return run(made)

        parameters = [_parameter(field) for field in fields_of(settings).values()]
        config = typer.Option(
            metavar="FILE",
            help=f"TOML file with these options; or {prefix_of(settings)}… in the environment.",
        )
        printed = typer.Option("--print-config", help="Write such a file without secrets, and end.")
        parameters += [
            _named("config", Annotated[str | None, config]),
            _named("print_config", Annotated[bool, printed], False),
        ]
        command.__name__, command.__doc__, command.__module__ = run.__name__, run.__doc__, run.__module__
        command.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate


def _named(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameter(field: Field) -> inspect.Parameter:
    option, kind = field.option, field.kind if field.kind in (int, float, bool) else list[str] if field.several else str
    notes = "required" if field.required else f"default: {field.default_words}" if field.default_words else ""
    text = f"{option.help}  [{notes}]" if notes else option.help
    if option.positional:
        return _named(
            field.name, Annotated[kind | None, typer.Argument(help=text, metavar=option.metavar, show_default=False)]
        )
    flags = option.flags or (_switch(field) if kind is bool else (field.flag,))
    metavar = None if kind is bool else option.metavar or ("<str>" if field.several else None)
    return _named(
        field.name, Annotated[kind | None, typer.Option(*flags, help=text, metavar=metavar, show_default=False)]
    )


def _switch(field: Field) -> tuple[str, ...]:
    """A flag alone where it is off by default; otherwise with its opposite."""
    return (field.flag,) if field.default is False else (f"{field.flag}/--no-{field.flag[2:]}",)
