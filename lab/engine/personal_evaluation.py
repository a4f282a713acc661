"""After a simulated run on the devices' own core: each device's own test, before and after one more fit.

This is the papers' personalised accuracy (FedHP's Tab. 1). Every device receives the last global state, trains once
more as in a round, and answers its own held-back samples. A second, equal device does it
(`lab/engine/device_turns.py`), so the run itself does not change.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from protofleet.contract.wire.messages import Announcement
from protofleet.lab.engine.deployed import RoundRecord, Simulation
from protofleet.lab.engine.device_accuracy import each_accuracy, mean_accuracy
from protofleet.lab.engine.device_turns import OwnTest, own_test
from protofleet.lab.engine.evaluation import AveragingRecord
from protofleet.lab.workers.workers import OneProcess, Workers, in_order

__all__ = ["own_tests"]


def own_tests(simulation: Simulation, *, fit: bool, workers: Workers | None = None) -> AveragingRecord:
    """The last record of a simulation, with `local_test` and, with `fit`, `personal`.

    Args:
        workers: where the tests are computed; None for this process.
    """
    last, state, fleet = simulation.records[-1], simulation.state, simulation.fleet
    first = fleet.bundle(0)
    again = Announcement(state.run, last.round + 1, "open", first.manifest.method, first.sha256)
    turns = [fleet.turn(place) for place in range(len(fleet.devices))]
    with (workers or OneProcess()).at_site(fleet) as site:
        pairs = list(in_order(site, own_test, OwnTest(again, state, fit), turns))
    before = [each for each, _ in pairs if each is not None]
    after = [each for _, each in pairs if each is not None]
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
