"""A joint head of those that a round left out: from three on, by leave alone, and as the store keeps it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, contribution, manifest

from protofleet.aggregator.closing import round_results
from protofleet.aggregator.closing.joint_heads import JointHead, joint_head
from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.merging.merge_round import merge_round, traits_of
from protofleet.aggregator.screening.outliers import Screening, Traits
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.contract.bundle.bundle_file import extractor_of
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import Method, method
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalCollector
from protofleet.contract.wire.joint_heads import JOINT, kind_and_members
from protofleet.contract.wire.messages import Contribution, Status

CLASSES, WIDTH, RUN, NCM = 6, 32, b"run1", method("ncm")
CENTRES = unit_rows(np.random.default_rng(3).normal(size=(CLASSES, WIDTH)))
SHIFTS = [1, 1, 1, 1] + [0] * 9
NAMES = [f"d{at:02}" for at in range(len(SHIFTS))]
HYPER = NCM.resolve({})
MANIFEST = manifest(classes=CLASSES, width=WIDTH, name="ncm")


def sent(at: int, shift: int | None = None, longer: float = 1.0) -> Contribution:
    rng, y = np.random.default_rng([5, at]), np.repeat(np.arange(CLASSES), 30)
    z = unit_rows(CENTRES[y] + 0.8 * rng.normal(size=(len(y), WIDTH)) / np.sqrt(WIDTH))
    shift = SHIFTS[at] if shift is None else shift
    means = NCM.statistic.of(longer * z, (y + shift) % CLASSES, CLASSES)  # type: ignore[attr-defined]
    return Contribution.of(means, run=RUN, round=3, method="ncm", bundle=bytes(4), extractor=bytes(4))


SENT = dict(zip(NAMES, map(sent, range(len(NAMES))), strict=True))


def made(
    leave: Sequence[str],
    sent: Mapping[str, Contribution] = SENT,
    out: Collection[str] = NAMES[:4],
    found: Method = NCM,
) -> JointHead | None:
    """The joint head of a round of the contributions `sent` that leaves `out` out."""

    def some(devices: Collection[str]) -> Iterator[tuple[str, Contribution]]:
        return ((name, each) for name, each in sent.items() if name in devices)

    traits = traits_of(NCM, lambda: iter(sent.items()), HYPER)
    size = {"classes": CLASSES, "width": WIDTH}
    result = merge_round(NCM, lambda: iter(sent.items()), traits, HYPER, **size, how=Screening())
    assert {finding.device for finding in result.findings if finding.left_out} == set(out)
    return joint_head(found, some, traits, HYPER, result, leave, run=RUN, round=3, **size)


@pytest.mark.parametrize("leave", [(), NAMES[:1], NAMES[:2], NAMES[1:3], NAMES[2:]])
def test_two_are_never_shown_each_others_means_and_without_leave_nobody(leave: Sequence[str]) -> None:
    assert made(leave) is None


def test_it_is_what_a_fleet_of_its_members_alone_would_be_given_and_names_how_many() -> None:
    found = made([*NAMES[:3], *NAMES[5:]])
    assert found is not None
    assert found.members == tuple(NAMES[:3])
    (rows,) = found.state.rows.values()
    each = [SENT[name].statistic(NCM.statistic, CLASSES, WIDTH) for name in NAMES[:3]]
    mean = np.mean([one.means for one in each if isinstance(one, ClassMeans)], axis=0)
    np.testing.assert_allclose(unit_rows(rows.rows), unit_rows(mean), atol=1e-5)
    parts = [decode(encode(part, "f32")) for part in found.parts(500)]
    assert len(parts) > 1
    assert all(len(encode(part, "f32")) <= 500 for part in found.parts(500))
    assert {kind_and_members(part.kind) for part in parts} == {(kind, 3) for kind in found.state.rows}  # type: ignore


def test_the_store_gives_back_what_it_was_given() -> None:
    found = made(NAMES)
    assert found is not None
    back = JointHead.read(found.written(), b"run2")
    assert back is not None
    assert (back.members, back.state.run, back.state.round) == (tuple(NAMES[:4]), b"run2", 3)
    for kind, rows in found.state.rows.items():
        np.testing.assert_allclose(back.state.rows[kind].rows, rows.rows, rtol=1e-6)
    collector = GlobalCollector()
    assert [collector.add(part) for part in back.parts(60_000)][-1] is not None


def _of_shifts(shifts: Sequence[int], longer: float = 1.0) -> JointHead | None:
    """Of devices of which each names its classes so many further, the first one's features so much longer."""
    found = {NAMES[at]: sent(at, shift, longer if at == 0 else 1.0) for at, shift in enumerate(shifts)}
    return made(NAMES, found, {NAMES[at] for at, shift in enumerate(shifts) if shift})


@pytest.mark.parametrize(("shifts", "members"), [([1, 1, 2], 0), ([1, 1, 2, 2], 0), ([1, 1, 1, 2], 3)])
def test_of_several_that_do_not_all_agree_two_are_no_group(shifts: list[int], members: int) -> None:
    found = _of_shifts([*shifts, *[0] * 9])
    assert (found is None, 0 if found is None else len(found.members)) == (members == 0, members)


def test_a_group_of_which_one_would_be_left_out_is_none() -> None:
    """Three agree, but one's means are ten times as long: without it two would see each other's."""
    assert _of_shifts([1, 1, 1, *[0] * 9]) is not None
    assert _of_shifts([1, 1, 1, *[0] * 9], 10.0) is None


def test_the_sums_of_a_gateway_are_no_devices_means() -> None:
    """They lie nearer to the middle than any device's, and are no measure of what chance does to one."""
    asked = set[str]()

    def some(devices: Collection[str]) -> Iterator[tuple[str, Contribution]]:
        asked.update(devices)
        return ((name, each) for name, each in SENT.items() if name in devices)

    traits, size = traits_of(NCM, lambda: iter(SENT.items()), HYPER), {"classes": CLASSES, "width": WIDTH}
    result = merge_round(NCM, lambda: iter(SENT.items()), traits, HYPER, **size, how=Screening())
    with_gateway = {**traits, "gateway": Traits(0.0, 900, 0.0, 9)}
    assert joint_head(NCM, some, with_gateway, HYPER, result, NAMES, run=RUN, round=3, **size) is not None
    assert asked == set(NAMES)


class _Noised(type(NCM)):  # type: ignore[misc]
    """Means to which a method of somebody's own adds noise."""

    def mechanism(self, hyper: Mapping[str, object]) -> object:
        return object()


def test_where_noise_is_added_nobody_is_given_one() -> None:
    assert made(NAMES, found=_Noised()) is None


# ── in a run ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _core(store: DurableStore) -> RoundCoordinator:
    settings = Settings(method="ncm", rounds=1, calibrate=False, encoding="f64", min_clients=len(NAMES))
    return rounds_of(store, MANIFEST, BUNDLE, settings, now=0.0)


def _says(core: RoundCoordinator, device: str, *, allows: bool) -> None:
    versions = {"protofleet": "0.2.0", **({JOINT: "allowed"} if allows else {})}
    core.status(device, encode(Status(True, b"instance", 1, versions=versions), "f64"), 0.0)


def _members(core: RoundCoordinator) -> set[str]:
    return {name for name in NAMES if core.joint_of(name) is not None}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DurableStore]:
    with DurableStore(tmp_path / "store", BUNDLE, "fleet") as opened:
        yield opened


def _closed(store: DurableStore) -> RoundCoordinator:
    """After a round in which the first four were left out, and are given a joint head."""
    return _close(_core(store))


def _close(core: RoundCoordinator) -> RoundCoordinator:
    for name in NAMES:
        _says(core, name, allows=True)
    while core.advance(0.0, 0.0) is not None:
        pass
    for name, each in SENT.items():
        statistic = each.statistic(NCM.statistic, CLASSES, WIDTH)
        mark = extractor_of(MANIFEST, BUNDLE, NCM)
        again = contribution(statistic, run=core.parts.run, method="ncm", extractor=mark)
        assert core.take([(name, encode(again, "f64"))], 1.0)[0].outcome == "committed"
    while core.advance(2.0, 2.0) is not None:
        pass
    return core


def test_it_ends_where_a_member_takes_its_leave_back_but_not_where_one_goes_to_sleep(store: DurableStore) -> None:
    core = _closed(store)
    assert _members(core) == set(NAMES[:4])
    core.status(NAMES[1], encode(Status(False, b"instance", 1), "f64"), 3.0)  # its last will
    _says(core, NAMES[7], allows=False)  # who is no member
    assert _members(_core(store)) == _members(core) == set(NAMES[:4])
    _says(core, NAMES[1], allows=False)
    assert _members(_core(store)) == _members(core) == set()


def test_it_ends_where_a_member_is_forgotten_and_who_is_removed_is_given_nothing(
    store: DurableStore, tmp_path: Path
) -> None:
    core = _closed(store)
    give(tmp_path / "store", "remove", NAMES[0], "me")
    core.advance(1_000.0, 1_000.0)
    assert _members(core) == set(NAMES[1:4])
    give(tmp_path / "store", "forget", NAMES[2], "me")
    core.advance(2_000.0, 2_000.0)
    assert _members(_core(store)) == _members(core) == set()


@pytest.mark.parametrize(("what", "detail"), [("rollback", "1"), ("forget class", MANIFEST.labels[0])])
def test_it_ends_where_what_it_was_made_of_is_taken_back(
    what: str, detail: str, store: DurableStore, tmp_path: Path
) -> None:
    core = _closed(store)
    assert _members(core) == set(NAMES[:4])
    give(tmp_path / "store", what, "", "me", detail=detail)
    obeyed = core.advance(1_000.0, 1_000.0)
    assert isinstance(obeyed, Obeyed)
    assert obeyed.outcome.startswith("done")
    assert _members(_core(store)) == _members(core) == set()


def test_a_leave_that_is_taken_back_while_the_round_closes_counts(store: DurableStore, monkeypatch) -> None:
    whole, core = round_results.joint_head, _core(store)

    def meanwhile(*args: object, **options: object) -> JointHead | None:
        made = whole(*args, **options)  # type: ignore[arg-type]
        _says(core, NAMES[2], allows=False)
        return made

    monkeypatch.setattr(round_results, "joint_head", meanwhile)
    _close(core)
    assert (core.findings != (), _members(core), _members(_core(store))) == (True, set(), set())
