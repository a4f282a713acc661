"""A roll-out in both kinds of aggregator, over a real store: begun, widened, halted, ended, and kept over restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from postgres_server import Places
from rollout_samples import new_bundle, old_bundle

from protofleet.aggregator.coordinators.coordinator import Coordinator
from protofleet.aggregator.coordinators.kinds import rounds_of, standing_sums
from protofleet.aggregator.database import read_only
from protofleet.aggregator.parts import rollout_coordinator
from protofleet.aggregator.rollout.rollout_stages import STAGES, Completed, Halted, Moved, Plan, Widened
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.backup import back_up, restore
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.aggregator.store.rollout_tables import PIECE_BYTES, give_rollout, said_in
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Status
from protofleet.contract.wire.rollout_messages import Request, bundle_tag

Make = Callable[[], "contextmanager[Coordinator]"]
OTHER = "6 00000000"


class World:
    """A store with an aggregator of the new bundle on it, which can be started again."""

    def __init__(self, folder: Path, kind: str, path: str) -> None:
        self.path, self._kind, self.now = path, kind, 1000.0
        self.old = read_bundle(old_bundle(folder / "old.bundle", pad=30_000))
        self.file = new_bundle(folder / "new.bundle", folder / "old.bundle")
        self.new: Bundle = read_bundle(self.file)
        self.blob = self.file.read_bytes()
        self.shorter = {self.old.sha256: self.old.manifest.classes}
        with self.core():
            pass

    @contextmanager
    def core(self) -> Iterator[Coordinator]:
        with DurableStore(self.path, self.new.sha256, "fleet", extends=self.shorter) as store:
            settings = Settings(standing=True, every=60.0 if self._kind == "standing" else None)
            made = standing_sums if self._kind == "standing" else rounds_of
            yield made(store, self.new.manifest, self.new.sha256, settings, now=self.now, shorter=self.shorter)

    def plan(self, **changes: object) -> Plan:
        given = {"sha256": self.new.sha256, "version": self.new.manifest.version, "size_bytes": len(self.blob)}
        return Plan(**{**given, "soak_s": 60.0, **changes})  # type: ignore[arg-type]

    def give(self, stages: tuple[float, ...] = STAGES, **changes: object) -> None:
        give_rollout(self.path, self.blob, self.plan(**changes), stages, "somebody")

    def steps(self, core: Coordinator, seconds: float = 1.0) -> list[object]:
        """What is due after so long."""
        self.now += seconds
        found = []
        while (step := core.advance(self.now, self.now)) is not None:
            found.append(step)
        return [step for step in found if isinstance(step, Obeyed | Moved)]  # and no round that opens

    def say(self, core: Coordinator, device: str, bundle: str = OTHER, rollout: str = "") -> None:
        versions = {"bundle": bundle} | ({"rollout": rollout} if rollout else {})
        core.status(device, encode(Status(True, bytes(8), 1, versions=versions)), self.now)


@pytest.fixture(params=["rounds", "standing"])
def world(request: pytest.FixtureRequest, tmp_path: Path, places: Places) -> World:
    return World(tmp_path, request.param, places("s.sqlite"))


def test_a_roll_out_goes_from_its_order_to_its_end_over_restarts(world: World) -> None:
    version, tag = world.new.manifest.version, bundle_tag(world.new.manifest.version, world.new.sha256)
    world.give()
    with world.core() as core:
        for number in range(20):
            world.say(core, f"d{number}")
        (begun,) = world.steps(core)
        assert isinstance(begun, Obeyed)
        assert begun.outcome == "done"
        offer = core.announcement().offer
        assert (offer.sha256, offer.version, offer.size_bytes) == (world.new.sha256, version, len(world.blob))
        assert decode(encode(core.announcement())).offer == offer
        first = list(core.parts.rollouts.current.members())
        assert 0 < len(first) < 10
        for device in first:
            world.say(core, device, tag, f"{version} healthy")
        assert world.steps(core) == []
        assert core.parts.rollouts.counts["healthy"] == len(first)
    with world.core() as core:  # the broker says nothing again: the store knows
        assert core.announcement().offer == offer
        assert world.steps(core, 30.0) == []
        (widened,) = world.steps(core, 30.0)
        assert (widened.fraction, widened.devices > len(first)) == (0.5, True)
    with world.core() as core:
        for number in range(20):
            world.say(core, f"d{number}", tag)  # who has it is healthy
        core.status("d0", encode(Status(False, bytes(8), 1)), world.now)  # a last will takes back nothing
        assert world.steps(core, 61.0) == [Widened(version, 1.0, 20)]
        assert world.steps(core, 61.0) == [Completed(version, 20)]
    with world.core() as core:
        assert core.announcement().offer.fraction == 1.0
        give(world.path, "rollout-end", "", "somebody")
        assert [step.outcome for step in world.steps(core)] == ["done"]
        assert core.announcement().offer is None
        for _ in range(3):
            world.steps(core)
    with DurableStore(world.path, world.new.sha256, "fleet") as store:
        assert store.rollouts.load() is None
        assert store.rollouts.read(world.new.sha256, 0, 1) == b""


def test_what_is_handed_out_is_the_bundle(world: World) -> None:
    assert len(world.blob) > 3 * PIECE_BYTES
    world.give((1.0,))
    with world.core() as core:
        world.steps(core)
        for offset, length in ((0, 10), (PIECE_BYTES - 3, 6), (PIECE_BYTES, PIECE_BYTES), (len(world.blob) - 5, 100)):
            assert core.parts.rollouts.read(offset, length) == world.blob[offset : offset + length]
        assert b"".join(core.parts.rollouts.read(at, 7000) for at in range(0, len(world.blob), 7000)) == world.blob


def test_who_is_refused_or_not_in_the_stage_gets_nothing(world: World) -> None:
    world.give((0.5, 1.0))
    with world.core() as core:
        for number in range(20):
            world.say(core, f"d{number}")
        world.steps(core)
        inside = list(core.parts.rollouts.current.members())
        (outside, *_) = (d for d in core.parts.rollouts.current.told if d not in inside)
        request = Request(core.parts.run, world.new.sha256[:8], 0, 100)
        assert core.parts.gives(inside[0], request)
        assert not core.parts.gives(outside, request)
        for wrong in (
            Request(core.parts.run, bytes(8), 0, 1),
            Request(core.parts.run, world.new.sha256[:8], len(world.blob), 1),
        ):
            assert not core.parts.gives(inside[0], wrong)
        for what, device in (("remove", inside[0]), ("forget", inside[1])):
            give(world.path, what, device, "somebody")
        world.steps(core)
        assert [core.parts.gives(device, request) for device in inside[:3]] == [False, False, True]
        assert not {inside[0], inside[1]} & core.parts.rollouts.current.told.keys()
        world.say(core, inside[0], OTHER, f"{world.new.manifest.version} failed")
        assert inside[0] not in core.parts.rollouts.current.told
        give(world.path, "rollout-halt", "", "somebody")
        world.steps(core)
        assert not core.parts.gives(inside[2], request)
    with read_only(world.path, KIND) as db:
        assert not {inside[0], inside[1]} & said_in(db).keys()


def test_failures_halt_it_and_an_operator_decides(world: World) -> None:
    version = world.new.manifest.version
    world.give((0.5, 1.0))
    with world.core() as core:
        for number in range(10):
            world.say(core, f"d{number}")
        world.steps(core)
        for device in core.parts.rollouts.current.members():
            world.say(core, device, OTHER, f"{version} failed: self-test: features are not finite")
        (halted,) = world.steps(core)
        assert isinstance(halted, Halted)
        assert "self-test: features are not finite" in halted.reason
        assert [(told.word, told.reason) for _, told in core.parts.rollouts.take_news()][:1] == [
            ("failed", "self-test: features are not finite")
        ]
        assert core.announcement().offer is None
    with world.core() as core:
        assert core.announcement().offer is None
        for what, detail, outcome in (
            ("rollout-stage", "1.0", "refused: it is halted, --resume goes on"),
            ("rollout-resume", "", "done"),
            ("rollout-stage", "0.2", "refused: expected a stage above 0.5, up to 1, got 0.2"),
            ("rollout-stage", "x", "refused: expected a stage above 0.5, up to 1, got x"),
            ("rollout-stage", "1.0", "done"),
            ("rollout-halt", "", "done"),
            ("rollout-halt", "", "done: it was halted"),
            ("rollout-dance", "", "refused: rollout-dance is no order"),
        ):
            give(world.path, what, "", "somebody", detail=detail)
            outcomes = [step.outcome for step in world.steps(core) if isinstance(step, Obeyed)]
            assert outcomes == [outcome]


def test_what_does_not_fit_is_refused_and_leaves_nothing(world: World) -> None:
    with world.core() as core:
        give(world.path, "rollout-halt", "", "somebody")
        assert [step.outcome for step in world.steps(core)] == ["refused: nothing is rolled out"]
        world.give(fleet="pets2", version=world.new.manifest.version)
        (step,) = world.steps(core)
        assert step.outcome == "refused: expected a version above 2, that of this fleet's bundle, got 2"
        give_rollout(world.path, b"else", world.plan(sha256=bytes(32), size_bytes=4), (1.0,), "somebody")
        (step,) = world.steps(core)
        assert step.outcome.startswith("refused: this aggregator does not run with that bundle yet")
        give_rollout(world.path, b"cut off", world.plan(), (1.0,), "somebody")
        (step,) = world.steps(core)
        assert step.outcome.startswith("refused: its bundle is not whole")
        assert core.announcement().offer is None
        world.steps(core)
        assert core.parts.rollouts._tables.read(bytes(32), 0, 9) == b""
        world.give(fleet="pets2", version=3)
        assert [step.outcome for step in world.steps(core)] == ["done"]
        assert core.parts.rollouts.elsewhere == "pets2"
        world.give()
        (step,) = world.steps(core)
        assert step.outcome == "done"  # of the same bytes: it takes the place of what it was


def elsewhere(core: Coordinator, device: str, status: Status) -> None:
    core.parts.statuses.hear_elsewhere(device, topics.status("pets2", device), encode(status))


def test_devices_that_went_over_are_heard_in_the_other_fleet(world: World) -> None:
    world.give((1.0,), fleet="pets2", version=3)
    with world.core() as core:
        world.say(core, "a")
        world.say(core, "b")
        world.steps(core)
        world.say(core, "a", OTHER, "3 testing")
        for device, word in (("a", "3 healthy"), ("stranger", ""), ("b", "3 healthy")):
            elsewhere(core, device, Status(True, bytes(8), 1, versions={"bundle": "3 aa", "rollout": word}))
        world.say(core, "a", OTHER, "3 testing")  # retained from before
        assert world.steps(core) == []  # others may be on their way
        assert world.steps(core, 61.0) == [Completed(3, 2)]


def test_of_the_other_fleet_no_flood_of_names_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_coordinator, "MAX_DEVICES", 3)
    world.give((1.0,), fleet="pets2", version=3)
    with world.core() as core:
        world.say(core, "a")
        world.steps(core)
        for device in ("x1", "x2", "x3", "x4", "a"):
            elsewhere(core, device, Status(True, bytes(8), 1, versions={"rollout": "3 healthy"}))
        told = core.parts.rollouts.current.told
        assert (list(told), told["a"].word) == (["a", "x1", "x2"], "healthy")


def test_a_restored_store_rolls_nothing_out_by_itself(world: World, tmp_path: Path) -> None:
    world.give((1.0,))
    with world.core() as core:
        world.say(core, "a")
        world.steps(core)
    back_up(world.path, tmp_path / "backup", "somebody")
    restore(tmp_path / "backup", world.path, "somebody", force=True)
    with world.core() as core:
        assert core.announcement().offer is None
        assert core.parts.rollouts.current.reason == "the store was restored from a backup"
        give(world.path, "rollout-resume", "", "somebody")
        world.steps(core)
        assert core.announcement().offer is not None
        assert core.parts.rollouts.read(0, 8) == world.blob[:8]


def test_what_was_given_while_no_aggregator_ran_but_cut_off_begins_nothing(world: World) -> None:
    """Killed while its bytes go in: no order; the next one takes its place."""
    with pytest.raises(KeyboardInterrupt):
        give_rollout(world.path, _Killed(world.blob), world.plan(), STAGES, "somebody")  # type: ignore[arg-type]
    with world.core() as core:
        assert world.steps(core) == []
        assert core.announcement().offer is None
        world.give((1.0,))
        (step,) = world.steps(core)
        assert step.outcome == "done"
        assert core.parts.rollouts.read(0, len(world.blob)) == world.blob


def test_of_two_that_are_given_at_once_the_one_that_began_last_is_rolled_out(world: World) -> None:
    """The other is told, and its order is none; it took up the newer one's bundle, in the name of its own."""
    first = _Slow(b"another bundle", lambda: world.give((1.0,)))
    with pytest.raises(UsageError, match="expected one roll-out given at a time, got another one meanwhile"):
        give_rollout(world.path, first, world.plan(sha256=bytes(32), size_bytes=14), (1.0,), "somebody")
    with world.core() as core:
        (step,) = world.steps(core)
        assert (step.outcome, core.parts.rollouts.current.plan) == ("done", world.plan())
        assert core.parts.rollouts.read(0, len(world.blob)) == world.blob


class _Slow(bytes):
    """A bundle while whose first bytes are read something else happens."""

    def __new__(cls, blob: bytes, happens: Callable[[], None]) -> _Slow:
        made = super().__new__(cls, blob)
        made.happens = happens  # type: ignore[attr-defined]
        return made

    def __getitem__(self, at: slice) -> bytes:  # type: ignore[override]
        self.happens()  # type: ignore[attr-defined]
        return super().__getitem__(at)


class _Killed(bytes):
    """A bundle of which nothing comes in but its beginning."""

    def __getitem__(self, at: slice) -> bytes:  # type: ignore[override]
        if at.start >= PIECE_BYTES:
            raise KeyboardInterrupt
        return super().__getitem__(at)


def test_an_older_device_and_an_older_announcement(world: World) -> None:
    """A device of the release before says no bundle: it is no part of a roll-out, and goes on as ever."""
    world.give((1.0,))
    with world.core() as core:
        core.status("old", encode(Status(True, bytes(8), 1, versions={"protofleet": "0.1.9"})), world.now)
        world.steps(core)
        assert core.parts.rollouts.current.told == {}
        assert core.rounds.is_online("old")
        plain = core.announcement()
        assert plain.offer is not None
        assert isinstance(core.parts.rollouts.current.advance(world.now + 1e6), Widened | None)


def test_what_was_said_of_an_earlier_roll_out_is_nothing_to_the_next_also_after_a_restart(world: World) -> None:
    world.give((1.0,))
    with world.core() as core:
        world.say(core, "a", OTHER, f"{world.new.manifest.version} failed")
        world.steps(core)
        world.steps(core)
    with read_only(world.path, KIND) as db:
        assert "a" in said_in(db)
    with world.core() as core:  # where nobody has said anything yet
        world.give((1.0,))
        assert [step.outcome for step in world.steps(core)] == ["done"]
    with world.core() as core:
        assert core.parts.rollouts.current.told == {}


def test_who_failed_before_it_was_resumed_does_not_halt_it_after_a_restart(world: World) -> None:
    world.give((1.0,))
    with world.core() as core:
        world.say(core, "a", OTHER, f"{world.new.manifest.version} failed")
        world.steps(core)
        give(world.path, "rollout-resume", "", "somebody")
        world.steps(core)
    with world.core() as core:
        world.steps(core)
        assert core.announcement().offer is not None


def test_a_bundle_stays_while_its_roll_out_is_halted_and_goes_whole_with_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofleet.aggregator.store.rollout_tables._ROWS_AT_ONCE", 1)  # so that it takes several turns
    world.give((1.0,))
    with world.core() as core:
        world.steps(core)
        give(world.path, "rollout-halt", "", "somebody")
        world.steps(core)
    with world.core() as core:
        for _ in range(3):
            world.steps(core)
        assert core.parts.rollouts.read(0, len(world.blob)) == world.blob
        give(world.path, "rollout-end", "", "somebody")
        for _ in range(9):
            world.steps(core)
        assert core.parts.rollouts._tables.read(world.new.sha256, 0, len(world.blob)) == b""


def test_of_two_that_are_given_the_newer_is_rolled_out(world: World) -> None:
    world.give((1.0,), fleet="pets2", version=3)
    world.give((1.0,))
    with world.core() as core:
        first, second = world.steps(core)
        assert (first.outcome.startswith("refused: its bundle is not whole"), second.outcome) == (True, "done")
        assert core.parts.rollouts.elsewhere == ""


def test_no_other_roll_out_takes_the_place_of_one_that_is_halted(world: World) -> None:
    world.give((1.0,))
    with world.core() as core:
        world.steps(core)
        give(world.path, "rollout-halt", "", "somebody")
        world.steps(core)
        other = world.plan(sha256=bytes(32), size_bytes=4, fleet="pets2", version=3)
        give_rollout(world.path, b"else", other, (1.0,), "somebody")
        (step,) = world.steps(core)
        assert step.outcome == "refused: version 2 is being rolled out, --end ends that"
        assert core.parts.rollouts.current.plan.sha256 == world.new.sha256


def test_a_device_that_is_forgotten_is_no_part_of_the_next_roll_out_whose_soak_begins_when_it_is_taken_up(
    world: World,
) -> None:
    world.now = 1e11  # long after it was given
    with world.core() as core:
        world.say(core, "a")
        world.say(core, "b", OTHER, f"{world.new.manifest.version} healthy")
        give(world.path, "forget", "a", "somebody")
        world.steps(core)
        world.give((1.0,))
        (begun,) = world.steps(core)
        assert isinstance(begun, Obeyed)
        assert set(core.parts.rollouts.current.told) == {"b"}
        assert world.steps(core, 61.0) == [Completed(world.new.manifest.version, 1)]
