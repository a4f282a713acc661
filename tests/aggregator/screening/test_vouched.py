"""Devices that the operator vouches for: what they contradict is a lie, whatever all others say together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, manifest
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.commands.solve_again import solve_again
from protofleet.aggregator.screening.contradictions import contradicted
from protofleet.aggregator.screening.outliers import Screening, Traits, screen
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.standing_tables import Stands
from protofleet.aggregator.store.stored_run import stored_run
from protofleet.contract.errors import UsageError
from protofleet.contract.sums.statistics import ClassMeans, Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution
from tests.aggregator.screening.test_contradictions import CLASSES, device, photos
from tests.aggregator.screening.test_named import a_round, fleet


def accused(fleet: Sequence[Statistic], *vouched: str) -> list[int]:
    told = contradicted(lambda: iter(fleet), [f"d{at:03}" for at in range(len(fleet))], vouched)
    assert not {each.device for each in told} & set(vouched)
    return sorted(int(each.device[1:]) for each in told if each.accused)


@given(st.integers(0, 1_000), st.integers(1, 2))
@settings(max_examples=20, deadline=None)
def test_liars_are_found_where_each_device_holds_one_class(seed: int, liars: int) -> None:
    """Nobody else can tell: no two others share a class."""
    sent = [device(seed + at, [at], 40, shift=int(at < liars)) for at in range(CLASSES)]
    fleet = [*sent, device(seed + 50)]
    assert not accused(fleet)
    assert accused(fleet, f"d{CLASSES:03}") == list(range(liars))


@pytest.mark.parametrize("liars", [6, 8])
def test_a_majority_that_lies_together_is_found(liars: int) -> None:
    """Of ten devices, which a vote would call honest."""
    fleet = [device(at, shift=int(at < liars)) for at in range(10)]
    assert set(accused(fleet)) & set(range(liars, 10)), "otherwise this shows nothing"
    assert accused(fleet, "d009") == list(range(liars))


def test_a_majority_has_nobody_accused_of_a_class_that_one_holds_who_is_vouched_for() -> None:
    """Its own three photos of a class are too few to tell who lies; then nobody's word is taken for it."""

    def blurred(seed: int, held: Sequence[int], each: int, shift: int = 0) -> ClassMeans:
        z, y = photos(seed, held, each, 4.0)
        return ClassMeans.of(z, (y + shift) % CLASSES, CLASSES)

    fleet = [blurred(at, range(CLASSES), 200, int(at < 6)) for at in range(9)]
    whole, half = blurred(9, range(CLASSES), 3), blurred(9, range(3), 3)
    assert set(accused([*fleet, whole])) & {6, 7, 8}, "otherwise this shows nothing"
    assert not accused([*fleet, whole], "d009")
    assert set(accused([*fleet, half], "d009")) & {6, 7, 8}, "of other classes it says nothing"


def test_what_is_said_is_what_those_say_that_are_vouched_for() -> None:
    """Others, who lie together, put the liar's class elsewhere."""
    fleet = [device(at, shift=2) for at in range(5)] + [device(5), device(6, shift=1)]
    told = {each.device: each for each in contradicted(lambda: iter(fleet), list("abcdefg"), ["f"])}
    liar = told["g"]
    assert (liar.by, liar.of, liar.vouched) == (1, 1, True)
    assert liar.looks_like == (liar.label - 1) % CLASSES
    assert liar.words().endswith("contradicted by 1 of 1 devices that are vouched for")


@given(st.integers(0, 10_000), st.integers(3, 12))
@settings(max_examples=30, deadline=None)
def test_honest_devices_are_left_alone_beside_one_that_is_vouched_for(seed: int, devices: int) -> None:
    rng, fleet = np.random.default_rng(seed), []
    for at in range(devices):
        held = rng.permutation(CLASSES)[: rng.integers(1, CLASSES + 1)]
        parts = [device(1000 * seed + 10 * at + int(j), [int(j)], int(rng.integers(1, 60))) for j in held]
        fleet.append(ClassMeans(sum(p.sums for p in parts), sum(p.counts for p in parts)))
    assert not accused([device(seed), *fleet], "d000")


def test_who_is_not_there_or_holds_nothing_says_nothing() -> None:
    fleet = [device(at, shift=int(at == 0)) for at in range(6)]
    names = [f"d{at:03}" for at in range(6)]
    assert contradicted(lambda: iter(fleet), names, ["stranger"]) == contradicted(lambda: iter(fleet), names)
    empty = [*fleet, ClassMeans.zero(CLASSES, fleet[0].width)]
    assert accused(empty, "d006") == accused(empty) == [0]


def test_its_length_is_the_usual_one_and_it_is_left_out_for_nothing() -> None:
    """Most devices send short rows; by the middle one of all, the honest would be the outliers."""
    short = [ClassMeans(device(at).sums / 100, device(at).counts) for at in range(4)]
    fleet = [*short, *(device(at) for at in range(4, 7))]
    made = [Contribution.of(s, run=b"run1", round=1, method="fedproto", bundle=bytes(32)) for s in fleet]
    traits = {f"d{at}": Traits.of(message) for at, message in enumerate(made)}
    by_all = screen(lambda: iter(fleet), traits, max_share=1.0).findings
    assert {each.device for each in by_all} == {"d4", "d5", "d6"}
    assert not screen(lambda: iter(fleet), traits, max_share=1.0, vouched=["d4"]).findings
    assert {each.device for each in screen(lambda: iter(fleet), traits, vouched=["d0", "d6"]).findings} == {"d4", "d5"}


def test_a_round_is_remade_as_it_was_made(tmp_path: Path) -> None:
    """Four of five lie together; one is vouched for, and what stays is its own alone."""
    sent = fleet("ffc", liar=None)
    lies = {name: fleet("ffc", liar=name)[name] for name in ("attic", "cellar", "porch", "shed")}
    state, found = a_round(tmp_path / "s", "ffc", sent | lies, vouch=("hall",))
    assert found == [(name, "left out") for name in sorted(lies)]
    alone, _ = a_round(tmp_path / "a", "ffc", {"hall": sent["hall"]})
    np.testing.assert_array_equal(state.rows["head"].rows, alone.rows["head"].rows)
    with stored_run(tmp_path / "s") as stored:
        assert stored.screening("ffc") == Screening(None, "leave-out", ("hall",))
    again = solve_again(tmp_path / "s", manifest(name="ffc"), {"ridge": "auto"})
    np.testing.assert_array_equal(again.state.rows["head"].rows, state.rows["head"].rows)


def test_a_store_of_an_earlier_release_vouches_for_nobody() -> None:
    assert Screening.read(b"0.5") == Screening(0.5, "ignore")
    assert Screening.read(b"0.25 name") == Screening(0.25, "name")
    for made in (Screening(), Screening(0.1, "name", ("a", "b-2"))):
        assert Screening.read(made.written()) == made
    with pytest.raises(ValueError, match="not enough values"):
        Screening.read(b"0.5 leave-in")


def test_what_the_command_takes() -> None:
    assert Settings(vouch=["hall", "hall", "attic"]).vouch == ("hall", "attic")
    with pytest.raises(UsageError, match="--vouch"):
        Settings(vouch=["Not a name"])
    with pytest.raises(UsageError, match="--vouch with --suspects ignore, expected one of them, got both"):
        Settings(vouch=["hall"], suspects="ignore")
    with pytest.raises(UsageError, match="--vouch with --standing"):
        Settings(vouch=["hall"], standing=True)


def test_where_sums_stand_an_operator_vouches_when_asking(tmp_path: Path) -> None:
    path, lies = tmp_path / "s", {name: fleet("ncm", liar=name)[name] for name in ("attic", "porch", "shed")}
    with DurableStore(path, BUNDLE, "fleet") as store:
        store.meta.put("standing", "ncm")
        standing = []
        for name, statistic in (fleet("ncm", liar=None) | lies).items():
            made = Contribution.of(statistic, run=store.run, round=1, method="ncm", bundle=BUNDLE, standing="present")
            standing.append(Stands(name, 1, encode(made, "f64"), 4))
        store.standing.commit(standing, {}, 1000.0)
    done = run("fleet", "suspects", "--store", path, "--vouch", "hall", "--json", "-")
    told = json.loads(done.stdout)
    assert {each["device"] for each in told["suspects"] if each["vouched"]} == set(lies)
    assert "contradicted by 1 of 1 devices that are vouched for" in done.stderr
