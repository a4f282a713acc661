"""A fleet's files: where its broker listens, and what is said of it to this machine and to others."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.first_fleet.files import Choice, write_fleet


@pytest.fixture(scope="module")
def shipped() -> Bundle:
    return read_bundle(photos_bundle())


@pytest.mark.parametrize(
    ("listen", "here", "is_open"),
    [
        ("0.0.0.0:1883", "mqtt://127.0.0.1:1883", True),
        ("127.0.0.1:1884", "mqtt://127.0.0.1:1884", False),
        ("localhost:1884", "mqtt://localhost:1884", False),
        ("192.168.0.7:1883", "mqtt://192.168.0.7:1883", True),
    ],
)
def test_who_reaches_the_broker_and_where(
    tmp_path: Path, shipped: Bundle, listen: str, here: str, is_open: bool
) -> None:
    choice = Choice(solved_with={"ridge": 0.5})
    files = write_fleet(tmp_path / "fleet", shipped, ("a", "b"), choice, listen=listen, photos=None)
    broker, aggregator, device = (
        tomllib.loads((files.folder / f"{name}.toml").read_text()) for name in ("broker", "aggregator", "device-1")
    )
    assert broker == {"listen": listen, "password_file": str(files.folder / "passwords")}
    assert (files.folder / "passwords").read_text() == f"photos:{files.password}\n"
    signed_in = here.replace("://", f"://photos:{files.password}@")
    assert (aggregator["broker"], device["broker"]) == (signed_in, signed_in)
    assert (aggregator["standing"], aggregator["ridge"]) == (True, 0.5)
    assert "ridge" not in device
    assert files.is_open == is_open
    assert ("192.168.0.7:1883" in files.second_device()) == listen.startswith("192")


def test_the_password_is_another_each_time_and_in_files_for_their_owner_alone(tmp_path: Path, shipped: Bundle) -> None:
    first, second = (
        write_fleet(tmp_path / name, shipped, ("a", "b"), Choice(), listen="0.0.0.0:1883", photos=None)
        for name in ("one", "two")
    )
    assert first.password != second.password
    assert len(first.password) >= 24
    assert first.password not in repr(first)
    holders = [
        path for path in first.folder.rglob("*") if path.is_file() and first.password.encode() in path.read_bytes()
    ]
    assert {path.name for path in holders} == {"passwords", "aggregator.toml", "device-1.toml"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in holders)
