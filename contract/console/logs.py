"""Log records: what a process says, what each record carries, and how our own commands show it.

1. A module that speaks has `logger = logging.getLogger(__name__)`, and makes whole sentences. A record carries fields
   beside its sentence: who begins something says of what (`with about(device="a"):`), and a single call adds the
   others (`extra=of_round(key)`). Later fields win.
2. The first handler of the logger `protofleet` is ours. It shows nothing; it gives each record the fields of `about`,
   before any handler of the program around it.
3. A program that embeds Protofleet sets levels and handlers as it likes; nothing of its logging is touched here.
4. A command calls `set_up` once: from then on the records go to standard error, as text or as a line of JSON each.

A record has no secret, and no photo's name: what may name one is an argument of class `Private`. `getMessage()` shows
an ellipsis in its place, whoever calls it. Only our own formatters show the names: on the terminal of the device's
owner, and with `--verbose`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from protofleet.contract.errors import DataError
from protofleet.contract.names import known
from protofleet.contract.printable import printable, without_password

__all__ = [
    "LOG_FORMATS",
    "LOG_FORMAT_HELP",
    "Changes",
    "Private",
    "about",
    "of_round",
    "private",
    "report",
    "set_up",
    "tear_down",
    "told",
]

LOG_FORMATS = ("text", "json")
LOG_FORMAT_HELP = "Log as text, or as json, a line for each record."

_ours = logging.getLogger("protofleet")
_about: ContextVar[Mapping[str, object]] = ContextVar("about", default={})  # noqa: B039 - never changed in place
_NO_FIELDS = {*vars(logging.makeLogRecord({})), "message", "asctime", "drawn"}


class Private:
    """Text that may name a photo.

    Args:
        text: for the owner's eyes.
        instead: what everybody else reads.
    """

    def __init__(self, text: str, instead: str = "…") -> None:
        self.text, self._instead = text, instead

    def __str__(self) -> str:
        return self._instead


def private(error: object) -> object:
    """An error as an argument of a record: one about data may name a photo, and tells only what was expected."""
    if not isinstance(error, DataError):
        return error
    return Private(str(error), f"data that cannot be used, expected {error.expected}")


@contextlib.contextmanager
def about(**fields: object) -> Iterator[None]:
    """Give each record of this thread these fields, for as long as the block lasts."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def of_round(key: tuple[bytes, int, str]) -> dict[str, object]:
    """The fields of a round: run, number, method."""
    return {"run": key[0].hex(), "round": key[1], "method": key[2]}


class Changes:
    """Logs a line unless it is what was said last.

    Attributes:
        last: what was said last; set it to have a line said again.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger, self.last = logger, ""

    def say(self, line: str, *args: object, level: int = logging.INFO) -> None:
        """Log a line, if it is new."""
        said = line % args if args else line
        if said != self.last:
            self._logger.log(level, line, *args)
        self.last = said


@contextlib.contextmanager
def told(tell: Callable[[str], object]) -> Iterator[None]:
    """Pass each sentence of level INFO or more to `tell`, whole, for as long as the block lasts.

    It is for what draws its own progress for who called it: `advise`, the lab and the demo.
    """
    handler, before = _Lines(tell, _Text(shows_names=True)), _ours.level
    handler.setLevel(logging.INFO)
    _ours.addHandler(handler)
    _ours.setLevel(min(before or logging.INFO, logging.INFO))
    try:
        yield
    finally:
        _ours.removeHandler(handler)
        _ours.setLevel(before)


# ── how a command shows records ─────────────────────────────────────────────────────────────────────────────────────


def set_up(
    log_format: str,
    *,
    quiet: bool = False,
    verbose: bool = False,
    prefix: str = "",
    text: logging.Handler | None = None,
    **fields: object,
) -> None:
    """Show our records on standard error until `tear_down`, in the present command alone.

    Args:
        log_format: one of `LOG_FORMATS`.
        quiet, verbose: errors only; or what is of level DEBUG, too, and the names of photos.
        prefix: what each line of text begins with.
        text: draws the text, where that is more than lines.
        fields: of every record of this process.

    Raises:
        UsageError: there is no such format.
    """
    known(LOG_FORMATS, log_format, "--log-format")
    tear_down()
    is_json = log_format == "json"
    shows = _Json(verbose, fields) if is_json else _Text(verbose or sys.stderr.isatty(), prefix)
    handler = _Lines(lambda line: print(line, file=sys.stderr, flush=True), shows) if is_json or not text else text
    handler.setFormatter(shows)
    handler.name = _NAME
    _ours.addHandler(handler)
    _ours.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    _ours.propagate = False


def tear_down() -> None:
    """Undo `set_up`; nothing where it was not called."""
    for handler in _shown_by():
        _ours.removeHandler(handler)
        _ours.setLevel(logging.NOTSET)
        _ours.propagate = True


def report(error: object) -> None:
    """Say in one line why a command ends."""
    if any(isinstance(handler.formatter, _Json) for handler in _shown_by()):
        _ours.error("%s", private(error))
    else:
        print(f"error: {error}", file=sys.stderr)


_NAME = "protofleet command"


def _shown_by() -> list[logging.Handler]:
    return [handler for handler in _ours.handlers if handler.name == _NAME]


class _Fields(logging.NullHandler):
    """Shows nothing, so that Python does not complain of records that nobody wants; adds the fields of `about`."""

    def handle(self, record: logging.LogRecord) -> bool:
        for name, value in _about.get().items():
            vars(record).setdefault(name, value)
        return True


class _Lines(logging.Handler):
    """Writes a line for each record. An error of what writes is the caller's: a closed pipe ends the command."""

    def __init__(self, write: Callable[[str], object], shows: logging.Formatter) -> None:
        super().__init__()
        self._write = write
        self.setFormatter(shows)

    def emit(self, record: logging.LogRecord) -> None:
        self._write(self.format(record))


_NAMES_LEFT_OUT = " (the names of photos are left out of what is not a terminal; --verbose shows them)"


class _Text(logging.Formatter):
    """The sentence, whose characters cannot move or style the terminal. The first without its names says so."""

    def __init__(self, shows_names: bool, prefix: str = "") -> None:
        super().__init__()
        self._shows_names, self._prefix = shows_names, prefix
        self._has_said = False  # that names are left out

    def sentence(self, record: logging.LogRecord) -> str:
        """What the record says, in one line."""
        args = record.args
        if self._shows_names and isinstance(args, tuple):
            args = tuple(one.text if isinstance(one, Private) else one for one in args)
        return _sound(str(record.msg) % args if args else str(record.msg))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return self._prefix + self.sentence(record) + self._left_out(record)

    def _left_out(self, record: logging.LogRecord) -> str:
        args = record.args
        names = isinstance(args, tuple) and any(isinstance(one, Private) for one in args)
        if not names or self._shows_names or self._has_said:
            return ""
        self._has_said = True
        return _NAMES_LEFT_OUT


class _Json(_Text):
    """One object a line, in ASCII: time, level, logger, message, and the record's fields."""

    def __init__(self, shows_names: bool, fields: Mapping[str, object]) -> None:
        super().__init__(shows_names)
        self._of_all = fields

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": moment.replace("+00:00", "Z"), "level": record.levelname, "logger": record.name}
        line["message"] = self.sentence(record)
        fields = {**self._of_all, **vars(record)}
        line |= {name: _plain(value) for name, value in fields.items() if name not in _NO_FIELDS}
        if record.exc_info:
            line["exception"] = _sound(self.formatException(record.exc_info))
        return json.dumps(line)


def _plain(value: object) -> object:
    """A field's value as JSON has it; not a number is null."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_sound(str(name)): _plain(one) for name, one in value.items()}
    if isinstance(value, Collection) and not isinstance(value, str | bytes):
        return [_plain(one) for one in value]
    return value.hex() if isinstance(value, bytes) else _sound(str(value))


def _sound(text: str) -> str:
    return without_password(printable(text))


if not any(isinstance(handler, _Fields) for handler in _ours.handlers):
    _ours.addHandler(_Fields())
