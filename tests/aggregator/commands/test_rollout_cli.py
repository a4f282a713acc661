"""`protofleet rollout` on a store: what it takes, shows and refuses, each in one line."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from aggregator_samples import bundle_file
from commands import one_error_line, run
from rollout_samples import new_bundle, old_bundle
from scraped import text_of

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.metrics.metrics import Metrics
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import StoreError
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status


class World:
    """A store of the new bundle, and what is around it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, folder / "s.sqlite"
        self.old = old_bundle(folder / "old.bundle")
        self.new = new_bundle(folder / "new.bundle", self.old)
        self.next = new_bundle(folder / "next.bundle", self.new, "mouse")
        self.bare = new_bundle(folder / "bare.bundle", self.old, sign=None)
        self.other = old_bundle(folder / "other.bundle", version=5)
        with DurableStore(self.store, read_bundle(self.new).sha256, "pets"):
            pass

    def rollout(self, *words: object) -> tuple[int, str]:
        done = run("rollout", *words, "--store", self.store)
        return done.returncode, done.stdout + done.stderr

    def serve(self, *said: tuple[str, str], after_s: float = 0.0) -> RoundCoordinator:
        """What an aggregator does that runs for a moment: obey, and hear (device, word)."""
        bundle = read_bundle(self.new)
        with DurableStore(self.store, bundle.sha256, "pets") as store:
            chosen = Settings(calibrate=False)
            core = rounds_of(store, bundle.manifest, bundle.sha256, chosen, now=0.0)
            for device, word in said:
                versions = {"bundle": "1 00000000"} | ({"rollout": word} if word else {})
                core.status(device, encode(Status(True, bytes(8), 1, versions=versions)), 0.0)
            for turn in range(3):
                while core.advance(turn + 1.0, time.time() + after_s + turn) is not None:
                    pass
            self.metrics = text_of(Metrics("pets", core, store.refused_devices))
        return core


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_roll_out_that_ends_at_a_part_says_so(world: World) -> None:
    world.rollout(world.new, "--stage", "50%")
    world.serve()
    assert "offered to 50 % since " in world.rollout()[1]
    assert ", its last stage; --stage 100% goes on; a stage lasts" in world.rollout()[1]
    world.rollout("--stage", "100%")
    world.serve()
    assert "last stage" not in world.rollout()[1]


def test_a_roll_out_is_given_shown_widened_and_ended(world: World) -> None:
    assert world.rollout() == (0, "nothing is rolled out\n")
    code, said = world.rollout(world.new, "--stage", "50%", "--stage", "100%", "--soak", "2h")
    assert code == 0
    assert said.startswith("rollout version 2, sha256 ")
    assert said.endswith(": no aggregator runs on this store; the next one that is started on it does it\n")
    world.serve()
    assert "no device of it known yet: each says which bundle it uses when" in world.rollout()[1]
    world.serve(*((f"d{n}", "") for n in range(10)), ("d0", "2 failed: accuracy fell"), ("d1", "2 healthy"))
    code, said = world.rollout()
    first, second, third, *table = said.splitlines()
    assert first.endswith(("bytes): running", "accuracy fell"))
    assert second.startswith("offered to 50 % since ")
    assert second.endswith("then 100 %; a stage lasts 2 h or longer and needs 90 % healthy")
    assert "of it known: " in third
    assert "last stage" not in said
    assert [line.split()[0] for line in table[2:]] == ["d0"]
    told = json.loads(run("rollout", "--store", world.store, "--json", "-").stdout)
    assert told["rollout"]["devices"]["d0"]["reason"] == "accuracy fell"
    assert told["rollout"]["stages"] == [1.0]
    assert "rollout: version 2 failed: accuracy fell" in run("fleet", "show", "d0", "--store", world.store).stdout
    for words in (("--halt",), ("--resume",), ("--stage", "80%"), ("--end",)):
        code, said = world.rollout(*words)
        assert (code, "NOT yet done: no aggregator runs" in said) == (0, True), said
    core = world.serve()
    assert core.parts.rollouts.current is None
    log = run("fleet", "log", "--store", world.store).stdout.splitlines()
    assert [line.split(", asked")[0].split(", sha")[0] for line in log] == [
        "rollout version 2",
        "rollout-halt",
        "rollout-resume",
        "rollout-stage 0.8",
        "rollout-end",
    ]
    assert all(": done" in line for line in log)


def test_what_a_device_says_cannot_style_a_terminal(world: World) -> None:
    world.rollout(world.new, "--stage", "100%")
    world.serve(("a", "2 failed: \x1b[31mred\n[bold]x"))
    world.rollout("--resume")
    world.serve(("a", "2 failed: \x1b[31mred\n[bold]x"))
    for words in (("rollout",), ("fleet", "show", "a")):
        said = run(*words, "--store", world.store).stdout
        assert "\\x1b[31mred\\n[bold]x" in said
        assert "\x1b" not in said


@pytest.mark.parametrize(
    "wrong", ["stages = '[1'", "fraction = 'half'", "sha256 = 7", "version = x'00'", "stages = '{}', since = 'soon'"]
)
def test_what_somebody_wrote_into_a_roll_out_by_hand_is_one_line_or_shown(world: World, wrong: str) -> None:
    world.rollout(world.new, "--stage", "100%")
    world.serve(("a", "2 testing"))
    with closing(sqlite3.connect(world.store)) as db, db:
        db.execute(f"UPDATE rollout SET {wrong}")
        db.execute("UPDATE rollout_device SET told = x'ff'")
    for words in (
        ("rollout",),
        ("rollout", "--json", "-"),
        ("rollout", world.new),
        ("fleet", "list"),
        ("fleet", "log"),
    ):
        done = run(*words, "--store", world.store)
        assert done.returncode == 0 or "store" in one_error_line(done)
    with pytest.raises(StoreError, match="expected what an aggregator writes"):
        world.serve()


def test_metrics_tell_how_many_devices_are_where(world: World) -> None:
    world.serve()
    assert 'protofleet_rollout_devices{state="healthy"} 0.0\n' in world.metrics
    assert "protofleet_rollout_fraction 0.0\n" in world.metrics
    world.rollout(world.new, "--stage", "100%")
    world.serve(("a", "2 healthy"), ("b", "2 testing"), ("c", ""))
    assert 'protofleet_rollout_devices{state="healthy"} 1.0\n' in world.metrics
    assert 'protofleet_rollout_devices{state="testing"} 1.0\n' in world.metrics
    assert 'protofleet_rollout_devices{state="waiting"} 1.0\n' in world.metrics
    assert "protofleet_rollout_fraction 1.0\n" in world.metrics


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("{bare}",), "expected a signed bundle, got one without a signature, try protofleet export … --sign KEY"),
        (("{old}",), "expected a bundle that extends the fleet's, got one that extends none, try export --extend, or"),
        (("{next}",), "expected the bundle that the aggregator runs with, got one that extends it, try the aggregator"),
        (("{next}", "--to-fleet", "pets"), "--to-fleet, expected another fleet than the store's, got pets"),
        (("{next}", "--to-fleet", "A/#"), "--to-fleet, expected 1 to 64 of a-z"),
        (("{new}", "--stage", "10"), "--stage, expected a percentage above 0% up to 100%, such as 10%, got 10"),
        (("{new}", "--stage", "0%"), "--stage, expected a percentage"),
        (("{new}", "--stage", "50%", "--stage", "10%"), "--stage, expected rising stages, got 50%, 10%"),
        (("{new}", "--healthy", "101%"), "--healthy, expected a percentage"),
        (("{new}", "--soak", "soon"), "--soak, expected a duration"),
        (("{new}", "--halt"), "expected one of BUNDLE, --stage, --halt, --resume and --end, got more"),
        (("--halt", "--end"), "expected one of BUNDLE"),
        (("--stage", "10%", "--stage", "20%"), "--stage, expected one, without BUNDLE, got 2"),
        (("--to-fleet", "pets2"), "--to-fleet, expected a BUNDLE beside it, got none"),
        (("{folder}/none.bundle",), "cannot read bundle"),
        (("{store}",), "is not a whole bundle"),
    ],
)
def test_what_cannot_be_is_one_line_and_records_nothing(world: World, words: tuple[str, ...], line: str) -> None:
    done = run("rollout", *(word.format(**vars(world)) for word in words), "--store", world.store)
    assert line in one_error_line(done), done.stderr
    assert done.returncode in (1, 2)
    assert run("fleet", "log", "--store", world.store).stdout == ""


def test_one_at_a_time_but_a_complete_one_makes_room(world: World) -> None:
    world.rollout(world.new, "--stage", "100%")
    world.serve(("a", "2 testing"))
    code, said = world.rollout(world.other, "--to-fleet", "pets2")
    assert code == 2
    assert "expected no other roll-out under way, got version 2 at 100 %, running, try rollout --end" in said
    world.serve(("a", "2 healthy"), after_s=3600.0)
    assert ": complete" in world.rollout()[1]
    assert world.rollout(world.other, "--to-fleet", "pets2")[0] == 0
    world.serve()
    assert "to fleet pets2: running" in world.rollout()[1]


def test_a_store_that_is_none_is_one_line(world: World) -> None:
    opaque = world.folder / "opaque.bundle"
    bundle_file(opaque)
    for store in (world.folder / "none.sqlite", opaque):
        for words in ((world.new,), (), ("--halt",)):
            done = run("rollout", *words, "--store", store)
            assert done.returncode in (1, 2)
            one_error_line(done)
    assert not (world.folder / "none.sqlite").exists()
