"""What a device decides about roll-outs, what it remembers of them, and what it fetches; whatever is interrupted."""

from __future__ import annotations

import hashlib
import os
import random
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from edge_samples import fashion
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollout_peer import SEED, offer_of, trusted

from aggregator.orders import refusal
from contract.bundle import Bundle, read_bundle, write_bundle
from contract.errors import StoreError, UsageError
from contract.messages import Announcement, ClassRows, Receipt
from contract.offers import MAX_PIECES, Offer, Piece, Request
from contract.service_manager import ServiceManager
from contract.state import GlobalState
from contract.wire import decode
from edge_client import download as download_module
from edge_client import rollout, rollout_work
from edge_client.config import ClientConfig, settle_config
from edge_client.data import LocalData
from edge_client.download import Download
from edge_client.journal import Journal
from edge_client.probation import ProbationWatch
from edge_client.rollout import STARTS, Rollouts, Seat, considered
from edge_client.rollout_file import RolloutFile, bundle_file, part_file, read_rollouts
from edge_client.rollout_work import RolloutWork
from edge_client.seated import settle
from edge_client.self_test import Trial, failure, some_photos, tried_apart
from export.extend import extend_bundle
from protofleet import Predictor

RUN = bytes(4)
BLOB = random.Random(1).randbytes(10_000)


def seat(number: int, version: int, fleet: str = "home", directory: str = "") -> Seat:
    return Seat(f"{number:064x}", version, fleet, directory)


def offered(number: int, version: int, fleet: str = "", **fields: object) -> Offer:
    return Offer(bytes.fromhex(f"{number:064x}"), version, 1000, fleet=fleet, **fields)  # type: ignore[arg-type]


def verdict(known: Rollouts, offer: Offer, running: Seat, **fields: bool) -> rollout.Verdict:
    return considered(
        known, offer, running, **{"in_stage": True, "trusts": True, "wanted": True, "budget": False, **fields}
    )


# ── decisions ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_said_to_an_offer() -> None:
    known, running = Rollouts(floor=3), seat(1, 3)
    assert verdict(known, offered(2, 4), running) == rollout.Verdict("fetch", "fetching")
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
    after = rollout.activated(known, seat(2, 4), running)
    assert verdict(after, offered(3, 5), seat(2, 4)).what == "wait"
    back = rollout.rolled_back(after, "rejected: rows")
    assert verdict(back, offered(2, 4), running).word == "failed: rejected: rows"
    assert verdict(back, offered(3, 5), running).what == "fetch"
    assert len(rollout.word(7, "failed: " + "x" * 100)) == 64


def test_starts_that_do_not_get_through_end_a_probation() -> None:
    known = rollout.activated(Rollouts(), seat(2, 2), seat(1, 1))
    for _ in range(STARTS):
        known = rollout.started(known)
        assert known.active == seat(2, 2)
    assert rollout.started(rollout.got_through(known)).active == seat(2, 2)
    known = rollout.started(known)
    assert (known.active, known.probation) == (seat(1, 1), None)
    assert known.failed[seat(2, 2).sha256].back_to == seat(1, 1).sha256


def test_accuracy_that_falls_is_told_from_what_was_before() -> None:
    known = rollout.with_accuracy(Rollouts(), 0.9004)
    assert not rollout.has_fallen(known, 0.1)
    known = rollout.activated(known, seat(2, 2), seat(1, 1))
    assert not rollout.has_fallen(known, 0.81)
    assert rollout.has_fallen(known, 0.79)
    assert rollout.rolled_back(rollout.with_accuracy(known, 0.7), "").accuracy == 0.9


class Life(RuleBasedStateMachine):
    """A device's years: offers, starts, files that are named by hand, and bundles that turn out well or badly."""

    @initialize()
    def born(self) -> None:
        self.known = rollout.proved(Rollouts(), seat(1, 1))
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
            self.running = rollout.seat_of(made, before)
            self.known = rollout.activated(self.known, self.running, before)
            assert self.known.previous == before
            assert (self.running.fleet == before.fleet) == (self.running.directory == before.directory)

    @precondition(lambda self: self.known.probation is not None)
    @rule()
    def turns_out_well(self) -> None:
        self.known = rollout.proved(self.known, self.running)
        self.healthy.add(self.running.version)

    @precondition(lambda self: self.known.probation is not None)
    @rule()
    def turns_out_badly(self) -> None:
        before, self.known = self.known, rollout.rolled_back(self.known, "")
        self.failed.add(self.running.sha256)
        assert before.previous is not None
        self.running = before.previous

    @rule(through=st.booleans())
    def starts(self, through: bool) -> None:
        before, self.known = self.known, rollout.started(self.known)
        if self.known.active != before.active:
            assert before.previous is not None
            self.failed.add(self.running.sha256)
            self.running = before.previous
        self.known = rollout.got_through(self.known) if through else self.known

    @rule(number=st.integers(1, 9), version=st.integers(1, 9))
    def named_by_hand(self, number: int, version: int) -> None:
        named = seat(number, version)
        found = rollout.instead(self.known, named.sha256, named.fleet)
        if found is not None:
            assert found == self.running
            return
        try:
            known, running = rollout.given(self.known, named, trusts=True, where="F")
        except UsageError:
            assert version < max(*self.healthy, self.running.version)
            return
        self.known, self.running = rollout.proved(known, running), running
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
        file.change(rollout.proved, seat(1, 1))
        assert file.known.floor == 1
    assert not (tmp_path / "none").exists()
    with RolloutFile(tmp_path, make=True) as file:
        known = file.change(rollout.activated, seat(2, 2), seat(1, 1))
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


def test_a_bundle_that_runs_is_kept_for_the_way_back_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "f.bundle").write_bytes(b"one")
    one = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"
    with RolloutFile(tmp_path / "s", make=True) as file:
        file.keep(tmp_path / "f.bundle", one)
        assert bundle_file(tmp_path / "s", one).read_bytes() == b"one"
        with pytest.raises(StoreError, match="which runs"):
            file.keep(tmp_path / "f.bundle", "0" * 64)
        for name in (f"{'1' * 64}.part", f"{'2' * 64}.bundle"):
            (tmp_path / "s" / "bundles" / name).write_bytes(b"x")
        file.put(rollout.activated(Rollouts(), Seat(one, 2, "home"), seat(7, 1)))
        file.tidy("1" * 64)
        left = sorted(path.name for path in (tmp_path / "s" / "bundles").iterdir())
        assert left == [f"{'1' * 64}.part", f"{one}.bundle"]


# ── fetched ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def blob_offer(blob: bytes = BLOB) -> Offer:
    return Offer(hashlib.sha256(blob).digest(), 2, len(blob))


def pieces(found: Download, blob: bytes, size: int, now_s: float = 0.0) -> list[Piece]:
    """What an aggregator answers to the download's next request."""
    asked = found.request(RUN, now_s)
    if asked is None:
        return []
    found.asked(asked, now_s)
    end = min(asked.offset + asked.wanted_bytes, len(blob))
    starts = range(asked.offset, end, size)[:MAX_PIECES]
    return [Piece(RUN, asked.bundle, at, blob[at : min(at + size, end)]) for at in starts]


def test_a_download_that_is_cut_off_at_any_byte_goes_on_there(tmp_path: Path) -> None:
    """The process is gone at any moment, and with it any number of the file's last bytes, or they are zero."""
    rng, offer, path = random.Random(3), blob_offer(), tmp_path / "b" / "p"
    for _ in range(25):
        path.unlink(missing_ok=True)
        rounds = 0
        while True:
            rounds += 1
            found = Download(path, offer, rng)
            for piece in pieces(found, BLOB, 700)[: rng.randrange(1, 8)]:
                found.take(piece, 0.0)
            here, whole = found.have, found.is_whole
            found.close()
            assert path.read_bytes() == BLOB[:here]
            if whole:
                break
            os.truncate(path, rng.randrange(here - min(here, 500), here + 1))
        found = Download(path, offer, rng)
        assert found.is_right()
        found.close()
        assert rounds > 2


def test_lost_doubled_and_foreign_pieces_are_asked_for_again_and_never_kept(tmp_path: Path) -> None:
    rng, found, now_s = random.Random(4), Download(tmp_path / "b" / "p", blob_offer(), random.Random(5)), 0.0
    while not found.is_whole:
        came = [piece for piece in pieces(found, BLOB, 900, now_s) if rng.random() < 0.8]
        came += [Piece(RUN, b"another!", found.have, b"x" * 50), *came[:1]]
        for piece in came:
            found.take(piece, now_s)
        now_s += found.wait_s(now_s) or 0.0
    assert found.is_right()
    assert found.have == len(BLOB)
    found.take(Piece(RUN, found.offer.digest, found.have, b"more"), now_s)
    assert found.have == len(BLOB)
    found.begin_again()
    for _ in range(30):  # other bytes than were offered, and more of them
        for piece in pieces(found, BLOB[::-1] + b"beyond", 900, now_s):
            found.take(piece, now_s)
        now_s += 700.0
    assert (found.have, found.is_right()) == (len(BLOB), False)
    found.close()


def test_a_request_that_nobody_answers_is_made_ever_more_rarely(tmp_path: Path) -> None:
    found, now_s, times = Download(tmp_path / "b" / "p", blob_offer(), random.Random(6)), 0.0, []
    while now_s < 7200:
        asked = found.request(RUN, now_s)
        assert asked is not None
        found.asked(asked, now_s)
        wait_s = found.wait_s(now_s)
        assert wait_s is not None
        times.append(wait_s)
        now_s += wait_s
    assert 7 < times[0] < 13
    assert 400 < times[-1] < 800
    assert len(times) < 25
    found.connected()
    assert found.request(RUN, now_s) is not None
    found.close()


def test_a_disk_without_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "_MARGIN_BYTES", 1 << 62)
    with pytest.raises(StoreError, match=r"no room for the bundle .* MB free, got .* MB, try freeing space"):
        Download(tmp_path / "b" / "p", blob_offer(), random.Random())


# ── tried ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def paths(mnist_like_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A signed bundle, one that extends it, and one of another backbone, version 3."""
    folder = tmp_path_factory.mktemp("rollout")
    old = mnist_like_bundle("ncm", private_key=SEED)
    extend_bundle(old, ["hamster"], folder / "new.bundle", private_key=SEED)
    found = read_bundle(old)
    moved = {name: value * np.float32(1.01) for name, value in found.params.items()}
    manifest = msgspec.structs.replace(found.manifest, version=3, extractor="ab" * 32)
    parts = {"features": found.features, "train_step": None, "params": moved, "private_key": SEED}
    write_bundle(folder / "other.bundle", manifest, **parts)  # type: ignore[arg-type]
    return old, folder / "new.bundle", folder / "other.bundle"


def trial(path: Path, folder: Path, **fields: object) -> Trial:
    return Trial(**{"path": str(path), "public_key": trusted(folder).read_bytes(), "version": 2, **fields})  # type: ignore[arg-type]


def test_a_bundle_is_tried_with_the_parts_that_run_it(paths: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, new, other = paths
    first = read_bundle(old)
    photos = some_photos(fashion(first, 40, (0, 1)))
    extends = {"extends": first.sha256.hex(), "extractor": first.manifest.extractor}
    assert len(photos) == 8
    assert failure(trial(new, tmp_path, **extends, labels=tuple(map(int, photos.y))), photos.x) == ""
    colour = np.repeat(np.repeat(photos.x, 2, axis=1), 3, axis=3)
    assert (
        failure(trial(other, tmp_path, version=3), colour)
        == failure(trial(other, tmp_path, version=3), photos.x[:0])
        == ""
    )
    for path, fields, expected in (
        (new, {"version": 3}, "expected version 3, as offered, got version 2"),
        (other, {**extends, "version": 3}, "expected one that extends"),
        (new, {**extends, "extractor": "another"}, "expected one that extends"),
        (new, {"public_key": bytes(32)}, "Ed25519 signature"),
        (tmp_path / "none", {}, "cannot read bundle"),
    ):
        assert expected in failure(trial(path, tmp_path, **fields), photos.x)


def test_a_trial_takes_nothing_down_whatever_becomes_of_it(paths: tuple[Path, Path, Path], tmp_path: Path) -> None:
    given, none = trial(paths[1], tmp_path), np.zeros((0, 28, 28, 1), np.uint8)
    for code, expected in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with signal SIGSEGV"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("print('no json')", "ended with exit code 0"),
        ("import time; time.sleep(60)", "did not end in time"),
    ):
        found = tried_apart(given, none, patience_s=1.0, command=[sys.executable, "-S", "-c", code])
        assert found is not None
        assert expected in found
    stopping = threading.Event()
    stopping.set()
    assert tried_apart(given, none, stopping=stopping, command=[sys.executable, "-S", "-c", "input()"]) is None


# ── run ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def of(path: Path, folder: Path, **options: object) -> ClientConfig:
    named = {"bundle": str(path), "broker": "mqtt://h", "id": "pi-1", "state": str(folder / "s"), "data": "d"}
    return settle_config(None, {**named, "trust": str(trusted(folder)), **options})


def runs(path: Path, folder: Path, **options: object) -> Seat:
    """A start with this file."""
    config = of(path, folder, **options)
    with RolloutFile(folder / "s", make=True) as file:
        seated = settle(config, file, None if config.trust is None else trusted(folder).read_bytes(), lambda line: None)
        with seated.journal():
            seated.runs(file)
        return seated.seat


def test_an_older_signed_file_is_refused_whoever_copied_it(paths: tuple[Path, Path, Path], tmp_path: Path) -> None:
    old, new, _ = paths
    assert runs(old, tmp_path).version == 1
    assert runs(new, tmp_path).version == 2
    with pytest.raises(UsageError, match=r"--bundle .*expected version 2 or above, which has run here, got version 1"):
        runs(old, tmp_path)
    with pytest.raises(StoreError, match="another bundle"):  # without a key the journal says so, as ever
        runs(old, tmp_path, trust=None)
    assert runs(new, tmp_path).version == 2


class KilledError(BaseException):
    """The process is gone."""


class Faults:
    """Ends the process before or after the n-th of its steps on the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.after, self.steps = 10**9, False, 0
        for owner, name in ((os, "write"), (os, "replace"), (os, "fsync"), (os, "ftruncate"), (RolloutFile, "put")):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name)))

    def _wrapped(self, real: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **options: object) -> object:
            self.left, self.steps = self.left - 1, self.steps + 1
            if self.left == 0 and not self.after:
                raise KilledError
            found = real(*args, **options)
            if self.left == 0:
                raise KilledError
            return found

        return step


def goes_over(old: Path, new: Path, folder: Path, fleet: str = "") -> Seat:
    """A process that starts with the old file and is offered the new one, until that runs."""
    offer, blob, said = offer_of(new, fleet), new.read_bytes(), list[str]()
    with RolloutFile(folder / "s", make=True) as file:
        key = trusted(folder).read_bytes()
        seated = settle(of(old, folder), file, key, said.append)
        with seated.journal():
            seated.runs(file)
        if seated.seat.version > 1:
            return seated.seat
        work = RolloutWork(
            file,
            seated.seat,
            seated.bundle,
            seated.path,
            device_id="pi-1",
            terms=seated.terms,
            samples=lambda: LocalData(np.zeros((1, 28, 28, 1), np.uint8), np.zeros(1, np.int64)),
            manager=ServiceManager({}),
            stopping=threading.Event(),
            log=said.append,
        )
        try:
            fetch(work, offer, blob)
        finally:
            work.close()
        assert work.is_over, said
        assert file.known.active is not None
        return file.known.active


def fetch(work: RolloutWork, offer: Offer, blob: bytes) -> None:
    """All of it, from the announcement to the end."""
    asked: list[bytes] = []
    work.announced(Announcement(RUN, 1, "closed", "ncm", bytes(32), offer=offer))
    work.connected()
    for _ in range(100):
        work.send(lambda payload: not asked.append(payload), 0.0)
        while asked:
            request = decode(asked.pop())
            assert isinstance(request, Request)
            end = min(request.offset + request.wanted_bytes, len(blob))
            for at in range(request.offset, end, 1 << 19):
                work.take(Piece(RUN, request.bundle, at, blob[at : min(at + (1 << 19), end)]), 0.0)
        work.work(is_settled=True)
        if work.is_over:
            return


@pytest.mark.parametrize(
    ("fleet", "stride"), [("", 5), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("", "second"))]
)
def test_killed_at_any_step_the_old_bundle_runs_or_the_new_one(
    paths: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fleet: str, stride: int
) -> None:
    """What it does with the bundle before that is tested above, and writes nothing."""
    old, new = paths[0], paths[2] if fleet else paths[1]
    monkeypatch.setattr(rollout_work, "tried_apart", lambda given, photos, **_: "")
    faults, point = Faults(monkeypatch), 0
    first, second = read_bundle(old).sha256.hex(), read_bundle(new).sha256.hex()
    while True:
        point, folder = point + stride, tmp_path / str(point)
        folder.mkdir()
        trusted(folder)
        faults.left, faults.after = (point + 1) // 2, point % 2 == 0
        try:
            goes_over(old, new, folder, fleet)
        except KilledError:
            known = read_rollouts(folder / "s")
            now = first if known.active is None else known.active.sha256
            assert now in (first, second)
            if known.active is not None:
                for sha256 in (first, second):
                    assert hashlib.sha256(bundle_file(folder / "s", sha256).read_bytes()).hexdigest() == sha256
            faults.left = 10**9
            reached = goes_over(old, new, folder, fleet)
            assert (reached.sha256, reached.fleet) == (second, fleet or "fleet")
            assert not part_file(folder / "s", second).exists()
            back_again(folder, old, first)
            continue
        assert point > 12
        return


def back_again(folder: Path, old: Path, first: str) -> None:
    """Its first contribution is rejected: the old bundle runs, on the journal that it had."""
    with RolloutFile(folder / "s", make=True) as file:
        file.change(rollout.rolled_back, "rejected")
    assert runs(old, folder).sha256 == first


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def ncm_state(bundle: Bundle, version: int, seed: int) -> GlobalState:
    """Class means of these weights: random ones."""
    m, rng = bundle.manifest, np.random.default_rng(seed)
    rows = ClassRows(np.arange(m.classes, dtype=np.uint16), rng.normal(size=(m.classes, m.features)).astype(np.float32))
    return GlobalState(RUN, version, version, {"means": rows})


def test_answers_go_over_to_the_other_fleet_once_it_has_a_global_state_and_back(
    paths: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    old, _, other = paths
    first, second = read_bundle(old), read_bundle(other)
    state, x = tmp_path / "s", fashion(first, 12, (0, 1, 2)).x
    owner = {"device": "pi-1", "fleet": "home", "bundle": first.sha256, "lies_at": old}
    with Journal(state, **owner) as journal:  # type: ignore[arg-type]
        journal.keep_global(ncm_state(first, 1, seed=1))
    following = Predictor(state)
    before = following(x)
    with RolloutFile(state, make=True) as file:
        offer = offer_of(other, "away")
        running = Seat(first.sha256.hex(), 1, "home")
        away = rollout.seat_of(offer, running)
        file.change(rollout.activated, away, running)
        owner |= {"fleet": "away", "bundle": second.sha256, "lies_at": other}
        with Journal(state / away.directory, **owner) as to:  # type: ignore[arg-type]
            np.testing.assert_array_equal(following(x).scores, before.scores)
            np.testing.assert_array_equal(Predictor(state)(x).scores, before.scores)
            to.keep_global(ncm_state(second, 1, seed=2))
        after = following(x)
        assert following.bundle.sha256 == second.sha256
        np.testing.assert_array_equal(after.scores, Predictor(state)(x).scores)
        assert not np.allclose(after.scores, before.scores)
        file.change(rollout.rolled_back, "rejected")
        np.testing.assert_array_equal(following(x).scores, before.scores)
        assert following.bundle.sha256 == first.sha256


def test_a_record_that_is_being_made_remembers_nothing(tmp_path: Path) -> None:
    """Who answers from a state directory may look at it while its device starts for the first time, or was killed."""
    (tmp_path / "rollout.sqlite").touch()
    assert read_rollouts(tmp_path) == Rollouts()


@pytest.mark.parametrize(("refused", "lasts"), [({"a": "it was forgotten"}, True), ({}, False)])
def test_a_device_that_is_refused_does_not_blame_its_bundle(
    tmp_path: Path, refused: dict[str, str], lasts: bool
) -> None:
    """A device that is forgotten while a bundle is on probation: once admitted, it goes on with that bundle."""
    with RolloutFile(tmp_path, make=True) as file:
        file.change(rollout.activated, seat(2, 2), seat(1, 1))
        watch = ProbationWatch(file, lambda line: None)
        reason = refusal("a", refused) or "class rows"
        watch.settled(Receipt(RUN, 1, "ffc", "rejected", reason))
        assert (watch.is_on, watch.is_over) == (lasts, not lasts)
        watch.settled(Receipt(RUN, 2, "ffc", "committed"))
        assert (file.known.active is not None and file.known.active.version == 2) == lasts
