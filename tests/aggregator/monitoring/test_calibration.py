"""What an aggregator makes of devices' reports on their probabilities: pooled, kept, announced, forgotten."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protofleet.aggregator.monitoring.calibration import (
    CLEAR,
    MOST_PHOTOS,
    PACE_OF_DEVICE_S,
    PACE_S,
    CalibrationTable,
    fleet_calibration,
)
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.stored_run import stored_run
from protofleet.contract.calibration import STRENGTHS, TEMPERATURES, Bins, Calibration, SurpriseTable
from protofleet.contract.errors import WireError
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration, CalibrationReport
from protofleet.contract.wire.fields import MAX_UINT

BUNDLE = bytes(range(32))


def report(
    run: bytes, best: tuple[int, int], photos: int = 30, way: str = "linear", at: Calibration | None = None
) -> CalibrationReport:
    surprise = np.full((len(TEMPERATURES), len(STRENGTHS)), 2.0)
    surprise[:, best[1]] = 1.0
    surprise[best] = 0.5
    table = SurpriseTable(surprise, photos).to_bytes()
    if at is None:
        return CalibrationReport(run, 3, way, photos, table)
    counts = Bins((0,) * 19 + (photos,), (0,) * 9 + (photos,), (0,) * 9 + (photos - 1,), (0,) * 9 + (950 * photos,))
    return CalibrationReport(run, 3, way, photos, table, at.temperature, at.strength, counts.to_bytes())


def told(table: CalibrationTable, device: str, said: CalibrationReport, at: float = 0.0) -> None:
    table.hear(device, said, max_samples=1_000)
    table.commit_heard(at)


def test_reports_are_pooled_announced_kept_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with DurableStore(path, BUNDLE, "fleet") as store:
        table = store.calibration
        assert table.announced == AnnouncedCalibration()
        told(table, "a", report(store.run, (4, 2)))
        assert table.announced == AnnouncedCalibration()  # until it is time
        assert table.renew(10.0)
        first = AnnouncedCalibration("linear", TEMPERATURES[4], STRENGTHS[2], 30, 1)
        assert table.announced == first
        assert not table.renew(100.0)  # nothing has come
        told(table, "b", report(store.run, (4, 2), 50, at=first.calibration))
        assert not table.renew(10.0 + PACE_S + PACE_OF_DEVICE_S)  # two devices
        assert table.renew(10.0 + PACE_S + 3 * PACE_OF_DEVICE_S)
        bins = table.announced.bins
        assert bins is not None
        assert (table.announced.photos, table.announced.devices, bins.photos) == (80, 2, 50)
        assert bins.error == pytest.approx(abs(0.95 * 50 - 49) / 50)
        run, announced = store.run, table.announced
    with DurableStore(path, BUNDLE, "fleet") as store:
        assert store.run == run
        assert store.calibration.announced == announced
    with stored_run(path) as stored:
        assert stored.calibration() == announced


def test_what_cannot_count_does_not(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "store.sqlite", BUNDLE, "fleet") as store:
        table = store.calibration
        table.hear("a", report(b"none", (4, 2)), max_samples=1_000)
        table.hear("b", report(store.run, (4, 2), 200), max_samples=199)
        table.hear("c", None, max_samples=1_000)
        table.commit_heard(0.0)
        assert not table.renew(10.0)
        store.begin_new_run()
        told(table, "a", report(store.run, (4, 2)))
        assert table.renew(20.0)


def test_the_way_of_most_devices_counts_and_few_photos_announce_nothing() -> None:
    run = bytes(4)
    few = {"a": report(run, (4, 2), 19)}
    assert fleet_calibration(few, None) == AnnouncedCalibration()
    mixed = {"a": report(run, (4, 2), 300), "b": report(run, (6, 0), 20, "head"), "c": report(run, (6, 0), 20, "head")}
    found = fleet_calibration(mixed, None)
    assert (found.way, found.temperature, found.photos, found.devices) == ("head", TEMPERATURES[6], 40, 2)


def test_a_small_difference_announces_nothing_anew() -> None:
    run = bytes(4)
    before = fleet_calibration({"a": report(run, (4, 2))}, None)
    near = np.full((len(TEMPERATURES), len(STRENGTHS)), 2.0)
    near[:, 2] = 1.0
    near[4, 2], near[5, 2] = 0.5 + CLEAR / 2, 0.5
    said = CalibrationReport(run, 4, "linear", 30, SurpriseTable(near, 30).to_bytes())
    assert fleet_calibration({"a": said}, before).calibration == before.calibration
    assert fleet_calibration({"a": said}, None).calibration == Calibration(TEMPERATURES[5], STRENGTHS[2])


def test_one_device_of_ten_that_claims_everything_does_not_decide() -> None:
    run = bytes(4)
    fleet = {f"d{number}": report(run, (4, 2), 40) for number in range(9)}
    fleet["liar"] = report(run, (20, 0), 10**6, at=Calibration(TEMPERATURES[4], STRENGTHS[2]))
    found = fleet_calibration(fleet, None)
    assert found.calibration == Calibration(TEMPERATURES[4], STRENGTHS[2])
    assert (found.devices, found.photos) == (10, 9 * 40 + 120)
    assert found.bins is not None
    assert found.bins.photos == 120


def test_a_forgotten_device_is_out_of_the_pool_and_of_the_file(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "store.sqlite", BUNDLE, "fleet") as store:
        told(store.calibration, "a", report(store.run, (4, 2)))
        told(store.calibration, "b", report(store.run, (9, 0)))
        store.calibration.renew(10.0)
        assert store.calibration.announced.devices == 2
        store.calibration.forget("b")
        assert store.calibration.renew(20.0)
        assert store.calibration.announced.calibration == Calibration(TEMPERATURES[4], STRENGTHS[2])


def test_more_photos_than_four_bytes_can_count_are_announced_as_shares() -> None:
    run, at = bytes(4), Calibration(TEMPERATURES[4], STRENGTHS[2])
    fleet = {f"d{number}": report(run, (4, 2), 1_000_000, at=at) for number in range(5)}  # 4.75e9 thousandths
    found = fleet_calibration(fleet, None)
    assert (found.photos, found.devices, found.bins and found.bins.photos) == (5_000_000, 5, MOST_PHOTOS)
    assert found.bins is not None
    assert found.bins.error == pytest.approx(0.05, abs=1e-5)
    many = {f"d{number}": report(run, (4, 2), 4_000_000, at=at) for number in range(1_100)}
    assert fleet_calibration(many, None).photos == MAX_UINT


def test_bins_that_could_only_be_true_alone_are_no_report() -> None:
    """Two devices that each say a thousandth more than is possible would have added up to what cannot be announced."""
    said = report(bytes(4), (4, 2), 50, at=Calibration(TEMPERATURES[4], STRENGTHS[2]))
    counts = np.frombuffer(said.counts, "<u4").copy()
    counts[40] = 1  # of no photos
    with pytest.raises(WireError):
        replace(said, counts=counts.tobytes())


def test_names_beyond_the_largest_fleet_are_ignored_and_known_ones_are_not(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("protofleet.aggregator.monitoring.calibration.MAX_DEVICES", 1)
    with DurableStore(tmp_path / "store.sqlite", BUNDLE, "fleet") as store:
        for device, best in (("a", (4, 2)), ("b", (9, 0)), ("a", (6, 0))):
            told(store.calibration, device, report(store.run, best))
        assert store.calibration.renew(10.0)
        assert store.calibration.announced == AnnouncedCalibration("linear", TEMPERATURES[6], 0.0, 30, 1)


def test_a_report_that_is_heard_again_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    with DurableStore(path, BUNDLE, "fleet") as store:
        for at in (1.0, 2.0):
            told(store.calibration, "a", report(store.run, (4, 2)), at)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT told_at FROM calibration").fetchall() == [(1.0,)]
    db.close()


@pytest.mark.parametrize("row", ["x'00'", "x'80'", "x'a0'", "x'ff'", "x''"])
def test_a_row_that_cannot_be_read_counts_as_none(tmp_path: Path, row: str) -> None:
    path = tmp_path / "store.sqlite"
    with DurableStore(path, BUNDLE, "fleet") as store:
        told(store.calibration, "a", report(store.run, (4, 2)))
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE calibration SET report = {row}")
    db.close()
    with DurableStore(path, BUNDLE, "fleet") as store:
        assert store.calibration.announced == AnnouncedCalibration()


def test_what_held_for_another_way_of_answering_does_not_stay() -> None:
    run = bytes(4)
    near = np.full((len(TEMPERATURES), len(STRENGTHS)), 2.0)
    near[4, 2], near[5, 2] = 0.5 + CLEAR / 2, 0.5
    said = CalibrationReport(run, 4, "linear", 30, SurpriseTable(near, 30).to_bytes())
    before = AnnouncedCalibration("head", TEMPERATURES[4], STRENGTHS[2], 30, 1)
    assert fleet_calibration({"a": said}, before).calibration == Calibration(TEMPERATURES[5], STRENGTHS[2])


def test_photos_that_were_counted_at_another_choice_are_not_added() -> None:
    at = Calibration(TEMPERATURES[4], STRENGTHS[2])
    fleet = {
        "a": report(bytes(4), (4, 2), 30, at=at),
        "b": report(bytes(4), (4, 2), 40, at=replace(at, strength=0.0)),
        "c": report(bytes(4), (4, 2), 40, at=replace(at, temperature=TEMPERATURES[5])),
    }
    bins = fleet_calibration(fleet, None).bins
    assert bins is not None
    assert bins.photos == 30


def test_a_quarter_more_counted_photos_are_news_and_fewer_are(tmp_path: Path) -> None:
    at = Calibration(TEMPERATURES[4], STRENGTHS[2])
    with DurableStore(tmp_path / "store.sqlite", BUNDLE, "fleet") as store:
        table = store.calibration

        def news(device: str, photos: int, now: float, counted: Calibration | None = at) -> bool:
            told(table, device, report(store.run, (4, 2), photos, at=counted))
            return table.renew(now)

        assert news("a", 40, 10.0)
        assert not news("b", 9, 20.0)
        assert news("b", 10, 30.0)
        assert news("b", 10, 40.0, None)  # not counted at this choice any more
        assert table.announced.bins is not None
        assert table.announced.bins.photos == 40


def test_what_was_heard_of_a_device_that_is_forgotten_is_not_written(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "store.sqlite", BUNDLE, "fleet") as store:
        store.calibration.hear("a", report(store.run, (4, 2)), max_samples=1_000)
        store.calibration.forget("a")
        store.calibration.commit_heard(1.0)
        assert not store.calibration.renew(10.0)
