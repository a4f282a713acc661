"""The aggregator's core without a network: whole runs, restarts anywhere, and what it counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, WIDTH, contribution, extractor, gram, manifest, means
from pooled_head import usual_head
from postgres_server import Places

from protofleet.aggregator.coordinators.kinds import planned, rounds_of, standing_sums
from protofleet.aggregator.coordinators.round_coordinator import SETTLE_S, RoundCoordinator
from protofleet.aggregator.rounds.round_machine import Closed, Finished, Opened
from protofleet.aggregator.server.run_report import Summary
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import extractor_of
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.files.json_output import write_json
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status

SETTINGS = Settings(rounds=2, calibrate=True, min_clients=3)
DEVICES = ("a", "b", "c")
RIDGE = method("ffc").hyper["ridge"].default


def _birth(online: bool = True, instance: bytes = b"instance") -> bytes:
    return encode(Status(online, instance, 1))


def _core(store: DurableStore, settings: Settings = SETTINGS, now: float = 0.0) -> RoundCoordinator:
    core = rounds_of(store, manifest(), BUNDLE, settings, now=now)
    for device in DEVICES:
        core.status(device, _birth(), now)
    return core


def _steps(core: RoundCoordinator, now: float) -> list[object]:
    steps = []
    while (step := core.advance(now, 1000.0 + now)) is not None:
        steps.append(step)
    return steps


def _message(core: RoundCoordinator, device: str, round: int | None = None) -> tuple[str, bytes]:
    """What `device` sends for a round, the one that is open by default: its own statistic, always the same."""
    number = round or core.rounds.number
    method = core.rounds.plan[number - 1]
    seed = DEVICES.index(device) + 10 * number
    statistic = gram(seed) if method == "ffc" else means(seed)
    made = contribution(statistic, run=core.parts.run, round=number, method=method, extractor=extractor(method))
    return device, encode(made, "f64")


def _sums(core: RoundCoordinator, statistic: FeatureGram, **told: bytes) -> bytes:
    """What a device sends in an FFC round that comes first."""
    given = {"extractor": extractor("ffc"), **told}
    return encode(contribution(statistic, run=core.parts.run, method="ffc", **given), "f64")


def _pooled(round: int, kind: str) -> ClassMeans | FeatureGram:
    made = [(gram if kind == "ffc" else means)(i + 10 * round) for i in range(len(DEVICES))]
    total = made[0]
    for other in made[1:]:
        total = total.merge(other)
    return total


def _check_result(core: RoundCoordinator) -> None:
    pooled = _pooled(2, "fedproto")
    np.testing.assert_array_equal(core.state.prototypes.classes, [0, 1])
    np.testing.assert_allclose(core.state.prototypes.rows, pooled.means[:2])
    np.testing.assert_allclose(core.state.head.rows, usual_head(_pooled(3, "ffc"), RIDGE), rtol=1e-9)
    assert (core.state.version, core.state.round) == (3, 3)


def test_a_whole_run(places: Places) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _core(store)
        assert core.announcement().phase == "closed"
        assert _steps(core, 0.0) == [Opened(1, "fedproto", 0)]
        told = core.announcement()
        assert (told.round, told.phase, told.method, told.encoding, told.global_version) == (
            1,
            "open",
            "fedproto",
            "f32",
            0,
        )
        core.take([_message(core, d) for d in DEVICES], 1.0)
        assert _steps(core, 1.0) == [Closed(1, "fedproto"), Opened(2, "fedproto", 0)]
        assert core.announcement().global_version == 1
        core.take([_message(core, d) for d in DEVICES], 2.0)
        assert _steps(core, 2.0) == [Closed(2, "fedproto"), Opened(3, "ffc", 0)]
        assert (core.announcement().encoding, core.announcement().method) == ("f64", "ffc")
        core.take([_message(core, d) for d in DEVICES], 3.0)
        assert _steps(core, 3.0) == [Closed(3, "ffc"), Finished(3)]
        assert core.announcement().phase == "finished"
        _check_result(core)


def test_a_restart_after_every_single_message_changes_nothing(places: Places) -> None:
    """Each device sends everything twice, and the process is replaced between any two messages."""
    now = 0.0
    for round, device in [(r, d) for r in (1, 2, 3) for d in DEVICES for _ in range(2)]:
        with DurableStore(places("s"), BUNDLE, "fleet") as store:
            core = _core(store, now=now)
            _steps(core, now + SETTLE_S)
            core.take([_message(core, device, round)], now + SETTLE_S)
        now += 10.0
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _core(store, now=now)
        assert _steps(core, now) == [Finished(3)]
        _check_result(core)
        told = Summary(store, "fleet", BUNDLE).content(finished=True, global_version=core.state.version)
        assert told["totals"]["committed"] == 9
        assert told["totals"]["duplicates"] == 9


def test_nothing_is_promised_when_the_store_refuses(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        core = _core(store)
        _steps(core, 0.0)
        store._db.execute("PRAGMA max_page_count = 1")  # SQLite's own "database or disk is full"
        payload = _message(core, "a")[1]
        with pytest.raises(StoreError, match="full"):
            core.take([("a", payload)] + [(f"x{i}", payload) for i in range(200)], 1.0)
        assert not store.holds(1, "fedproto", "a")


def test_the_robust_rule_is_applied_to_prototypes_and_never_to_sums(places: Places) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _core(store, dataclasses.replace(SETTINGS, rounds=1, rule="median"))
        _steps(core, 0.0)
        core.take([_message(core, d) for d in DEVICES], 1.0)
        _steps(core, 1.0)
        stacked = np.stack([means(i + 10).means for i in range(3)])
        np.testing.assert_allclose(core.state.prototypes.rows, np.median(stacked, axis=0)[:2])
        core.take([_message(core, d) for d in DEVICES], 2.0)
        _steps(core, 2.0)
        np.testing.assert_allclose(core.state.head.rows, usual_head(_pooled(2, "ffc"), RIDGE), rtol=1e-9)


def test_counts_by_round_and_in_all(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        core = _core(store)
        _steps(core, 0.0)
        first = {d: _message(core, d) for d in DEVICES}
        stale = contribution(run=b"old!")
        core.take([first["a"], first["a"], ("a", b"garbage"), ("b", encode(stale))], 1.0)
        core.take([first["b"], first["c"]], 1.0)
        _steps(core, 1.0)
        core.take([first["a"], ("z", first["a"][1])], 2.0)
        core.status("a", b"garbage", 0.0)
        core.take([], 2.0)
        core.take([], 2.0)  # what was counted with a batch is not counted with the next
        content = Summary(store, "f", BUNDLE).content(finished=False, global_version=1)
        told = msgspec.json.decode(msgspec.json.encode(content))
        (row,) = told["rounds"]
        assert {
            k: row[k] for k in ("round", "method", "participants", "committed", "duplicates", "late", "rejected")
        } == {
            "round": 1,
            "method": "fedproto",
            "participants": 3,
            "committed": 3,
            "duplicates": 2,
            "late": 1,
            "rejected": 0,
        }
        assert row["classes_merged"] == 2
        assert row["uplink_bytes"] == {d: len(first[d][1]) for d in DEVICES}
        assert told["totals"] == {
            "committed": 3,
            "duplicates": 2,
            "late": 1,
            "rejected": 1,
            "malformed": 2,
            "uplink_bytes": sum(len(m[1]) for m in first.values()),
        }
        write_json(tmp_path / "out.json", told)
        assert msgspec.json.decode((tmp_path / "out.json").read_bytes()) == told


def test_what_is_no_message_is_no_sign_of_life(places: Places) -> None:
    """Bytes that speak of no contribution may be anybody's; they keep nobody awaited."""
    settings = dataclasses.replace(SETTINGS, min_clients=1, deadline=10.0)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _core(store, settings)
        _steps(core, 0.0)
        core.take([_message(core, "a"), ("b", b"nonsense")], 9.0)
        core.take(
            [("c", encode(contribution(means(1), run=core.parts.run, round=9)))], 9.0
        )  # refused, and yet a word of this fleet's
        assert core.advance(10.0, 10.0) == Closed(1, "fedproto")
        assert [device for device, _ in core.rounds.take_lost()] == ["b"]


def test_a_refused_device_is_not_awaited_even_after_a_restart(places: Places) -> None:
    settings = dataclasses.replace(SETTINGS, min_clients=2)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _core(store, settings)
        _steps(core, 0.0)
        wide = contribution(ClassMeans.from_means(np.ones((CLASSES, WIDTH + 1)), [1, 1, 1]), run=core.parts.run)
        assert core.take([("c", encode(wide))], 1.0)[0].outcome == "rejected"
        core.take([_message(core, "a")], 1.0)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _core(store, settings, now=5.0)
        core.take([_message(core, "b")], 6.0)
        assert _steps(core, 5.0 + SETTLE_S)[0] == Closed(1, "fedproto")


def test_settings_that_do_not_fit_the_bundle(places: Places) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        wide = rounds_of(store, manifest(width=1280), BUNDLE, SETTINGS, now=0.0)
        assert 8 * 1280 * 1281 // 2 < wide.largest_message_bytes < 8_000_000  # FFC's sums, whole
        frugal = dataclasses.replace(SETTINGS, calibrate=False)
        wide = rounds_of(store, manifest(width=1280), BUNDLE, frugal, now=0.0)
        assert wide.largest_message_bytes == SETTINGS.limit_bytes
        with pytest.raises(UsageError, match=r"--limit-bytes, expected at least 5250 for class rows"):
            rounds_of(store, manifest(width=1280), BUNDLE, dataclasses.replace(SETTINGS, limit_bytes=2048), now=0.0)
        many = manifest(name="fedhkd", classes=1000)  # soft predictions are rows of 1000 numbers, whatever the width
        with pytest.raises(UsageError, match=r"--limit-bytes, expected at least 4130 for class rows"):
            rounds_of(store, many, BUNDLE, dataclasses.replace(SETTINGS, limit_bytes=2048), now=0.0)
        with pytest.raises(UsageError, match="--rounds"):
            rounds_of(store, manifest(), BUNDLE, Settings(rounds=0, calibrate=False), now=0.0)
        with pytest.raises(UsageError, match="--rule"):
            rounds_of(store, manifest(name="ffc"), BUNDLE, Settings(rule="median"), now=0.0)
        other = bytes(32)  # FFC's sums are over one extractor
        words = "a round of FFC, expected one backbone, got 2 bundles, try --no-calibrate"
        with pytest.raises(UsageError, match=words):
            rounds_of(store, manifest(), BUNDLE, SETTINGS, now=0.0, others=(other,))
        rounds_of(store, manifest(), BUNDLE, dataclasses.replace(SETTINGS, calibrate=False), now=0.0, others=(other,))


def _one_round(store: DurableStore, settings: Settings, made: dict[str, ClassMeans | FeatureGram]) -> RoundCoordinator:
    """A run of one round with these contributions, closed."""
    core = _core(store, settings)
    _steps(core, 0.0)
    method = core.rounds.method
    batch = [(device, encode(contribution(s, run=core.parts.run, method=method), "f64")) for device, s in made.items()]
    assert [d.outcome for d in core.take(batch, 1.0)] == ["committed"] * len(batch)
    assert isinstance(_steps(core, 2.0)[0], Closed)
    return core


def test_a_device_that_scales_its_means_does_not_reach_the_prototypes_and_is_named(places: Places) -> None:
    one = dataclasses.replace(SETTINGS, rounds=1, calibrate=False)
    liar = ClassMeans.from_means(means(2).means * -1000, means(2).counts)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _one_round(store, one, {"a": means(0), "b": means(1), "c": liar})
        expected = means(0).merge(means(1)).means[:2]
        np.testing.assert_allclose(core.state.prototypes.rows, expected)
        assert [(found.device, found.left_out) for found in core.findings] == [("c", True)]


@pytest.mark.parametrize(("share", "counts_for"), [(0.5, 60), (1.0, 900_000)])
def test_a_huge_claim_weighs_as_max_share_says(places: Places, share: float, counts_for: int) -> None:
    one = dataclasses.replace(SETTINGS, rounds=1, calibrate=False, max_share=share)
    rows = [ClassMeans.from_means(np.full((3, 4), value), [10, 10, 10]) for value in (1.0, 2.0, 3.0)]
    liar = ClassMeans.from_means(rows[2].means, [900_000, 10, 10])
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _one_round(store, one, {"a": rows[0], "b": rows[1], "c": liar})
        expected = (10 * 1.0 + 10 * 2.0 + counts_for * 3.0) / (20 + counts_for)
        np.testing.assert_allclose(core.state.prototypes.rows[0], expected, rtol=0.02)
        assert [found.device for found in core.findings] == (["c"] if share < 1 else [])


def test_min_samples_and_max_samples_are_held_to(places: Places) -> None:
    few = dataclasses.replace(SETTINGS, min_samples=5, max_samples=100)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _core(store, few)
        _steps(core, 0.0)
        sent = {
            "a": ClassMeans.from_means(np.ones((3, 4)), [5, 6, 7]),
            "b": ClassMeans.from_means(np.ones((3, 4)), [5, 4, 7]),
            "c": ClassMeans.from_means(np.ones((3, 4)), [5, 90, 7]),
        }
        made = core.take([(d, encode(contribution(s, run=core.parts.run))) for d, s in sent.items()], 1.0)
        assert [d.outcome for d in made] == ["committed", "rejected", "rejected"]
        assert "at least 5 examples" in made[1].receipt.reason
        assert "at most 100 samples" in made[2].receipt.reason


@pytest.mark.parametrize("given", [None, 0.7, 0.0])
def test_the_aggregator_sets_the_ridge(places: Places, given: float | None) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        settings = dataclasses.replace(SETTINGS, rounds=1, ridge=given)
        core = rounds_of(store, manifest(name="ffc"), BUNDLE, settings, now=0.0)
        for device in DEVICES:
            core.status(device, _birth(), 0.0)
        _steps(core, 0.0)
        sent = {device: gram(i) for i, device in enumerate(DEVICES)}
        core.take([(d, _sums(core, s)) for d, s in sent.items()], 1.0)
        _steps(core, 2.0)
        pooled = gram(0).merge(gram(1)).merge(gram(2))
        expected = usual_head(pooled, RIDGE if given is None else given)
        np.testing.assert_allclose(core.state.head.rows, expected, rtol=1e-6)
        assert core.doubt == ""  # 90 samples of 4 features: far from each other


def test_a_small_ridge_near_as_many_samples_as_features_is_warned_of(places: Places) -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(16, 16))
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    part = FeatureGram.of(z, rng.integers(0, CLASSES, 16), CLASSES)
    for ridge, words in ((1e-6, "16 samples for 16 features, and a ridge of 1e-06"), (0.1, "")):
        with DurableStore(places(f"s{ridge}"), BUNDLE, "fleet") as store:
            settings = Settings(rounds=1, ridge=ridge)
            core = rounds_of(store, manifest(name="ffc", width=16), BUNDLE, settings, now=0.0)
            core.status("a", _birth(), 0.0)
            _steps(core, 0.0)
            core.take([("a", _sums(core, part))], 1.0)
            _steps(core, 2.0)
            assert core.doubt.startswith(words)
            assert bool(core.doubt) == bool(words)


def test_a_round_in_which_every_class_was_withheld_is_warned_of(places: Places) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = rounds_of(store, manifest(name="ffc"), BUNDLE, dataclasses.replace(SETTINGS, rounds=1), now=0.0)
        for device in DEVICES:
            core.status(device, _birth(), 0.0)
        _steps(core, 0.0)
        nothing = FeatureGram.zero(CLASSES, gram(0).width)
        core.take([(device, _sums(core, nothing)) for device in DEVICES], 1.0)
        _steps(core, 2.0)
        assert core.doubt.startswith("no class is known: devices withhold")


@pytest.mark.parametrize(("name", "given"), [("ncm", {"ridge": 1.0}), ("fedcof", {"form": "discriminant"})])
def test_what_no_head_is_made_with_is_refused(places: Places, name: str, given: dict[str, object]) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        settings = dataclasses.replace(SETTINGS, rounds=1, method=name, **given)
        line = f"--{next(iter(given))}, expected a round whose head is made with it, got rounds of {name}"
        with pytest.raises(UsageError, match=line):
            rounds_of(store, manifest(name="ffc"), BUNDLE, settings, now=0.0)


def test_after_a_restart_a_liar_is_still_left_out(places: Places) -> None:
    one = dataclasses.replace(SETTINGS, rounds=1, calibrate=False)
    liar = ClassMeans.from_means(means(0).means * 1000, means(0).counts)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _core(store, one)
        _steps(core, 0.0)
        core.take([("a", encode(contribution(liar, run=core.parts.run), "f64"))], 1.0)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = _core(store, one)
        for device, seed in (("b", 1), ("c", 2)):
            core.take([(device, encode(contribution(means(seed), run=core.parts.run), "f64"))], 1.0)
        assert isinstance(_steps(core, 2.0 + SETTLE_S)[0], Closed)
        assert [found.device for found in core.findings] == ["a"]
        np.testing.assert_allclose(core.state.prototypes.rows, means(1).merge(means(2)).means[:2])


def test_an_ffc_round_takes_any_bundle_of_its_extractor_and_no_other(places: Places) -> None:
    """What is announced is what a contribution must name; a device's bundle may be another with the same extractor."""
    shared, another = b"\x11" * 32, bytes(range(50, 82))
    made = msgspec.structs.replace(manifest(name="ffc"), extractor=shared.hex())
    settings = dataclasses.replace(SETTINGS, rounds=1)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = rounds_of(store, made, BUNDLE, settings, now=0.0)
        for device in DEVICES:
            core.status(device, _birth(), 0.0)
        _steps(core, 0.0)
        told = core.announcement().extractor
        assert told == extractor_of(made, another, method("ffc"))  # it follows from the manifest alone
        sent = {
            "a": _sums(core, gram(0), extractor=told),
            "b": _sums(core, gram(1), extractor=told, bundle=another, class_list=list_digest(made.labels)),
            "c": _sums(core, gram(2), extractor=extractor_of(manifest(), BUNDLE, method("ffc"))),
        }
        decided = core.take(list(sent.items()), 1.0)
        assert [d.outcome for d in decided] == ["committed", "committed", "rejected"]
        assert f"extractor, expected sha256 {told[:4].hex()}…, got" in decided[2].receipt.reason
        for listed in (b"", list_digest(made.labels[::-1])):  # the class numbers of another bundle must mean the same
            (refused,) = core.take(
                [("c", _sums(core, gram(2), extractor=told, bundle=another, class_list=listed))], 2.0
            )
            assert refused.receipt.reason.startswith(f"list of classes, expected {list_digest(made.labels)[:4].hex()}…")
        core.take([("c", _sums(core, gram(2), extractor=told))], 2.0)
        _steps(core, 2.0)
        pooled = gram(0).merge(gram(1)).merge(gram(2))
        np.testing.assert_allclose(core.state.head.rows, usual_head(pooled, RIDGE), rtol=1e-6)


def test_which_rounds_are_asked_for(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        two, none = Settings(rounds=2), Settings(rounds=0)
        assert planned(store, manifest(), two) == ("fedproto", "fedproto", "ffc")
        assert planned(store, manifest(), none) == ("ffc",)
        assert len(planned(store, manifest(), Settings(calibrate=False))) == method("fedproto").rounds
        assert planned(store, manifest(), two, others=(b"o" * 32,)) == ("fedproto", "fedproto")
        assert planned(store, manifest(), two, shorter={b"o" * 32: 1}) == ("fedproto", "fedproto")
        with pytest.raises(UsageError, match=r"FFC, expected one backbone, got 2 bundles, try --no-calibrate"):
            planned(store, manifest(), Settings(calibrate=True), others=(b"o" * 32,))


def test_a_store_of_rounds_takes_no_standing_sums_nor_the_other_way_round(tmp_path: Path) -> None:
    standing, sums = Settings(method="ncm", standing=True), "--standing, expected a store of standing sums of"
    with DurableStore(tmp_path / "rounds", BUNDLE, "fleet") as store:
        _steps(_core(store), 0.0)
        with pytest.raises(UsageError, match=f"{sums} ncm, or a new one, got one with 1 rounds"):
            standing_sums(store, manifest(), BUNDLE, standing, now=0.0)
    with DurableStore(tmp_path / "sums", BUNDLE, "fleet") as store:
        standing_sums(store, manifest(), BUNDLE, standing, now=0.0)
        with pytest.raises(UsageError, match="expected one of rounds, or a new one, got standing sums of ncm"):
            _core(store)
        with pytest.raises(UsageError, match=f"{sums} ffc, or a new one, got one of ncm"):
            standing_sums(store, manifest(), BUNDLE, dataclasses.replace(standing, method="ffc"), now=0.0)
