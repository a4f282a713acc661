"""What `--print-config` writes: a TOML file with which the command would do the same, secrets left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from protofleet.contract.settings.options import CommandSettings, Field, fields_of
from protofleet.contract.settings.sources import prefix_of

__all__ = ["toml_text", "toml_value"]

_SIGNED_IN = re.compile(r"://[^/]*@")  # the user too: it may be a part of a password with an @


def toml_text(settings: type[CommandSettings], values: Mapping[str, Any]) -> str:
    """The settings as TOML.

    Args:
        values: as `values_of` returns them.
    """
    lines = [f"# protofleet {settings.COMMAND} --config THIS_FILE"]
    for field in fields_of(settings).values():
        if not field.option.only_typed:
            lines += _lines(field, values.get(field.name, field.default), f"{prefix_of(settings)}{field.name.upper()}")
    return "\n".join(lines) + "\n"


def _lines(field: Field, value: Any, variable: str) -> list[str]:
    if value is None or value == ():
        return [f"# {field.name} is not set{f': {field.option.absent}' if field.option.absent else ''}"]
    if field.option.secret:
        return [f"# {field.name} is set, and left out: a secret; {variable} takes it"]
    if field.option.url and _SIGNED_IN.search(str(value)):
        told = f"# user and password of {field.name} are left out; {variable} takes the whole URL"
        return [told, f"{field.name} = {toml_value(_SIGNED_IN.sub('://', str(value)))}"]
    return [f"{field.name} = {toml_value(value)}"]


def toml_value(value: Any) -> str:
    """Text, a number, a truth value or a list of them as TOML."""
    if isinstance(value, bool | int | float):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return msgspec.json.encode(str(value)).decode().replace("\x7f", "\\u007f")  # JSON's strings are TOML's but for DEL
