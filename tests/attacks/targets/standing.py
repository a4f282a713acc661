"""Stores of standing sums and of blinded rounds that somebody has changed: refused in one line, or gone on from.

Beside what `store.py` has: sums that stand, orders, keys and invitations, shares with their seeds, and a set
that the helper is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from aggregator_samples import BUNDLE, CLASSES, WIDTH, gram, manifest
from blinded_samples import KEY, PUBLIC, signer

from protofleet.aggregator.coordinators.coordinator import Coordinator
from protofleet.aggregator.coordinators.kinds import rounds_of, standing_sums
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.stored_run import stored_run
from protofleet.contract.bundle.bundle_file import extractor_of
from protofleet.contract.errors import ProtofleetError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.identity.signatures import Signer, enrolment_of, invitation_key
from protofleet.contract.methods import method
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution, Status
from protofleet.contract.wire.messages import Opened as HelperOpened
from protofleet.edge_client.privacy.blinded_shares import Blinding
from tests.attacks.choices import Choices
from tests.attacks.damaged_sqlite import write_damaged
from tests.attacks.guard import scratch
from tests.attacks.promises import may_refuse

LONGEST_BYTES = 512
FLEET, MANIFEST = "fleet", manifest(name="ncm")
STANDING = Settings(standing=True, every=60.0, method="ncm")
BLINDED = Settings(method="ffc", rounds=3, calibrate=False, helper=PUBLIC, least=2, min_clients=2, deadline=60.0)


def run(data: bytes) -> None:
    choices = Choices(data)
    good, use = choices.one_of(((_good_standing, _stand), (_good_blinded, _blind)))
    with scratch() as folder:
        path = folder / "s"
        write_damaged(path, good(), choices)
        for act in (lambda: _read(path), lambda: use(path), lambda: use(path)):
            may_refuse(act, ProtofleetError)


def _read(path: Path) -> None:
    with stored_run(path) as stored:
        stored.state()
        stored.closed_rounds()


# ── standing sums ───────────────────────────────────────────────────────────────────────────────────────────────────


def _sums(seed: int) -> Statistic:
    rng = np.random.default_rng(seed)
    return UnitMeans.of(unit_rows(rng.normal(size=(12, WIDTH))), rng.integers(0, CLASSES, 12), CLASSES)


def _standing(run: bytes, generation: int, seed: int) -> bytes:
    key = {"run": run, "round": generation, "method": "ncm", "bundle": BUNDLE, "standing": "present"}
    return encode(Contribution.of(_sums(seed), **key), "f64")  # type: ignore[arg-type]


def _stand(path: Path) -> None:
    """Sums come, one is taken out, a head is made, the enrolled are looked at, and it is started anew."""
    with DurableStore(path, BUNDLE, FLEET) as store:
        core = standing_sums(store, MANIFEST, BUNDLE, STANDING, now=0.0, wall=lambda: 1e9)
        core.status("a", encode(Status(True, b"instance", 1)), 0.0)
        core.take([("a", _standing(core.parts.run, 9, 3)), ("d", _standing(core.parts.run, 1, 4))], 1.0)
        core.take(
            [("b", encode(Contribution.withdrawal(run=core.parts.run, round=9, method="ncm", bundle=BUNDLE)))], 1.0
        )
        _turn(core)
        _enrolments(store)


def _turn(core: Coordinator) -> None:
    for now in (2.0, 100.0, 1000.0):
        for _ in range(20):
            if core.advance(now, 1e9 + now) is None:
                break
        core.stalled(now)  # type: ignore[attr-defined]
        encode(core.announcement())


def _enrolments(store: DurableStore) -> None:
    tables = store.enrolment
    keys = tables.keys()
    assert all(key is None or isinstance(key, bytes) for key in keys.values())
    tables.intruders()
    tables.invitation("i")
    tables.enrol("n", bytes(32), 1e9)
    tables.revoke("a", 1e9)


@functools.cache
def _good_standing() -> bytes:
    with scratch() as folder:
        path = folder / "s"
        with DurableStore(path, BUNDLE, FLEET) as store:
            core = standing_sums(store, MANIFEST, BUNDLE, STANDING, now=0.0, wall=lambda: 1e9)
            core.take([(name, _standing(core.parts.run, 1, n)) for n, name in enumerate("abc")], 0.0)
            _turn(core)
            core.take([("a", _standing(core.parts.run, 2, 7))], 1.0)
            store.enrolment.enrol("a", Signer(bytes(32)).public_key, 1e9)
            store.enrolment.invite("i", invitation_key(bytes(20)), 2e9)
            encode(enrolment_of(FLEET, "i", Signer(bytes(32)).public_key, bytes(20)))
        give(path, "forget", "c", "its operator")
        return path.read_bytes()


# ── blinded rounds ──────────────────────────────────────────────────────────────────────────────────────────────────


def _share(core: RoundCoordinator, device: str, seed: int) -> bytes:
    a = core.announcement()
    plain = Contribution.of(
        gram(seed),
        run=core.parts.run,
        round=a.round,
        method="ffc",
        bundle=BUNDLE,
        extractor=extractor_of(MANIFEST, BUNDLE, method("ffc")),
    )
    each = Blinding(MANIFEST, fleet=FLEET, device=device, helper=KEY.public, signer=signer(device))
    return encode(each.blinded(plain, a))


@functools.cache
def _sample_share() -> tuple[bytes, bytes]:
    """A good share of the store's first round, and the run that it is of."""
    with scratch() as folder, DurableStore(folder / "s", BUNDLE, FLEET) as store:
        core = _blinded(store)
        return _share(core, "d", 5), core.parts.run


def _blinded(store: DurableStore) -> RoundCoordinator:
    core = rounds_of(store, MANIFEST, BUNDLE, BLINDED, now=0.0)
    for device in "abd":
        core.status(device, encode(Status(True, b"instance", 1)), 0.0)
    core.advance(10.0, 1e9)
    return core


def _blind(path: Path) -> None:
    """Another share comes, the helper is asked, and answers."""
    with DurableStore(path, BUNDLE, FLEET) as store:
        core = _blinded(store)
        payload, _ = _sample_share()
        core.take([("d", payload)], 10.0)
        _turn(core)
        for part in core.helper.asks(4096):
            encode(part)
            key = (part.run, part.round, part.method, part.digest)
            words = np.arange(CLASSES, dtype=np.uint64)
            core.helper.hear(HelperOpened(*key, 0, 1, "opened", words))
            _turn(core)
            core.helper.hear(HelperOpened(*key, 0, 1, "refused", words[:0], "no", {"a": "why"}))
        _turn(core)


@functools.cache
def _good_blinded() -> bytes:
    with scratch() as folder:
        path = folder / "s"
        with DurableStore(path, BUNDLE, FLEET) as store:
            core = _blinded(store)
            core.take([(device, _share(core, device, n)) for n, device in enumerate("abd")], 10.0)
            for now in (11.0, 200.0):
                while core.advance(now, 1e9 + now) is not None:
                    pass
            assert core.helper.asked is not None
        return path.read_bytes()


def seeds() -> Iterable[bytes]:
    for kind in range(2):
        yield bytes([kind, 0, 0])
        for table in range(32):
            yield bytes([kind, 1, 0, table, 0])
            column = 1 + table % 2
            yield bytes([kind, 1, 0, table, 9, column, (0, 4, 11)[column], 0, 7, 3, 9, 2, 1])
