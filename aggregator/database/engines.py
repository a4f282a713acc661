"""The engines that a store can be on, in one table: by the type of the store's place, what opens and reads it there.

A further engine is a module beside `sqlite.py` and `postgres.py`, a type of place in `store_url.py`, and its line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protofleet.aggregator.database import postgres
from protofleet.aggregator.database.postgres_members import Leader, Member
from protofleet.aggregator.database.sql import Connection, Database
from protofleet.aggregator.database.sqlite import SqliteDatabase
from protofleet.aggregator.database.store_url import Place, PostgresPlace
from protofleet.contract.files import sqlite

__all__ = ["ENGINES", "Engine", "engine_of"]

Watch = sqlite.Watch | postgres.Watch


@dataclass(frozen=True)
class Engine:
    """What is done with a store on one engine. Each takes the place, and all but `watch` the kind of the store.

    Attributes:
        open: opens it for its only aggregator; `wait_s=` is how long to wait for another process that has it.
        read_only: one consistent look beside whoever has it; `older=` accepts an older version.
        beside: one transaction beside whoever has it.
        bring_up: brings it to the present version, unless an aggregator runs on it; returns whether one does.
        is_taken: whether an aggregator runs on it.
        watch: says whether there may be a newer global state.
        leader, member: open it as one of several processes, the one that leads or another; None where only one may.
    """

    open: Callable[..., Database]
    read_only: Callable[..., AbstractContextManager[Connection]]
    beside: Callable[..., AbstractContextManager[Connection]]
    bring_up: Callable[..., bool]
    is_taken: Callable[..., bool]
    watch: Callable[[Any], Watch]
    leader: Callable[..., Leader] | None = None
    member: Callable[..., Member] | None = None


_FILE = Engine(
    open=SqliteDatabase,
    read_only=sqlite.read_only,
    beside=sqlite.beside,
    bring_up=sqlite.bring_up,
    is_taken=lambda place, kind: sqlite.is_taken(place),
    watch=sqlite.Watch,
)
_SERVER = Engine(
    open=postgres.PostgresDatabase,
    read_only=postgres.read_only,
    beside=postgres.beside,
    bring_up=postgres.bring_up,
    is_taken=postgres.is_taken,
    watch=postgres.Watch,
    leader=Leader,
    member=Member,
)
ENGINES: Mapping[type, Engine] = MappingProxyType({Path: _FILE, PostgresPlace: _SERVER})


def engine_of(place: Place) -> Engine:
    """The engine of a place.

    Raises:
        TypeError: no engine has places of its type.
    """
    for kind, engine in ENGINES.items():
        if isinstance(place, kind):
            return engine
    raise TypeError(f"no engine for a place of type {type(place).__name__}")
