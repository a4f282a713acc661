"""A page that stays open while the camera goes on: what is remembered of its visitor does not grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.page.visitors import Visitor
from protofleet.edge_client.answers.camera_answers import CameraAnswers, OwnAnswers
from protofleet.edge_client.cameras.sources import camera_of
from protofleet.edge_client.page import device_page
from protofleet.edge_client.page.device_page import DevicePage, Owned
from protofleet.edge_client.photos.kept_photo import NewPhoto
from protofleet.edge_client.photos.photo_ring import PhotoRing, basis_of
from protofleet.edge_client.privacy.elapsed_time import moment
from protofleet.edge_client.privacy.ledger import Ledger, read_ledger
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs

BUNDLE = Path(__file__).parents[3] / "lab" / "demo" / "shipped" / "fleet.bundle"


def noise(number: int) -> NewPhoto:
    rng = np.random.default_rng(number)
    x = rng.integers(0, 256, (28, 28, 1), np.uint8)
    view = rng.integers(0, 256, (160, 160, 3), np.uint8)
    return NewPhoto(x, view, f"photo-{number}", 1000.0 + number, np.eye(128, dtype=np.float32)[number % 128])


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[Owned]:
    bundle, path = read_bundle(BUNDLE), tmp_path / "ledger.sqlite"
    ring = PhotoRing(tmp_path, basis_of(bundle.manifest), limit_bytes=1 << 20)
    answers = OwnAnswers(tmp_path, bundle, CompiledGraphs(bundle))
    camera = CameraAnswers(camera_of(f"folder:{tmp_path}"), answers, ring, every_s=5.0)
    with Ledger(path) as ledger:
        yield Owned(
            name="porch", fleet="fleet", directory=tmp_path, manifest=bundle.manifest, ring=ring, camera=camera,
            ledger=ledger, ledger_path=path, cost=str, basis=str, on_change=lambda: None,
        )  # fmt: skip
    ring.close()


def test_what_a_visitor_may_look_at_stays_within_what_is_kept(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_page, "_MOST_SHOWN", 10)
    page, visitor = DevicePage(owned), Visitor("token", "10.0.0.2")
    for number in range(150):
        owned.ring.keep(noise(number))
        page.came()
        state = page.state(visitor)
    kept = {photo.pixels for photo in owned.ring.photos()}
    assert len(kept) < 60
    assert len(visitor.shown) <= len(kept) + 10
    assert state["health"]["kept"] == len(kept)
    for one in state["newest"]:
        assert page.image(visitor, one["id"])
    shown = [entry.statistic for entry in read_ledger(owned.ledger_path)[0] if entry.what == "shown"]
    assert sum(int(statistic.split()[0]) for statistic in shown) == 150
    assert len(shown) <= 2  # of one hour, or of two where one has just begun


def test_who_went_away_is_remembered_with_no_photo_that_has_left(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 browsers that came once each: what they were shown would stay in memory until further 32 have come."""
    monkeypatch.setattr(device_page, "_MOST_SHOWN", 30)
    page, visitors = DevicePage(owned), [Visitor(f"token {number}", "10.0.0.2") for number in range(5)]
    for number in range(200):
        owned.ring.keep(noise(number))
        page.came()
        page.state(visitors[number // 40])
    kept = {photo.pixels for photo in owned.ring.photos()}
    assert len(kept) < 60
    assert [len(visitor.shown) for visitor in visitors[:3]] == [0, 0, 0]
    assert max(len(visitor.shown) for visitor in visitors) <= len(kept) + 30
    newest = owned.ring.photos(1)[0]
    assert page.image(visitors[-1], newest.id) is not None


def test_an_open_page_counts_photos_of_a_few_hours_alone(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    page, visitor = DevicePage(owned), Visitor("token", "10.0.0.2")
    for number in range(60):
        wall_s = 1.8e9 + 3600.0 * number
        monkeypatch.setattr(device_page, "moment", lambda wall_s=wall_s: replace(moment(), wall_s=wall_s))
        owned.ring.keep(noise(number))
        page.came()
        page.state(visitor)
    assert len(page._shown[visitor]) <= 16
    assert sum(int(entry.statistic.split()[0]) for entry in read_ledger(owned.ledger_path)[0]) == 60


def test_the_ledger_keeps_every_address_that_a_visitor_was_at(owned: Owned) -> None:
    """A cookie that somebody read from plain HTTP is used at another address, while its owner goes on."""
    page, visitor = DevicePage(owned), Visitor("token", "10.0.0.2")
    owned.ring.keep(noise(0))
    for number, who in enumerate(("10.0.0.2", "10.0.0.66", "10.0.0.2"), 1):
        owned.ring.keep(noise(number))
        page.came()
        visitor.who = who
        page.state(visitor)
        page.state(visitor)
    shown = [entry.statistic.split(" photos to ") for entry in read_ledger(owned.ledger_path)[0]]
    assert {who for _, who in shown} == {"10.0.0.2", "10.0.0.66"}
    assert sum(int(count) for count, who in shown if who == "10.0.0.66") == 3  # those that were there before, too
    assert sum(int(count) for count, who in shown if who == "10.0.0.2") == 2 + 4


def test_a_cookie_at_another_address_gets_no_photo_before_the_ledger_says_so(owned: Owned) -> None:
    page, visitor = DevicePage(owned), Visitor("token", "10.0.0.2")
    owned.ring.keep(noise(0))
    page.came()
    page.state(visitor)
    id = owned.ring.photos()[0].id
    assert page.image(visitor, id) is not None
    visitor.who = "10.0.0.66"
    assert page.image(visitor, id) is None
    page.state(visitor)
    assert page.image(visitor, id) is not None


def test_a_clock_that_goes_back_takes_nothing_out_of_the_ledger(owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    page, visitor = DevicePage(owned), Visitor("token", "10.0.0.2")
    for number, wall_s in enumerate((1.8e9, 1.8e9, 1.8e9 - 7200, 1.8e9)):
        monkeypatch.setattr(device_page, "moment", lambda wall_s=wall_s: replace(moment(), wall_s=wall_s))
        owned.ring.keep(noise(number))
        page.came()
        page.state(visitor)
    assert sum(int(entry.statistic.split()[0]) for entry in read_ledger(owned.ledger_path)[0]) == 4
