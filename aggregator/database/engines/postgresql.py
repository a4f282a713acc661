"""The engine of a store in one schema of a PostgreSQL server."""

from __future__ import annotations

from protofleet.aggregator.database import copy_rows, postgres
from protofleet.aggregator.database.engines.engine import Engine
from protofleet.aggregator.database.postgres_members import Leader, Member
from protofleet.aggregator.database.postgres_place import EXPECTED, PostgresPlace, postgres_place

__all__ = ["ENGINE"]

ENGINE = Engine(
    place=PostgresPlace,
    read=postgres_place,
    expected=EXPECTED,
    open=postgres.PostgresDatabase,
    read_only=postgres.read_only,
    beside=postgres.beside,
    bring_up=postgres.bring_up,
    is_taken=postgres.is_taken,
    watch=postgres.Watch,
    replacing=postgres.replacing,
    into_file=copy_rows.into_file,
    into_schema=copy_rows.into_schema,
    leader=Leader,
    member=Member,
)
