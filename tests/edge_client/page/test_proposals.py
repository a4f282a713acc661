"""A class that is proposed on a device's page reaches the operator: broker, aggregator and devices are processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import TestBroker, make_broker
from commands import run
from fleets import Processes

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.edge_client.photos.photo_ring import PhotosBeside
from protofleet.edge_client.privacy.ledger import read_ledger
from protofleet.edge_client.run.photo_work import LEAST, STEP
from tests.edge_client.page.test_page import BUNDLE, Device, browser_at

WAIT_S = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker("embedded", tmp_path)
    found.start()
    yield found
    found.stop()


def device(broker: TestBroker, folder: Path, name: str, policy: str) -> Device:
    """A client with a camera and a page, as a process, and what its owner allows."""
    (folder / name).mkdir()
    made = Device(broker, folder / name, name=name)
    (made.folder / "policy.toml").write_text(policy)
    made.start()
    return made


def until(store: Path, holds: Callable[[dict[str, Any]], object], said: Callable[[], str]) -> dict[str, Any]:
    """What `fleet list` says once that holds."""
    deadline = time.monotonic() + WAIT_S
    while True:
        done = run("fleet", "list", "--store", store, "--json", "-")
        found = json.loads(done.stdout) if done.returncode == 0 else {"devices": []}
        found["states"] = {each["device"]: each["state"] for each in found["devices"]}
        try:
            if holds(found):
                return found
        except (KeyError, TypeError):
            pass
        assert time.monotonic() < deadline, f"{found}\n{done.stderr}\n{said()}"
        time.sleep(0.2)


def test_a_class_that_is_proposed_on_a_page_is_named_by_fleet_show(broker: TestBroker, tmp_path: Path) -> None:
    bundle, store, processes = read_bundle(BUNDLE), tmp_path / "store.sqlite", Processes(tmp_path)
    options = ("--method", "ncm", "--every", "1s", "--window", "1s", "--min-clients", "1", "--store", store)
    processes.start("aggregator", "aggregate", "--bundle", BUNDLE, "--broker", broker.url, *options)
    door = device(broker, tmp_path, "door", "page = true\nproposals = true\n")
    hall = device(broker, tmp_path, "hall", "page = true\nfigures = []\n")
    everybody = [door, hall]

    def said() -> str:
        return "\n---\n".join([processes.log("aggregator"), *(each.said() for each in everybody)])

    try:
        for each in everybody:
            each.show(bundle, (5, 8), 12)
            truth, browser = each.truth(), browser_at(each)
            browser.open()
            for label in set(truth.values()):
                browser.post("/name", {"photos": [id for id, true in truth.items() if true == label], "label": label})
        both = until(store, lambda found: sum(each["rounds"] > 0 for each in found["devices"]) == 2, said)
        heard = max(each["rounds"] for each in both["devices"]) + 3  # by then the head of what was named is with both
        until(store, lambda found: min(each["rounds"] for each in found["devices"]) >= heard, said)
        for each in everybody:
            each.show(bundle, (1, 2, 3, 4), 24, seed=7)
        for each in everybody:
            _wait_for_answers(each, said)
            browser = browser_at(each)
            ids = [photo["id"] for photo in browser.open()["newest"]]
            browser.post("/aside", {"photos": ids[:3], "why": "none", "proposed": "barn owl"})
            state = browser.post("/aside", {"photos": ids[3:4], "why": "none", "proposed": "<b>bat</b>"})["state"]
            assert state["proposed"] == {"barn owl": 3, "<b>bat</b>": 1}
            assert state["tells_proposed"] is (each is door)

        told = {"barn owl": {"door": 3}, "<b>bat</b>": {"door": 1}}
        found = until(store, lambda found: found["classes_proposed"] == told, said)
        unknown, answered = _unknown(door)
        share = found["states"]["door"]["figures"]["unknown_share"]
        assert share == pytest.approx(unknown / answered, abs=STEP + 0.01)
        assert share > 0.2  # the fleet knows two classes of six
        shown = run("fleet", "show", "door", "--store", store).stdout
        assert "proposed class barn owl: 3 photos\nproposed class <b>bat</b>: 1 photo\n" in shown
        assert "of its photos are unlike all classes" in shown
        (last, *_) = [entry for entry in read_ledger(door.state / "ledger.sqlite")[0][::-1] if entry.what == "figures"]
        assert {"proposed", "unknown"} <= set(last.statistic.split(", "))

        time.sleep(2.0)
        hall_state = until(store, lambda found: found["states"]["hall"]["online"], said)["states"]["hall"]
        assert (hall_state["proposed"], "unknown_share" in hall_state["figures"]) == ({}, False)
        assert not [entry for entry in read_ledger(hall.state / "ledger.sqlite")[0] if entry.what == "figures"]

        browser = browser_at(door)
        browser.open()
        for _ in range(2):
            browser.post("/undo", {})
        until(store, lambda found: found["classes_proposed"] == {}, said)
    finally:
        for each in everybody:
            each.kill()
        processes.end()


def _wait_for_answers(device: Device, said: Callable[[], str]) -> None:
    """Until enough photos were answered about, and no further ones come; those before the first head have no answer."""
    deadline, before = time.monotonic() + WAIT_S, -1
    while (answered := _unknown(device)[1]) < LEAST or answered != before:
        assert time.monotonic() < deadline, said()
        before = answered
        time.sleep(1.0)


def _unknown(device: Device) -> tuple[int, int]:
    """How many of its photos were unknown, of how many that were answered about."""
    answered = [photo for photo in PhotosBeside(device.state).photos() if photo.answer]
    return sum(photo.is_unknown for photo in answered), len(answered)
