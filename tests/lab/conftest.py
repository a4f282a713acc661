"""For the lab's tests: what their experiments export is exported once a run."""

from __future__ import annotations

import pytest
import shared

from protofleet.lab.engine import experiment


@pytest.fixture(autouse=True)
def _exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred experiments ask for some twenty bundles (`shared.export_to`)."""
    monkeypatch.setattr(experiment, "build_bundle", shared.export_to)
