"""What one look at a store leaves to the next; what of many is named, and what is counted."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from fleets import stocked

from protofleet.aggregator.database import place_of
from protofleet.aggregator.monitoring.device_table import DeviceReader
from protofleet.aggregator.overview.fleet_state import state_of
from protofleet.aggregator.page.fleet_content import KeptRows, device_content, look_at


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = stocked(tmp_path / "store", 12)
    assert isinstance(path, Path)
    return path


def changed(store: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(store)) as db, db:
        for statement in statements:
            db.execute(statement)


def parts_of(store: Path, kept: KeptRows) -> dict[str, Any]:
    place = place_of(str(store))
    look = look_at(place, state_of(place, True, DeviceReader()), kept)
    return {name: json.loads(part) for name, part in look.parts.items()}


def test_rounds_are_read_again_while_devices_may_report_of_them(store: Path) -> None:
    one = "INSERT INTO round (number, method, seed, opened_at, closed) VALUES ({}, 'ncm', 1, 1.0, 1)"
    changed(store, "DELETE FROM accuracy", *(one.format(number) for number in range(3, 7)))
    kept = KeptRows()
    parts_of(store, kept)
    report = "INSERT INTO accuracy (round, device, samples, all_classes) VALUES ({}, 'd0', 50, 0.5)"
    changed(store, *(report.format(number) for number in range(1, 7)))
    told = {each["round"]: each["accuracy"]["devices"] for each in parts_of(store, kept)["rounds"]}
    assert told == {6: 1, 5: 1, 4: 1, 3: 0, 2: 0, 1: 0}
    assert {each["accuracy"]["devices"] for each in parts_of(store, KeptRows())["rounds"]} == {1}


def test_a_round_that_is_open_is_read_again_however_old_it_is(store: Path) -> None:
    one = "INSERT INTO round (number, method, seed, opened_at, closed) VALUES ({}, 'ncm', 1, 1.0, 1)"
    changed(store, "UPDATE round SET closed = 0 WHERE number = 1", *(one.format(number) for number in range(3, 9)))
    kept = KeptRows()
    assert not parts_of(store, kept)["rounds"][-1]["closed"]
    changed(store, "UPDATE round SET closed = 1 WHERE number = 1")
    assert parts_of(store, kept)["rounds"][-1]["closed"]


def test_three_of_each_cause_are_named_and_all_are_counted(store: Path) -> None:
    changed(store, f"UPDATE device SET online = 0, since = {time.time() - 9e4} WHERE device != 'd1'")
    top = parts_of(store, KeptRows())["top"]
    named = [cause for _, cause, _ in top["cares"]]
    assert named.count("gone") == 3
    assert top["counts"]["gone"] == 12
    assert {"old-bundle", "slow", "left-out"} <= set(named)  # which many that are gone do not hide


def test_the_page_of_a_device_says_that_nothing_is_taken_of_it(store: Path) -> None:
    changed(store, "INSERT INTO refused (device, since, reason) VALUES ('d1', 1.0, 'it was removed')")
    place = place_of(str(store))
    state = state_of(place, True, DeviceReader())
    found = device_content(place, state, "d1")
    assert found is not None
    assert "nothing is taken of it: it was removed" in found["lines"]
    assert found["cares"] == []
    other = device_content(place, state, "d0")
    assert other is not None
    assert not any("nothing is taken" in line for line in other["lines"])
