"""A device with the old list of classes among new ones, and one that changes to the new list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from edge_samples import RUN, announcement, fashion, sums_of

import protofleet
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.fleet_compatibility import announced_lists, list_digest
from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.methods import method
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, ClassRows
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal, read_kept
from protofleet.edge_client.rounds.round_follower import Follower
from protofleet.export.bundles.extend import extend_bundle

OWNER = {"fleet": "fleet", "device": "pi-1"}


@pytest.fixture(scope="module")
def paths(mnist_like_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle, and one that extends it."""
    old, new = mnist_like_bundle("ncm"), tmp_path_factory.mktemp("grown") / "new.bundle"
    extend_bundle(old, ["hamster"], new)
    return old, new


@pytest.fixture(scope="module")
def bundles(paths: tuple[Path, Path]) -> tuple[Bundle, Bundle]:
    return read_bundle(paths[0]), read_bundle(paths[1])


def told(new: Bundle, *, knows: Bundle | None = None, **fields: object) -> Announcement:
    """What an aggregator with the longer bundle announces, that of sums that stand."""
    shorter = {} if knows is None else {knows.sha256: knows.manifest.classes}
    named = {"phase": "standing", "others": tuple(shorter), "extractor": new.extractor(method("ncm"))}
    named["class_lists"] = announced_lists(new.manifest, shorter)
    return announcement(new, 0, **{**named, **fields})


def state(bundle: Bundle, version: int) -> GlobalState:
    """Unit means of all its classes; the hamster's points where no other does."""
    rows = np.random.default_rng(version).normal(size=(bundle.manifest.classes, bundle.manifest.features))
    rows *= 0.5 / np.linalg.norm(rows, axis=1, keepdims=True)
    numbers = np.arange(bundle.manifest.classes, dtype=np.uint16)
    return GlobalState(RUN, version, version, {"means": ClassRows(numbers, rows.astype(np.float32))})


def follower(bundle: Bundle, *, stays: bool = True) -> Follower:
    return Follower("pi-1", bundle, is_done=lambda key: False, took_part=lambda run: False, stays=stays)


# ── who is of the fleet ─────────────────────────────────────────────────────────────────────────────────────────────


def test_old_and_new_devices_are_of_a_fleet_that_has_grown(bundles: tuple[Bundle, Bundle]) -> None:
    old, new = bundles
    for bundle in bundles:
        fleet = follower(bundle)
        fleet.announced(told(new, knows=old))
        assert fleet.standing is not None


def test_a_device_that_is_ahead_of_the_aggregator_waits_for_it(bundles: tuple[Bundle, Bundle]) -> None:
    old, new = bundles
    fleet = follower(new)
    with pytest.raises(UsageError, match="not know all classes of this device's bundle, expected an aggregator with"):
        fleet.announced(told(old))
    assert (fleet.standing, fleet.waits_for()) == (None, "waiting for a run of this device's bundle")
    assert fleet.apart == "more classes than the fleet's"
    fleet.announced(told(new, knows=old))
    assert fleet.apart == ""
    fleet.announced(told(new, knows=old))
    assert fleet.standing is not None


def other_order(bundle: Bundle) -> Bundle:
    labels = bundle.manifest.labels
    swapped = msgspec.structs.replace(bundle.manifest, labels=(labels[1], labels[0], *labels[2:]))
    return Bundle(swapped, b"x" * 32, bundle.features, None, bundle.params, vectors=bundle.vectors)


def test_the_same_extractor_with_another_order_is_no_part_of_it(bundles: tuple[Bundle, Bundle]) -> None:
    """Neither would it be counted, nor would its answers mean what the fleet's do."""
    old, new = bundles
    fleet = follower(other_order(new))
    with pytest.raises(UsageError, match=r"other classes, or has them in another order, expected .*try export"):
        fleet.announced(told(new, knows=old))
    assert fleet.newest_state is None
    follower(other_order(new)).announced(told(new, class_lists=()))  # an older aggregator does not say


def test_a_list_is_told_where_the_bundle_is_none_of_those_announced(bundles: tuple[Bundle, Bundle]) -> None:
    old, new = bundles
    data, chosen = fashion(old, 8, (0, 1)), np.ones(8, bool)
    for a, expected in ((told(new, knows=old), b""), (told(new), list_digest(old.manifest.labels)[:4])):
        assert Device(old, data, "pi-1").stand(a, 1, chosen).contribution.class_list == expected


# ── the old list ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_device_with_the_old_list_answers_of_what_it_knows(
    paths: tuple[Path, Path], bundles: tuple[Bundle, Bundle], tmp_path: Path
) -> None:
    """Rows of the new class are kept and not looked at: the same answers as of a state without them."""
    old, new = bundles
    whole, data = state(new, 3), fashion(old, 60, (0, 1, 2))
    device = Device(old, data, "pi-1", test=data)
    assert not device.judge(whole).refused
    seen, cut = device.evaluate(whole), device.evaluate(whole.below(10))
    assert seen is not None
    assert cut is not None
    assert seen.all_classes == cut.all_classes
    with Journal(tmp_path / "state", **OWNER, bundle=old.sha256, bundle_path=paths[0]) as journal:
        journal.keep_global(whole)
        predictor = protofleet.Predictor(tmp_path / "state")
        scores = predictor(data.x).scores
        assert (scores.shape, predictor.labels) == ((60, 10), old.manifest.labels)
        kept = journal.kept_global()
        assert kept is not None
        assert kept.rows["means"].classes.tolist() == list(range(11))
        journal.keep_global(whole.below(10))
        np.testing.assert_array_equal(protofleet.Predictor(tmp_path / "state")(data.x).scores, scores)


def test_below_is_the_state_itself_where_there_is_nothing_to_leave_out(bundles: tuple[Bundle, Bundle]) -> None:
    whole = state(bundles[1], 1)
    assert whole.below(11) is whole
    none = GlobalState(RUN, 1, 1, {"means": ClassRows(np.zeros(0, np.uint16), np.zeros((0, 4)))})
    assert none.below(1) is none
    assert whole.below(4).rows["means"].classes.tolist() == [0, 1, 2, 3]


# ── a change of bundle ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_device_that_changes_keeps_its_state_and_sends_nothing_again(
    paths: tuple[Path, Path], bundles: tuple[Bundle, Bundle], tmp_path: Path
) -> None:
    old, new = bundles
    few = fashion(old, 20, (0, 1))
    with Journal(tmp_path, **OWNER, bundle=old.sha256, bundle_path=paths[0]) as journal:
        journal.begin(b"instance")
        secret = journal.secret()
        made = sums_of(Device(old, few, "pi-1"), journal).make(told(new, knows=old), 1, 0.0)
        assert made is not None
        journal.keep_global(state(new, 2))
    following = protofleet.Predictor(tmp_path)
    before = following(few.x)
    with Journal(tmp_path, **OWNER, bundle=new.sha256, extends=new.manifest.extended, bundle_path=paths[1]) as journal:
        assert (journal.secret(), journal.begin(b"another!")) == (secret, 2)
        assert [waiting.key[1] for waiting in journal.pending()] == [1]
        sums = sums_of(Device(new, few, "pi-1"), journal)
        assert sums.make(told(new, knows=old), 2, 0.0) is None
        after = following(few.x)  # which was asked before, and goes on with the new class
        assert (before.names, after.names) == (old.manifest.labels, new.manifest.labels)
        np.testing.assert_array_equal(after.scores[:, :10], before.scores)
        assert np.isfinite(after.scores[:, 10]).all()
        hamsters = LocalData(np.concatenate([few.x, few.x[:4] // 2]), np.concatenate([few.y, np.full(4, 10)]))
        made = sums_of(Device(new, hamsters, "pi-1"), journal).make(told(new, knows=old), 2, 0.0)
        assert made is not None
        sent = decode(made.payload)
        assert (sent.round, sent.body.classes.tolist(), sent.samples) == (2, [0, 1, 10], 24)


def test_bundle_and_its_place_change_together_and_only_to_one_that_extends(
    paths: tuple[Path, Path], bundles: tuple[Bundle, Bundle], tmp_path: Path
) -> None:
    old, new = bundles
    Journal(tmp_path, **OWNER, bundle=old.sha256, bundle_path=paths[0]).close()
    for changes, line in (
        ({"bundle": new.sha256, "extends": {b"z" * 32: 2}}, "another bundle"),
        ({"bundle": new.sha256, "extends": new.manifest.extended, "device": "pi-2"}, "another device"),
        ({"bundle": new.sha256, "extends": new.manifest.extended, "fleet": "north"}, "another fleet"),
    ):
        with pytest.raises(StoreError, match=line):
            Journal(tmp_path, **{**OWNER, "bundle_path": paths[1], **changes})  # type: ignore[arg-type]
        kept = read_kept(tmp_path)
        assert (kept.bundle, kept.bundle_path) == (old.sha256, paths[0])
    Journal(tmp_path, **OWNER, bundle=new.sha256, extends=new.manifest.extended, bundle_path=paths[1]).close()
    kept = read_kept(tmp_path)
    assert (kept.bundle, kept.bundle_path) == (new.sha256, paths[1])
    with pytest.raises(StoreError, match="another bundle"):  # and not back
        Journal(tmp_path, **OWNER, bundle=old.sha256)


def test_the_new_bundle_answers_from_what_the_old_one_has_left(
    paths: tuple[Path, Path], bundles: tuple[Bundle, Bundle], tmp_path: Path
) -> None:
    """Before its client has started with it, and from a store that its aggregator has not taken up yet; not the other
    way round."""
    old, new = bundles
    x = fashion(old, 4, (0, 1)).x
    with Journal(tmp_path / "state", **OWNER, bundle=old.sha256, bundle_path=paths[0]) as journal:
        journal.keep_global(state(old, 1))
    with DurableStore(tmp_path / "s", old.sha256, "fleet") as store:
        store.open_round(1, "ncm", 0, 0.0)
        found = GlobalState(store.run, 1, 1, state(old, 1).rows)
        store.close_round(1, 1.0, 10, found)
    for predictor in (
        protofleet.Predictor(tmp_path / "state", bundle=paths[1]),
        protofleet.Predictor(paths[1], store=tmp_path / "s"),
    ):
        scores = predictor(x).scores
        assert predictor.labels[-1] == "hamster"
        assert np.isinf(scores[:, 10]).all()
    DurableStore(tmp_path / "s", new.sha256, "fleet", extends=new.manifest.extended).close()
    with pytest.raises(UsageError, match="is of another bundle"):
        protofleet.Predictor(paths[0], store=tmp_path / "s")
