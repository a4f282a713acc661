"""A bundle that is tried, and run: by whom, whatever is interrupted, and who answers meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from edge_samples import fashion
from rollout_peer import SEED, offer_of, trusted

from protofleet import Predictor
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle, write_bundle
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import BundleError, StoreError, UsageError
from protofleet.contract.settings.sources import read_settings
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, ClassRows
from protofleet.contract.wire.rollout_messages import Offer, Piece, Request
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.rollout import download as download_module
from protofleet.edge_client.rollout import rollout_decisions, rollout_work
from protofleet.edge_client.rollout.active_bundle import ActiveBundle, find_active_bundle
from protofleet.edge_client.rollout.rollout_decisions import InstalledBundle
from protofleet.edge_client.rollout.rollout_file import RolloutFile, bundle_file, part_file, read_rollouts
from protofleet.edge_client.rollout.rollout_work import RolloutWork
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.trials.bundle_trial import Trial, failure, some_photos, tried_apart
from protofleet.export.bundles.extend import extend_bundle

RUN = bytes(4)


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
    return Trial(**{"path": str(path), "public_keys": (trusted(folder).read_bytes(),), "version": 2, **fields})  # type: ignore[arg-type]


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
        (new, {"public_keys": (bytes(32),)}, "Ed25519 signature"),
        (tmp_path / "none", {}, "cannot read bundle"),
    ):
        assert expected in failure(trial(path, tmp_path, **fields), photos.x)


_ENDLESS = "import time; time.sleep(600)"


def test_a_trial_takes_nothing_down_whatever_becomes_of_it(paths: tuple[Path, Path, Path], tmp_path: Path) -> None:
    given, none = trial(paths[1], tmp_path), np.zeros((0, 28, 28, 1), np.uint8)
    for code, patience_s, expected in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 300.0, "ended with signal SIGSEGV"),
        ("raise SystemExit(3)", 300.0, "ended with exit code 3"),
        ("print('no json')", 300.0, "ended with exit code 0"),
        (_ENDLESS, 0.2, "did not end in time"),
    ):
        found = tried_apart(given, none, patience_s=patience_s, command=[sys.executable, "-S", "-c", code])
        assert found is not None
        assert expected in found
    stopping = threading.Event()
    stopping.set()
    assert tried_apart(given, none, stopping=stopping, command=[sys.executable, "-S", "-c", _ENDLESS]) is None


# ── run ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def of(path: Path, folder: Path, **options: object) -> ClientSettings:
    named = {"bundle": str(path), "broker": "mqtt://h", "id": "pi-1", "state": str(folder / "s"), "data": "d"}
    return read_settings(ClientSettings, {**named, "trust": str(trusted(folder)), **options})


def runs(path: Path, folder: Path, **options: object) -> InstalledBundle:
    """A start with this file."""
    config = of(path, folder, **options)
    with RolloutFile(folder / "s", make=True) as file:
        active = find_active_bundle(config, file, () if config.trust is None else (trusted(folder).read_bytes(),))
        with active.journal():
            active.runs(file)
        return active.installed


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


def working(file: RolloutFile, active: ActiveBundle) -> RolloutWork:
    return RolloutWork(
        file,
        active.installed,
        active.bundle,
        active.path,
        device_id="pi-1",
        terms=active.terms,
        samples=lambda: LocalData(np.zeros((1, 28, 28, 1), np.uint8), np.zeros(1, np.int64)),
        manager=ServiceManager({}),
        stopping=threading.Event(),
    )


def goes_over(old: Path, new: Path, folder: Path, fleet: str = "") -> InstalledBundle:
    """A process that starts with the old file and is offered the new one, until that runs."""
    offer, blob = offer_of(new, fleet), new.read_bytes()
    with RolloutFile(folder / "s", make=True) as file:
        key = trusted(folder).read_bytes()
        active = find_active_bundle(of(old, folder), file, (key,))
        with active.journal():
            active.runs(file)
        if active.installed.version > 1:
            return active.installed
        work = working(file, active)
        try:
            fetch(work, offer, blob)
        finally:
            work.close()
        assert work.is_over
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
        if work.is_over or "failed" in work.versions().get("rollout", ""):
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
        file.change(rollout_decisions.rolled_back, "rejected")
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
    owner = {"device": "pi-1", "fleet": "home", "bundle": first.sha256, "bundle_path": old}
    with Journal(state, **owner) as journal:  # type: ignore[arg-type]
        journal.keep_global(ncm_state(first, 1, seed=1))
    following = Predictor(state)
    before = following(x)
    with RolloutFile(state, make=True) as file:
        offer = offer_of(other, "away")
        running = InstalledBundle(first.sha256.hex(), 1, "home")
        away = rollout_decisions.installed_of(offer, running)
        file.change(rollout_decisions.activated, away, running)
        owner |= {"fleet": "away", "bundle": second.sha256, "bundle_path": other}
        with Journal(state / away.directory, **owner) as to:  # type: ignore[arg-type]
            np.testing.assert_array_equal(following(x).scores, before.scores)
            np.testing.assert_array_equal(Predictor(state)(x).scores, before.scores)
            to.keep_global(ncm_state(second, 1, seed=2))
        after = following(x)
        assert following.bundle.sha256 == second.sha256
        np.testing.assert_array_equal(after.scores, Predictor(state)(x).scores)
        assert not np.allclose(after.scores, before.scores)
        file.change(rollout_decisions.rolled_back, "rejected")
        np.testing.assert_array_equal(following(x).scores, before.scores)
        assert following.bundle.sha256 == first.sha256


# ── an offer that comes and goes ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def work(paths: tuple[Path, Path, Path], tmp_path: Path) -> Iterator[RolloutWork]:
    """Of a device that runs the old bundle."""
    with RolloutFile(tmp_path / "s", make=True) as file:
        active = find_active_bundle(of(paths[0], tmp_path), file, (trusted(tmp_path).read_bytes(),))
        made = working(file, active)
        yield made
        made.close()


def test_an_offer_that_is_withdrawn_stops_everything_and_goes_on_later(
    work: RolloutWork, paths: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_work, "tried_apart", lambda given, photos, **_: "")
    offer, blob = offer_of(paths[1]), paths[1].read_bytes()
    without, part = Announcement(RUN, 1, "closed", "ncm", bytes(32)), part_file(tmp_path / "s", offer.sha256.hex())
    work.connected()
    work.announced(replace(without, offer=offer))
    work.take(Piece(RUN, offer.digest, 0, blob[:1000]), 0.0)
    work.announced(without)
    assert (part.stat().st_size, work.wait_s(0.0)) == (1000, None)
    work.take(Piece(RUN, offer.digest, 1000, blob[1000:]), 0.0)
    assert part.stat().st_size == 1000
    work.announced(replace(without, offer=offer))
    work.take(Piece(RUN, offer.digest, 1000, blob[1000:]), 0.0)
    for _ in range(3):
        work.work(is_settled=False)
    assert work.versions()["rollout"] == "2 testing"
    work.announced(without)
    assert not work.work(is_settled=True)
    assert not work.is_over
    fetch(work, offer, blob)
    assert work.is_over


def test_bytes_that_are_others_than_were_offered_are_fetched_three_times(
    work: RolloutWork, paths: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, blob = offer_of(paths[1]), paths[1].read_bytes()
    begun, begin_again = [], download_module.Download.begin_again
    monkeypatch.setattr(download_module.Download, "begin_again", lambda self: begun.append(begin_again(self)))
    fetch(work, offer, blob[::-1])
    assert len(begun) == 3
    assert (work.is_over, work.versions()["rollout"]) == (False, "2 failed: wrong bytes")
    assert not part_file(tmp_path / "s", offer.sha256.hex()).exists()


def test_a_self_test_that_takes_the_device_down_is_made_three_times(
    paths: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = Mock(side_effect=[None, KilledError(), KilledError(), BlockingIOError(11, "x"), None, KilledError()])
    offer, blob, key, words = offer_of(paths[1]), paths[1].read_bytes(), trusted(tmp_path).read_bytes(), []
    monkeypatch.setattr(rollout_work, "tried_apart", trials)
    for _ in range(7):
        with RolloutFile(tmp_path / "s", make=True) as file:
            work = working(file, find_active_bundle(of(paths[0], tmp_path), file, (key,)))
            with contextlib.suppress(KilledError):
                work.announced(Announcement(RUN, 1, "closed", "ncm", bytes(32), offer=offer))
                work.take(Piece(RUN, offer.digest, 0, blob), 0.0)
                assert work.work(is_settled=True) and work.work(is_settled=True)  # noqa: PT018
            words.append(work.versions()["rollout"])
            work.close()
    assert (words[:3], words[3]) == (["2 testing"] * 3, "2 refused: no room for its self-test")
    assert words[4:] == [*["2 testing"] * 2, "2 failed: 3 self-tests ended this device"]


def test_a_full_disk_is_said_and_asked_again(
    work: RolloutWork, paths: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = Announcement(RUN, 1, "closed", "ncm", bytes(32), offer=offer_of(paths[1]))
    with monkeypatch.context() as full:
        full.setattr(download_module, "_MARGIN_BYTES", 1 << 62)
        work.announced(offered)
    work.announced(offered)
    assert work.versions()["rollout"] == "2 refused: the disk takes no more"
    wait_s = work.wait_s(time.monotonic())
    assert wait_s is not None
    assert 590 < wait_s <= 600
    monkeypatch.setattr(rollout_work, "_AGAIN_S", 0.0)
    work._paused_until_s = time.monotonic() - 1
    assert work.work(is_settled=True)
    assert work.versions()["rollout"] == "2 fetching"


def test_starts_with_what_a_roll_out_brought_are_counted_and_with_nothing_else(
    paths: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """A file that is refused says nothing of the bundle on probation; one that cannot be read gives it up."""
    old, new, other = paths
    goes_over(old, new, tmp_path)
    found = read_bundle(old)
    parts = {"features": found.features, "train_step": None, "params": found.params, "private_key": SEED}
    write_bundle(tmp_path / "mine", msgspec.structs.replace(found.manifest, provenance="mine"), **parts)  # type: ignore[arg-type]
    for _ in range(6):
        with pytest.raises(UsageError, match="expected version 2 or above"):
            runs(tmp_path / "mine", tmp_path)
    assert read_rollouts(tmp_path / "s").probation == rollout_decisions.Probation()
    kept = bundle_file(tmp_path / "s", read_bundle(new).sha256.hex())
    kept.rename(tmp_path / "moved")
    assert runs(new, tmp_path).version == 2  # lost, and given by hand
    (tmp_path / "moved").rename(kept)
    assert runs(tmp_path / "gone", tmp_path).version == 2
    assert read_rollouts(tmp_path / "s").probation == rollout_decisions.Probation(2)
    kept.write_bytes(b"PK, once")
    assert runs(old, tmp_path).version == 1
    assert read_rollouts(tmp_path / "s").failed[read_bundle(new).sha256.hex()].reason == "its file cannot be read"
    with pytest.raises(StoreError, match="another bundle"):  # a person's decision, which this journal does not allow
        runs(other, tmp_path)


def test_a_healthy_bundle_whose_file_is_gone_brings_nothing_older_back(
    paths: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    first, second = (
        InstalledBundle(read_bundle(path).sha256.hex(), number, "fleet") for number, path in enumerate(paths[:2], 1)
    )
    with RolloutFile(tmp_path / "s", make=True) as file:
        file.put(
            rollout_decisions.proved(rollout_decisions.activated(rollout_decisions.Rollouts(), second, first), second)
        )
        file.keep(paths[0], first.sha256)
    with pytest.raises(BundleError, match="cannot read bundle"):
        runs(paths[0], tmp_path)
    assert read_rollouts(tmp_path / "s").active == second
