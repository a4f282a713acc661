"""A fleet's bill against arithmetic done here, with plain numbers, and what must hold for every fleet."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import one_error_line, run
from hypothesis import given, settings
from hypothesis import strategies as st
from page_checks import check_page
from shared import exported

from benchmarks.device.wire_bytes import fitted
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import METHODS
from protofleet.hw_profiles.devices.schema import load_devices
from protofleet.hw_profiles.latency.predict import predict
from protofleet.hw_profiles.plan.bill import Bill, bill
from protofleet.hw_profiles.plan.choice import cheapest, choices
from protofleet.hw_profiles.plan.device_work import way_work
from protofleet.hw_profiles.plan.fleet_file import Fleet, parse_fleet
from protofleet.hw_profiles.plan.report import plan_report
from protofleet.hw_profiles.plan.wire_bytes import connection_traffic, payload_down, payload_up, round_traffic, table
from protofleet.hw_profiles.reports.subject import load_subject

ROOT = Path(__file__).parents[3]
HERE = ROOT / "lab" / "demo" / "shipped"
DEVICES = load_devices()


def figure(value: float, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    bounds = {} if low is None else {"low": low, "high": high}
    return {"value": value, **bounds, "source": "this test"}


def fleet_of(**changes: Any) -> Fleet:
    table: dict[str, Any] = {
        "bundle": "fleet.bundle",
        "samples": 600,
        "rounds_a_day": 4,
        "keepalive_s": 240,
        "connections_a_day": 2,
        "way": [{"method": "ncm", "rounds": 3, "accuracy": figure(0.7, 0.6, 0.8)}],
        "devices": [
            {"name": "a", "kind": "raspberry-pi-4", "count": 10, "radio": "r", "battery_wh": figure(100, 90, 110)}
        ],
        "boards": {"raspberry-pi-4": {"price": figure(60, 50, 70), "asleep_w": figure(0.1)}},
        "radios": {
            "r": {
                "up_mbit_s": figure(1, 0.5, 2),
                "down_mbit_s": figure(4, 2, 8),
                "up_w": figure(2, 1, 3),
                "down_w": figure(1, 0.5, 1.5),
                "wake_s": figure(0.5),
                "wake_w": figure(1),
                "tail_s": figure(10),
                "tail_w": figure(1, 0.8, 1.2),
                "idle_w": figure(0.05),
                "price_mb": figure(0.02, 0.01, 0.04),
                "price_month": figure(1.5),
            }
        },
        "prices": {"electricity_kwh": figure(0.3, 0.2, 0.4), "board_months": figure(30, 20, 60)},
    }
    return parse_fleet(table | changes, HERE / "fleet.toml", DEVICES)


def bill_of(fleet: Fleet, way: int = 0) -> Bill:
    group = fleet.groups[0]
    return bill(fleet, way_work(fleet.ways[way]), group, group.boards[0], group.radios[0], fleet.rounds_a_day[0])


def test_a_bill_is_what_pencil_and_paper_make_of_it() -> None:
    fleet = fleet_of()
    found = bill_of(fleet)
    board, manifest = DEVICES["raspberry-pi-4"], way_work(fleet.ways[0]).manifest
    photo = predict(load_subject(str(HERE / "fleet.bundle"), batch=1).inference, board, runtime="onnxruntime")
    computing = 600 * photo.ms / 1000
    up, down = 5201, 5173  # the encoded class means and their state: 10 classes of 128 float32, and what is around them
    assert (payload_up(manifest, METHODS["ncm"]), payload_down(manifest, METHODS["ncm"])) == (up, down)
    wire = {
        name: [fixed + per_up * sent + per_down * down for fixed, per_up, per_down in (table()[name][w] for w in ways)]
        for name, sent, ways in (("round", up, ("up", "down")), ("connection", 0, ("up", "down")))
    }
    ping_up, ping_down = table()["ping"]["up"], table()["ping"]["down"]
    pings = 86_400 / 240
    day_up = 4 * wire["round"][0] + 2 * wire["connection"][0] + pings * ping_up
    day_down = 4 * wire["round"][1] + 2 * wire["connection"][1] + pings * ping_down
    assert found.traffic_a_day.up.value == pytest.approx(day_up)
    assert found.traffic_a_day.down.value == pytest.approx(day_down)

    sending = wire["round"][0] * 8 / 1e6 + wire["round"][1] * 8 / 4e6 + 0.5
    assert found.round_s is not None
    assert found.round_s.value == pytest.approx(computing + sending)

    def air(up: float, down: float) -> float:
        return 2 * up * 8 / 1e6 + 1 * down * 8 / 4e6

    radio_round = 0.5 * 1 + 10 * 1 + air(*wire["round"])
    radio_idle = 0.05 * 86_400 + pings * (0.5 + 10 + air(ping_up, ping_down)) + 2 * (10.5 + air(*wire["connection"]))
    active, waiting = (6.3 * 7.2) ** 0.5, 2.7
    day = waiting * 86_400 + 4 * (computing * (active - waiting) + radio_round) + radio_idle
    assert found.joules_a_round is not None
    assert found.joules_a_round.value == pytest.approx(computing * active + sending * waiting + radio_round)
    assert found.joules_a_day is not None
    assert found.joules_a_day.value == pytest.approx(day)
    assert found.battery_days is not None
    assert found.battery_days.value == pytest.approx(100 * 3600 / day)

    month = 365.25 / 12
    megabytes = 10 * month * (day_up + day_down) / 1e6
    assert found.megabytes_a_month.value == pytest.approx(megabytes)
    money = megabytes * 0.02 + 10 * 1.5 + 10 * 60 / 30 + 10 * month * day / 3.6e6 * 0.3
    assert found.money is not None
    assert found.money.value == pytest.approx(money)


def test_a_device_that_sleeps_connects_for_each_round_and_draws_its_sleep_between_them() -> None:
    fleet = fleet_of(stays_connected=False)
    found = bill_of(fleet)
    work = way_work(fleet.ways[0])
    once = round_traffic(work.manifest, work.method).plus(connection_traffic(work.manifest, work.method))
    assert found.traffic_a_day.both.value == pytest.approx(4 * once.both.value)
    assert found.work.seconds is not None
    sending = once.up.value * 8 / 1e6 + once.down.value * 8 / 4e6 + 0.5
    radio = 10.5 + 2 * once.up.value * 8 / 1e6 + once.down.value * 8 / 4e6
    each = found.work.seconds.value * ((6.3 * 7.2) ** 0.5 - 0.1) + sending * (2.7 - 0.1) + radio
    assert found.joules_a_day is not None
    assert found.joules_a_day.value == pytest.approx(0.1 * 86_400 + 4 * each)


def test_a_device_that_may_draw_nothing_has_no_battery_days() -> None:
    """Its sleep may be free, and computing no more than its sleep: no bound above the days of its battery."""
    power, radio = DEVICES["raspberry-pi-4"].power, {"up_mbit_s": figure(1), "down_mbit_s": figure(4)}
    assert power is not None
    boards = {"raspberry-pi-4": {"asleep_w": figure(power.active_high_w, 0, power.active_high_w), "idle_w": figure(2)}}
    one = bill_of(fleet_of(stays_connected=False, boards=boards, radios={"r": radio}))
    assert one.joules_a_day is not None
    assert one.joules_a_day.low == 0
    assert one.battery_days is None
    assert one.gaps == ("raspberry-pi-4 may draw nothing all day: the low of boards.raspberry-pi-4.asleep_w",)


def test_bounds_are_the_models_interval_and_the_users_figures() -> None:
    fleet = fleet_of()
    found = bill_of(fleet)
    photo = predict(load_subject(str(HERE / "fleet.bundle"), batch=1).inference, DEVICES["raspberry-pi-4"])
    assert found.work.seconds is not None
    assert found.work.seconds.low == pytest.approx(0.6 * photo.low_ms)
    assert found.work.seconds.high == pytest.approx(0.6 * photo.high_ms)
    boards = found.money_boards
    assert (boards.low, boards.value, boards.high) == pytest.approx((10 * 50 / 60, 10 * 60 / 30, 10 * 70 / 20))


def test_a_bundle_that_trains_is_billed_for_its_steps() -> None:
    labels = tuple(f"c{number}" for number in range(10))
    path = exported(method_name="fedproto", backbone="small_cnn", labels=labels, input_shape=(28, 28, 1))
    fleet = fleet_of(bundle=str(path), way=[{"rounds": 2}])
    found, work, subject = bill_of(fleet), way_work(fleet.ways[0]), load_subject(str(path), batch=1)
    assert subject.step is not None
    step = predict(subject.step, DEVICES["raspberry-pi-4"], forward=subject.inference)
    photo = predict(subject.inference, DEVICES["raspberry-pi-4"], runtime="onnxruntime")
    steps = int(work.manifest.hyper["epochs"]) * -(-600 // work.manifest.batch)
    assert found.work.seconds is not None
    assert found.work.seconds.value == pytest.approx((steps * step.ms + 600 * photo.ms) / 1000)
    with pytest.raises(UsageError, match="expected a bundle exported for fedhp, since it trains, got"):
        way_work(fleet_of(bundle=str(path), way=[{"method": "fedhp"}]).ways[0])


def test_without_ground_there_are_no_seconds_no_joules_and_no_money_and_nothing_is_taken() -> None:
    """A board whose file has a GPU alone: our client does not run there, and no row says how long it would take."""
    gpu_alone = [board for board in DEVICES.values() if board.cpu is None and board.systolic is None]
    assert gpu_alone
    name = gpu_alone[0].name
    fleet = fleet_of(devices=[{"kind": name, "count": 3, "radio": "wifi"}], goal={"deadline_h": 100})
    report = plan_report(fleet)
    (choice,) = report["choices"]
    (group,) = choice["groups"]
    assert group["support"] == "no ground"
    assert {group[key] for key in ("computing_s", "round_s", "joules_a_day") if group[key] is None} == {None}
    assert choice["money_a_month"] is None
    assert choice["meets_deadline"] == "not known"
    assert report["taken"] is None
    assert report["sentence"].startswith("No choice is known to meet the goal.")
    assert group["megabytes_a_month"]["value"] > 0  # what is known is still said


def test_a_round_fits_the_day_where_even_its_upper_bound_ends_before_the_next_begins() -> None:
    found = bill_of(fleet_of())
    assert found.round_s is not None
    value, high = found.round_s.value, found.round_s.high
    assert value < high
    assert replace(found, rounds_a_day=0.999 * 86_400 / high).fits_the_day is True
    assert replace(found, rounds_a_day=2 * 86_400 / (value + high)).fits_the_day is False
    assert replace(found, round_s=None).fits_the_day is None


def test_a_fleet_is_done_when_the_round_that_opens_last_has_ended() -> None:
    (choice,) = choices(fleet_of())
    (round_s,) = (one.round_s for one in choice.bills)
    assert round_s is not None
    assert choice.finish_h is not None
    for name in ("value", "low", "high"):
        hours = 2 * 24 / 4 + getattr(round_s, name) / 3600  # the third of three rounds, four a day
        assert getattr(choice.finish_h, name) == pytest.approx(hours)


def test_what_meets_the_goal_for_money_that_nobody_knows_is_not_taken() -> None:
    found = choices(fleet_of(stays_connected=False, boards={}, goal={"accuracy": 0.5, "deadline_h": 1000}))
    assert [(one.meets, one.money) for one in found] == [("yes", None)]
    assert cheapest(found) is None


def test_the_cheapest_that_meets_accuracy_and_deadline_is_taken() -> None:
    ways = [
        {"method": "ncm", "accuracy": figure(0.60, 0.58, 0.62)},
        {"method": "fedcof", "accuracy": figure(0.72, 0.71, 0.73)},
        {"method": "ffc", "accuracy": figure(0.71, 0.69, 0.74)},
        {"name": "slow", "method": "fedcof", "rounds": 9, "accuracy": figure(0.9)},
    ]
    fleet = fleet_of(way=ways, rounds_a_day=[1, 4], goal={"accuracy": 0.7, "deadline_h": 30})
    report = plan_report(fleet)
    answers = {(one["way"], one["rounds_a_day"]): one["meets"] for one in report["choices"]}
    assert answers["ncm", 1] == answers["slow", 1] == answers["slow", 4] == "no"  # eight days; two days and more
    assert answers["fedcof", 1] == answers["fedcof", 4] == "yes"
    assert answers["ffc", 1] == "perhaps"
    taken = report["choices"][report["taken"]]
    assert (taken["way"], taken["rounds_a_day"]) == ("fedcof", 1)
    able = [one["money_a_month"]["value"] for one in report["choices"] if one["meets"] == "yes"]
    assert taken["money_a_month"]["value"] == min(able)


def test_each_group_takes_its_cheapest_board_and_radio() -> None:
    prices = {"raspberry-pi-4": {"price": figure(60)}, "raspberry-pi-zero-2w": {"price": figure(18)}}
    group = {"name": "a", "kind": list(prices), "count": 10, "radio": ["wifi", "lte"]}
    report = plan_report(fleet_of(devices=[group], boards=prices))
    (taken,) = report["choices"][0]["groups"]
    every = report["alternatives"][0][0]
    assert len(every) == 4
    assert taken["money_a_month"]["value"] == min(one["money_a_month"]["value"] for one in every)
    assert (taken["board"], taken["radio"]) == ("raspberry-pi-zero-2w", "wifi")


def ordered(value: object) -> bool:
    """Every figure within: low ≤ value ≤ high."""
    if isinstance(value, dict):
        if {"value", "low", "high"} <= set(value):
            return bool(value["low"] <= value["value"] <= value["high"])
        return all(map(ordered, value.values()))
    return all(map(ordered, value)) if isinstance(value, list) else True


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 10_000),
    more=st.integers(1, 1000),
    often=st.floats(0.1, 50),
    samples=st.integers(1, 5000),
    keepalive=st.integers(10, 3600),
    stays=st.booleans(),
    radio=st.sampled_from(["wifi", "lte", "r"]),
    board=st.sampled_from(["raspberry-pi-4", "raspberry-pi-zero-2w", "jetson-nano"]),
)
def test_bounds_are_ordered_and_more_costs_no_less(
    count: int, more: int, often: float, samples: int, keepalive: int, stays: bool, radio: str, board: str
) -> None:
    changes = {"rounds_a_day": often, "samples": samples, "keepalive_s": keepalive, "stays_connected": stays}
    changes |= {"boards": {board: {"idle_w": figure(2, 1, 3), "asleep_w": figure(0.1)}}}

    def report(**other: Any) -> dict[str, Any]:
        number = other.pop("count", count)
        devices = [{"name": "a", "kind": board, "count": number, "radio": radio, "battery_wh": figure(50, 40, 60)}]
        return plan_report(fleet_of(**(changes | {"devices": devices} | other)))

    def total(one: dict[str, Any]) -> tuple[float, ...]:
        (choice,) = one["choices"]
        return choice["money_a_month"]["value"], choice["megabytes_a_month"]["value"]

    base = report()
    assert ordered(base)
    for other in ({"count": count + more}, {"rounds_a_day": often * 2}, {"samples": samples + more}):
        bigger = report(**other)
        for less, most in zip(total(base), total(bigger), strict=True):
            assert most >= less * (1 - 1e-12)


def test_the_table_is_what_its_cases_say() -> None:
    """The coefficients that ship are the fit of the counted cases that ship beside them."""
    cases = [dict(case) for case in table()["cases"]]
    for what in ("round", "connection"):
        assert fitted(cases, what) == table()[what]
        for case in cases:
            sent = 0 if what == "connection" else case["payload_up"]
            for direction in ("up", "down"):
                fixed, per_up, per_down = table()[what][direction]
                said = fixed + per_up * sent + per_down * case["payload_down"]
                assert said == pytest.approx(case[what][direction], rel=0.1)
    assert table()["round"]["up"][1] > 1  # more than the payload travels, since packets have headers


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sample": 3}, "fleet.toml: sample, expected a known name, got sample, try one of samples"),
        ({"samples": 0}, "samples, expected a whole number from 1 to 1e+07, got 0"),
        ({"samples": float("nan")}, "samples, expected a whole number from 1 to 1e+07, got nan"),
        ({"way": []}, "way, expected one or more [[way]], got none"),
        ({"devices": [{"kind": "raspberry-pi-44", "count": 1, "radio": "wifi"}]}, "raspberry-pi-4"),
        ({"devices": [{"kind": "host", "count": 1, "radio": "wiffi"}]}, "got wiffi, try one of wifi"),
        (
            {"devices": [{"kind": "host", "radio": "wifi"}]},
            "count, expected a whole number from 1 to 1e+08, got nothing",
        ),
        ({"prices": {"electricity_kwh": 3}}, "prices.electricity_kwh, expected { value = …, source = "),
        ({"prices": {"electricity_kwh": {"value": 3, "source": " "}}}, "expected a source in words"),
        ({"prices": {"electricity_kwh": figure(3, 4, 5)}}, "expected low ≤ value ≤ high, got 4, 3, 5"),
        ({"prices": {"electricity_kwh": figure(-3)}}, "expected a number from 0 to 100000, got -3"),
        ({"goal": {"accuracy": 70}}, "goal: accuracy, expected a number from 0 to 1, got 70"),
        ({"goal": {"accuracy": 0.7}, "way": [{"method": "ncm"}]}, "expected an accuracy, since the goal has one"),
        ({"currency": "USD", "prices": {}}, "electricity_kwh, expected your price in USD, got the default in EUR"),
        ({"radios": {"mine": {"up_mbit_s": figure(1)}}}, "radios.mine.down_mbit_s, expected"),
        ({"way": [{"method": "fcc"}]}, "got fcc, try one of ffc"),
        ({"way": [{"method": "ffc"}, {"method": "ffc", "rounds": 9}]}, "way.name, expected a name for each [[way]]"),
        ({"devices": [{"kind": "", "count": 1, "radio": "wifi"}]}, "devices 1.kind, expected a device of"),
        ({"boards": {"raspberry-pi-4": {"idle_w": figure(2700)}}}, "expected a number from 0.0001 to 1000, got 2700"),
        ({"boards": {"raspberry-pi-4": {"asleep_w": figure(100)}}}, "raspberry-pi-4.asleep_w, expected at most the "),
        ({"boards": {"nope": {}}}, "fleet.toml: boards, expected a device of `profile --list`, got nope"),
        ({"prices": {"electricity_kwh": figure(10**400)}}, "expected a number from 0 to 100000, got 1000"),
        ({"prices": {"electricity_kwh": figure(16**5000)}}, "got a number of more than 4,300 digits"),
        ({"samples": 16**5000}, "samples, expected a whole number from 1 to 1e+07, got a number of more than 4,300"),
        ({"devices": 16**5000}, "got a number of more than 4,300 digits"),
        ({"radios": {"wifi": {"up_w": figure(283)}}}, "from 0 to 100, got 283, try W: mW / 1,000"),
        ({"radios": {"wifi": {"tail_s": figure(1200)}}}, "from 0 to 600, got 1200, try seconds: ms / 1,000"),
        (
            {"devices": [{"kind": "host", "count": 1, "radio": "wifi", "battery_wh": figure(200_000)}]},
            "from 0.001 to 100000, got 200000, try watt-hours: mAh x V / 1,000",
        ),
        ({"prices": {"electricity_kwh": figure(float("nan"))}}, "expected a number from 0 to 100000, got nan"),
        ({"prices": {"electricity_kwh": figure(float("inf"))}}, "expected a number from 0 to 100000, got inf"),
    ],
)
def test_bad_input_is_one_clear_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as raised:
        fleet_of(**changes)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        (
            {"devices": [{"kind": "host", "count": 1, "radio": "wifi", "battery_wh": figure(20_000)}]},
            "host.battery_wh = 20,000 is unusual: 0.1 to 200 is; is it in watt-hours: mAh x V / 1,000",
        ),
        ({"radios": {"lte": {"up_mbit_s": figure(5640)}}}, "radios.lte.up_mbit_s = 5,640 is unusual: 0.0001 to 1000"),
        (
            {"radios": {"wifi": {"up_mbit_s": figure(940)}}},
            "radios.wifi.up_mbit_s = 940 is 1,000 times apart from the default 0.94; is it in Mbit/s: kbit/s / 1,000?",
        ),
        (
            {"radios": {"lte": {"down_mbit_s": figure(20)}}},
            "radios.lte.down_mbit_s is yours, radios.lte.down_w is not: the default 1.95 W is a radio's at 12.74",
        ),
        ({"prices": {"electricity_kwh": figure(28.72)}}, "prices.electricity_kwh = 28.72 is unusual: 0.01 to 2 is"),
        ({"prices": {"electricity_kwh": figure(1_444)}}, "prices.electricity_kwh = 1,444 is unusual"),  # of rupiah
        ({"prices": {"board_months": figure(3)}}, "prices.board_months = 3 is unusual: 6 to 180 is; is it in months"),
    ],
)
def test_a_figure_in_another_unit_is_doubted_and_a_rate_without_its_watts_said(
    changes: dict[str, Any], asked: str
) -> None:
    devices = [{"kind": "host", "count": 1, "radio": list(changes.get("radios", {"wifi": {}}))}]
    doubts = fleet_of(**{"devices": devices, "prices": {}, **changes}).doubts
    assert any(line.startswith(asked) for line in doubts), doubts
    assert not fleet_of().doubts, "figures that are usual"


def test_a_rate_with_watts_of_ones_own_is_not_doubted() -> None:
    own = {"up_mbit_s": figure(10), "up_w": figure(2), "down_mbit_s": figure(10), "down_w": figure(1)}
    devices = [{"kind": "host", "count": 1, "radio": "lte"}]
    assert fleet_of(devices=devices, radios={"lte": own}).doubts == ()


def test_doubts_are_in_the_terminal_the_report_and_the_page(tmp_path: Path) -> None:
    text = run("plan", "--example").stdout.replace("value = 74,", "value = 20000,")
    (tmp_path / "fleet.toml").write_text(text)
    shutil.copy(HERE / "fleet.bundle", tmp_path)
    done = run("plan", tmp_path / "fleet.toml", "--json", tmp_path / "p.json", "--html", tmp_path / "p.html")
    (doubt,) = json.loads((tmp_path / "p.json").read_text())["doubts"]
    assert doubt.startswith("doorbells.battery_wh = 20,000 is unusual")
    assert doubt in " ".join(done.stdout.split())
    assert doubt in (tmp_path / "p.html").read_text()


def test_a_ping_within_the_tail_of_the_last_wakes_no_radio() -> None:
    """It starts the tail anew, so that of a tail that is never left nothing but the seconds between pings is drawn."""
    radio = {"up_mbit_s": figure(1), "down_mbit_s": figure(1), "tail_w": figure(1), "wake_s": figure(0.5)}
    given = {"keepalive_s": 20, "rounds_a_day": 0.001, "connections_a_day": 0}

    def joules(tail_s: float, wake_w: float) -> float:
        own = {**radio, "tail_s": figure(tail_s), "wake_w": figure(wake_w)}
        found = bill_of(fleet_of(**given, radios={"r": own})).joules_a_day
        assert found is not None
        return found.value

    assert joules(10, 1) - joules(10, 0) == pytest.approx(86_400 / 20 * 0.5, rel=1e-3), "each ping wakes it"
    assert joules(30, 1) - joules(30, 0) == pytest.approx(0.0, abs=0.01), "it never sleeps"
    assert joules(30, 0) - joules(0, 0) == pytest.approx(86_400, rel=1e-3), "one watt all day"


def test_the_sentence_counts_what_it_leaves_out_and_says_the_slowest_board() -> None:
    ways = [{"method": "ncm", "name": f"w{n}", "rounds": 1} for n in range(6)]
    fleet = fleet_of(way=ways, rounds_a_day=1, connections_a_day=1)
    report = plan_report(fleet)
    said = report["sentence"]
    assert "Within 1 % of it: w1 once a day, w2 once a day, w3 once a day and 2 more." in said
    assert ", the least of 6 choices that meet the goal. Its slowest board is raspberry-pi-4: a round in " in said
    assert "extrapolated). " in said
    assert not re.search(r"\b1 times", json.dumps(report))
    assert "connects once a day" in report["assumptions"][2]
    lte = fleet_of(devices=[{"kind": "raspberry-pi-4", "count": 1, "radio": "lte"}])
    assert any(line.startswith("no idle_w of lte: ") for line in plan_report(lte)["assumptions"])


def test_the_example_is_a_plan_in_text_json_and_a_page(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(run("plan", "--example").stdout)
    shutil.copy(HERE / "fleet.bundle", tmp_path)
    done = run("plan", tmp_path / "fleet.toml", "--json", tmp_path / "p.json", "--html", tmp_path / "p.html")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "p.json").read_text())
    assert report["taken"] is not None
    assert " ".join(report["sentence"].split()[:4]) in done.stdout
    assert ordered(report)
    page = (tmp_path / "p.html").read_text()
    check_page(page)
    first, stop, more = report["sentence"].partition(". ")
    assert f"<b>{first}{stop}</b>{more}</p>" in page
    assert {one["yours"] for one in report["figures"]} == {True, False}
    assert all(one["source"] for one in report["figures"])


def test_names_of_a_file_neither_style_the_terminal_nor_the_page(tmp_path: Path) -> None:
    name = 'name = "[/x]<b>\\u001b[31m"'
    text = run("plan", "--example").stdout.replace('name = "forty doorbells"', name).replace('name = "halls"', name)
    (tmp_path / "fleet.toml").write_text(text)
    shutil.copy(HERE / "fleet.bundle", tmp_path)
    done = run("plan", tmp_path / "fleet.toml", "--html", tmp_path / "p.html")
    assert done.returncode == 0, done.stderr
    assert "[/x]<b>\\x1b[31m: 42 devices" in done.stdout
    assert "\x1b" not in done.stdout
    assert "[/x]<b>" not in (tmp_path / "p.html").read_text()


def test_the_command_without_a_file_or_with_a_broken_one_says_so_in_one_line(tmp_path: Path) -> None:
    for words in (("plan",), ("plan", tmp_path / "none.toml")):
        assert one_error_line(run(*words))
    for encoding, told in (("utf-8-sig", "a byte order mark of UTF-8"), ("utf-16", "UTF-16"), ("utf-16-le", "UTF-16")):
        (tmp_path / "marked.toml").write_text("samples = 3", encoding=encoding)
        line = one_error_line(run("plan", tmp_path / "marked.toml"))
        assert f"expected TOML in UTF-8 without a byte order mark, got {told}, try save it so; PowerShell's" in line
    (tmp_path / "hex.toml").write_text(f"samples = 0x{'f' * 5000}")
    assert "got a number of more than 4,300 digits" in one_error_line(run("plan", tmp_path / "hex.toml"))
    (tmp_path / "broken.toml").write_text("samples = [")
    assert "expected TOML" in one_error_line(run("plan", tmp_path / "broken.toml"))
