"""Text from outside reaches a terminal as visible signs only: in errors, in logs, in what `inspect` shows."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import bundle_file
from commands import ROOT, run
from fleets import FLEET, Fleet, fleet_in
from hypothesis import given
from hypothesis import strategies as st
from log_lines import drawing

from protofleet.aggregator.monitoring import events
from protofleet.contract.errors import ProtofleetError
from protofleet.contract.mqtt.link import Address, Link
from protofleet.contract.printable import counted, printable
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import ClassRows, Contribution, Receipt

HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\x9b31m\u202e[bold red]\\[/x]\x00"


def _is_harmless(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


@given(st.text())
def test_what_is_printable_is_one_line_of_visible_signs(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    if text.isprintable():
        assert printable(text) == text


@given(st.text(), st.text(), st.text())
def test_an_error_is_one_harmless_line(message: str, got: str, hint: str) -> None:
    assert str(ProtofleetError(message, expected=got, got=got, hint=hint)).isprintable()


@pytest.mark.parametrize(
    "event",
    [
        events.Refused(HOSTILE, HOSTILE),
        events.LinkDown(HOSTILE, 1.0),
        events.StoreAway(HOSTILE, 1.0),
        events.RoundOpened(1, 2, HOSTILE, 3),
        events.LinkUp(HOSTILE, 1),
    ],
)
def test_no_event_can_style_the_aggregators_log(event: events.Event) -> None:
    out = io.StringIO()
    drawing(out)(event)
    assert _is_harmless(out.getvalue())
    assert "owned" in out.getvalue()
    assert out.getvalue().count("\n") == 1


def test_inspect_shows_a_hostile_message_harmlessly(tmp_path: Path) -> None:
    file = tmp_path / "m.cbor"
    file.write_bytes(encode(Receipt(bytes(4), 1, HOSTILE[:32], "rejected", HOSTILE, b"")))
    for words in ((), ("--json", "-")):
        shown = run("inspect", str(file), *words)
        assert shown.returncode == 0, shown.stderr
        assert _is_harmless(shown.stdout)
        assert "owned" in shown.stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_no_command_breaks_where_the_terminal_lacks_a_character(encoding: str, tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "protofleet", "inspect", str(tmp_path / "ε – ж.bundle")],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
    )
    assert shown.returncode == 2
    assert b"Traceback" not in shown.stderr
    assert b"epsilon - \\u0436.bundle" in shown.stderr


def test_one_thing_is_not_called_several() -> None:
    assert [counted(number, "device") for number in (0, 1, 2_000)] == ["0 devices", "1 device", "2,000 devices"]
    assert [counted(number, "class", "classes") for number in (1, 2)] == ["1 class", "2 classes"]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with fleet_in(tmp_path) as made:
        yield made


def test_a_hostile_contribution_reaches_the_aggregators_log_harmlessly(fleet: Fleet) -> None:
    bundle_file(fleet.folder / "f.bundle")
    fleet.aggregator([fleet.folder / "f.bundle"], "--rounds", 1, "--min-clients", 2)
    fleet.wait_for("aggregator", "waiting for devices")
    link = Link(Address.parse(fleet.url), "evil", subscriptions=[topics.down(FLEET, "evil")])
    link.open()
    link.wait_connected(60)
    body = ClassRows(np.array([0], np.uint16), np.ones((1, 4)))
    message = Contribution(bytes(4), 1, HOSTILE[:32], bytes(4), body, np.array([1], np.uint64))
    for payload in (encode(message), HOSTILE.encode()):
        link.publish(topics.up(FLEET, "evil"), payload)
    fleet.wait_for("aggregator", "refused")
    link.close()
    assert _is_harmless(fleet.log("aggregator"))
