"""What is done with a store on one engine."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from protofleet.aggregator.database.sql import Connection, Database
from protofleet.contract.files.sqlite import Kind

__all__ = ["Engine", "Place", "ServerPlace", "Watch"]


class Watch(Protocol):
    """Says whether there may be a newer global state."""

    def changed(self) -> bool:
        """Look; the first look finds it changed."""

    def close(self) -> None:
        """Let go of what it looks with."""


class ServerPlace(Protocol):
    """A place on a server; `str` of it is its printed form, without a password."""

    @property
    def url(self) -> str:
        """As the server's library takes it."""


Place = Path | ServerPlace


@dataclass(frozen=True)
class Engine:
    """What is done with a store on one engine. Each takes the place, and all but `read` and `watch` the store's kind.

    Attributes:
        place: the type of its places.
        read: the place that the value of `--store` names; None where it names none of this engine.
        expected: what such a value is, for an error.
        open: opens it for its only aggregator; `wait_s=` is how long to wait for another process that has it.
        read_only: one consistent look beside whoever has it; `older=` accepts an older version.
        beside: one transaction beside whoever has it.
        bring_up: brings it to the present version, unless an aggregator runs on it; returns whether one does.
        is_taken: whether an aggregator runs on it.
        watch: says whether anything may have been written.
        replacing: a transaction that puts other rows in the place of all; None for a file, which another replaces.
        into_file, into_schema: copy all rows into an empty SQLite file, and all rows of one in; None for a file.
        leader, member: open it as one of several processes, the one that leads or another; None where only one may.
    """

    place: type
    read: Callable[[str], Place | None]
    expected: str
    open: Callable[..., Database]
    read_only: Callable[..., AbstractContextManager[Connection]]
    beside: Callable[..., AbstractContextManager[Connection]]
    bring_up: Callable[..., bool]
    is_taken: Callable[..., bool]
    watch: Callable[[Any], Watch]
    replacing: Callable[..., AbstractContextManager[Any]] | None = None
    into_file: Callable[[Any, sqlite3.Connection, Kind], None] | None = None
    into_schema: Callable[[sqlite3.Connection, Any], None] | None = None
    leader: Callable[..., Any] | None = None
    member: Callable[..., Any] | None = None
