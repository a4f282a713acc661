"""What an operator sees of a fleet of processes: who is online, who is gone, and who was only said to be there.

Devices, aggregator and broker are processes; they are killed, stopped and started again, and after each of these the
operator's commands must tell the truth within the time that they promise.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from brokers import Embedded, TestBroker, make_broker
from commands import run
from fleets import Processes
from postgres_server import need_postgres

import protofleet

SHIPPED = Path(protofleet.__file__).parent.parent / "lab" / "demo" / "shipped"
KEEPALIVE_S = 60.0  # of a device's link
WAIT_S = 90.0


@dataclass(kw_only=True)
class Fleet(Processes):
    """Processes around a broker, and what the operator's commands say of them."""

    broker: TestBroker
    store: str
    workers: tuple[str, ...] = ("aggregator",)
    options: tuple[object, ...] = field(default=())

    def start_aggregator(self, name: str = "aggregator") -> None:
        words = ("--every", "1h", "--window", "1s", "--min-clients", "2", *self.options)
        self._join(name, "aggregate", "--store", self.store, *words)

    def start_device(self, name: str, share: slice) -> None:
        with np.load(SHIPPED / "images.npz") as images:
            np.savez(self.folder / f"{name}.npz", x=images["dealt_x"][share], y=images["dealt_y"][share])
        data = ("--data", self.folder / f"{name}.npz", "--state", self.folder / f"state-{name}", "--hold-out", "0.2")
        self._join(name, "client", "--id", name, *data)

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid, number)
        if number == signal.SIGKILL:
            self.processes.pop(name).wait()

    def listed(self) -> dict[str, dict[str, Any] | None]:
        done = run("fleet", "list", "--store", self.store, "--json", "-")
        return {each["device"]: each["state"] for each in json.loads(done.stdout)["devices"]} if done.stdout else {}

    def until(self, holds: Callable[[dict[str, Any]], object], within_s: float = WAIT_S) -> dict[str, Any]:
        """What is listed once that holds."""
        deadline = time.monotonic() + within_s
        while True:
            listed = self.listed()
            try:
                if holds(listed):
                    return listed
            except (KeyError, TypeError):
                pass
            assert time.monotonic() < deadline, f"{listed}\n" + "\n---\n".join(map(self.log, self.processes))
            time.sleep(0.2)

    def _join(self, name: str, command: str, *options: object) -> None:
        told = ("--bundle", SHIPPED / "fleet.bundle", "--broker", self.broker.url, "--fleet", "known")
        self.start(name, command, *told, *options)


@pytest.fixture(params=["mosquitto", pytest.param("embedded", marks=pytest.mark.slow)])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    broker = make_broker(request.param, tmp_path)
    broker.start()
    made = Fleet(folder=tmp_path, broker=broker, store=str(tmp_path / "s.sqlite"))
    yield made
    for name in made.processes:
        os.kill(made.processes[name].pid, signal.SIGCONT)
    made.end()
    broker.stop()


def both_contributed(listed: dict[str, Any]) -> bool:
    return all(listed[name]["confirmed"] and listed[name]["up_bytes"] > 2_000 for name in ("kitchen", "porch"))


def test_who_is_killed_is_gone_and_who_is_only_retained_is_not_heard(fleet: Fleet) -> None:
    fleet.start_aggregator()
    began = time.time()
    fleet.start_device("kitchen", slice(0, 40))
    fleet.start_device("porch", slice(40, 80))
    listed = fleet.until(both_contributed)
    porch = listed["porch"]
    assert began - 1 < porch["first_seen"] <= porch["heard_at"] <= time.time()
    assert porch["board"]
    assert porch["software"]["protofleet"] == protofleet.__version__
    assert porch["bundle"].startswith("1 ")
    assert porch["boot"] == 1
    assert porch["figures"]["rss_bytes"] > 1e6
    assert fleet.until(lambda listed: listed["porch"]["down_bytes"] > 2_000)

    killed_at = time.monotonic()
    fleet.signal("porch", signal.SIGKILL)
    fleet.until(lambda listed: listed["porch"]["online"] is False and listed["kitchen"]["online"], KEEPALIVE_S)
    assert time.monotonic() - killed_at < KEEPALIVE_S
    shown = run("fleet", "show", "porch", "--store", fleet.store).stdout
    assert "porch: gone" in shown

    fleet.signal("kitchen", signal.SIGSTOP)  # it lives, and cannot say so
    stopped_at = time.time()
    fleet.signal("aggregator", signal.SIGKILL)
    assert fleet.listed()["kitchen"]["online"] is None  # nobody knows
    assert "no aggregator runs" in run("status", "--store", fleet.store).stdout
    fleet.start_aggregator()
    listed = fleet.until(lambda listed: listed["kitchen"]["online"] is not None)
    time.sleep(3.0)  # what the broker retains has come by then
    listed = fleet.listed()
    kitchen = listed["kitchen"]
    assert (kitchen["online"], kitchen["confirmed"]) == (True, False)
    assert kitchen["heard_at"] < stopped_at + 1
    assert (kitchen["boot"], listed["porch"]["online"]) == (1, False)

    fleet.broker.kill()
    fleet.broker.start()
    listed = fleet.until(lambda listed: len(listed) == 2)
    assert not listed["kitchen"]["confirmed"]
    assert listed["kitchen"]["heard_at"] < stopped_at + 1
    resumed_at = time.time()
    fleet.signal("kitchen", signal.SIGCONT)
    kitchen = fleet.until(lambda listed: listed["kitchen"]["confirmed"])["kitchen"]
    assert (kitchen["online"], kitchen["boot"]) == (True, 1)
    fleet.until(lambda listed: listed["kitchen"]["heard_at"] > resumed_at - 1)

    fleet.start_device("porch", slice(40, 80))
    porch = fleet.until(lambda listed: listed["porch"]["confirmed"])["porch"]
    assert (porch["boot"], porch["online"]) == (2, True)
    assert porch["up_bytes"] > listed["porch"]["up_bytes"]  # in total, over restarts
    done = run("forget", "porch", "--store", fleet.store)
    assert done.returncode == 0
    assert "done" in done.stdout
    assert fleet.listed()["porch"] is None
    assert "gone" not in run("fleet", "show", "porch", "--store", fleet.store).stdout


def test_what_workers_take_is_seen_by_who_leads(tmp_path: Path) -> None:
    """The leader is stopped from hearing contributions by the broker's share; each of two takes some, and counts."""
    server, broker = need_postgres(), Embedded()
    broker.start()
    place = server.new_place()
    fleet = Fleet(folder=tmp_path, broker=broker, store=place, options=("--worker",))
    try:
        for name in ("one", "two"):
            fleet.start_aggregator(name)
        fleet.start_device("kitchen", slice(0, 40))
        fleet.start_device("porch", slice(40, 80))
        fleet.until(both_contributed)
        for name in ("kitchen", "porch"):
            sent = _sent_bytes(tmp_path / f"state-{name}" / "journal.sqlite")
            listed = fleet.until(lambda listed, name=name, sent=sent: listed[name]["up_bytes"] > sent)
            assert listed[name]["up_bytes"] < 3 * sent + 20_000  # births and reports beside it, and nothing twice
        fleet.signal("porch", signal.SIGKILL)
        fleet.until(lambda listed: listed["porch"]["online"] is False, KEEPALIVE_S)
    finally:
        fleet.end()
        broker.stop()
        server.give_back(place)


def _sent_bytes(journal: Path) -> int:
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(journal)) as db:
        (total,) = db.execute("SELECT sum(length(payload)) FROM contributions").fetchone()
    return int(total)


def test_what_a_program_reads_of_status_keeps_its_keys(tmp_path: Path) -> None:
    """`status --json` is promised (docs/stability.md): what goes fails here, what is new does not."""
    store = Path(__file__).parents[2] / "files" / "v6" / "store.sqlite"
    (tmp_path / "store.sqlite").write_bytes(store.read_bytes())
    told = json.loads(run("status", "--store", tmp_path / "store.sqlite", "--json", "-").stdout)
    assert {"schema", "well", "sentence", "aggregator_runs", "devices", "online", "cares", "events"} <= set(told)
