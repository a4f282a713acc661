"""After a simulated run on the devices' own core: each device's own test, before and after one more fit.

The papers' personalised accuracy (FedHP's Tab. 1): every device receives the last global state, trains once more as in
a round, and answers its own held-back samples. It is a second device that does so (`lab/engine/device_turns.py`), so
nothing of the run changes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from contract.messages import Announcement
from lab.engine.deployed import RoundRecord, Simulation
from lab.engine.device_accuracy import each_accuracy, mean_accuracy
from lab.engine.device_turns import OwnTest, own_test
from lab.engine.evaluation import AveragingRecord
from lab.engine.workers import OneProcess, Workers, in_order

__all__ = ["own_tests"]


def own_tests(simulation: Simulation, *, fit: bool, workers: Workers | None = None) -> AveragingRecord:
    """The last record of `simulation`, with `local_test` and, where `fit`, `personal`.

    Args:
        workers: where devices do it; in this process when left out.
    """
    last, state, fleet = simulation.records[-1], simulation.state, simulation.fleet
    first = fleet.bundle(0)
    again = Announcement(state.run, last.round + 1, "open", first.manifest.method, first.sha256)
    turns = [fleet.turn(place) for place in range(len(fleet.devices))]
    with (workers or OneProcess()).settle(fleet) as at:
        found = list(in_order(at, own_test, OwnTest(again, state, fit), turns))
    before = [each for each, _ in found if each is not None]
    after = [each for _, each in found if each is not None]
    clients = each_accuracy(before, {"all_classes": "local_test"}) | each_accuracy(
        after, {"all_classes": "personal/fit"}
    )
    return AveragingRecord(
        **_as_fields(last) | {"clients": last.clients | clients},
        local_test=mean_accuracy(before)[1],
        personal={f"fit/{way}": value for way, value in mean_accuracy(after)[1].items()},
    )


def _as_fields(record: RoundRecord) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(RoundRecord)}
