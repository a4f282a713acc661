"""Four more files that somebody has changed: a device's ledger, what it was taught, its photos, the helper's ledger.

Each is refused in one line or goes on. What they promise is kept by whoever reads them wrong, too: a changed ledger may
state another sum, and never a budget that is none; a changed helper's ledger opens no share that is written there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from aggregator_samples import BUNDLE, manifest
from blinded_samples import PUBLIC, RUN

from protofleet.aggregator.helper import ledger as helper_ledger
from protofleet.aggregator.helper.ledger import Share
from protofleet.aggregator.helper.witness import Witness
from protofleet.contract.errors import DataError, StoreError, UsageError, WireError
from protofleet.edge_client.data.learned import FILE as LEARNED
from protofleet.edge_client.data.learned import Learned, LearnedFile, example_of
from protofleet.edge_client.photos.kept_photo import NewPhoto
from protofleet.edge_client.photos.photo_ring import FILE as PHOTOS
from protofleet.edge_client.photos.photo_ring import PhotoRing, PhotosBeside
from protofleet.edge_client.privacy import ledger as edge_ledger
from protofleet.edge_client.privacy.elapsed_time import Moment
from protofleet.edge_client.privacy.ledger import Cost, Entry, Ledger, Terms, digest_of, read_ledger
from tests.attacks.choices import Choices
from tests.attacks.damaged_sqlite import write_damaged
from tests.attacks.guard import scratch
from tests.attacks.promises import is_one_line, may_refuse

LONGEST_BYTES = 512
FLEET, MANIFEST = "fleet", manifest()
NOW, LATER = Moment("boot", 100.0, 1.8e9), Moment("other", 50.0, 1.8e9 + 1e5)
IMAGES = np.random.default_rng(1).integers(0, 255, (3, *MANIFEST.input_shape), np.uint8)
_OURS = (StoreError, UsageError, DataError)


def run(data: bytes) -> None:
    choices = Choices(data)
    good, use = choices.one_of(_KINDS)
    with scratch() as folder:
        write_damaged(folder / LEARNED, good(), choices)
        may_refuse(lambda: use(folder / LEARNED), *_OURS)


# ── a device's ledger ───────────────────────────────────────────────────────────────────────────────────────────────


def _entry(number: int, **cost: float) -> Entry:
    key = (FLEET, b"run1", number, "ncm", "unit-means", "f32", 5, 100)
    return Entry("round", *key, digest_of(bytes([number])), Cost(**cost))


def _use_ledger(path: Path) -> None:
    """As a device that has it, then as who reads along."""
    may_refuse(lambda: _go_on(path), *_OURS)
    may_refuse(lambda: _read(path), *_OURS)


def _go_on(path: Path) -> None:
    with Ledger(path) as ledger:
        before = ledger.spent()
        steps: tuple[Callable[[], object], ...] = (
            lambda: ledger.put_terms(Terms(2.0, 1e-6)),
            lambda: _waits(ledger),
            lambda: ledger.newest(FLEET, b"run1", 1, "ncm"),
            lambda: ledger.record_missing(FLEET, [(b"run1", 7, "ncm")], LATER),
            lambda: ledger.record(_entry(9, add_remove=0.5), LATER),
        )
        for step in steps:
            may_refuse(step, *_OURS)
        after = ledger.spent()
        assert after.releases >= before.releases, "a release was forgotten"
        assert all(total >= 0 for name in ("add-remove", "replace") for total in ledger.spent().of(name))


def _waits(ledger: Ledger) -> None:
    assert ledger.free_in_s(1, 86_400.0, LATER) >= 0, "not a time"


def _read(path: Path) -> None:
    entries, spent, terms = read_ledger(path)
    assert spent.releases == sum(entry.what != "shown" for entry in entries)
    assert terms.epsilon is None or math.isfinite(terms.epsilon)


@functools.cache
def _good_ledger() -> bytes:
    with scratch() as folder:
        path = folder / edge_ledger.FILE
        with Ledger(path) as ledger:
            ledger.put_terms(Terms(4.0, 1e-6))
            for number, cost in enumerate(({"add_remove": 0.1, "replace": 0.2}, {}), start=1):
                ledger.record(_entry(number, **cost), NOW)
        return path.read_bytes()


# ── what it was taught ──────────────────────────────────────────────────────────────────────────────────────────────


def _use_learned(path: Path) -> None:
    learned = Learned(path.parent)
    try:
        for step in (learned.look, learned.ids, lambda: learned.numbers(MANIFEST), lambda: _decoded(learned)):
            may_refuse(step, *_OURS)
    finally:
        learned.close()
    taught = LearnedFile(path.parent, MANIFEST.labels)
    example = example_of(IMAGES[0], MANIFEST)
    for act in (lambda: taught.learn(example, "class-1"), lambda: taught.unlearn(example)):
        may_refuse(act, *_OURS)


def _decoded(learned: Learned) -> None:
    data = learned.decoded(MANIFEST)
    assert data.x.dtype == np.uint8
    assert data.x.shape == (len(learned), *MANIFEST.input_shape)
    assert len(data.y) == 0 or 0 <= data.y.min() <= data.y.max() < MANIFEST.classes


@functools.cache
def _good_learned() -> bytes:
    with scratch() as folder:
        taught = LearnedFile(folder, MANIFEST.labels)
        for image, label in zip(IMAGES, MANIFEST.labels, strict=True):
            taught.learn(example_of(image, MANIFEST), label)
        return (folder / LEARNED).read_bytes()


# ── the photos that it keeps ────────────────────────────────────────────────────────────────────────────────────────


def _photo(number: int) -> NewPhoto:
    return NewPhoto(IMAGES[number], IMAGES[number], f"photo {number}", 1.0, np.ones(4, np.float32) / 2, "class-1", 0.5)


def _use_photos(path: Path) -> None:
    path = path.rename(path.with_name(PHOTOS))
    beside = PhotosBeside(path.parent)
    for look in (beside.photos, beside.features, lambda: beside.naming(beside.photos())):
        may_refuse(look, *_OURS)
    may_refuse(lambda: [beside.image(photo) for photo in beside.photos()], *_OURS)
    may_refuse(lambda: _keep(path), *_OURS)


def _keep(path: Path) -> None:
    ring = PhotoRing(path.parent, "net", limit_bytes=1 << 20)
    try:
        for step in (lambda: ring.keep(_photo(2)), lambda: ring.committed(ring.namings), ring.photos, ring.features):
            may_refuse(step, *_OURS)
    finally:
        ring.close()


@functools.cache
def _good_photos() -> bytes:
    with scratch() as folder:
        ring = PhotoRing(folder, "net")
        for number in range(2):
            ring.keep(_photo(number))
        ring.close()
        return (folder / PHOTOS).read_bytes()


# ── the helper's ──────────────────────────────────────────────────────────────────────────────────────────────────


def _share(device: str, round: int) -> Share:
    return Share(RUN, round, "ncm", device, f"{device} {round}".encode().ljust(32))


def _use_helper(path: Path) -> None:
    with _helpers(path) as ledger:
        for digest in (bytes([1]) * 32, bytes([9]) * 32):
            if ledger.is_open(digest):
                may_refuse(lambda digest=digest: ledger.sum(digest), *_OURS)  # type: ignore[misc]
        shares = [_share(device, round) for round in (1, 2) for device in "abcd"]
        used = {share for share in shares if ledger.why_used(share)}
        for round, digest in ((1, b"x" * 32), (2, b"y" * 32)):
            asked = [share for share in shares if share.round == round]
            try:
                ledger.open(digest, asked, np.ones(3, np.uint64), least=2, at=1.0)
            except WireError as error:
                is_one_line(error)
                continue
            assert not used & set(asked), "a share was opened twice"
            assert all(ledger.why_used(share) for share in asked)


def _helpers(path: Path) -> helper_ledger.Ledger:
    witness = Witness(path.with_name("key"), FLEET, PUBLIC.seal)
    return helper_ledger.Ledger(path, fleet=FLEET, key=PUBLIC.seal, witness=witness)


@functools.cache
def _good_helper() -> bytes:
    with scratch() as folder:
        with _helpers(folder / "l") as ledger:
            asked = [_share(device, 1) for device in "abcd"]
            ledger.open(bytes([1]) * 32, asked, np.arange(3, dtype=np.uint64), least=2, at=1.0)
        return (folder / "l").read_bytes()


_KINDS = (
    (_good_ledger, _use_ledger),
    (_good_learned, _use_learned),
    (_good_helper, _use_helper),
    (_good_photos, _use_photos),
)


_VALUES = (0, 4, 7, 8, 9, 11)  # NULL, a number, infinity, words, bytes, other bytes


def seeds() -> Iterable[bytes]:
    assert len(BUNDLE) == 32
    for kind in range(len(_KINDS)):
        yield bytes([kind, 0, 0])
        yield bytes([kind, 0, 1, 0, 9, 0, 0, 9])
        for table in range(4):
            for what in (0, 1, 2, 4, 8):
                yield bytes([kind, 1, 0, table, what, table, what + 1, 0, 7, 3, 9, 2, 1])
            for column in range(14 if table < 3 and kind == 0 else 6):
                for value in _VALUES[column % 3 :: 3]:
                    yield bytes([kind, 1, 0, table, 9, column, value, 2, 65, 66, 0, 0, 0, 3, 1, 2, 3])
