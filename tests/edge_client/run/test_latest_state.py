"""What the log says of the fleet's global versions."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from protofleet.edge_client.run import latest_state
from protofleet.edge_client.run.latest_state import KeptState


def test_of_versions_that_come_quickly_the_log_says_the_first_and_later_the_last(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now_s = 100.0
    monkeypatch.setattr(latest_state, "time", SimpleNamespace(monotonic=lambda: now_s))
    follower = SimpleNamespace(newest_state=None)
    kept: list[Any] = []
    device = SimpleNamespace(judge=lambda state: SimpleNamespace(refused=state.version == 9))
    journal = SimpleNamespace(kept_global=lambda: None, keep_global=kept.append)
    state = KeptState(*cast("tuple[Any, Any, Any]", (device, journal, follower)))
    for version in (1, 2, 3):
        follower.newest_state = SimpleNamespace(run=b"run", version=version)
        assert state.keep()
        assert _said(caplog) == [1]
        now_s += 10
    assert [each.version for each in kept] == [1, 2, 3]
    now_s += 60
    assert not state.keep()  # nothing new has come; but the last one was not said yet
    now_s += 120
    assert not state.keep()
    assert _said(caplog) == [1, 3]
    follower.newest_state = SimpleNamespace(run=b"run", version=9)  # cannot be true
    state.keep()
    assert _said(caplog) == [1, 3]


def _said(caplog: pytest.LogCaptureFixture) -> list[int]:
    lines = [line for line in caplog.messages if "global version" in line]
    return [int(line.removesuffix(" is here").rpartition(" ")[2]) for line in lines]
