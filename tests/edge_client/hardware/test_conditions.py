"""What a device tells of its clock, its disk and its certificate, and when it tells it again."""

from __future__ import annotations

import os
import time
from pathlib import Path

import certificates
import pytest

from protofleet.contract.mqtt.address import Address
from protofleet.edge_client.hardware import conditions as module
from protofleet.edge_client.hardware.conditions import Conditions
from protofleet.edge_client.messages.status_message import Health


def plain(folder: Path) -> Conditions:
    return Conditions(Address.parse("mqtt://h"), folder)


def test_it_tells_its_clock_and_what_its_disk_has_left(tmp_path: Path) -> None:
    before, found = time.time(), plain(tmp_path).figures()
    assert set(found) == {"clock_s", "disk_free_bytes"}
    assert before <= found["clock_s"] <= time.time()
    disk = os.statvfs(tmp_path)
    assert 0 < found["disk_free_bytes"] <= disk.f_blocks * disk.f_frsize


def test_it_tells_from_when_until_when_its_certificate_is_good(tmp_path: Path) -> None:
    authority = certificates.issue(tmp_path, "ca")
    made, _ = certificates.issue(tmp_path, "pi", authority)
    files = {"ca_file": "ca.pem", "cert_file": "pi.pem", "key_file": "pi.key"}
    address = Address.parse("mqtts://h", **{name: str(tmp_path / file) for name, file in files.items()})
    found = Conditions(address, tmp_path).figures()
    assert found["certificate_since_s"] == made.not_valid_before_utc.timestamp()
    assert found["certificate_until_s"] == made.not_valid_after_utc.timestamp()


def test_a_clock_that_was_set_and_a_disk_that_fills_are_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, true = plain(tmp_path), time.time
    assert not told.is_news(0.0)  # nothing was told yet, and the first birth will
    told.figures()
    assert not told.is_news(1.0)
    monkeypatch.setattr(time, "time", lambda: true() + 3_600)
    assert not told.is_news(2.0)  # it looked a second ago
    assert told.is_news(20.0)
    told.figures()
    assert not told.is_news(40.0)
    monkeypatch.setattr(module, "LEAST_DISK_BYTES", float("inf"))
    assert told.is_news(60.0)
    told.figures()
    assert not told.is_news(80.0)


def test_a_death_tells_the_disk_where_it_is_full_and_a_last_will_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_, private = (
        Health(bytes(8), 1, {}, conditions=plain(tmp_path), is_private=lambda said=is_private: said)
        for is_private in (False, True)
    )
    assert open_.death(tells=True).metrics == {}
    monkeypatch.setattr(module, "LEAST_DISK_BYTES", float("inf"))
    assert set(open_.death(tells=True).metrics) == {"disk_free_bytes"}
    assert open_.death().metrics == {}
    assert private.death(tells=True).metrics == {}
    assert not {"clock_s", "disk_free_bytes"} & set(private.birth().metrics)
    assert not private.has_changed(0.0)
    assert {"clock_s", "disk_free_bytes"} <= set(open_.birth().metrics)


def test_a_status_has_room_for_it_or_goes_without(tmp_path: Path) -> None:
    full = Health(bytes(8), 1, {f"profile_{number}": 1.0 for number in range(29)}, conditions=plain(tmp_path))
    assert len(full.birth().metrics) == 32
    assert "clock_s" in full.birth().metrics
