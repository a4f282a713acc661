"""A store's engine is found in one table; what has no line there is no store."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest

from protofleet.aggregator import database
from protofleet.aggregator.database import engines
from protofleet.aggregator.database.engines import ENGINES, Engine, engine_of
from protofleet.aggregator.database.store_url import Place, PostgresPlace, place_of
from protofleet.aggregator.store.schema import KIND


@dataclass(frozen=True)
class Elsewhere:
    """A place of an engine that is not ours."""

    name: str


def test_a_file_and_a_servers_url_have_each_their_engine(tmp_path: Path) -> None:
    assert engine_of(place_of(tmp_path / "s")) is ENGINES[Path]
    assert engine_of(place_of("postgresql://h/d")) is ENGINES[PostgresPlace]
    assert (ENGINES[Path].leader, ENGINES[Path].member) == (None, None)  # one process has a file


def test_a_place_without_an_engine_is_refused_and_not_taken_for_a_file() -> None:
    with pytest.raises(TypeError, match="no engine for a place of type Elsewhere"):
        engine_of(cast("Place", Elsewhere("x")))


def test_a_further_engine_is_its_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way into a store goes there, and to no other engine."""
    asked: list[str] = []

    def heard(what: str, answer: Any = None) -> Any:
        return lambda *given, **named: (asked.append(f"{what} {given[0].name}"), answer)[1]

    theirs: Engine = replace(
        ENGINES[Path],
        open=heard("open"),
        read_only=heard("read", nullcontext()),
        beside=heard("beside", nullcontext()),
        bring_up=heard("up"),
        is_taken=heard("taken"),
        watch=heard("watch"),
    )
    monkeypatch.setattr(engines, "ENGINES", MappingProxyType({**ENGINES, Elsewhere: theirs}))
    monkeypatch.setattr(database, "place_of", lambda given: given)
    place = cast("Any", Elsewhere("x"))
    database.open_database(place, KIND)
    with database.read_only(place, KIND), database.beside(place, KIND):
        pass
    for ask in (database.bring_up, database.is_taken):
        ask(place, KIND)
    database.watch(place)
    assert asked == ["open x", "read x", "beside x", "up x", "taken x", "watch x"]
