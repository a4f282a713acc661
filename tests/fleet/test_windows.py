"""A window over a real broker: two devices that are never awake together, and a round that closes with both."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import Embedded
from log_lines import said_by_device

import protofleet
from protofleet.aggregator.monitoring import events

SHIPPED = Path(protofleet.__file__).parent.parent / "lab" / "demo" / "shipped"
Event = events.Event


@pytest.fixture
def url() -> object:
    broker = Embedded()
    broker.start()
    yield broker.url
    broker.stop()


def wait_for(condition: object, said: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, said
        time.sleep(0.02)


def awake(url: str, name: str, share: slice, folder: Path) -> None:
    """A device that wakes, takes part in the round that is open, and sleeps again."""
    with np.load(SHIPPED / "images.npz") as images:
        data = images["dealt_x"][share], images["dealt_y"][share]
    device = protofleet.Device(
        SHIPPED / "fleet.bundle",
        broker=url,
        id=name,
        data=data,
        state=folder / name,
        hold_out=0.0,
        until_finished=False,
    )
    running = threading.Thread(target=device.run, daemon=True)
    with said_by_device() as said:
        running.start()
        wait_for(lambda: any("committed" in line for line in said[name]), said)
        device.stop()
        running.join(20)
    assert not running.is_alive()


def test_devices_that_are_never_awake_together_are_in_one_round(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), list[str]()
    manager.bind(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    threading.Thread(target=lambda: notes.extend(iter(lambda: manager.recv(4096).decode(), "")), daemon=True).start()
    told, once = list[Event](), threading.Event()
    aggregator = protofleet.Aggregator(
        SHIPPED / "fleet.bundle", broker=url, store=tmp_path / "s", every="1h", window="6s", min_clients=2
    )

    def on_event(event: Event) -> None:
        told.append(event)
        if isinstance(event, events.RoundClosed):
            once.set()

    summary: dict[str, Any] = {}
    serving = threading.Thread(target=lambda: summary.update(aggregator.run(on_event)), daemon=True)
    serving.start()
    awake(url, "kitchen", slice(0, 40), tmp_path)
    awake(url, "porch", slice(40, 80), tmp_path)
    assert once.wait(60), told
    wait_for(lambda: isinstance(told[-1], events.Waiting), told)
    aggregator.stop()
    serving.join(20)
    assert not serving.is_alive()
    wait_for(lambda: [notes.count(word) for word in ("READY=1", "STOPPING=1")] == [3, 3], notes)
    assert summary["schedule"] == {
        "every_s": 3600.0, "when_new": 0, "window_s": 6.0, "open_clients": 1, "min_clients": 2, "max_clients": 0,
    }  # fmt: skip
    assert (summary["finished"], len(summary["rounds"])) == (False, 1)
    (opened,) = [event for event in told if isinstance(event, events.RoundOpened)]
    (closed,) = [event for event in told if isinstance(event, events.RoundClosed)]
    assert (opened.awaited, opened.window_s, closed.committed) == (1, 6.0, 2)
    assert closed.seconds >= 6.0
    last = told[-1] if isinstance(told[-1], events.Waiting) else told[-2]
    assert isinstance(last, events.Waiting)
    assert (last.round, last.online <= 1) == (2, True)  # the second may not have gone yet, never are there both
    assert 3_500 < (last.opens_in_s or 0.0) < 3_600
