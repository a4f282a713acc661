"""Probabilities over a real broker, with processes of their own: what devices report, what they are told, what a
photo's answer then says, and that nothing of it leaves where noise or a policy protects the photos."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fleets import FLEET, Fleet, bundle, fleet_in, run, share
from PIL import Image

import protofleet
from protofleet.aggregator.store.stored_run import stored_run
from protofleet.contract.errors import StoreError
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.messages import Announcement, Status
from protofleet.edge_client.device.calibration import Known
from protofleet.edge_client.journal.journal import read_kept

HELD = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 0))
PHOTOS = 60


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_in(tmp_path) as made:
        yield made


def staying(fleet: Fleet, name: str, path: Path, index: int, *options: object) -> None:
    """A client that stays after the run, with the default share held out."""
    data = fleet.folder / f"{name}.npz"
    x, y = share(index, HELD[index], PHOTOS)
    np.savez(data, x=x, y=y)
    told = ("--broker", fleet.url, "--fleet", FLEET, "--id", name, "--bundle", path, "--data", data)
    fleet.start(name, "client", *told, "--state", fleet.folder / f"state-{name}", *options)


def retained(url: str, topics: tuple[str, ...], wanted: int, timeout_s: float = 120.0) -> dict[str, bytes]:
    link = Link(
        Address.parse(url),
        f"looks-on-{os.urandom(4).hex()}",
        subscriptions=list(topics),
        content_type="application/cbor",
    ).open()
    found: dict[str, bytes] = {}
    try:
        deadline = time.monotonic() + timeout_s
        while len(found) < wanted and time.monotonic() < deadline:
            event = link.receive(0.1)
            if isinstance(event, Received):
                found[event.topic] = event.payload
    finally:
        link.close(timeout_s=1.0)
    return found


def kept(fleet: Fleet) -> Known | None:
    """What d0's journal has of it; None before there is a journal."""
    try:
        return read_kept(fleet.folder / "state-d0").calibration
    except StoreError:
        return None


def until(what: str, met, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def announced(fleet: Fleet) -> Announcement:
    ((_, payload),) = retained(fleet.url, (topics.round_(FLEET),), 1).items()
    message = decode(payload)
    assert isinstance(message, Announcement)
    return message


def agreed(fleet: Fleet) -> AnnouncedCalibration | None:
    """The calibration, where store, broker and d0 have the same; devices report, and it moves, while they run."""
    told, known = announced(fleet).calibration, kept(fleet)
    with stored_run(fleet.folder / "store.sqlite") as stored:
        return told if told == stored.calibration() and known is not None and known.fleet == told else None


def statuses(fleet: Fleet, count: int) -> dict[str, Status]:
    found = retained(fleet.url, tuple(topics.status(FLEET, f"d{index}") for index in range(count)), count)
    made = {topics.device_of(topic): decode(payload) for topic, payload in found.items()}
    assert all(isinstance(message, Status) for message in made.values())
    return made  # type: ignore[return-value]


def test_devices_report_are_told_and_answer_with_probabilities(fleet: Fleet) -> None:
    path = bundle(fleet.folder / "f.bundle", "ffc")
    fleet.aggregator([path], "--standing", "--every", "2s")
    for index in range(len(HELD)):
        staying(fleet, f"d{index}", path, index)
    until("a calibration with the bins of all", lambda: _is_settled(fleet))
    until("one calibration stored, announced and kept", lambda: agreed(fleet) is not None)
    told = agreed(fleet)
    assert told is not None
    assert (told.way, told.devices, told.photos) == ("linear", len(HELD), len(HELD) * PHOTOS // 10)
    assert told.strength > 0  # each device has two classes of five
    for name, status in statuses(fleet, len(HELD)).items():
        assert status.calibration is not None
        assert (status.calibration.way, status.calibration.photos) == ("linear", PHOTOS // 10), name
    state = fleet.folder / "state-d0"
    for process in fleet.processes.values():
        process.terminate()
    fleet.finish()
    _ledger_names_it(state)
    x, y = share(5, HELD[0], 40)
    by_shares = protofleet.Predictor(state, answers="auto")(x)
    by_fleet = protofleet.Predictor(state, answers="fleet")(x)
    assert by_shares.probabilities is not None
    np.testing.assert_allclose(by_shares.probabilities.sum(axis=1), 1.0)
    np.testing.assert_array_equal(by_fleet.classes, by_fleet.scores.argmax(axis=1))
    assert (by_shares.classes == y).mean() >= (by_fleet.classes == y).mean()
    own = by_shares.probabilities[:, list(HELD[0])].sum(axis=1).mean()
    assert by_fleet.probabilities is not None
    assert own > by_fleet.probabilities[:, list(HELD[0])].sum(axis=1).mean()
    _what_predict_says(fleet, state, x[0], by_shares)


def _is_settled(fleet: Fleet) -> bool:
    """Whether all devices have tested their photos with a head that knows all classes."""
    told = announced(fleet).calibration
    if told is None or told.bins is None or told.bins.photos < len(HELD) * PHOTOS // 10:
        return False
    newest = max(status.calibration.version for status in statuses(fleet, len(HELD)).values() if status.calibration)
    return told.strength > 0 and newest == announced(fleet).global_version


def _ledger_names_it(state: Path) -> None:
    code, said = run("inspect", state / "ledger.sqlite")
    assert code == 0, said
    assert "calibration" in said


def _what_predict_says(fleet: Fleet, state: Path, photo: np.ndarray, answers) -> None:
    file, out = fleet.folder / "photo.png", fleet.folder / "answers.jsonl"
    Image.fromarray(photo[..., 0]).save(file)
    code, said = run("predict", file, "--state", state, "--json", out, "--coverage", 0.8)
    assert code == 0, said
    (line,) = [json.loads(row) for row in out.read_text().splitlines()]
    assert line["probability"] == pytest.approx(answers.probabilities[0].max())
    assert line["probability"] == line["top"][0]["probability"] >= line["top"][1]["probability"]
    assert line["label"] in line["set"]
    assert re.search(r"probabilities by the fleet's 30 held-out photos of 5 devices", said)
    assert f"{line['label']} {line['probability']:.0%}" in said
    assert "one of: " in said
    code, said = run("predict", file, "--state", state, "--answers", "flet")
    assert code != 0
    assert "fleet" in said
    code, said = run("predict", file, "--state", state, "--answers", "fleet", "--coverage", 0.8)
    assert code == 0, said
    assert "no sets: held-out photos have not said them for this, --answers auto" in said
    assert "one of: " not in said
    code, said = run("predict", file, "--state", state, "--coverage", 1.5)
    assert code != 0


@pytest.mark.parametrize("how", ["policy", "option"])
def test_nothing_is_told_where_the_owner_does_not_want_it(fleet: Fleet, how: str) -> None:
    path, policy = bundle(fleet.folder / "f.bundle", "ncm"), fleet.folder / "policy.toml"
    policy.write_text('figures = ["accuracy"]\n')
    options = ("--policy", policy) if how == "policy" else ("--no-report-calibration",)
    fleet.aggregator([path], "--standing", "--every", "2s")
    staying(fleet, "d0", path, 0, "--hold-out", 0.4, *options)
    until("a state", lambda: (known := kept(fleet)) is not None and known.own.way == "class_mean")
    time.sleep(1.0)
    status = statuses(fleet, 1)["d0"]
    assert status.calibration is None
    assert announced(fleet).calibration is not None
    assert announced(fleet).calibration.way == ""
    x, _ = share(5, HELD[0], 10)
    predictor = protofleet.Predictor(fleet.folder / "state-d0")
    assert predictor(x).probabilities is not None  # its own
    known = kept(fleet)
    assert known is not None
    assert predictor.threshold == known.limit is not None
    assert predictor.measure == "minus the largest score, divided by the head's scale"
    strange = np.random.default_rng(0).integers(0, 256, x.shape, np.uint8)
    assert predictor(strange).novelty.mean() > predictor(x).novelty.mean()


def test_under_noise_no_photo_says_anything(fleet: Fleet) -> None:
    path = bundle(fleet.folder / "f.bundle", "ncm-dp")
    fleet.aggregator([path], "--rounds", 1, "--min-clients", 1)
    staying(fleet, "d0", path, 0, "--hold-out", 0.4)
    fleet.wait_for("d0", "committed")
    until("the round's state", lambda: read_kept(fleet.folder / "state-d0").state is not None)
    time.sleep(2.0)
    assert statuses(fleet, 1)["d0"].calibration is None
