"""A device that contradicts the others: merged without it, named on every way to the operator, and remembered."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, WIDTH, contribution, extractor, manifest
from commands import one_error_line, run
from log_lines import drawing
from postgres_server import Places

from protofleet.aggregator.commands.solve_again import solve_again
from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.rounds.round_machine import Closed
from protofleet.aggregator.screening.outliers import Finding, Screening
from protofleet.aggregator.server.run_events import RunEvents
from protofleet.aggregator.server.run_report import Summary
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.finding_tables import newest_findings, put_findings
from protofleet.aggregator.store.finding_tables import verdicts as verdicts_of
from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.standing_tables import Stands
from protofleet.aggregator.store.stored_run import stored_run
from protofleet.contract.errors import UsageError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution, Receipt, Status

DEVICES = ("attic", "cellar", "hall", "porch", "shed")


def sums(name: str, seed: int, shift: int = 0) -> Statistic:
    """Of 30 photos of each class, around centres that all share; said to be of the class `shift` further."""
    rng, y = np.random.default_rng([9, seed]), np.arange(90) % CLASSES
    z = unit_rows(np.eye(CLASSES, WIDTH)[y] + 0.2 * rng.normal(size=(90, WIDTH)))
    return method(name).statistic.of(z, (y + shift) % CLASSES, CLASSES)


def a_round(path: Path, name: str, sent: Mapping[str, Statistic], told: io.StringIO | None = None, **given: object):
    """The state after one round of these contributions, and what was found."""
    with DurableStore(path, BUNDLE, "fleet") as store:
        settings = Settings(method=name, rounds=1, calibrate=False, encoding="f64", min_clients=len(sent), **given)
        core = rounds_of(store, manifest(name=name), BUNDLE, settings, now=0.0)
        teller = RunEvents(core, drawing(told or io.StringIO()))
        for device in sent:
            core.status(device, encode(Status(True, b"instance", 1), "f64"), 0.0)
        while core.advance(0.0, 0.0) is not None:
            pass
        mark = extractor(name) if method(name).extractor == "bundle" else b""
        for device, statistic in sent.items():
            made = contribution(statistic, run=core.parts.run, method=name, extractor=mark)
            assert core.take([(device, encode(made, "f64"))], 1.0)[0].outcome == "committed"
        while (step := core.advance(2.0, 2.0)) is not None:
            if isinstance(step, Closed):
                teller.step(step)
        return core.state, [(found.device, found.verdict) for found in core.findings]


HONEST = {device: at for at, device in enumerate(DEVICES)}


def fleet(name: str, liar: str | None = "hall") -> dict[str, Statistic]:
    return {device: sums(name, at, int(device == liar)) for device, at in HONEST.items()}


@pytest.mark.parametrize("name", ["ncm", "ffc", "fedproto"])
def test_what_comes_back_is_that_of_the_others_alone_bit_for_bit(tmp_path: Path, name: str) -> None:
    state, found = a_round(tmp_path / "s", name, fleet(name))
    without, none = a_round(tmp_path / "w", name, {d: s for d, s in fleet(name).items() if d != "hall"})
    assert (found, none) == ([("hall", "left out")], [])
    for kind, rows in state.rows.items():
        np.testing.assert_array_equal(rows.rows, without.rows[kind].rows)
    assert a_round(tmp_path / "h", name, fleet(name, liar=None))[1] == []


def test_an_operator_may_have_it_named_only_or_not_at_all(tmp_path: Path) -> None:
    merged = {}
    for suspects, verdicts in (
        ("name", [("hall", "suspected")]),
        ("ignore", []),
        ("leave-out", [("hall", "left out")]),
    ):
        state, found = a_round(tmp_path / suspects, "ncm", fleet("ncm"), suspects=suspects)
        assert found == verdicts
        merged[suspects] = state.rows["means"].rows
        with stored_run(tmp_path / suspects) as stored:
            assert stored.screening("ncm") == Screening(suspects=suspects)
    np.testing.assert_array_equal(merged["name"], merged["ignore"])
    assert np.abs(merged["name"] - merged["leave-out"]).max() > 0.1


def test_the_terminal_the_summary_and_the_fleets_list_name_it_and_why(tmp_path: Path) -> None:
    told, path = io.StringIO(), tmp_path / "s"
    a_round(path, "ffc", fleet("ffc"), told)
    why = "what it calls class-0 is like what others call class-2: contradicted by 4 of 4 devices"
    assert f"left out hall: {why}" in told.getvalue()
    with DurableStore(path, BUNDLE, "fleet") as store:
        (listed,) = Summary(store, "fleet", BUNDLE).content(finished=True, global_version=1)["rounds"]
    assert listed["findings"] == [{"device": "hall", "verdict": "left out", "reason": why}]
    shown = run("fleet", "list", "--store", path).stdout
    assert "left out, round 1" in next(line for line in shown.splitlines() if line.startswith("hall"))
    assert f"left out in round 1: {why}; 1 round in all" in run("fleet", "show", "hall", "--store", path).stdout
    devices = {
        each["device"]: each
        for each in json.loads(run("fleet", "list", "--store", path, "--json", "-").stdout)["devices"]
    }
    assert devices["hall"]["finding"] == {"round": 1, "verdict": "left out", "reason": why, "rounds": 1}
    assert devices["shed"]["finding"] is None
    assert "found" not in run("fleet", "list", "--store", path).stdout.splitlines()[2]


def test_a_head_that_is_made_again_leaves_out_the_same(tmp_path: Path) -> None:
    state, _ = a_round(tmp_path / "s", "ffc", fleet("ffc"))
    again = solve_again(tmp_path / "s", manifest(name="ffc"), {"ridge": "auto"})
    np.testing.assert_array_equal(again.state.head.rows, state.head.rows)
    everybody, _ = a_round(tmp_path / "i", "ffc", fleet("ffc"), suspects="ignore")
    again = solve_again(tmp_path / "i", manifest(name="ffc"), {"ridge": "auto"})
    np.testing.assert_array_equal(again.state.head.rows, everybody.head.rows)
    assert np.abs(state.head.rows - everybody.head.rows).max() > 0.1


def test_whoever_is_forgotten_is_named_no_more_and_the_others_are_judged_anew(tmp_path: Path) -> None:
    path = tmp_path / "s"
    a_round(path, "ncm", fleet("ncm"))
    with DurableStore(path, BUNDLE, "fleet") as store:
        settings = Settings(method="ncm", rounds=1, calibrate=False, encoding="f64")
        core = rounds_of(store, manifest(name="ncm"), BUNDLE, settings, now=0.0)
        give(path, "forget", "attic", "me")
        core.advance(1.0, 1.0)
        kept = [sums("ncm", HONEST[d]) for d in ("cellar", "porch", "shed")]
        expected = kept[0].merge(kept[1]).merge(kept[2]).means
        np.testing.assert_allclose(core.state.rows["means"].rows, expected, rtol=1e-12)
        assert set(newest_findings(store._db)) == {"hall"}
        give(path, "forget", "hall", "me")
        core.advance(2.0, 2.0)
        assert not newest_findings(store._db)


def test_who_counts_as_less_now_or_is_suspected_is_not_told_that_it_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "s"
    a_round(path, "ncm", fleet("ncm"))
    with DurableStore(path, BUNDLE, "fleet") as store:
        assert {device: told.counts for device, told in verdicts_of(store._db, b"run1").items()} == {"hall": False}
        store._db.execute("UPDATE finding SET round = 0")  # the round before
        less, doubted = Finding("hall", "counts as less", "90 samples"), Finding("attic", "suspected", "by two")
        put_findings(store._db, 1, [less, doubted], 100)
        (told,) = verdicts_of(store._db, b"run1").values()
        assert (told.round, told.counts, told.why) == (1, True, "")


def test_means_of_different_backbones_are_not_compared(tmp_path: Path) -> None:
    """They contradict each other, and nobody lies."""
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        settings = Settings(rounds=1, calibrate=False)
        alone = rounds_of(store, manifest(), BUNDLE, settings, now=0.0)
        several = rounds_of(store, manifest(), BUNDLE, settings, now=0.0, others=(bytes(range(50, 82)),))
    assert alone.books.suspects(method("fedproto")) == "leave-out"
    assert several.books.suspects(method("fedproto")) == "ignore"


def test_a_median_of_unit_means_is_one(tmp_path: Path) -> None:
    """A round of NCM by a robust rule."""
    for rule in ("median", "trimmed-mean"):
        state, _ = a_round(tmp_path / rule, "ncm", fleet("ncm"), rule=rule, suspects="ignore")
        stack = np.array([s.means for s in fleet("ncm").values()])
        expected = np.median(stack, axis=0) if rule == "median" else np.sort(stack, axis=0)[1:-1].mean(axis=0)
        np.testing.assert_allclose(state.rows["means"].rows, expected, atol=1e-12)


def test_what_the_command_takes() -> None:
    assert (Settings().suspects, Settings(suspects="name").suspects, Settings(max_share=0.1).max_share) == (
        "leave-out",
        "name",
        0.1,
    )
    with pytest.raises(UsageError, match="--suspects, expected leave-out, name or ignore, got leave-in"):
        Settings(suspects="leave-in")
    with pytest.raises(UsageError, match="--suspects with --standing"):
        Settings(standing=True, suspects="name")
    for share in (0.0, 1.1, float("nan")):
        with pytest.raises(UsageError, match="--max-share"):
            Settings(max_share=share)


@pytest.mark.parametrize("name", ["ncm", "ffc"])
def test_where_sums_stand_an_operator_asks_who_contradicts(tmp_path: Path, name: str) -> None:
    path = tmp_path / "s"
    with DurableStore(path, BUNDLE, "fleet") as store:
        store.meta.put("standing", name)
        standing = []
        for device, statistic in fleet(name).items():
            made = Contribution.of(statistic, run=store.run, round=1, method=name, bundle=BUNDLE, standing="present")
            standing.append(Stands(device, 1, encode(made, "f64"), 4))
        store.standing.commit([*standing, Stands("gone", 2, None, 0)], {}, 1000.0)
    done = run("fleet", "suspects", "--store", path, "--json", "-")
    told = json.loads(done.stdout)
    assert (told["devices"], [each["device"] for each in told["suspects"]]) == (5, ["hall"])
    assert "hall: what it calls 0 is like what others call 2: contradicted by 4 of 4 devices" in done.stderr
    assert done.stderr.endswith("1 device of 5 suspected\n")


def test_a_store_of_rounds_has_said_who_contradicts_when_they_closed(tmp_path: Path) -> None:
    a_round(tmp_path / "s", "ncm", fleet("ncm"))
    done = run("fleet", "suspects", "--store", tmp_path / "s")
    assert "hall: left out in round 1: what it calls class-0 is like what others call class-2" in done.stdout
    assert done.stdout.endswith("suspected\n")
    line = one_error_line(run("fleet", "suspects", "--store", tmp_path / "s", "--vouch", "hall"))
    assert "expected standing sums, got one of rounds" in line


def test_who_is_left_out_is_to_be_told_and_that_it_counts_again(places: Places) -> None:
    """Of the newest closed round that it took part in, also by an aggregator that was started anew."""
    path, settings = places("s"), Settings(method="ncm", rounds=3, calibrate=False, encoding="f64", min_clients=5)
    told: dict[int, Mapping[str, Receipt]] = {}
    for number, liar in ((1, "hall"), (2, None), (3, "hall")):
        with DurableStore(path, BUNDLE, "fleet") as store:
            core = rounds_of(store, manifest(name="ncm"), BUNDLE, settings, now=0.0)
            assert core.verdicts == told.get(number - 1, {})
            for device in DEVICES:
                core.status(device, encode(Status(True, b"instance", 1), "f64"), 0.0)
            while core.advance(0.0, 0.0) is not None:
                pass
            assert core.rounds.number == number
            for device, statistic in fleet("ncm", liar).items():
                made = contribution(
                    statistic, run=core.parts.run, round=number, method="ncm", extractor=extractor("ncm")
                )
                assert core.take([(device, encode(made, "f64"))], 1.0)[0].outcome == "committed"
            assert store.verdicts() == told.get(number - 1, {})  # of a round that is open nothing is told
            while not isinstance(core.advance(2.0, 2.0), Closed):
                pass
            told[number] = core.verdicts
            if number == 3:
                give(path, "forget", "hall", who="test")
                core.advance(1_000.0, 1_000.0)
                assert core.verdicts.get("hall") is None
    assert {number: list(found) for number, found in told.items()} == {1: ["hall"], 2: ["hall"], 3: ["hall"]}
    assert [(found["hall"].round, found["hall"].status, found["hall"].counts) for found in told.values()] == [
        (1, "duplicate", False),
        (2, "duplicate", True),
        (3, "duplicate", False),
    ]
    assert "contradicted by 4 of 4 devices" in told[1]["hall"].why
    assert told[2]["hall"].why == ""
