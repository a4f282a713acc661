"""The head of a finished round made again from its store: by another ridge, in another form, and what has none."""

from __future__ import annotations

import contextlib
import io
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, WIDTH, contribution, extractor, gram, manifest, means
from log_lines import drawing
from pooled_head import solve_head

from protofleet.aggregator.commands.solve_again import solve_again
from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.rounds.round_machine import Closed
from protofleet.aggregator.server.run_events import RunEvents
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.stored_run import read_state
from protofleet.contract.errors import MethodError, StoreError, UsageError
from protofleet.contract.heads.covariance import within_gram
from protofleet.contract.heads.discriminant import discriminant_head, without_bias
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.methods.fedcof import GroupMeans
from protofleet.contract.sums.statistics import FeatureGram, Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status

SENT = {"a": gram(1, 40), "b": gram(2, 20), "c": gram(3, 300)}  # c counts for less, since it has most of the samples
POOLED = SENT["a"].merge(SENT["b"]).merge(SENT["c"])


def _run(
    path: Path, name: str, sent: dict[str, Statistic], told: io.StringIO | None = None, **settings: object
) -> None:
    """One round of a method, with these contributions, in a store."""
    width = next(iter(sent.values())).width
    with DurableStore(path, BUNDLE, "fleet") as store:
        chosen = Settings(method=name, rounds=1, calibrate=False, **settings)  # type: ignore[arg-type]
        core = rounds_of(store, manifest(name=name, width=width), BUNDLE, chosen, now=0.0)
        events = RunEvents(core, drawing(told or io.StringIO()))
        for device in sent:
            core.status(device, encode(Status(True, b"instance", 1), "f64"), 0.0)
        while core.advance(0.0, 0.0) is not None:
            pass
        for device, statistic in sent.items():
            mark = extractor(name) if method(name).extractor == "bundle" else b""
            made = contribution(statistic, run=core.parts.run, method=name, extractor=mark)
            assert core.take([(device, encode(made, "f64"))], 1.0)[0].outcome == "committed"
        while (step := core.advance(2.0, 2.0)) is not None:
            if isinstance(step, Closed):
                events.step(step)


@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
def test_the_same_ridge_gives_the_head_that_the_fleet_has_and_another_one_another(tmp_path: Path, share: float) -> None:
    """Also where one device counted for less: as the aggregator was told then, which the store remembers."""
    _run(tmp_path / "s", "ffc", SENT, max_share=share)
    _, published = read_state(tmp_path / "s")
    for ridge in ("auto", 0.7):
        again = solve_again(tmp_path / "s", manifest(name="ffc"), {"ridge": ridge})
        assert (again.state.version, again.state.round, again.round, again.method.name) == (1, 1, 1, "ffc")
        same = np.allclose(again.state.head.rows, published.head.rows, rtol=1e-6, atol=1e-9)
        assert same == (ridge == "auto")
    assert again.told == "ridge 0.7, as given"
    if share == 1.0:
        np.testing.assert_allclose(again.state.head.rows, solve_head(POOLED, 0.7), rtol=1e-6)
    np.testing.assert_array_equal(read_state(tmp_path / "s")[1].head.rows, published.head.rows)  # it was only read


def test_it_is_the_newest_round_that_is_made_again(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        core = rounds_of(
            store, manifest(name="ffc"), BUNDLE, Settings(method="ffc", rounds=2, calibrate=False), now=0.0
        )
        core.status("a", encode(Status(True, b"instance", 1), "f64"), 0.0)
        for number in (1, 2):
            core.advance(0.0, 0.0)
            made = contribution(
                gram(number), run=core.parts.run, round=number, method="ffc", extractor=extractor("ffc")
            )
            core.take([("a", encode(made, "f64"))], 0.0)
            assert core.advance(0.0, 0.0) == Closed(number, "ffc")
    again = solve_again(tmp_path / "s", manifest(name="ffc"), {"ridge": 0.7, "form": "ridge"})
    assert again.round == 2
    np.testing.assert_allclose(again.state.head.rows, solve_head(gram(2), 0.7), rtol=1e-6)


def test_ffcs_sums_make_a_discriminant_at_once_or_afterwards(tmp_path: Path) -> None:
    _run(tmp_path / "ridge", "ffc", SENT, max_share=1.0)
    told = io.StringIO()
    _run(tmp_path / "form", "ffc", SENT, told, max_share=1.0, form="discriminant")
    within = within_gram(POOLED.matrix, POOLED.cross, POOLED.counts)
    expected = without_bias(discriminant_head(within), within)
    again = solve_again(tmp_path / "ridge", manifest(name="ffc"), {"form": "discriminant"})
    for state in (again.state, read_state(tmp_path / "form")[1]):
        np.testing.assert_allclose(state.head.rows, expected, rtol=1e-5, atol=1e-6)
    assert again.told.startswith("discriminant, ridge ")
    assert again.told.endswith(", chosen by the error it expects")
    assert again.told in told.getvalue()
    given = solve_again(tmp_path / "ridge", manifest(name="ffc"), {"form": "discriminant", "ridge": 0.2})
    np.testing.assert_allclose(given.state.head.rows, without_bias(discriminant_head(within, 0.2), within), rtol=1e-5)


def test_ffcs_sums_make_an_even_head_at_once_or_afterwards_and_by_itself_where_classes_are_unequal(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    uneven = FeatureGram.of(unit_rows(rng.normal(size=(60, WIDTH))), np.arange(60) // 41 + np.arange(60) // 55, CLASSES)
    assert uneven.counts.tolist() == [41, 14, 5]
    _run(tmp_path / "ridge", "ffc", {"a": uneven}, form="ridge")
    _run(tmp_path / "auto", "ffc", {"a": uneven})
    expected = solve_head(uneven, "auto") / np.sqrt(uneven.counts / 20)[:, None]
    again = solve_again(tmp_path / "ridge", manifest(name="ffc"), {"form": "even"})
    for state in (again.state, read_state(tmp_path / "auto")[1]):
        np.testing.assert_allclose(state.head.rows, expected, rtol=1e-5)
    plain = read_state(tmp_path / "ridge")[1].head.rows
    np.testing.assert_allclose(plain, solve_head(uneven, "auto"), rtol=1e-5)


def _groups(seed: int) -> GroupMeans:
    rng = np.random.default_rng(seed)
    y = np.arange(60) % CLASSES
    places = y * GroupMeans.GROUPS + np.arange(60) // CLASSES % 4
    z = unit_rows(rng.normal(size=(60, WIDTH)) + np.eye(CLASSES, WIDTH)[y])
    return GroupMeans.of(z, places, CLASSES * GroupMeans.GROUPS)


def test_fedcofs_head_is_made_again_by_another_ridge(tmp_path: Path) -> None:
    _run(tmp_path / "s", "fedcof", {name: _groups(i) for i, name in enumerate("ab")})
    again = {
        ridge: solve_again(tmp_path / "s", manifest(name="ncm"), {"ridge": ridge}).state.rows["discriminant"].rows
        for ridge in ("auto", 1e-3, 10.0)
    }
    np.testing.assert_array_equal(again["auto"], read_state(tmp_path / "s")[1].rows["discriminant"].rows)
    assert not np.allclose(again[1e-3], again[10.0], rtol=0.1)
    with pytest.raises(UsageError, match="a closed round of ffc, got rounds of fedcof"):
        solve_again(tmp_path / "s", manifest(name="ncm"), {"ridge": 0.1, "form": "ridge"})
    told = io.StringIO()
    _run(tmp_path / "at once", "fedcof", {name: _groups(i) for i, name in enumerate("ab")}, told, ridge=10.0)
    np.testing.assert_array_equal(again[10.0], read_state(tmp_path / "at once")[1].rows["discriminant"].rows)
    assert "24 groups of 3 classes, discriminant, ridge 10, as given" in told.getvalue()


def test_what_has_no_sums_is_said_in_a_line(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "new", BUNDLE, "fleet"):
        pass
    _run(tmp_path / "means", "fedproto", {"a": means(0), "b": means(1)})
    _run(tmp_path / "cof", "fedcof", {"a": _groups(0)})
    _run(tmp_path / "dropped", "ffc", SENT)
    with DurableStore(tmp_path / "dropped", BUNDLE, "fleet") as store:
        store._db.execute("DELETE FROM payload")
    wanted = "expected the sums of a closed round of fedcof or ffc or ffc-dp"
    for name, given, words in (
        ("new", {"ridge": 1}, f"{wanted}, got no closed round"),
        ("means", {"ridge": 1}, f"{wanted}, got rounds of fedproto"),
        ("cof", {"form": "discriminant"}, "expected the sums of a closed round of ffc, got rounds of fedcof"),
        ("dropped", {"ridge": 1}, f"{wanted}, got rounds of ffc whose contributions were dropped"),
    ):
        with pytest.raises(UsageError, match=words):
            solve_again(tmp_path / name, manifest(name="ffc"), given)
    with pytest.raises(StoreError, match="no such file"):
        solve_again(tmp_path / "none", manifest(name="ffc"), {"ridge": 1})
    _run(tmp_path / "ffc", "ffc", SENT)
    for name, value in (("ridge", -1), ("ridge", "much"), ("form", "square")):
        with pytest.raises(MethodError, match=f"--{name}, expected"):
            solve_again(tmp_path / "ffc", manifest(name="ffc"), {name: value})


def test_what_speaks_against_a_head_is_on_the_aggregators_terminal(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    z = unit_rows(rng.normal(size=(40, 16)))
    even, uneven = (FeatureGram.of(z, labels, CLASSES) for labels in (np.arange(40) % 3, np.arange(40) // 19))
    scarce = FeatureGram.of(z[:6], np.arange(6) % 3, CLASSES)
    cases: dict[str, tuple[Statistic, dict[str, object], str]] = {
        "near": (even, {"ridge": 1e-6}, "warning: round 1: 40 samples for 16 features, and a ridge of 1e-06"),
        "fine": (even, {"ridge": "auto"}, ""),
        "uneven": (
            uneven,
            {"form": "ridge"},
            "warning: round 1: one class has 19 samples, another 2, and a",
        ),
        "mended": (uneven, {"ridge": "auto"}, ""),
        "told": (uneven, {"form": "discriminant"}, ""),
        "scarce": (scarce, {"ridge": "auto"}, "warning: round 1: 2.0 samples a class"),
    }
    for name, (statistic, hyper, words) in cases.items():
        told = io.StringIO()
        _run(tmp_path / name, "ffc", {"a": statistic}, told, **hyper)
        assert (words in told.getvalue()) if words else ("warning" not in told.getvalue()), name
    told = io.StringIO()
    _run(tmp_path / "evened", "ffc", {"a": uneven}, told)
    assert "cross-validation on the sums, rows evened: classes have 2 to 19 samples" in told.getvalue()
    told = io.StringIO()
    _run(tmp_path / "nearest", "ffc", {"a": scarce}, told, form="discriminant")
    labels = np.arange(6) % 3 * GroupMeans.GROUPS + np.arange(6) // 3
    few = GroupMeans.of(z[:6, :WIDTH] / 2, labels, CLASSES * GroupMeans.GROUPS)
    _run(tmp_path / "groups", "fedcof", {"a": few}, told)
    assert told.getvalue().count("nearest class mean, since 2.0 samples a class are too few for a discriminant") == 2


def test_what_is_not_asked_for_stays_as_the_bundle_has_it(tmp_path: Path) -> None:
    _run(tmp_path / "s", "ffc", SENT)
    made = manifest(name="ffc")
    made = msgspec.structs.replace(made, hyper={**made.hyper, "ridge": 2.0})
    assert solve_again(tmp_path / "s", made, {"form": "ridge"}).told == "ridge 2, as given"


FOREIGN = {
    "no meta": "DELETE FROM meta",
    "text for a run": "UPDATE meta SET value = 'abc' WHERE name = 'run'",
    "a number for a bundle": "UPDATE meta SET value = 99999999999999 WHERE name = 'bundle'",
    "a share in words": "UPDATE meta SET value = 'much' WHERE name LIKE 'max_share%'",
    "text for a contribution": "UPDATE payload SET bytes = 'abc'",
    "a number for a contribution": "UPDATE payload SET bytes = 5",
    "no message": "UPDATE payload SET bytes = x'ffff'",
    "a global state for a contribution": "UPDATE payload SET bytes = (SELECT payload FROM global)",
    "a contribution for a global state": "UPDATE global SET payload = (SELECT bytes FROM payload)",
    "a number for a global state": "UPDATE global SET payload = 3",
}


@pytest.mark.parametrize("change", FOREIGN)
def test_a_store_that_somebody_else_wrote_into_is_one_line(tmp_path: Path, change: str) -> None:
    _run(tmp_path / "s", "ffc", SENT)
    with contextlib.closing(sqlite3.connect(tmp_path / "s")) as db, db:
        db.execute(FOREIGN[change])
    with pytest.raises(StoreError, match="/s, expected what an aggregator writes, got "):
        solve_again(tmp_path / "s", manifest(name="ffc"), {"ridge": 1.0})
    if change in ("text for a run", "a number for a global state"):  # its aggregator sees the same
        with (
            pytest.raises(StoreError, match="what an aggregator"),
            DurableStore(tmp_path / "s", BUNDLE, "fleet") as store,
        ):
            store.state()
