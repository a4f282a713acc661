"""What a device decides about roll-outs, what it remembers of them, and what brings the bundle before back."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protofleet.aggregator.store.operator_orders import refusal
from protofleet.contract.accuracy import Accuracy
from protofleet.contract.errors import BundleError, DataError, LinkError, PrivacyError, StoreError, UsageError
from protofleet.contract.wire.messages import Announcement, Receipt
from protofleet.contract.wire.rollout_messages import Offer
from protofleet.edge_client.rollout import rollout_decisions
from protofleet.edge_client.rollout.probation import ProbationWatch
from protofleet.edge_client.rollout.rollout_decisions import STARTS, InstalledBundle, Rollouts, considered
from protofleet.edge_client.rollout.rollout_file import RolloutFile, bundle_file, read_rollouts

RUN = bytes(4)


def seat(number: int, version: int, fleet: str = "home", directory: str = "") -> InstalledBundle:
    return InstalledBundle(f"{number:064x}", version, fleet, directory)


def offered(number: int, version: int, fleet: str = "", **fields: object) -> Offer:
    return Offer(bytes.fromhex(f"{number:064x}"), version, 1000, fleet=fleet, **fields)  # type: ignore[arg-type]


def verdict(known: Rollouts, offer: Offer, running: InstalledBundle, **fields: bool) -> rollout_decisions.Verdict:
    return considered(
        known, offer, running, **{"in_stage": True, "trusts": True, "wanted": True, "budget": False, **fields}
    )


# ── decisions ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_said_to_an_offer() -> None:
    known, running = Rollouts(floor=3), seat(1, 3)
    assert verdict(known, offered(2, 4), running) == rollout_decisions.Verdict("fetch", "fetching")
    for fields, number, version, fleet, expected in (
        ({"trusts": False}, 2, 4, "", "refused: no key"),
        ({"wanted": False}, 2, 4, "", "refused: no roll-outs wanted here"),
        ({"budget": True}, 2, 4, "other", "refused: a privacy budget is of one fleet"),
        ({}, 2, 3, "", "refused: not above 3"),
        ({"in_stage": False, "trusts": False}, 2, 4, "", ""),
        ({}, 1, 3, "", "healthy"),
    ):
        found = verdict(known, offered(number, version, fleet), running, **fields)
        assert (found.what, found.word) == ("leave", expected)
    assert verdict(known, offered(2, 4), running, budget=True).what == "fetch"
    after = rollout_decisions.activated(known, seat(2, 4), running)
    assert verdict(after, offered(3, 5), seat(2, 4)).what == "wait"
    back = rollout_decisions.rolled_back(after, "rejected: rows")
    assert verdict(back, offered(2, 4), running).word == "failed: rejected: rows"
    assert verdict(back, offered(3, 5), running).what == "fetch"
    assert len(rollout_decisions.word(7, "failed: " + "x" * 100)) == 64


def test_starts_that_do_not_get_through_end_a_probation() -> None:
    known = rollout_decisions.activated(Rollouts(), seat(2, 2), seat(1, 1))
    for _ in range(STARTS):
        known = rollout_decisions.started(known)
        assert known.active == seat(2, 2)
    assert rollout_decisions.started(rollout_decisions.got_through(known)).active == seat(2, 2)
    known = rollout_decisions.started(known)
    assert (known.active, known.probation) == (seat(1, 1), None)
    assert known.failed[seat(2, 2).sha256].back_to == seat(1, 1).sha256


def test_what_a_roll_out_brought_runs_in_place_of_what_it_replaced_and_of_what_failed() -> None:
    one, two, five = seat(1, 1), seat(2, 2), seat(5, 5)
    known = rollout_decisions.activated(rollout_decisions.proved(Rollouts(), one), five, one)
    with pytest.raises(UsageError, match="expected version 5 or above, which has run here, got version 2"):
        rollout_decisions.given(known, two, trusts=True, where="F")  # also while 5 is on probation
    back = rollout_decisions.rolled_back(known, "rejected")
    assert rollout_decisions.instead(back, five.sha256, "home") == one
    known, running = rollout_decisions.given(rollout_decisions.proved(known, five), seat(6, 6), trusts=True, where="F")
    known = rollout_decisions.activated(known, seat(7, 7), running)
    assert rollout_decisions.instead(known, five.sha256, "home") == seat(7, 7)
    away, further = seat(8, 8, "away", "fleets/away"), seat(9, 9, "further", "fleets/further")
    known = rollout_decisions.activated(rollout_decisions.activated(Rollouts(), away, one), further, away)
    assert rollout_decisions.instead(known, one.sha256, "home") == further  # the command names the first fleet, as ever


def test_of_what_failed_the_newest_are_remembered() -> None:
    known = Rollouts()
    for number in range(2, 70):
        known = rollout_decisions.refused(known, seat(number, 9).sha256, 9, "wrong bytes", seat(1, 1))
    assert len(known.failed) == 64
    assert verdict(known, offered(69, 9), seat(1, 1)).word == "failed: wrong bytes"


def test_accuracy_that_falls_is_told_from_what_was_before() -> None:
    known = rollout_decisions.with_accuracy(Rollouts(), 0.9004)
    assert not rollout_decisions.has_fallen(known, 0.1, 1_000)
    known = rollout_decisions.activated(known, seat(2, 2), seat(1, 1))
    assert not rollout_decisions.has_fallen(known, 0.81, 1_000)
    assert rollout_decisions.has_fallen(known, 0.79, 1_000)
    assert not rollout_decisions.has_fallen(known, 0.775, 8)  # one photo of eight
    assert rollout_decisions.has_fallen(known, 0.525, 8)
    assert rollout_decisions.rolled_back(rollout_decisions.with_accuracy(known, 0.7), "").accuracy == 0.9


class Life(RuleBasedStateMachine):
    """A device's years: offers, starts, files that are named by hand, and bundles that turn out well or badly."""

    @initialize()
    def born(self) -> None:
        self.known = rollout_decisions.proved(Rollouts(), seat(1, 1))
        self.running = self.best = seat(1, 1)
        self.healthy, self.failed = {1}, set[str]()

    @rule(number=st.integers(1, 9), version=st.integers(1, 9), fleet=st.sampled_from(["", "home", "other"]))
    def offer(self, number: int, version: int, fleet: str) -> None:
        made = offered(number, version, fleet)
        found = verdict(self.known, made, self.running)
        if found.what == "fetch":
            assert version > max(self.healthy)
            assert made.sha256.hex() not in self.failed
            before = self.running
            self.running = rollout_decisions.installed_of(made, before)
            self.known = rollout_decisions.activated(self.known, self.running, before)
            assert self.known.previous == before
            assert (self.running.fleet == before.fleet) == (self.running.directory == before.directory)

    @precondition(lambda self: self.known.probation is not None)
    @rule()
    def turns_out_well(self) -> None:
        self.known = rollout_decisions.proved(self.known, self.running)
        self.healthy.add(self.running.version)

    @precondition(lambda self: self.known.probation is not None)
    @rule()
    def turns_out_badly(self) -> None:
        before, self.known = self.known, rollout_decisions.rolled_back(self.known, "")
        self.failed.add(self.running.sha256)
        assert before.previous is not None
        self.running = before.previous

    @rule(through=st.booleans())
    def starts(self, through: bool) -> None:
        before, self.known = self.known, rollout_decisions.started(self.known)
        if self.known.active != before.active:
            assert before.previous is not None
            self.failed.add(self.running.sha256)
            self.running = before.previous
        self.known = rollout_decisions.got_through(self.known) if through else self.known

    @rule(number=st.integers(1, 9), version=st.integers(1, 9))
    def named_by_hand(self, number: int, version: int) -> None:
        named = seat(number, version)
        found = rollout_decisions.instead(self.known, named.sha256, named.fleet)
        if found is not None:
            assert found == self.running
            return
        try:
            known, running = rollout_decisions.given(self.known, named, trusts=True, where="F")
        except UsageError:
            assert version < max(*self.healthy, self.running.version)
            return
        self.known, self.running = rollout_decisions.proved(known, running), running
        self.healthy.add(version)

    @invariant()
    def holds(self) -> None:
        assert self.known.floor == max(self.healthy) <= self.running.version
        assert self.known.active in (None, self.running)
        assert (self.known.probation is None) or self.known.previous is not None
        assert msgspec.json.decode(msgspec.json.encode(self.known), type=Rollouts) == self.known


Life.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestLife = Life.TestCase


# ── the record ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_record_changes_whole_or_not_and_needs_a_key_to_be_made(tmp_path: Path) -> None:
    with RolloutFile(tmp_path / "none", make=False) as file:
        file.change(rollout_decisions.proved, seat(1, 1))
        assert file.known.floor == 1
    assert not (tmp_path / "none").exists()
    with RolloutFile(tmp_path, make=True) as file:
        known = file.change(rollout_decisions.activated, seat(2, 2), seat(1, 1))
        with pytest.raises(StoreError, match="only user"):
            RolloutFile(tmp_path, make=True)
        assert read_rollouts(tmp_path) == known
    with RolloutFile(tmp_path, make=False) as file:
        assert file.known == known
    with sqlite3.connect(tmp_path / "rollout.sqlite") as db:
        db.execute("UPDATE rollouts SET json = '[]'")
    db.close()
    with pytest.raises(StoreError, match="what a device wrote"):
        RolloutFile(tmp_path, make=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"active": {"sha256": "../x", "version": 2, "fleet": "home"}},
        {"active": {"sha256": "0" * 64, "version": 2, "fleet": "home", "directory": "../elsewhere"}},
        {"active": {"sha256": "0" * 64, "version": 2, "fleet": "#"}},
        {"failed": {"x": {"version": 2, "reason": "", "back_to": "0" * 64}}},
        {"probation": {"starts": 3}},
    ],
)
def test_what_somebody_wrote_into_the_record_by_hand_is_one_line(tmp_path: Path, wrong: dict[str, object]) -> None:
    with RolloutFile(tmp_path, make=True) as file:
        file.change(rollout_decisions.activated, seat(2, 2), seat(1, 1))
    with sqlite3.connect(tmp_path / "rollout.sqlite") as db:
        db.execute("UPDATE rollouts SET json = ?", (msgspec.json.encode(wrong),))
    db.close()
    for reads in (read_rollouts, lambda state: RolloutFile(state, make=True)):
        with pytest.raises(StoreError, match="expected what a device wrote"):
            reads(tmp_path)


def test_a_bundle_that_runs_is_kept_for_the_way_back_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "f.bundle").write_bytes(b"one")
    one = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    with RolloutFile(tmp_path / "s", make=True) as file:
        file.keep(tmp_path / "f.bundle", one)
        assert bundle_file(tmp_path / "s", one).read_bytes() == b"one"
        with pytest.raises(StoreError, match="which runs"):
            file.keep(tmp_path / "f.bundle", "0" * 64)
        for name in (f"{'1' * 64}.part", f"{'2' * 64}.bundle", f"{'3' * 64}.bundle.partial", "mine.bundle"):
            (tmp_path / "s" / "bundles" / name).write_bytes(b"x")
        file.put(rollout_decisions.activated(Rollouts(), InstalledBundle(one, 2, "home"), seat(7, 1)))
        file.tidy("1" * 64)
        left = sorted(path.name for path in (tmp_path / "s" / "bundles").iterdir())
        assert left == [f"{'1' * 64}.part", f"{one}.bundle", "mine.bundle"]  # a person's stays


def test_only_the_directory_of_a_fleet_whose_bundle_failed_is_removed(tmp_path: Path) -> None:
    """What was left is a journal that a person's file may go on with."""
    away = rollout_decisions.installed_of(offered(0xAB << 248, 2, "away"), seat(1, 1))
    for name in (away.directory, "fleets/left-12345678"):
        (tmp_path / name).mkdir(parents=True)
    with RolloutFile(tmp_path, make=True) as file:
        file.put(rollout_decisions.activated(Rollouts(), away, seat(1, 1)))
        file.tidy()
        assert len(list((tmp_path / "fleets").iterdir())) == 2
        file.change(rollout_decisions.rolled_back, "rejected")
        file.tidy()
        assert [path.name for path in (tmp_path / "fleets").iterdir()] == ["left-12345678"]


# ── a verdict ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tried(tmp_path: Path) -> Iterator[RolloutFile]:
    """A record with version 2 on probation after version 1, which named 80 % right."""
    with RolloutFile(tmp_path / "s", make=True) as file:
        file.put(rollout_decisions.activated(Rollouts(accuracy=0.8), seat(2, 2), seat(1, 1)))
        yield file


def receipt(status: str, reason: str = "") -> Receipt:
    return Receipt(RUN, 3, "ncm", status, reason)  # type: ignore[arg-type]


def standing(phase: str = "standing") -> Announcement:
    return Announcement(RUN, 0, phase, "ncm", bytes(32))  # type: ignore[arg-type]


def test_a_commit_and_photos_named_as_well_as_before_are_healthy(tried: RolloutFile) -> None:
    watch = ProbationWatch(tried)
    watch.on_final_receipt(receipt("late"))
    watch.reported(Accuracy(50, 0.75))
    assert watch.is_on
    watch.on_final_receipt(receipt("committed"))
    assert watch.is_on  # until it has measured itself once more
    watch.reported(Accuracy(50, 0.75))
    assert (watch.is_on, watch.is_over, tried.known.floor, tried.known.accuracy) == (False, False, 2, 0.75)
    watch.on_final_receipt(receipt("rejected"))
    assert tried.known.active == seat(2, 2)  # it is over, and no rejection undoes it


@pytest.mark.parametrize(("alone", "is_over"), [(0.75, False), (0.6, True), (None, True)])
def test_in_another_fleet_a_state_without_its_classes_speaks_not_against_the_bundle(
    tmp_path: Path, alone: float | None, is_over: bool
) -> None:
    with RolloutFile(tmp_path / "s", make=True) as file:
        there = msgspec.structs.replace(seat(2, 2), fleet="pets2", directory="fleets/pets2-x")
        file.put(rollout_decisions.activated(Rollouts(accuracy=0.8), there, seat(1, 1)))
        watch = ProbationWatch(file)
        watch.on_final_receipt(receipt("committed"))
        watch.reported(Accuracy(50, 0.0, alone=alone))
        assert (watch.is_over, watch.is_on) == (is_over, False)


@pytest.mark.parametrize("directory", ["", "fleets/away"])
def test_what_a_fleet_that_was_left_holds_twice_is_removed_once_the_bundle_is_healthy(
    tmp_path: Path, directory: str
) -> None:
    with RolloutFile(tmp_path, make=True) as file:
        file.put(
            rollout_decisions.activated(Rollouts(), seat(2, 2, "away" if directory else "home", directory), seat(1, 1))
        )
        (tmp_path / "images").mkdir()
        ProbationWatch(file).on_final_receipt(receipt("committed"))
        assert file.known.probation is None
        assert (tmp_path / "images").exists() == (not directory)


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (lambda watch: watch.on_final_receipt(receipt("rejected", "rows")), "rejected: rows"),
        (
            lambda watch: watch.reported(Accuracy(500, 0.69, alone=0.9)),
            "69.0% of the held-out photos right, 80.0% before",
        ),
        (lambda watch: watch.ended(MemoryError()), "not enough memory"),
        (lambda watch: watch.ended(UsageError("x"), at_start=True), "this device's photos or settings do not fit it"),
        (
            lambda watch: watch.ended(DataError("cannot read /photos/of/me", got="x")),
            "this device's photos or settings do not fit it",
        ),
        (
            lambda watch: watch.ended(BundleError("/s/a.bundle: tail.onnx", got="no graph")),
            "a.bundle: tail.onnx: got no graph",
        ),
    ],
)
def test_what_brings_the_bundle_before_back(
    tried: RolloutFile, happens: Callable[[ProbationWatch], None], reason: str
) -> None:
    watch = ProbationWatch(tried)
    happens(watch)
    assert (watch.is_over, tried.known.active) == (True, seat(1, 1))
    assert tried.known.failed[seat(2, 2).sha256].reason == reason


def test_what_says_nothing_of_the_bundle_changes_nothing(tried: RolloutFile) -> None:
    watch = ProbationWatch(tried)
    for error in (LinkError("x"), StoreError("x"), PrivacyError("x"), UsageError("x"), KeyboardInterrupt(), None):
        tried.change(rollout_decisions.started)
        watch.ended(error)
        assert tried.known.probation is not None
        assert tried.known.probation.starts == 0
    watch.rested(None, settled=True, plausible=True)
    watch.rested(standing("closed"), settled=True, plausible=True)
    watch.rested(standing(), settled=False, plausible=True)
    watch.rested(standing(), settled=True, plausible=False)
    assert watch.is_on
    watch.rested(standing(), settled=True, plausible=True)
    assert tried.known.floor == 2


@pytest.mark.parametrize(("refused", "lasts"), [({"a": "it was forgotten"}, True), ({}, False)])
def test_a_device_that_is_refused_does_not_blame_its_bundle(
    tmp_path: Path, refused: dict[str, str], lasts: bool
) -> None:
    """A device that is forgotten while a bundle is on probation: once admitted, it goes on with that bundle."""
    with RolloutFile(tmp_path, make=True) as file:
        file.change(rollout_decisions.activated, seat(2, 2), seat(1, 1))
        watch = ProbationWatch(file)
        reason = refusal("a", refused) or "class rows"
        watch.on_final_receipt(Receipt(RUN, 1, "ffc", "rejected", reason))
        assert (watch.is_on, watch.is_over) == (lasts, not lasts)
        watch.on_final_receipt(Receipt(RUN, 2, "ffc", "committed"))
        assert (file.known.active is not None and file.known.active.version == 2) == lasts
