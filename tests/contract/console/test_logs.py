"""What log records carry, and what formatters, handlers and programs around us make of them."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_lines import each_record

from protofleet.aggregator.metrics.console import Progress
from protofleet.aggregator.monitoring import events
from protofleet.contract.console import logs
from protofleet.contract.console.logs import Changes, Private, about, of_round, private, told
from protofleet.contract.errors import DataError, StoreError, UsageError

logger = logging.getLogger("protofleet.edge_client.tests")
ours = logging.getLogger("protofleet")


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """What this module's tests set up is undone."""
    yield
    logs.tear_down()
    assert ours.level == logging.NOTSET
    assert ours.propagate
    assert all(handler.name is None for handler in ours.handlers), "pytest's have no name, a command's have one"


def said(log_format: str, *args: object, level: int = logging.INFO, extra: dict | None = None, **options: bool) -> str:
    """What a command writes for one record."""
    with redirect_stderr(io.StringIO()) as err:
        logs.set_up(log_format, **options, prefix="pi-1: ", fleet="pets", device="pi-1")  # type: ignore[arg-type]
        logger.log(level, *args, extra=extra)  # type: ignore[arg-type]
    return err.getvalue()


def test_a_record_as_json_has_its_fields_and_its_moment() -> None:
    key = (b"run1", 3, "ffc")
    found = json.loads(said("json", "round 3: committed", extra=of_round(key) | {"array": (1.5, float("nan"))}))
    time = found.pop("time")
    assert len(time) == len("2026-11-26T02:44:44.353Z")
    assert time.endswith("Z")
    assert found == {
        "level": "INFO",
        "logger": "protofleet.edge_client.tests",
        "message": "round 3: committed",
        "fleet": "pets",
        "device": "pi-1",
        "run": "72756e31",
        "round": 3,
        "method": "ffc",
        "array": [1.5, None],
    }


@given(st.text(), st.text() | st.binary() | st.floats() | st.none() | st.dictionaries(st.text(), st.integers()))
def test_whatever_a_record_has_is_one_line(text: str, value: object) -> None:
    line = said("json", "%s", text, extra={"of": value})
    assert line.endswith("\n")
    assert line[:-1].isascii()
    assert line[:-1].isprintable()
    json.loads(line, parse_constant=lambda name: pytest.fail(name))
    shown = said("text", "%s", text)
    assert shown.startswith("pi-1: ")
    assert shown[:-1].isprintable()
    assert shown.endswith("\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_password_is_written_even_if_somebody_logs_it(log_format: str) -> None:
    url = "mqtt://user:s3cret@broker.example"
    line = said(log_format, "connected to %s", url, extra={"address": url})
    assert "s3cret" not in line
    assert "broker.example" in line


@pytest.mark.parametrize(
    ("log_format", "verbose", "shown"),
    [("text", False, False), ("text", True, True), ("json", False, False), ("json", True, True)],
)
def test_a_photos_name_is_shown_where_it_was_asked_for(log_format: str, verbose: bool, shown: bool) -> None:
    line = said(log_format, "skipped %s", Private("grandma.jpg"), verbose=verbose)
    assert ("grandma" in line) == shown


def test_the_first_line_whose_names_are_left_out_says_so() -> None:
    with redirect_stderr(io.StringIO()) as err:
        logs.set_up("text")
        for _ in range(2):
            logger.info("skipped %s", Private("grandma.jpg"))
        logger.info("nobody %s", "there")
    first, *further = err.getvalue().splitlines()
    assert first.startswith("skipped … (")
    assert "--verbose" in first
    assert further == ["skipped …", "nobody there"]
    assert "--verbose" not in said("text", "skipped %s", Private("grandma.jpg"), verbose=True)


def test_nobody_else_reads_a_photos_name_in_a_record() -> None:
    error = DataError("photos/grandma.jpg: label", expected="a class of the bundle's 10", got="grandma")
    with each_record(lambda record: heard.append(record.getMessage())):
        heard: list[str] = []
        logger.info("skipped %s", Private("grandma.jpg"))
        logger.info("%s", private(error))
        logger.info("%s", private(StoreError("/var/s", expected="room", got="none")))
    assert heard == [
        "skipped …",
        "data that cannot be used, expected a class of the bundle's 10",
        "/var/s, expected room, got none",
    ]


def test_the_error_that_ends_a_command_is_a_record_where_the_others_are() -> None:
    error = DataError("photos/grandma.jpg", expected="a whole image file", got="half of one")
    for log_format, quiet in (("json", False), ("json", True)):
        with redirect_stderr(io.StringIO()) as err:
            logs.set_up(log_format, quiet=quiet)
            logs.report(error)
        found = json.loads(err.getvalue())
        assert (found["level"], "grandma" in found["message"]) == ("ERROR", False)
    for set_up in (True, False):
        with redirect_stderr(io.StringIO()) as err:
            logs.tear_down()
            if set_up:
                logs.set_up("text")
            logs.report(error)
        assert err.getvalue() == f"error: {error}\n"


def test_levels_are_those_of_quiet_and_verbose() -> None:
    for options, least in (({}, logging.INFO), ({"quiet": True}, logging.ERROR), ({"verbose": True}, logging.DEBUG)):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            assert bool(said("text", "x", level=level, **options)) == (level >= least)  # type: ignore[arg-type]


def test_an_unknown_format_is_one_line() -> None:
    with pytest.raises(UsageError, match="--log-format, expected text or json, got jsom, try one of json"):
        logs.set_up("jsom")


def test_a_record_has_the_fields_of_what_it_is_about_and_each_thread_its_own() -> None:
    heard = list[tuple[str, object, object]]()
    both = threading.Barrier(2)

    def speak(device: str) -> None:
        with about(device=device, round=1):
            both.wait(10)
            logger.info(device)
            with about(round=2):
                logger.info(device)
            logger.info(device, extra={"round": 3})

    def take(record: logging.LogRecord) -> None:
        heard.append((record.getMessage(), record.device, record.round))  # type: ignore[attr-defined]

    with each_record(take):
        threads = [threading.Thread(target=speak, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(heard, key=str) == [(name, name, number) for name in ("a", "b") for number in (1, 2, 3)]


def test_later_fields_win_over_those_of_the_process() -> None:
    with about(device="hall", round=1):
        found = json.loads(said("json", "x", extra={"round": 2}))
    assert (found["fleet"], found["device"], found["round"]) == ("pets", "hall", 2)


@pytest.mark.parametrize("before", [logging.NOTSET, logging.DEBUG, logging.ERROR])
def test_who_is_told_hears_sentences_whole_and_leaves_the_level_as_it_was(before: int) -> None:
    heard = list[str]()
    try:
        ours.setLevel(before)
        with told(heard.append):
            assert ours.isEnabledFor(logging.DEBUG) == (before == logging.DEBUG)
            logger.debug("not this")
            logger.info("skipped %s", Private("grandma.jpg"))
        logger.error("nor this")
        assert (heard, ours.level) == (["skipped grandma.jpg"], before)
    finally:
        ours.setLevel(logging.NOTSET)


def test_what_was_said_last_is_not_said_again(said: list[str]) -> None:
    changes = Changes(logger)
    for line in ("away", "away", "here", "away"):
        changes.say(line)
    changes.last = ""
    changes.say("away")
    assert said == ["away", "here", "away", "away"]


def test_every_event_of_an_aggregator_is_a_record_with_its_fields() -> None:
    records = list[logging.LogRecord]()
    examples = {"figure": "unlike", "cause": "token", "mean": {"all_classes": 0.5}, "pooled": {}, "shorter": (3,)}
    for event in get_args(events.Event):
        hints, values = get_type_hints(event), dict[str, object]()
        for field in fields(event):
            kind = str(hints[field.name])
            plain: object = ("a",) if "tuple" in kind else 1 if "int" in kind or "float" in kind else "x"
            values[field.name] = examples.get(field.name, False if "bool" in kind else plain)
        records.clear()
        for level in (logging.INFO, logging.DEBUG):
            with each_record(records.append, level):
                Progress()(event(**values))
        for record in records:
            assert record.name == "protofleet.aggregator"
            assert record.event == event.__name__  # type: ignore[attr-defined]
            assert {name: vars(record)["class" if name == "name" else name] for name in values} == values
        assert records or event is events.BatchTaken
