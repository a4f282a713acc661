"""Progress lines a person can follow, and the room's public surface."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from log_lines import drawing

from protofleet import aggregator
from protofleet.aggregator.monitoring import events


def _lines(*told: events.Event) -> list[str]:
    text = io.StringIO()
    progress = drawing(text, 40)
    for event in told:
        progress(event)
    return text.getvalue().splitlines()


def test_a_run_is_told_line_by_line() -> None:
    assert _lines(
        events.LinkUp("mqtt://127.0.0.1:1883", 65_536),
        events.Waiting(1, 2, 5),
        events.Waiting(1, 5, 5, unsampled=True),
        events.Waiting(1, 2, 1),
        events.RoundOpened(1, 3, "fedproto", 5),
        events.ContributionsIn(1, 3, 2),
        events.ContributionsIn(1, 4, 1),
        events.LinkDown("connection lost", 1.25),
        events.RoundExtended(1, 4, 5, 30.0),
        events.RoundClosed(1, "fedproto", 5, 10, 18_240, 12.34, 1),
        events.RoundOpened(2, 3, "ffc", 4, resumed=1),
        events.RunFinished(3, 15, 54_321),
    ) == [
        "connected to mqtt://127.0.0.1:1883, messages up to 65,536 bytes",
        "waiting for devices: 2 online, 5 needed",
        "waiting for devices: 5 online, 5 needed, but no sample of them has so many: "
        "--fraction is too small for --min-clients",
        "2 devices online, 1 needed: the next round opens when due",
        "round 1/3 open: fedproto, 5 devices awaited",
        "  round 1: contributions 3/5",
        "  round 1: contributions 4/5",
        "broker away (connection lost), trying again in 1.2 s",
        "  deadline passed with 4 of 5 contributions: round 1 goes on for another 30 s",
        "  round 1 closed: 5 contributions, 10 classes merged, 18,240 bytes up, 12.3 s, global version 1",
        "round 2/3 open: ffc, 4 devices awaited, 1 contribution already here",
        "finished: 3 rounds, 15 contributions committed, 54,321 bytes up",
    ]


def test_a_list_that_has_grown_is_told() -> None:
    assert _lines(events.ListsCounted(6, (3, 5))) == [
        "6 classes; devices whose bundle has the first 3 or 5 of them count, too"
    ]


def test_a_broker_that_stays_away_does_not_fill_the_log() -> None:
    away = [events.LinkDown(f"refused {number % 2}", 30.0) for number in range(500)]
    told = _lines(*away, events.LinkUp("mqtt://b", 1_024), away[0])
    assert len(told) == 20 + 2
    assert told[-1] == "broker away (refused 0), trying again in 30.0 s"


def test_windows_are_told_as_such() -> None:
    assert _lines(
        events.Waiting(4, 2, 1, opens_in_s=7_500.0),
        events.RoundOpened(4, 6, "ncm", 2, window_s=3_600.0),
        events.RoundExtended(4, 1, 20, 3_600.0, is_window=True),
    ) == [
        "round 4 is due in 2.08 h; 2 devices online",
        "round 4 open for 60 min: ncm, 2 devices online",
        "  window over with 1 of 20 contributions: round 4 goes on until they are there",
    ]


def test_a_large_fleet_prints_one_line_a_second() -> None:
    crowd = [events.ContributionsIn(1, n, 1000 - n) for n in range(1, 1001)]
    assert _lines(*crowd) == ["  round 1: contributions 1/1000", "  round 1: contributions 1000/1000"]


def test_every_refused_device_of_a_small_fleet_is_named_and_a_flood_is_not() -> None:
    two = [events.Refused("kitchen", "[bold]no[/bold]"), events.Refused("garden", "no")]
    named = ["  refused kitchen: [bold]no[/bold]", "  refused garden: no"]
    assert _lines(*two, *two, *two) == named  # within a second each is named once
    opened = events.RoundOpened(2, 3, "fedproto", 2)
    assert [line for line in _lines(*two, opened, *two) if "refused" in line] == named * 2
    assert len(_lines(*[events.Refused(f"d{n}", "no") for n in range(500)])) == 20


def test_an_older_copy_of_a_store_is_told_how_it_goes_on() -> None:
    """Its devices have done rounds that it opens again, and do none of them twice."""
    (lost,), (older,) = _lines(events.NumbersLost(9, 0)), _lines(events.NumbersLost(9, 5))
    assert "the store knows of none" in lost
    assert lost.endswith("going on above")
    assert "the store knows of 5" in older
    assert "if it is an older copy, stop and start it once with --new-run" in older
    (given,) = _lines(events.NumbersLost(9, 5, is_new_run=True))
    assert given.endswith("it is another run, so there is nothing to be done")


def test_invented_names_do_not_fill_the_log() -> None:
    told = [events.IntruderTold(f"x{number}", "not-enrolled", "no", 1) for number in range(2_000)]
    assert 20 <= len(_lines(*told)) < 100  # the first ones, then one a second


def test_an_event_without_a_line_is_a_mistake_that_shows() -> None:
    with pytest.raises(TypeError, match="no line for object"):
        drawing(io.StringIO())(object())


def test_the_public_names() -> None:
    assert aggregator.__all__ == ["Policy", "Rounds", "next_global", "plan"]


def test_the_pure_part_needs_no_mqtt_and_no_database() -> None:
    heavy = "{'paho', 'sqlite3', 'torch', 'iotcore', 'rich'}"
    script = f"import sys, protofleet.aggregator; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
