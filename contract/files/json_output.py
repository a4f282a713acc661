"""The option `--json FILE`, the same in every command: a file whole or not at all, or standard output for `-`.

If the report goes to standard output, all text for a person goes to standard error (`beside`). A report is ASCII, so no
string in it can style a terminal.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from protofleet.contract.errors import UsageError
from protofleet.contract.files.atomic_files import whole_file

if TYPE_CHECKING:  # a device loads no rich
    from rich.console import Console

__all__ = [
    "JSON_HELP",
    "add_json_line",
    "beside",
    "check_target",
    "is_stdout",
    "json_line",
    "write_json",
    "write_text",
]

JSON_HELP = "Write {} as JSON; - for standard output."


def is_stdout(target: str | os.PathLike[str] | None) -> bool:
    """Whether the report goes to standard output."""
    return target is not None and os.fspath(target) == "-"


def beside(target: str | os.PathLike[str] | None, **options: Any) -> Console:
    """A console for text that a person reads: standard output, or standard error if the report goes there."""
    from rich.console import Console

    return Console(stderr=is_stdout(target), **options)


def write_json(target: str | os.PathLike[str] | None, content: Any) -> None:
    """Write a report to the target of `--json`. Without the option nothing is written.

    Raises:
        UsageError: the file cannot be written.
    """
    if target is not None:
        write_text(target, _json(content, indent=1))


def add_json_line(target: str | os.PathLike[str] | None, content: Any) -> None:
    """Append one line of JSON, for a report that grows. Its file is first made empty with `write_text`.

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


def check_target(target: str | os.PathLike[str] | None) -> None:
    """Check that a report can be written, before work that takes long.

    Raises:
        UsageError: the folder does not exist or is not writable, or the target is a folder.
    """
    if target is None or is_stdout(target):
        return
    folder = os.path.dirname(os.path.abspath(target))
    if os.path.isdir(target) or not os.access(folder, os.W_OK):
        got = "a folder" if os.path.isdir(target) else f"no folder {folder} to write in"
        raise UsageError(f"--json {os.fspath(target)}", expected="a file that can be written", got=got)


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
    try:
        encoded = msgspec.json.encode(content, enc_hook=_plain)
    except UnicodeEncodeError:  # a file's name that is no UTF-8: shown as the terminal shows it
        encoded = msgspec.json.encode(_sound(msgspec.to_builtins(content, enc_hook=_plain)))
    text = msgspec.json.format(encoded, indent=indent).decode()
    return re.sub(r"[^\x00-\x7f]", _escaped, text) + "\n"


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"no JSON for {type(value).__name__}")


def _sound(content: Any) -> Any:
    """Plain values whose strings can all be encoded as UTF-8: halves of characters are written as their escapes."""
    if isinstance(content, dict):
        return {_sound(name): _sound(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_sound(value) for value in content]
    return content.encode(errors="backslashreplace").decode() if isinstance(content, str) else content


def _escaped(character: re.Match[str]) -> str:
    units = character[0].encode("utf-16-be")
    return "".join(f"\\u{units[start]:02x}{units[start + 1]:02x}" for start in range(0, len(units), 2))


def _refused(target: str | os.PathLike[str], option: str, error: Exception) -> UsageError:
    got = getattr(error, "strerror", None) or error
    return UsageError(f"{option} {os.fspath(target)}", expected="a file that can be written", got=got)
