"""Answers that stay current: what a client writes while a predictor runs on its state directory is taken up, whole."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from edge_samples import fashion

import protofleet
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.files.sqlite import Database, Kind, Watch
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows
from protofleet.edge_client.journal.journal import Journal

BUNDLE = Path(protofleet.__file__).parent.parent / "lab" / "demo" / "shipped" / "fleet.bundle"
RUN, CLASSES = b"run1", 10
KIND = Kind("note", "--note", application_id=0x50464E54, steps=("CREATE TABLE note (word TEXT);",))


@pytest.fixture(scope="module")
def paths(mnist_like_bundle: Callable[..., Path]) -> dict[str, Path]:
    """The shipped bundle, which trains nothing, and one that trains."""
    return {"ncm": BUNDLE, "fedproto": mnist_like_bundle()}


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return fashion(read_bundle(BUNDLE), 40, tuple(range(10))).x


Opens = Callable[[str], tuple[Bundle, Journal]]


@pytest.fixture
def opened(paths: dict[str, Path], tmp_path: Path) -> Iterator[Opens]:
    """The journal of a device's client, which runs, and its bundle."""
    journals: list[Journal] = []

    def make(method: str) -> tuple[Bundle, Journal]:
        found = read_bundle(paths[method])
        owner = {"fleet": "f", "device": "d", "bundle": found.sha256}
        journals.append(Journal(tmp_path / "state", **owner, bundle_path=paths[method]))
        return found, journals[-1]

    yield make
    for journal in journals:
        journal.close()


def state(found: Bundle, version: int, *, kind: str = "means", scale: float = 0.5, run: bytes = RUN) -> GlobalState:
    """A global state whose rows point elsewhere in each version."""
    rows = np.random.default_rng(version).normal(size=(CLASSES, found.manifest.features))
    rows *= scale / np.linalg.norm(rows, axis=1, keepdims=True)
    return GlobalState(run, version, version, {kind: ClassRows(np.arange(CLASSES), rows.astype(np.float32))})


def test_each_new_global_state_is_taken_up_and_said_once(
    opened: Opens, x: np.ndarray, tmp_path: Path, said: list[str]
) -> None:
    found, journal = opened("ncm")
    journal.keep_global(state(found, 1))
    following = protofleet.Predictor(tmp_path / "state")
    pinned = protofleet.Predictor(tmp_path / "state", follow=False)
    before, extractor = following(x), following._ready.extractor
    assert (before.version, said) == (1, [])
    journal.keep_global(state(found, 2))
    after = following(x)
    fresh = protofleet.Predictor(tmp_path / "state")(x)
    assert (after.version, pinned(x).version) == (2, 1)
    assert following._ready.extractor is extractor  # the bundle's weights are what they were
    np.testing.assert_array_equal(after.scores, fresh.scores)
    np.testing.assert_array_equal(pinned(x).scores, before.scores)
    assert np.abs(after.scores - before.scores).max() > 0.01
    following(x)
    assert said == ["taken up: the bundle's weights, global version 2; answers by class_mean"]
    assert following.basis == "the bundle's weights, global version 2"


def test_a_new_run_counts_and_an_own_threshold_stays(opened: Opens, x: np.ndarray, tmp_path: Path) -> None:
    found, journal = opened("ncm")
    journal.keep_global(state(found, 3))
    predictor = protofleet.Predictor(tmp_path / "state")
    predictor.calibrate(x, 1.0)
    assert not predictor(x).unknown.any()
    with pytest.raises(UsageError, match="the novelty above which an image is unknown, expected a number"):
        protofleet.Predictor(tmp_path / "state", threshold=float("nan"))
    limit = predictor.calibrate(x, 0.5)
    journal.keep_global(state(found, 3, run=b"run2", scale=0.2))
    assert predictor.renew()
    assert predictor.threshold == limit != 2.0
    assert predictor._ready.known.state is not None
    assert predictor._ready.known.state.run == b"run2"
    assert not predictor.renew()


def test_own_weights_are_taken_up_with_what_belongs_to_them(opened: Opens, x: np.ndarray, tmp_path: Path) -> None:
    found, journal = opened("fedproto")
    journal.keep_global(state(found, 1, kind="prototypes"))
    predictor = protofleet.Predictor(tmp_path / "state", way="prototype")
    for number, rounds in ((1, "1 round"), (2, "2 rounds")):
        times = np.float32(1.0 + number)
        trained = {name: found.params[name] * times for name in found.manifest.names("param", "buffer")}
        journal.commit_round((RUN, number, "fedproto"), weights=trained, payload=None, limit_bytes=0, metrics={})
        scores = predictor(x).scores
        assert predictor.basis == f"own weights after {rounds}, global version 1"
        np.testing.assert_array_equal(scores, protofleet.Predictor(tmp_path / "state", way="prototype")(x).scores)


def test_answers_wait_for_nobody_who_takes_something_up(opened: Opens, x: np.ndarray, tmp_path: Path) -> None:
    found, journal = opened("ncm")
    journal.keep_global(state(found, 1))
    predictor, versions = protofleet.Predictor(tmp_path / "state"), list[int]()
    journal.keep_global(state(found, 2))
    with predictor._renewing:
        asking = threading.Thread(target=lambda: versions.append(predictor(x).version), daemon=True)
        asking.start()
        asking.join(20)
        assert versions == [1]
    assert predictor(x).version == 2


def test_a_state_that_cannot_be_true_is_not_taken_up(
    opened: Opens, x: np.ndarray, tmp_path: Path, said: list[str]
) -> None:
    found, journal = opened("fedproto")
    journal.keep_global(state(found, 1, kind="prototypes"))
    predictor = protofleet.Predictor(tmp_path / "state", way="prototype")
    before = predictor(x)
    journal.keep_global(state(found, 2, kind="prototypes", scale=1e9))
    for _ in range(3):
        after = predictor(x)
    assert after.version == 1
    np.testing.assert_array_equal(after.scores, before.scores)
    assert len(said) == 1
    assert said[0].startswith("global version 2 is not taken up: a prototype of norm 1e+09")
    journal.keep_global(state(found, 3, kind="prototypes"))
    assert predictor(x).version == 3


def test_what_cannot_be_read_or_is_gone_leaves_the_answers_as_they_were(
    opened: Opens, x: np.ndarray, tmp_path: Path, said: list[str]
) -> None:
    found, journal = opened("ncm")
    journal.keep_global(state(found, 1))
    predictor = protofleet.Predictor(tmp_path / "state")
    before = predictor(x)
    with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as db:
        db.execute("UPDATE global SET payload = x'00'")
    db.close()
    after = predictor(x)
    assert said[0].startswith("nothing new is taken up: journal ")
    journal.keep_global(GlobalState(RUN, 2, 2, {"head": state(found, 2).rows["means"]}))  # no class means any more
    assert predictor(x).version == 2  # it answers by what there is now
    shutil.rmtree(tmp_path / "state")
    assert predictor(x).version == 2
    np.testing.assert_array_equal(after.scores, before.scores)
    assert (after.version, len(said)) == (1, 2)


def test_while_states_come_each_answer_is_of_one_of_them(opened: Opens, x: np.ndarray, tmp_path: Path) -> None:
    """Answers of three threads, while versions are written: each is just what its version gives, never a mixture."""
    found, journal = opened("ncm")
    x = x[:4]
    journal.keep_global(state(found, 1))
    predictor, last = protofleet.Predictor(tmp_path / "state"), 12
    seen: list[protofleet.predictor.predictor.Answers] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            seen.append(predictor(x))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, last + 1):
        journal.keep_global(state(found, version))
    over.set()
    for thread in threads:
        thread.join()
    assert predictor(x).version == last
    wanted: dict[int, np.ndarray] = {}
    for version in {each.version for each in seen}:
        journal.keep_global(state(found, version))
        wanted[version] = predictor(x).scores
    assert len(wanted) > 1
    for each in seen:
        np.testing.assert_array_equal(each.scores, wanted[each.version])


def test_an_aggregators_store_is_followed_too(paths: dict[str, Path], x: np.ndarray, tmp_path: Path) -> None:
    from protofleet.aggregator.store.durable_store import DurableStore

    found = read_bundle(paths["ncm"])
    with DurableStore(tmp_path / "s.sqlite", found.sha256, "f") as store:
        run = store.run
        predictor = None
        for version in (1, 2):
            made = state(found, version, run=run)
            store.open_round(version, "ncm", 1, 0.0)
            store.close_round(version, 0.0, CLASSES, made)
            predictor = predictor or protofleet.Predictor(paths["ncm"], store=tmp_path / "s.sqlite")
            assert predictor(x).version == version


# ── the watch ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_watch_sees_each_commit_once_also_of_a_file_that_comes_later_or_again(tmp_path: Path) -> None:
    path = tmp_path / "note.sqlite"
    watch = Watch(path)
    assert not watch.changed()
    for _ in range(2):
        with sqlite_note(path) as note:
            assert [watch.changed(), watch.changed()] == [True, False]
            with note.transaction() as db:
                db.execute("INSERT INTO note VALUES ('a')")
            assert [watch.changed(), watch.changed()] == [True, False]
            with note.guard():
                note.connection.execute("SELECT * FROM note").fetchall()
            assert not watch.changed()
        shutil.move(path, tmp_path / "elsewhere")
        assert not watch.changed()
    watch.close()


class sqlite_note:
    """A file of ours, closed at the end."""

    def __init__(self, path: Path) -> None:
        self._file = Database(path, KIND)

    def __enter__(self) -> Database:
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.close()


def test_who_waits_for_a_file_gets_it_when_it_is_free(tmp_path: Path) -> None:
    first = Database(tmp_path / "n.sqlite", KIND)
    timer = threading.Timer(0.2, first.close)
    timer.start()
    Database(tmp_path / "n.sqlite", KIND, wait_s=20).close()
    timer.join()
    with sqlite_note(tmp_path / "n.sqlite"), pytest.raises(protofleet.ProtofleetError, match="its only user"):
        Database(tmp_path / "n.sqlite", KIND, wait_s=0.05)
