"""Old and new lists of classes in one fleet: the sums are those of a fleet that had the long list from the start."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aggregator_samples import WIDTH, manifest
from contract_samples import empty_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from postgres_server import Places

from protofleet.aggregator.coordinators.kinds import rounds_of, standing_sums
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.server.service import Service
from protofleet.aggregator.settings import AggregateSettings, Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import Manifest, extractor_of, write_bundle
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.errors import UsageError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import METHODS, method
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution, Status

SHARED = "11" * 32
OLD, NEW = b"o" * 32, b"n" * 32
EVERY_S = 60.0


def grown(classes: int, name: str = "ncm") -> Manifest:
    return msgspec.structs.replace(manifest(classes=classes, name=name), extractor=SHARED)


def sums(name: str, seed: int, labels: list[int], classes: int) -> Statistic:
    """Of samples of these classes, as a device with a list of so many classes sums them."""
    z = unit_rows(np.random.default_rng(seed).normal(size=(len(labels), WIDTH)))
    kind, numbers = method(name).statistic, np.array(labels, np.int64)
    groups = np.arange(len(labels)) % 2 if kind.GROUPS > 1 else 0
    return kind.of(z, numbers * kind.GROUPS + groups, classes * kind.GROUPS)  # type: ignore[attr-defined]


def message(
    core: StandingCoordinator | RoundCoordinator, statistic: Statistic, bundle: bytes, number: int, **more: object
):
    name = next(each.name for each in METHODS.values() if each.statistic is type(statistic))
    key = {"run": core.parts.run, "round": number, "method": name, "bundle": bundle}
    return encode(
        Contribution.of(statistic, **key, extractor=extractor_of(grown(2), OLD, method(name)), **more), "f64"
    )  # fmt: skip


def standing(store: DurableStore, name: str, classes: int, bundle: bytes, **more: object) -> StandingCoordinator:
    chosen = Settings(method=name, standing=True, every=EVERY_S, encoding="f64")
    return standing_sums(store, grown(classes), bundle, chosen, now=0.0, **more)  # type: ignore[arg-type]


DEVICE = st.tuples(st.booleans(), st.lists(st.integers(0, 99), min_size=1, max_size=8))


@pytest.mark.parametrize("name", ["ncm", "ffc"])
@given(
    old=st.integers(2, 5),
    added=st.integers(1, 4),
    before=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=8), max_size=3),
    after=st.lists(DEVICE, max_size=4),
)
@settings(max_examples=20, deadline=None)
def test_a_fleet_that_grows_is_one_that_had_all_classes_from_the_start(
    name: str, old: int, added: int, before: list[list[int]], after: list[tuple[bool, list[int]]]
) -> None:
    """Some devices came before the list grew, and never send again; of those that come after, some still have the old
    bundle. Integers and head are the same, bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        path, long, taken = Path(folder, "s"), old + added, []
        with DurableStore(path, OLD, "fleet") as store:
            core = standing(store, name, old, OLD)
            for number, drawn in enumerate(before):
                labels = [label % old for label in drawn]
                given_ = (f"b{number}", message(core, sums(name, number, labels, old), OLD, 1, standing="present"))
                assert [d.outcome for d in core.take([given_], 0.0)] == ["committed"]
                taken.append((number, labels))
            core.advance(0.0, 0.0)
            version, run = core.state.version, core.parts.run
        with DurableStore(path, NEW, "fleet", extends={OLD: old}) as store:
            core = standing(store, name, long, NEW, shorter={OLD: old})
            assert core.parts.run == run
            for number, (is_new, drawn) in enumerate(after, 50):
                known, bundle = (long, NEW) if is_new else (old, OLD)
                labels = [label % known for label in drawn]
                given_ = (f"a{number}", message(core, sums(name, number, labels, known), bundle, 1, standing="present"))
                assert [d.outcome for d in core.take([given_], 1.0)] == ["committed"]
                taken.append((number, labels))
            while core.advance(1e6, 0.0) is not None:
                pass
            found = method(name)
            expected = ExactSum.zero(found.statistic, long, WIDTH)
            for seed, labels in taken:
                expected = expected.add(ExactSum.of(sums(name, seed, labels, long)))
            assert core.standing.total.equal(expected)
            if taken:
                hyper = found.resolved_in(grown(long).hyper)
                ((kind, rows),) = found.next_rows({}, expected.statistic(found.statistic, WIDTH), hyper).items()
                np.testing.assert_array_equal(core.state.rows[kind].rows, rows.rows)
                np.testing.assert_array_equal(core.state.rows[kind].classes, rows.classes)
            assert core.state.version >= version


@pytest.fixture
def core(places: Places):
    with DurableStore(places("s"), NEW, "fleet", extends={OLD: 2}) as store:
        yield standing(store, "ncm", 4, NEW, shorter={OLD: 2})


def reason(core: StandingCoordinator, statistic: Statistic, bundle: bytes, **more: object) -> str:
    (found,) = core.take([("a", message(core, statistic, bundle, 1, standing="present", **more))], 0.0)
    return found.reason


def test_a_class_that_the_senders_bundle_has_not_is_refused(core: StandingCoordinator) -> None:
    assert reason(core, sums("ncm", 1, [0, 2], 4), OLD) == (
        "class rows, expected classes below 2 and width 4, got class 2 and width 4"
    )
    labels = grown(4).labels
    assert reason(core, sums("ncm", 1, [0, 2], 4), b"x" * 32, class_list=list_digest(labels[:2])).startswith(
        "class rows, expected classes below 2"
    )
    assert reason(core, sums("ncm", 1, [0, 3], 4), b"x" * 32, class_list=list_digest(labels)) == ""


@pytest.mark.parametrize("labels", [("class-1", "class-0"), ("class-0", "class-1", "class-2"), None])
def test_a_list_that_is_not_the_fleets_is_refused(core: StandingCoordinator, labels: tuple[str, ...] | None) -> None:
    """Another order, one that begins the list but was never the fleet's, and one that is not told."""
    more = {} if labels is None else {"class_list": list_digest(labels)}
    assert reason(core, sums("ncm", 1, [0, 1], 2), b"x" * 32, **more).startswith("list of classes, expected ")
    assert core.standing.present == set()


def test_what_is_announced(core: StandingCoordinator) -> None:
    told = core.announcement()
    labels = grown(4).labels
    assert (told.bundle, told.others) == (NEW, (OLD,))
    assert told.class_lists == (list_digest(labels), list_digest(labels[:2]))


def test_a_store_goes_on_with_a_bundle_that_extends_its_own_and_not_back(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with DurableStore(path, OLD, "fleet") as store:
        run = store.run
    with pytest.raises(UsageError, match="is of another bundle, expected sha256 6f6f"):
        DurableStore(path, NEW, "fleet", extends={b"z" * 32: 2})
    with pytest.raises(UsageError, match="is of another fleet"):  # and then nothing of it is changed
        DurableStore(path, NEW, "another", extends={OLD: 2})
    DurableStore(path, OLD, "fleet").close()
    for _ in range(2):
        with DurableStore(path, NEW, "fleet", extends={OLD: 2}) as store:
            assert store.run == run
    with pytest.raises(UsageError, match="is of another bundle, expected sha256 6e6e"):
        DurableStore(path, OLD, "fleet")


@pytest.mark.parametrize("name", ["ncm", "fedcof", "ffc"])
def test_a_round_that_is_open_while_the_list_grows_counts_both(places: Places, name: str) -> None:
    chosen = Settings(rounds=1, calibrate=False, method=name, min_clients=2, deadline=0)
    with DurableStore(places("s"), OLD, "fleet") as store:
        core = rounds_of(store, grown(2), OLD, chosen, now=0.0)
        for index, device in enumerate("ab"):
            core.status(device, encode(Status(True, bytes([index]) * 8, 1)), 0.0)
        core.advance(0.0, 0.0)
        first = message(core, sums(name, 1, [0, 1, 1], 2), OLD, 1)
        assert [d.outcome for d in core.take([("a", first)], 0.0)] == ["committed"]
    with DurableStore(places("s"), NEW, "fleet", extends={OLD: 2}) as store:
        core = rounds_of(store, grown(3), NEW, chosen, now=0.0, shorter={OLD: 2})
        assert core.announcement().others == (OLD,)
        assert len(core.announcement().class_lists) == 2
        again, second = first, message(core, sums(name, 2, [0, 2, 2], 3), NEW, 1)
        decided = core.take([("a", again), ("b", second)], 1.0)
        assert [d.outcome for d in decided] == ["duplicate", "committed"]
        while core.advance(1e6, 0.0) is not None:
            pass
        found, hyper = method(name), method(name).resolved_in(grown(3).hyper)
        pooled = [sums(name, 1, [0, 1, 1], 3), sums(name, 2, [0, 2, 2], 3)]
        merged = found.merge(lambda: iter(pooled), "mean", hyper)
        for kind, rows in found.next_rows({}, merged, hyper).items():
            np.testing.assert_allclose(core.state.rows[kind].rows, rows.rows, rtol=1e-9)
            assert core.state.rows[kind].classes.tolist() == [0, 1, 2]


def test_a_service_takes_bundles_in_any_order_and_goes_on_with_the_store(tmp_path: Path, places: Places) -> None:
    paths = [tmp_path / "old.bundle", tmp_path / "new.bundle"]
    hashes = []
    for path, classes in zip(paths, (2, 4), strict=True):
        made, params = grown(classes), {"backbone.weight": np.ones((2, 2), np.float32)}
        hashes.append(write_bundle(path, made, features=empty_graph(), train_step=None, params=params))
    runs = []
    for given_ in (paths[:1], paths[::-1], paths, paths[1:]):
        given = {"bundle": tuple(map(str, given_)), "broker": "mqtt://127.0.0.1", "store": places("s")}
        service = Service(AggregateSettings(**given, standing=True))  # type: ignore[arg-type]
        roster = service._roster
        assert roster.bundle == (hashes[0] if len(given_) == 1 and given_[0] == paths[0] else hashes[1])
        with DurableStore(places("s"), roster.bundle, "fleet", extends=roster.shorter) as store:
            told = service._core(store).announcement()
            runs.append(told.run)
            assert told.others == ((hashes[0],) if len(given_) == 2 else ())
    assert len(set(runs)) == 1


def test_other_backbones_are_still_no_fleet_of_sums(places: Places) -> None:
    chosen = dataclasses.replace(Settings(), method="ncm")
    with (
        DurableStore(places("s"), NEW, "fleet") as store,
        pytest.raises(UsageError, match="expected one backbone, got 2 bundles"),
    ):
        rounds_of(store, grown(3), NEW, chosen, now=0.0, others=(b"x" * 32,), shorter={OLD: 2})
