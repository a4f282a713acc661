"""A store's engine is found in one table; what has no line there is no store."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest

from protofleet.aggregator import database
from protofleet.aggregator.database import engines
from protofleet.aggregator.database.engines import ENGINES, Engine, Place, engine_of, place_of
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.errors import UsageError


@dataclass(frozen=True)
class Elsewhere:
    """A place of an engine that is not ours."""

    name: str


def test_a_file_and_a_servers_url_have_each_their_engine(tmp_path: Path) -> None:
    assert engine_of(place_of(tmp_path / "s")) is ENGINES["file"]
    assert engine_of(place_of("postgresql://h/d")) is ENGINES["postgresql"]
    assert (ENGINES["file"].leader, ENGINES["file"].member) == (None, None)  # one process has a file


def test_a_place_without_an_engine_is_refused_and_not_taken_for_a_file() -> None:
    with pytest.raises(TypeError, match="no engine for a place of type Elsewhere"):
        engine_of(cast("Place", Elsewhere("x")))


def test_a_module_in_the_folder_is_an_engine_and_all_that_a_further_one_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tape.py").write_text(
        "from dataclasses import dataclass, replace\n"
        "from protofleet.aggregator.database.engines.file import ENGINE as FILE\n\n"
        "@dataclass(frozen=True)\nclass Tape:\n    url: str\n\n"
        "ENGINE = replace(FILE, place=Tape, expected='tape://REEL', open=lambda place, kind, wait_s: place.url,\n"
        "    read=lambda text: Tape(text) if text.startswith('tape://') else None)\n"
    )
    monkeypatch.setattr(engines, "__path__", [*engines.__path__, str(tmp_path)])
    monkeypatch.setattr(engines, "ENGINES", engines._found())
    assert list(engines.ENGINES) == ["file", "postgresql", "tape"]
    assert database.open_database("tape://7", KIND) == "tape://7"
    assert isinstance(place_of(tmp_path / "s"), Path)
    with pytest.raises(UsageError, match=r"expected a file, or postgresql://.*, or tape://REEL, got 10 characters"):
        place_of("mysql://h/")
    monkeypatch.delitem(sys.modules, "protofleet.aggregator.database.engines.tape")


def test_every_way_into_a_store_goes_to_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """And to no other."""
    asked: list[str] = []

    def heard(what: str, answer: Any = None) -> Any:
        return lambda *given, **named: (asked.append(f"{what} {given[0].name}"), answer)[1]

    theirs: Engine = replace(
        ENGINES["file"],
        place=Elsewhere,
        open=heard("open"),
        read_only=heard("read", nullcontext()),
        beside=heard("beside", nullcontext()),
        bring_up=heard("up"),
        is_taken=heard("taken"),
        watch=heard("watch"),
    )
    monkeypatch.setattr(engines, "ENGINES", MappingProxyType({**ENGINES, "elsewhere": theirs}))
    monkeypatch.setattr(database, "place_of", lambda given: given)
    place = cast("Any", Elsewhere("x"))
    database.open_database(place, KIND)
    with database.read_only(place, KIND), database.beside(place, KIND):
        pass
    for ask in (database.bring_up, database.is_taken):
        ask(place, KIND)
    database.watch(place)
    assert asked == ["open x", "read x", "beside x", "up x", "taken x", "watch x"]
