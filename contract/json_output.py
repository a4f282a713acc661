"""`--json FILE`, the same in every command: the file whole or not at all, or standard output for `-`.

Where a report goes to standard output, nothing else is printed there: what a person reads goes to standard error
(`beside`). A report is ASCII, so that no string in it can style a terminal.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from contract.errors import UsageError
from contract.files import whole_file

if TYPE_CHECKING:  # a device loads no rich
    from rich.console import Console

__all__ = ["JSON_HELP", "add_json_line", "beside", "is_stdout", "json_line", "write_json", "write_text"]

JSON_HELP = "Write {} as JSON; - for standard output."


def is_stdout(target: str | os.PathLike[str] | None) -> bool:
    """Whether the report goes to standard output."""
    return target is not None and os.fspath(target) == "-"


def beside(target: str | os.PathLike[str] | None, **options: Any) -> Console:
    """A console for what a person reads: standard output, unless the report goes there."""
    from rich.console import Console

    return Console(stderr=is_stdout(target), **options)


def write_json(target: str | os.PathLike[str] | None, content: Any) -> None:
    """Write a report where `--json` says; nothing where it was not given.

    Raises:
        UsageError: the file cannot be written.
    """
    if target is not None:
        write_text(target, _json(content, indent=1))


def add_json_line(target: str | os.PathLike[str] | None, content: Any) -> None:
    """Append one line of JSON, for a report that grows; its file is made empty by `write_text` first.

    Raises:
        UsageError: the file cannot be written.
    """
    if target is None:
        return
    line = json_line(content)
    if is_stdout(target):
        _print(line)
        return
    try:
        with open(target, "a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise _refused(target, "--json", error) from None


def write_text(target: str | os.PathLike[str], text: str, *, option: str = "--json") -> None:
    """Write `text` to a file, whole or not at all, or to standard output for `-`.

    Raises:
        UsageError: the file cannot be written.
    """
    if is_stdout(target):
        _print(text)
        return
    try:
        with whole_file(target) as file:
            file.write(text.encode())
    except (OSError, ValueError) as error:
        raise _refused(target, option, error) from None


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def json_line(content: Any) -> str:
    """One line of JSON, with its end."""
    return _json(content, indent=-1)


def _json(content: Any, *, indent: int) -> str:
    """ASCII, with a line's end; not a number is null. `indent` as in `msgspec.json.format`."""
    text = msgspec.json.format(msgspec.json.encode(content, enc_hook=_plain), indent=indent).decode()
    return re.sub(r"[^\x00-\x7f]", _escaped, text) + "\n"


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"no JSON for {type(value).__name__}")


def _escaped(sign: re.Match[str]) -> str:
    units = sign[0].encode("utf-16-be")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _refused(target: str | os.PathLike[str], option: str, error: Exception) -> UsageError:
    got = getattr(error, "strerror", None) or error
    return UsageError(f"{option} {os.fspath(target)}", expected="a file that can be written", got=got)
