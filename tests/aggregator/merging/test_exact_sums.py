"""Sums that stand: always those of who is there, as integers; a head in time; and what was taken out is gone."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, WIDTH, extractor, gram, manifest, unassigned
from commands import one_error_line, run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from postgres_server import ON_FILES, Places

from protofleet import Aggregator
from protofleet.aggregator.coordinators.kinds import MAX_SAMPLES, rounds_of, standing_sums
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.merging.exact_sums import ExactSum, Standing
from protofleet.aggregator.monitoring.drift import drift_of
from protofleet.aggregator.parts.steps import Solved
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.standing import standing_sums as sums_module
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.contract.drift import Drift
from protofleet.contract.errors import ProtofleetError, StoreError, UsageError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.sums.fixed_point import FRACTION_BITS
from protofleet.contract.sums.statistics import FeatureGram, Statistic
from protofleet.contract.wire.chunks import split
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import MAX_ROUND, Contribution, Status

EVERY_S = 60.0
DEVICES = ("a", "b", "c", "d")


def means(seed: int, samples: int = 12) -> UnitMeans:
    rng = np.random.default_rng(seed)
    return UnitMeans.of(unit_rows(rng.normal(size=(samples, WIDTH))), rng.integers(0, CLASSES, samples), CLASSES)


SUMS = [ExactSum.of(means(seed)) for seed in range(24)]


def integers(value: ExactSum) -> list[int]:
    return [*value.numbers.integers(), *value.counts.tolist()]


# ── the core ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Fleet(RuleBasedStateMachine):
    """Whatever comes in whatever order, and whenever the process dies: the core beside a plain dictionary."""

    @initialize()
    def begin(self) -> None:
        self.core = self._core()
        self.kept: dict[str, tuple[int, int | None]] = {}  # device → generation, which sum; what a store would hold
        self.now, self.changed_at = 0.0, None
        self.headed = self.core.total  # what the last head was made of

    def _core(self) -> Standing:
        return Standing(ExactSum.zero(UnitMeans, CLASSES, WIDTH), EVERY_S)

    @rule(device=st.sampled_from(DEVICES), generation=st.integers(1, 9), which=st.none() | st.integers(0, 23))
    def comes(self, device: str, generation: int, which: int | None) -> None:
        """A contribution, or a withdrawal; not for the second time, nor overtaken by a newer one."""
        held, before = self.kept.get(device, (0, None))
        assert self.core.held(device) == held
        if generation > held:
            former = None if before is None else SUMS[before]
            self.core.replace(device, generation, former, None if which is None else SUMS[which], self.now)
            self.kept[device] = (generation, which)
            if (before, which) != (None, None) and self.changed_at is None:
                self.changed_at = self.now

    @rule()
    def dies_and_starts_again(self) -> None:
        """A new process adds up what is kept, and cannot know when the last head was made."""
        self.core = self._core()
        for device, (generation, which) in self.kept.items():
            self.core.replace(device, generation, None, None if which is None else SUMS[which], self.now)
        if self.core.total.equal(self.headed):  # its digest says that the head is of these
            self.core.solved(self.now)
            self.changed_at = None
        else:
            self.core.changed(self.now)

    @rule(seconds=st.floats(0.0, 2 * EVERY_S))
    def time_goes_by(self, seconds: float) -> None:
        """A head is made as soon as the core says so; it may not say so later than `every_s` after a change."""
        end = self.now + seconds
        while (wait_s := self.core.due_in_s(self.now)) is not None and self.now + wait_s <= end:
            assert self.changed_at is not None
            self.now += wait_s
            assert self.now <= self.changed_at + EVERY_S + 1e-6
            self.core.solved(self.now)
            self.changed_at, self.headed = None, self.core.total
        self.now = end
        assert self.changed_at is None or self.now < self.changed_at + EVERY_S + 1e-6

    @invariant()
    def the_total_is_that_of_who_is_there(self) -> None:
        present = [SUMS[which] for _, which in self.kept.values() if which is not None]
        expected = [sum(column) for column in zip(*map(integers, present), strict=True)] or [0] * (
            CLASSES * WIDTH + CLASSES
        )
        assert integers(self.core.total) == expected
        assert len(self.core.present) == len(present)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("statistic", [means(1), gram(1)], ids=["ncm", "ffc"])
def test_exact_sums_are_the_statistic_within_half_a_unit(statistic: Statistic) -> None:
    made = ExactSum.of(statistic)
    assert ExactSum(made.numbers, made.counts + 1).digest() != made.digest()
    back = made.statistic(type(statistic), WIDTH)
    np.testing.assert_array_equal(back.counts, statistic.counts)
    for one, other in zip(back.arrays(), statistic.arrays(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2.0 ** -(FRACTION_BITS + 1))


# ── with a store ────────────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = Settings(method="ncm", standing=True, every=EVERY_S, encoding="f64")


@pytest.fixture
def store(places: Places) -> Iterator[DurableStore]:
    with DurableStore(places("s"), BUNDLE, "fleet") as made:
        yield made


def core_of(store: DurableStore, settings: Settings = SETTINGS, now: float = 0.0) -> StandingCoordinator:
    return standing_sums(store, manifest(), BUNDLE, settings, now=now, wall=lambda: 1000.0)


def message(core: StandingCoordinator, device: str, generation: int, seed: int | None) -> tuple[str, bytes]:
    """Sums of what seed `seed` draws, or a withdrawal."""
    key = {"run": core.parts.run, "round": generation, "method": core.method.name, "bundle": BUNDLE}
    key["extractor"] = extractor(core.method.name)
    if seed is None:
        return device, encode(Contribution.withdrawal(**key))
    statistic = gram(seed) if core.method.name == "ffc" else means(seed)
    return device, encode(Contribution.of(statistic, **key, standing="present"), "f64")


def outcomes(core: StandingCoordinator, *given: tuple[str, bytes], now: float = 0.0) -> list[str]:
    return [decision.outcome for decision in core.take(given, now)]


def steps(core: StandingCoordinator, now: float) -> list[Solved | Obeyed]:
    found = []
    while (step := core.advance(now, 1000.0 + now)) is not None:
        found.append(step)
    return found


def expect_head_of(core: StandingCoordinator, *seeds: int) -> None:
    """The global state is of these and of nothing else, as a fleet that never had another has it."""
    total = ExactSum.zero(core.method.statistic, CLASSES, WIDTH)
    for seed in seeds:
        total = total.add(ExactSum.of(gram(seed) if core.method.name == "ffc" else means(seed)))
    assert core.standing.total.equal(total)
    hyper = core.method.resolve({})
    ((kind, expected),) = core.method.next_rows({}, total.statistic(core.method.statistic, WIDTH), hyper).items()
    np.testing.assert_array_equal(core.state.rows[kind].rows, expected.rows)
    np.testing.assert_array_equal(core.state.rows[kind].classes, expected.classes)


@pytest.mark.parametrize("name", ["ncm", "ffc"])
def test_a_day_in_the_life_of_standing_sums(store: DurableStore, places: Places, name: str) -> None:
    chosen = dataclasses.replace(SETTINGS, method=name)
    core = core_of(store, chosen)
    assert outcomes(core, message(core, "a", 1, 1), message(core, "b", 4, 2), message(core, "a", 1, 1)) == [
        "committed",
        "committed",
        "duplicate",
    ]
    assert steps(core, 0.0) == [Solved(1, 2, core.standing.total.counts.sum(), 3)]
    expect_head_of(core, 1, 2)
    told = core.announcement()
    assert (told.phase, told.round, told.global_version) == ("standing", 0, 1)
    late, newer = core.take([message(core, "b", 3, 5), message(core, "a", 2, 3)], 1.0)
    assert (late.outcome, late.receipt.held, newer.outcome) == ("late", 4, "committed")
    assert steps(core, 30.0) == []
    core = core_of(store, chosen, now=30.0)  # it died with a head due
    assert [type(step) for step in steps(core, 30.0)] == [Solved]
    expect_head_of(core, 2, 3)
    core = core_of(store, chosen, now=31.0)  # and now without
    assert steps(core, 100.0) == []
    assert outcomes(core, message(core, "b", 5, None), now=101.0) == ["committed"]
    (withdrawn,) = steps(core, 101.0)
    assert (withdrawn.order.what, withdrawn.order.device, withdrawn.version) == ("withdraw", "b", 3)
    expect_head_of(core, 3)
    refused, again = core.take([message(core, "b", 6, 2), message(core, "b", 5, None)], 102.0)
    assert (refused.outcome, again.outcome) == ("rejected", "duplicate")
    assert "fleet admit b" in refused.reason
    give(places("s"), "admit", "b", "me")
    give(places("s"), "forget", "a", "me")
    assert [step.order.what for step in steps(core, 110.0)] == ["admit", "forget"]
    assert [len(rows.classes) for rows in core.state.rows.values()] == [0]
    assert outcomes(core, message(core, "b", 6, 9), now=111.0) == ["committed"]
    assert [type(step) for step in steps(core, 200.0)] == [Solved]
    expect_head_of(core, 9)


def test_what_was_no_message_is_counted_once(store: DurableStore) -> None:
    core = core_of(store)
    assert not core.status("a", b"noise", 0.0)
    assert not core.status("a", message(core, "a", 1, 1)[1], 0.0)  # nor is this a status
    for now in (0.0, 1.0):
        core.take([message(core, "a", 1, 1)], now)
    assert unassigned(store) == {"malformed": 2, "duplicate": 1}


def test_what_was_accepted_is_decoded_once(store: DurableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    core, again = core_of(store), []
    monkeypatch.setattr(sums_module, "held_by", lambda payload: again.append(payload) or decode(payload))
    assert outcomes(core, message(core, "a", 1, 1), message(core, "b", 1, None)) == ["committed", "committed"]
    assert again == []


def test_what_two_generations_in_one_batch_come_to(store: DurableStore) -> None:
    core = core_of(store)
    given = [message(core, "a", 1, 1), message(core, "a", 3, 2), message(core, "a", 2, 3)]
    assert outcomes(core, *given) == ["committed", "committed", "late"]
    steps(core, 0.0)
    expect_head_of(core, 2)


def test_a_chunk_of_a_newer_generation_is_not_dropped_for_the_round(store: DurableStore) -> None:
    rng, shape = np.random.default_rng(1), {"width": 16}
    core = standing_sums(store, manifest(**shape), BUNDLE, dataclasses.replace(SETTINGS, method="ffc"), now=0.0)
    sums = FeatureGram.of(unit_rows(rng.normal(size=(30, 16))), rng.integers(0, CLASSES, 30), CLASSES)
    key = {"run": core.parts.run, "round": 7, "method": "ffc", "bundle": BUNDLE, "extractor": extractor("ffc")}
    first, *others = split(
        encode(Contribution.of(sums, **key, standing="present"), "f64"), 1024, run=core.parts.run, round=7, method="ffc"
    )
    assert others
    assert outcomes(core, ("a", encode(first))) == ["partial"]
    assert core.stalled(1.0) == []
    assert outcomes(core, *(("a", encode(chunk)) for chunk in others))[-1] == "committed"
    assert core.standing.held("a") == 7


@ON_FILES
def test_what_was_forgotten_is_in_no_byte_of_the_store(store: DurableStore, tmp_path: Path) -> None:
    """Neither in the file nor in its log: older generations are overwritten when they are replaced."""
    core = core_of(store)
    given = {seed: message(core, "a", seed, seed) for seed in (1, 2)}
    marks = {seed: means(seed).means.astype("<f8").tobytes() for seed in given}
    core.take([message(core, "b", 1, 7), given[1]], 0.0)
    steps(core, 0.0)
    core.take([given[2]], 100.0)
    steps(core, 100.0)
    assert marks[2] in _bytes_of(tmp_path)
    give(tmp_path / "s", "forget", "a", "me")
    (done,) = steps(core, 110.0)
    assert done.outcome == "done"
    steps(core, 111.0)  # the log is overwritten when nobody reads it
    for mark in marks.values():
        assert mark not in _bytes_of(tmp_path)
        assert mark[: 8 * WIDTH] not in _bytes_of(tmp_path)
    assert means(7).means.astype("<f8").tobytes() in _bytes_of(tmp_path)
    with closing(sqlite3.connect(tmp_path / "s")) as db:  # nor is a head that it was in
        assert db.execute("SELECT DISTINCT version FROM global").fetchall() == [(3,)]
    assert steps(core_of(store, now=112.0), 500.0) == []  # after a restart no other head is due


def _bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def test_an_order_that_nobody_takes_up_is_done_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with DurableStore(path, BUNDLE, "fleet") as store:
        core = core_of(store)
        core.take([message(core, "a", 1, 1), message(core, "b", 1, 2)], 0.0)
        steps(core, 0.0)
    order, running = give(path, "forget", "a", "me")
    assert not running
    with DurableStore(path, BUNDLE, "fleet") as store:
        core = core_of(store, now=5.0)
        (done,) = steps(core, 5.0)
        assert (done.order.id, done.version) == (order.id, 2)
        expect_head_of(core, 2)
        assert give(path, "pause", "", "me")[1]


@ON_FILES
def test_orders_written_by_hand_are_refused_and_stop_nothing(store: DurableStore, tmp_path: Path) -> None:
    core = core_of(store)
    core.take([message(core, "a", 1, 1)], 0.0)
    rows = [("forget", "A/#"), ("withdraw", "aggregator"), ("admit", ""), ("explode", ""), ("forget", b"\xff")]
    with closing(sqlite3.connect(tmp_path / "s")) as db, db:
        db.executemany("INSERT INTO fleet_order (what, device, who, given_at) VALUES (?, ?, x'00', 'once')", rows * 3)
    found = [step for step in steps(core, 1.0) if isinstance(step, Obeyed)]
    assert len(found) == len(rows) * 3
    assert all(step.outcome.startswith("refused: ") for step in found)
    assert (core.standing.present, store.refused_devices.reasons(), receipts(core)) == ({"a"}, {}, [])


def test_a_pause_takes_and_keeps_and_makes_nothing(store: DurableStore, places: Places) -> None:
    core = core_of(store)
    give(places("s"), "pause", "", "me")
    give(places("s"), "remove", "z", "me")
    assert [step.outcome for step in steps(core, 1.0)] == ["done", "done"]
    assert outcomes(core, message(core, "a", 1, 1), message(core, "z", 1, 2), now=1.0) == ["committed", "rejected"]
    core = core_of(store, now=2.0)
    assert outcomes(core, message(core, "z", 1, 2), now=2.0) == ["rejected"]
    assert steps(core, 1000.0) == []
    give(places("s"), "resume", "", "me")
    assert [type(step) for step in steps(core, 2000.0)] == [Obeyed, Solved]
    give(places("s"), "close-round", "", "me")
    (refused,) = steps(core, 3000.0)
    assert refused.outcome == "refused: close-round is for rounds, and sums stand here"


# ── the device and the aggregator do not hold the same ──────────────────────────────────────────────────────────────


def receipts(core: StandingCoordinator, now: float = 0.0) -> list[tuple[str, str, int, int]]:
    """What devices are told that did not ask: who, what, of which generation, and which is held."""
    told = [(decision.device, decision.receipt) for decision in core.stalled(now)]
    return [(device, receipt.status, receipt.round, receipt.held) for device, receipt in told if receipt is not None]


def test_a_device_that_is_admitted_again_is_told_to_send(store: DurableStore, places: Places) -> None:
    """It had a receipt for what was forgotten, and would wait for its photos to change."""
    core = core_of(store)
    core.take([message(core, "a", 3, 1), message(core, "b", 1, 2)], 0.0)
    steps(core, 0.0)
    assert receipts(core) == []
    give(places("s"), "forget", "a", "me")
    steps(core, 1.0)
    assert receipts(core) == [("a", "rejected", 3, 0)]
    born = encode(Status(True, b"instance", 1))
    core.status("a", born, 2.0)
    core.status("b", born, 2.0)
    core.status("c", born, 2.0)  # of which nothing ever came
    assert receipts(core) == [("a", "rejected", 3, 0), ("b", "late", MAX_ROUND, 1)]  # the latter to an older copy
    core.status("a", born, 2.0)  # retained, and heard again
    core.status("a", encode(Status(False, b"instance", 1)), 2.0)
    assert receipts(core) == []
    give(places("s"), "admit", "a", "me")
    steps(core, 3.0)
    assert receipts(core) == [("a", "late", 3, 3)]
    assert outcomes(core, message(core, "a", 3, 1), now=3.0) == ["late"]
    core = core_of(store, now=4.0)  # the device was away when it was admitted
    core.status("a", born, 4.0)
    assert receipts(core) == [("a", "late", 3, 3)]
    assert outcomes(core, message(core, "a", 3, 1), now=5.0) == ["late"]  # of it, nothing stands
    assert outcomes(core, message(core, "a", 4, 1), now=5.0) == ["committed"]
    core.status("a", encode(Status(True, b"instanc2", 1)), 6.0)
    assert receipts(core) == [("a", "late", MAX_ROUND, 4)]


def test_the_same_generation_with_other_bytes_is_no_duplicate(store: DurableStore) -> None:
    """A device whose state directory is an older copy numbers other sums as those that are held."""
    core = core_of(store)
    assert outcomes(core, message(core, "a", 2, 1), message(core, "a", 2, 1), message(core, "a", 2, 5)) == [
        "committed",
        "duplicate",
        "late",
    ]
    core = core_of(store)
    same, other = core.take([message(core, "a", 2, 1), message(core, "a", 2, 5)], 1.0)
    assert (same.outcome, other.outcome, other.receipt.held) == ("duplicate", "late", 2)


def test_a_refused_device_can_still_take_out_what_stands_of_it(store: DurableStore, places: Places) -> None:
    core = core_of(store)
    core.take([message(core, "a", 1, 1), message(core, "b", 1, 2)], 0.0)
    steps(core, 0.0)
    give(places("s"), "remove", "a", "me")
    steps(core, 1.0)
    assert outcomes(core, message(core, "a", 2, 5), message(core, "a", 2, None), now=2.0) == ["rejected", "committed"]
    assert [step.order.what for step in steps(core, 3.0)] == ["withdraw"]
    expect_head_of(core, 2)
    assert outcomes(core, message(core, "a", 3, None), message(core, "a", 7, None), now=4.0) == ["duplicate"] * 2
    assert steps(core, 5.0) == []


def test_what_follows_a_withdrawal_in_the_same_batch_is_refused(store: DurableStore) -> None:
    core = core_of(store)
    given = [message(core, "a", 1, 1), message(core, "a", 2, None), message(core, "a", 3, 5)]
    assert outcomes(core, *given, given[1]) == ["committed", "committed", "rejected", "duplicate"]
    core = core_of(store)  # it died before it made a head
    assert outcomes(core, given[2]) == ["rejected"]
    steps(core, 0.0)
    assert (core.standing.present, core.standing.held("a")) == (set(), 2)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_contribution_of_a_round_and_one_that_stands_are_not_each_other(store: DurableStore) -> None:
    core = core_of(store)
    key = {"run": core.parts.run, "round": 1, "method": "ncm", "bundle": BUNDLE, "extractor": extractor("ncm")}
    of_a_round = encode(Contribution.of(means(1), **key), "f64")
    (found,) = core.take([("a", of_a_round)], 0.0)
    assert found.reason == "contribution, expected one that stands, got one of a round"
    (found,) = core.take([("a", message(core, "a", 1, 1)[1].replace(b"cncm", b"cffc"))], 0.0)
    assert found.reason == "sums of ncm stand here, not of ffc"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"method": "fedproto"}, "--standing, expected a method whose sums add up .*: ffc or ncm, got fedproto"),
        ({"max_samples": MAX_SAMPLES + 1}, "--max-samples, expected at most 10,000,000 with --standing"),
        ({"limit_bytes": 100}, "--limit-bytes, expected at least"),
        ({"ridge": 1.0}, "--ridge, expected a round whose head is made with it, got rounds of ncm"),
    ],
)
def test_settings_that_cannot_stand(store: DurableStore, changed: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        core_of(store, dataclasses.replace(SETTINGS, **changed))


@ON_FILES
@pytest.mark.parametrize("bounds", [{"min_samples": 9}, {"max_samples": 9}])
def test_what_one_device_may_say_is_bounded_here_too(store: DurableStore, bounds: dict[str, int]) -> None:
    core = core_of(store, dataclasses.replace(SETTINGS, **bounds))
    assert outcomes(core, message(core, "a", 1, 1)) == ["rejected"]
    assert core.announcement().min_samples == bounds.get("min_samples", 1)
    core.status("a", encode(Status(True, b"instance", 1, metrics=Drift(20, 0.0, 1.0).metrics())), 0.0)
    store.drift.commit_heard(1.0)
    assert len(drift_of(store._db)) == ("min_samples" in bounds)


def test_another_ridge_is_a_reason_for_another_head(store: DurableStore) -> None:
    chosen = dataclasses.replace(SETTINGS, method="ffc", limit_bytes=4096)
    core = core_of(store, chosen)
    assert core.largest_message_bytes > core.parts.terms.limit_bytes  # a contribution is taken whole
    core.take([message(core, "a", 1, 1)], 0.0)
    assert core.rounds.due_in_s(0.0) == 0.0
    steps(core, 0.0)
    core.take([message(core, "a", 2, 2)], 1.0)
    assert core.rounds.due_in_s(1.0) == 0.0  # orders are looked for long before the head is due
    steps(core, 60.0)
    assert steps(core_of(store, chosen, now=61.0), 300.0) == []
    other = core_of(store, dataclasses.replace(chosen, ridge=7.0), now=62.0)
    assert [type(step) for step in steps(other, 300.0)] == [Solved]


def test_who_was_never_there_can_be_forgotten_and_no_head_is_made(store: DurableStore, places: Places) -> None:
    core = core_of(store)
    give(places("s"), "forget", "a", "me")
    (done,) = steps(core, 0.0)
    assert (done.outcome, done.version) == ("done: nothing was held of it", 0)


def test_noise_does_not_stand(store: DurableStore) -> None:
    noised = dataclasses.replace(SETTINGS, method="ffc")
    made = manifest(name="fedhkd")
    made = type(made)(**{f: getattr(made, f) for f in made.__struct_fields__} | {"hyper": {**made.hyper, "noise": 1.0}})
    with pytest.raises(UsageError, match=r"expected a bundle without noise, got fedhkd with noise.*try rounds"):
        standing_sums(store, made, BUNDLE, noised, now=0.0)


def test_a_store_is_of_rounds_or_stands_and_of_one_method(store: DurableStore) -> None:
    core_of(store)
    with pytest.raises(UsageError, match="expected one of rounds, or a new one, got standing sums of ncm"):
        rounds_of(store, manifest(), BUNDLE, Settings(), now=0.0)
    with pytest.raises(UsageError, match="of ffc, or a new one, got one of ncm, try another --store"):
        core_of(store, dataclasses.replace(SETTINGS, method="ffc"))


def test_a_store_with_rounds_does_not_stand(store: DurableStore) -> None:
    store.open_round(1, "ncm", 0, 0.0)
    with pytest.raises(UsageError, match="got one with 1 rounds"):
        core_of(store)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rounds": 2}, "--rounds with --standing, expected one of them"),
        ({"rule": "median"}, "--rule with --standing"),
        ({"deadline": 10.0}, "--deadline with --standing"),
        ({"calibrate": False}, "--no-calibrate with --standing"),
        ({"every": "soon"}, "--every, expected a duration such as 90s, 10m, 6h or 7d, got soon"),
    ],
)
def test_options_that_do_not_go_with_standing_sums(given: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Settings(standing=True, **given)
    assert Settings(standing=True, every="15m").standing_every_s == 900.0


def test_several_bundles_may_stand_without_a_word_on_calibration(tmp_path: Path) -> None:
    """The longer bundle and the one that it extends, as docs/living.md has it: no option was given that does not go."""
    common = ("--broker", "mqtt://127.0.0.1:1", "--store", tmp_path / "s", "--standing")
    done = run("aggregate", "--bundle", tmp_path / "new", "--bundle", tmp_path / "old", *common)
    assert f"cannot read bundle {tmp_path / 'new'}" in one_error_line(done)
    with pytest.raises(ProtofleetError, match="cannot read bundle"):
        Aggregator(["new", "old"], broker="mqtt://127.0.0.1:1", store=tmp_path / "s", standing=True).run()


@pytest.mark.parametrize(
    ("path", "device", "words"),
    [
        ("none", "a", "expected a store, got no such file"),
        ("s", "A!", "DEVICE, expected"),
        ("text", "a", "another file"),
    ],
)
def test_an_order_for_what_is_no_store_is_one_line(
    tmp_path: Path, places: Places, path: str, device: str, words: str
) -> None:
    DurableStore(places("s"), BUNDLE, "fleet").close()
    (tmp_path / "text").write_bytes(b"no store at all, " * 100)
    with pytest.raises(ProtofleetError, match=words) as told:
        give(tmp_path / path, "forget", device, "me")
    assert isinstance(told.value, UsageError | StoreError)


@ON_FILES
@pytest.mark.parametrize(
    "changed",
    [
        "UPDATE standing SET payload = x'00ff'",
        "UPDATE standing SET payload = 'text'",
        "UPDATE standing SET payload = (SELECT payload FROM global)",
        "UPDATE standing SET generation = 'many'",
        "INSERT OR REPLACE INTO meta VALUES ('paused', 7)",
        "INSERT OR REPLACE INTO meta VALUES ('standing solved', x'ff')",
    ],
)
def test_a_store_that_no_aggregator_wrote_is_one_line(store: DurableStore, tmp_path: Path, changed: str) -> None:
    core = core_of(store)
    core.take([message(core, "a", 1, 1)], 0.0)
    steps(core, 0.0)
    with closing(sqlite3.connect(tmp_path / "s")) as db, db:
        db.execute(changed)
    with pytest.raises(StoreError, match=r"expected what an aggregator writes, got .*, try another --store"):
        core_of(store)
