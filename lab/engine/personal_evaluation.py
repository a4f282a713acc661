"""After a simulated run on the devices' own core: each device's own test, before and after one more fit.

The papers' personalised accuracy (FedHP's Tab. 1): every device receives the last global state, trains once more as in
a round, and answers its own held-back samples. Devices are restored from where the simulation left them, so nothing of
it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from contract.bundle import Bundle
from contract.messages import Announcement
from contract.methods import method
from edge_client.compiled_graphs import CompiledGraphs
from edge_client.data import LocalData
from edge_client.device import Device
from edge_client.evaluate import Evaluation
from lab.engine.deployed import RoundRecord, Simulation, mean_accuracy
from lab.engine.evaluation import AveragingRecord

__all__ = ["own_tests"]


def own_tests(
    bundles: Sequence[Bundle],
    simulation: Simulation,
    shares: Sequence[LocalData],
    held: Sequence[LocalData],
    *,
    fit: bool,
) -> AveragingRecord:
    """The last record of `simulation`, with `local_test` and, where `fit`, `personal`.

    Args:
        bundles: each device's.
        held: each device's own test samples; a device without any is not asked.
    """
    last, state = simulation.records[-1], simulation.state
    benches = {bundle.sha256: CompiledGraphs(bundle, keep=True) for bundle in bundles}
    before: list[Evaluation] = []
    after: list[Evaluation] = []
    for number, (bundle, share, own) in enumerate(zip(bundles, shares, held, strict=True), start=1):
        if not len(own) or not len(share):
            continue
        device = Device(bundle, share, f"device-{number}", test=own, graphs=benches[bundle.sha256])
        device.restore(simulation.devices[number - 1].state())
        before += _asked(device, state)
        if fit and method(bundle.manifest.method).trains:
            again = Announcement(state.run, last.round + 1, "open", bundle.manifest.method, bundle.sha256)
            device.run_round(again, state)
            after += _asked(device, state)
    return AveragingRecord(
        **_as_fields(last),
        local_test=mean_accuracy(before)[1],
        personal={f"fit/{way}": value for way, value in mean_accuracy(after)[1].items()},
    )


def _asked(device: Device, state: Any) -> list[Evaluation]:
    found = device.evaluate(state)
    return [] if found is None else [found]


def _as_fields(record: RoundRecord) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(RoundRecord)}
