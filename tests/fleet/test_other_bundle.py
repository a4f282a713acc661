"""Who cannot take part is named: a device whose bundle does not fit, which is not awaited, and a second of one id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, manifest
from commands import run
from fleets import FLEET, Fleet, bundle, fleet_in, share

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.rounds.round_machine import Opened, Policy, Rounds
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Rival, Status


@pytest.fixture
def core(tmp_path: Path) -> Iterator[RoundCoordinator]:
    with DurableStore(tmp_path / "s", BUNDLE, "test") as store:
        yield rounds_of(store, manifest(), BUNDLE, Settings(rounds=1, calibrate=False, min_clients=2), now=0.0)


def birth(device: str, **versions: str) -> bytes:
    return encode(Status(True, device.encode().ljust(8), 1, versions={"bundle": "1 3fa94b12", **versions}))


def test_it_opens_no_round_and_none_waits_for_it(core: RoundCoordinator) -> None:
    core.status("a", birth("a"), 0.0)
    core.status("b", birth("b", apart="another bundle"), 0.0)
    assert (core.rounds.online, core.advance(10.0, 1e9)) == (1, None)
    core.status("c", birth("c"), 11.0)
    assert isinstance(core.advance(12.0, 1e9), Opened)
    assert core.rounds.awaited == {"a", "c"}
    core.status("b", birth("b"), 13.0)  # it has the fleet's bundle now
    assert core.rounds.awaited == {"a", "b", "c"}
    core.status("b", birth("b", apart="another bundle"), 14.0)
    assert core.rounds.awaited == {"a", "c"}


def test_the_operator_is_told_of_each_change_once_and_of_its_end(core: RoundCoordinator) -> None:
    for _ in range(3):
        core.status("b", birth("b", apart="another bundle\x1b[2J"), 0.0)
    (told,) = core.parts.gate.take_news(1e9)
    assert (told.device, told.cause) == ("b", "apart")
    assert "it runs another bundle" in told.reason
    assert "1 3fa94b12" in told.reason
    assert "\x1b" not in told.reason
    core.status("b", birth("b", apart="another bundle", bundle="2 00112233"), 1.0)
    (told,) = core.parts.gate.take_news(1e9)
    assert "2 00112233" in told.reason
    core.status("b", birth("b"), 2.0)
    assert core.parts.gate.take_news(2e9) == []
    assert core.parts.store.enrolment.intruders() == []


def test_a_device_that_changes_its_mind_with_each_birth_is_told_of_now_and_then(
    core: RoundCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a line nor a write for each; and what it said last is what `fleet list` shows."""
    writes, tables = list[str](), core.parts.store.enrolment
    forget, keep = tables.forget, tables.keep
    monkeypatch.setattr(tables, "forget", lambda *given: writes.append("forget") or forget(*given))
    monkeypatch.setattr(tables, "keep", lambda *given: writes.append("keep") or keep(*given))
    told = []
    for number in range(200):
        core.status("b", birth("b", apart="another bundle"), 0.0)
        told += core.parts.gate.take_news(1e9 + number / 100)
        core.status("b", birth("b"), 0.0)
        told += core.parts.gate.take_news(1e9 + number / 100)
    core.status("b", birth("b", apart="other classes"), 0.0)
    told += core.parts.gate.take_news(2e9)
    assert 1 <= len(told) <= 5
    assert len(writes) <= 5
    assert ["other classes" in each.reason for each in tables.intruders()] == [True]
    core.status("c", birth("c", apart="another bundle"), 0.0)
    assert [each.device for each in core.parts.gate.take_news(2e9)] == ["c"]  # others are told of at once


def test_a_sample_is_drawn_from_those_who_can_take_part() -> None:
    rounds = Rounds(("fedproto",), Policy(min_clients=1, fraction=0.3))
    for name in ("x1", "x2", "x3", "x4", "x5", "good"):
        rounds.leaves_out(name, is_apart=name != "good", now=0.0)
        rounds.birth(name, name.encode().ljust(8), 0.0)
    assert isinstance(rounds.advance(1.0), Opened)
    assert rounds.awaited == {"good"}
    assert replace(rounds).online == 1


def test_the_operator_is_told_who_else_runs_under_an_id(core: RoundCoordinator) -> None:
    rival = Rival(b"newcomer", 90, 4, "Raspberry Pi 4\n")
    for _ in range(3):  # a supervisor starts it again and again
        core.status("a", encode(Status(True, b"firstone", 1, rival=rival)), 0.0)
    (told,) = core.parts.gate.take_news(1e9)
    assert (told.device, told.cause) == ("a", "second-process")
    for word in (b"newcomer".hex(), "start 4", "Raspberry Pi 4", "--id", "--state"):
        assert word in told.reason
    assert core.rounds.is_online("a")


@pytest.mark.slow
def test_a_fleet_of_processes_goes_on_beside_it(tmp_path: Path) -> None:
    """Its deadline is ten minutes: a round that waited for the third would not end in this test's time."""
    ours, other = bundle(tmp_path / "ours", "ncm"), bundle(tmp_path / "other", "ncm", seed=3)
    with fleet_in(tmp_path) as fleet:
        fleet.aggregator([ours], "--rounds", 1, "--no-calibrate", "--min-clients", 2)
        _stays(fleet, "odd", other)
        fleet.wait_for("odd", "the fleet runs another bundle, expected sha256")
        fleet.wait_for("aggregator", "warning: odd: it runs another bundle, 1 ")
        listed = run("fleet", "list", "--store", tmp_path / "store.sqlite").stdout
        for index, name in enumerate(("one", "two")):
            fleet.client(name, ours, share(index, [0, 1, 2]))
        fleet.wait_for("aggregator", r"round 1: contributions 2/2")
        fleet.wait_for("aggregator", "finished")
        log = fleet.log("aggregator")
        assert "2 devices online, 2 needed" not in log.split("odd: it runs")[0]
        assert "still awaited" not in log
        assert "odd" in listed + run("fleet", "list", "--store", tmp_path / "store.sqlite").stdout


def _stays(fleet: Fleet, name: str, made: Path) -> None:
    x, y = share(5, [0, 1, 2])
    np.savez(fleet.folder / f"{name}.npz", x=x, y=y)
    words = ("--id", name, "--bundle", made, "--data", fleet.folder / f"{name}.npz", "--state", fleet.folder / name)
    fleet.start(name, "client", "--broker", fleet.url, "--fleet", FLEET, *words)
