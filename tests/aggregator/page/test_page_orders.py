"""Who may give orders from the operator's page and for how long; what a page is told after its store changed."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleets import SHIPPED_BUNDLE, TOKEN, stocked

from protofleet.aggregator.database import read_only
from protofleet.aggregator.page import fleet_page, page_orders
from protofleet.aggregator.page.fleet_content import COLUMNS
from protofleet.aggregator.page.fleet_page import FleetPage
from protofleet.aggregator.page.page_orders import PageOrders
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.order_table import orders
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.page.visitors import Visitor
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Status

BROWSER = Visitor("first", "192.0.2.7")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the orders; its `now_s` is ours to set."""
    made = SimpleNamespace(now_s=1_000.0, monotonic=lambda: made.now_s)
    monkeypatch.setattr(page_orders, "time", made)
    return made


@pytest.fixture
def desk(tmp_path: Path) -> PageOrders:
    return PageOrders(stocked(tmp_path / "store"), {"anna": TOKEN, "ben": "another-long-token-of-ben"})


def given(desk: PageOrders, what: str, visitor: Visitor = BROWSER, **more: object) -> str:
    return desk.give(visitor, {"what": what, **more}, {"d0", "d1"})


def log_of(desk: PageOrders) -> list[tuple[str, str, str, str]]:
    with read_only(desk._store, KIND) as db:
        return [(each.what, each.device, each.detail, each.who) for each in orders(db)]


def test_a_browser_that_was_idle_for_a_quarter_of_an_hour_gives_no_orders(
    desk: PageOrders, clock: SimpleNamespace
) -> None:
    assert desk.enter(BROWSER, TOKEN) == "anna"
    for _ in range(3):
        clock.now_s += 899.0
        assert given(desk, "pause") == "pause: recorded"  # and so it was not idle
    clock.now_s += 900.0
    with pytest.raises(UsageError, match="orders, expected a token first"):
        given(desk, "pause")
    assert log_of(desk) == [("pause", "", "", "anna (page, 192.0.2.7)")] * 3


def test_a_token_lets_one_browser_in_under_its_own_name(desk: PageOrders) -> None:
    second = Visitor("second", "192.0.2.8")
    assert (desk.enter(BROWSER, TOKEN), desk.enter(second, "another-long-token-of-ben")) == ("anna", "ben")
    with pytest.raises(UsageError, match="a token first"):
        given(desk, "pause", Visitor("third", "192.0.2.7"))
    given(desk, "pause", second)
    desk.leave(second)
    with pytest.raises(UsageError, match="a token first"):
        given(desk, "pause", second)
    given(desk, "resume")
    assert [each[-1] for each in log_of(desk)] == ["ben (page, 192.0.2.8)", "anna (page, 192.0.2.7)"]


def refused(desk: PageOrders, token: str, words: str, visitor: Visitor = BROWSER) -> None:
    with pytest.raises(UsageError, match=words):
        desk.enter(visitor, token)


def test_pauses_double_up_to_a_minute_and_begin_anew_after_a_right_token(
    desk: PageOrders, clock: SimpleNamespace
) -> None:
    for pauses_s in ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0], [1.0, 2.0]):
        for pause_s in pauses_s:
            refused(desk, "wrong", "one of the file")
            clock.now_s += pause_s - 0.25
            refused(desk, TOKEN, "patience", Visitor("another of that address", BROWSER.who))
            clock.now_s += 0.25
        assert desk.enter(BROWSER, TOKEN) == "anna"


def test_after_any_number_of_wrong_tokens_there_is_a_pause(desk: PageOrders, clock: SimpleNamespace) -> None:
    desk._wrong[BROWSER.who] = (5_000, 0.0)  # a week of them
    for _ in range(2):
        refused(desk, "wrong", "one of the file")
        refused(desk, TOKEN, "patience")
        clock.now_s += 60.5
    assert desk.enter(BROWSER, TOKEN) == "anna"


def test_who_guesses_tokens_locks_nobody_out_who_is_elsewhere(desk: PageOrders, clock: SimpleNamespace) -> None:
    for _ in range(9):
        refused(desk, "wrong", "one of the file")
        assert desk.enter(Visitor("second", "192.0.2.8"), TOKEN) == "anna"
        clock.now_s += 60.0
    refused(desk, "wrong", "one of the file", Visitor("a", "2001:db8::1"))
    refused(desk, TOKEN, "patience", Visitor("b", "2001:db8::ffff:2"))  # the same machine may have all of these
    assert desk.enter(Visitor("c", "2001:db8:0:1::1"), TOKEN) == "anna"
    refused(desk, "wrong", "one of the file", Visitor("d", "fe80::1%eth0"))


def test_guesses_from_many_networks_take_no_memory_and_do_not_free_the_newest(
    desk: PageOrders, clock: SimpleNamespace
) -> None:
    for number in range(1_500):
        clock.now_s += 0.0001
        refused(desk, "wrong", "one of the file", Visitor("x", f"10.0.{number // 250}.{number % 250}"))
    assert len(desk._wrong) == 1_000
    refused(desk, TOKEN, "patience", Visitor("x", "10.0.5.249"))


@pytest.mark.parametrize("share", [10**400, "nan", -1, None, [1]])
def test_a_stage_that_is_no_share_is_refused(desk: PageOrders, share: object) -> None:
    desk.enter(BROWSER, TOKEN)
    with pytest.raises(UsageError, match="the stage, expected above 0, up to 1"):
        given(desk, "rollout-stage", share=share)
    assert log_of(desk) == []


@pytest.mark.parametrize("typed", [{}, {"typed": ""}, {"typed": "Rollback"}, {"typed": "d0"}])
def test_what_cannot_be_undone_has_to_be_typed_out(desk: PageOrders, typed: dict[str, str]) -> None:
    desk.enter(BROWSER, TOKEN)
    with pytest.raises(UsageError, match="rollback, which cannot be undone, expected its name typed out"):
        given(desk, "rollback", **typed)
    with pytest.raises(UsageError, match="forget, which cannot be undone"):
        given(desk, "forget", device="d1", **typed)
    assert log_of(desk) == []
    given(desk, "rollback", typed="rollback")
    given(desk, "forget", device="d1", typed="d1")
    assert [each[:3] for each in log_of(desk)] == [("rollback", "", "1"), ("forget", "d1", "")]


# ── what a browser is told ──────────────────────────────────────────────────────────────────────────────────────────


def told(page: FleetPage, known: int) -> dict[str, Any]:
    return json.loads(page.event(BROWSER, known)[1])


def names_in(news: dict[str, Any]) -> set[str]:
    return {cells[COLUMNS.index("name")] for cells in news["rows"]}


def test_a_page_learns_of_a_device_that_is_no_more_and_of_another_server(tmp_path: Path) -> None:
    store = stocked(tmp_path / "store")
    page = FleetPage(store, "orchard", runs=lambda: True)
    page.look()
    before = page.version
    assert not told(page, before)["whole"]
    with contextlib.closing(sqlite3.connect(store)) as db, db:
        db.execute("DELETE FROM device WHERE device = 'd1'")
    page.look()
    news = told(page, before)
    assert news["whole"]  # it drops all rows that it has
    assert "d1" not in names_in(news)
    assert "d0" in names_in(news)
    assert told(page, page.version + 5)["whole"]  # of a server before this one
    assert not told(page, page.version)["whole"]


@pytest.mark.parametrize("figure", [sys.float_info.max, -sys.float_info.max, 1e300, 5e-324])
def test_no_figure_of_a_device_makes_a_page_that_a_browser_cannot_read(tmp_path: Path, figure: float) -> None:
    """A browser's JSON has no infinity: with one, the page of the whole fleet would be empty."""
    store = stocked(tmp_path / "store")
    names = ("train_step_ms", "profile_train_step_ms", "peak_rss_bytes", "profile_memory_at_most_bytes", "samples_new")
    names += ("profile_memory_samples", "profile_macs", "disk_free_bytes", "clock_s", "certificate_until_s")
    hostile = decode(encode(Status(True, b"instance", 2, "", {"bundle": "2 0123abcd"}, dict.fromkeys(names, figure))))
    assert isinstance(hostile, Status)
    with DurableStore(store, read_bundle(SHIPPED_BUNDLE).sha256, "orchard") as opened:
        opened.devices.status("d0", hostile, 100, time.time())
        opened.devices.status("d1", Status(False, b"instance", 1, metrics={"disk_free_bytes": figure}), 1, time.time())
        opened.devices.keep(0.0, time.time())
    with contextlib.closing(sqlite3.connect(store)) as db, db:  # a store of an older version, or of another program
        for value in ("NaN", "1e999", str(figure)):
            figures = f'{{"samples_new": {value}, "profile_macs": {value}}}'
            db.execute("UPDATE device SET figures = ? WHERE device = 'd3'", (figures,))
    page = FleetPage(store, "orchard", runs=lambda: True)
    page.look()
    texts = [page.first(BROWSER)]
    for name in ("d0", "d1", "d3"):
        content = page.get(BROWSER, "/device", {"name": name})
        assert content is not None
        texts.append(content.body.decode())
    for text in texts:
        json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert "0" * 30 not in text.replace(",", "")
    assert len(names_in(json.loads(texts[0]))) == 6


def test_a_store_that_cannot_be_read_is_said_and_what_was_seen_stays(tmp_path: Path) -> None:
    page = FleetPage(stocked(tmp_path / "store"), "orchard", runs=lambda: True)
    page.look()
    before = page.version
    (tmp_path / "store").rename(tmp_path / "away")
    page.look()
    news = told(page, before)
    assert "store" in news["wrong"]
    assert not news["whole"]
    assert "d0" in names_in(told(page, -1))
    (tmp_path / "away").rename(tmp_path / "store")
    page.look()
    assert told(page, before)["wrong"] == ""


def test_a_look_is_followed_by_a_rest_many_times_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = FleetPage(stocked(tmp_path / "store"), "orchard", runs=lambda: True)
    took, rests = iter((0.002, 0.1, 5.0)), list[float]()

    def look() -> None:
        page.looked_s += next(took)

    def wait(rest_s: float) -> None:
        rests.append(rest_s)
        page._is_stale.set()
        if len(rests) == 3:
            page._over.set()

    monkeypatch.setattr(page, "look", look)
    monkeypatch.setattr(page._wake, "wait", wait)
    page._look_again()
    assert rests == pytest.approx([fleet_page.LOOK_S, 9.9, 30.0])
