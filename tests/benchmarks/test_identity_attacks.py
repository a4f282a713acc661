"""A hostile client on a broker without ACL against real aggregators and devices: without signatures it gets its way."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.attacks import identity

HARDENED = ("global-of-the-last-version", "global-of-another-width")  # which fail without signatures, too


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return identity.small_bundle(tmp_path_factory.mktemp("identity") / "small.bundle")


@pytest.mark.slow
@pytest.mark.parametrize("name", identity.ATTACKS)
def test_an_attack_succeeds_without_signatures_and_fails_with_them(name: str, bundle: Path) -> None:
    found = identity.attack(name, bundle)
    assert found["open"] is (name not in HARDENED)
    assert found["signed"] is False
