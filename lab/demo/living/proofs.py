"""Checks the month's end against a second, real fleet in which none of it happened.

The remaining devices start again in another fleet on the same broker. They have new state directories, their photos of
the last day, and all classes from the start. This fleet never had the devices that were forgotten or withdrew. No
process was killed, and no device slept.

Both stores must then hold the same sums of each device, the same integers in total, and the same head, bit for bit.
This proves that nothing was lost or counted twice, that forgetting was exact, and that the later class costs nothing.

Three more checks: the head against a head from all photos in one place; on each device the answers of `protofleet
predict --state` against the page's figures; and contributions sent against contributions committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.files.sqlite import read_only
from protofleet.contract.identity.signatures import inside
from protofleet.contract.methods import method
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.answers.knowledge import Knowledge
from protofleet.edge_client.answers.predictor import Predictor
from protofleet.lab.demo.living.fleet import LivingFleet

__all__ = ["StoreContents", "compare", "head_error", "predicted", "read_store", "stands_of", "stretches", "total_of"]

_STRETCH = 32


@dataclass(frozen=True, eq=False)
class StoreContents:
    """The content of a store.

    Attributes:
        sums: standing sums of each device, as integers.
        total: sum over all devices; None without standing sums.
        head: (C, D) float32, as published.
        generations: generation of each device, also of those that were taken out.
    """

    sums: Mapping[str, ExactSum]
    total: ExactSum | None
    head: NDArray[np.float32]
    generations: Mapping[str, int]


def read_store(path: Path, bundle: Bundle, fleet: str) -> StoreContents:
    """Read the store of an aggregator that has ended."""
    m, kind = bundle.manifest, method("ffc").statistic
    with DurableStore(path, bundle.sha256, fleet, extends=m.extended) as store:
        sums = {}
        for device, payload in store.standing.payloads():
            message = inside(payload)
            assert isinstance(message, Contribution)
            sums[device] = ExactSum.of(message.statistic(kind, m.classes, m.features))
        head, _ = store.state().dense("head", m.classes, m.features)
        return StoreContents(sums, total_of(sums), head, store.standing.generations())


def total_of(sums: Mapping[str, ExactSum]) -> ExactSum | None:
    """The sum over devices, in any order."""
    total: ExactSum | None = None
    for device_sum in sums.values():
        total = device_sum if total is None else total.add(device_sum)
    return total


def compare(month: StoreContents, never: StoreContents) -> dict[str, Any]:
    """Compare the month's end with the fleet in which none of it happened, for the summary."""
    assert month.total is not None
    assert never.total is not None
    return {
        "devices": sorted(never.sums),
        "integers": len(month.total.numbers) + len(month.total.counts),
        "differing_integers": _differing(month.total, never.total),
        "equal_devices": sum(
            name in month.sums and month.sums[name].equal(device_sum) for name, device_sum in never.sums.items()
        ),
        "equal": sorted(month.sums) == sorted(never.sums) and month.total.equal(never.total),
        "digest": month.total.digest(),
        "head_numbers": int(month.head.size),
        "head_differing": int((month.head != never.head).sum()),
    }


def head_error(head: NDArray[np.floating], best: NDArray[np.float64]) -> float:
    """‖W − W*‖_F / ‖W*‖_F of two heads (C, D)."""
    return float(np.linalg.norm(head - best) / np.linalg.norm(best))


def predicted(fleet: LivingFleet, devices: Sequence[str], images: NDArray[np.uint8]) -> dict[str, NDArray[np.int64]]:
    """Answers (N,) of `protofleet predict --state` to images (N, H, W, c), for each device."""
    classes = {}
    for device in devices:
        bundle, known, _ = Knowledge.of_state(fleet.state(device))
        classes[device] = Predictor(bundle, known)(images).classes
    return classes


def stands_of(store: Path, device: str) -> bytes:
    """The message of a device's standing sums, from the store of a running aggregator."""
    with read_only(store, KIND) as db:
        (payload,) = db.execute("SELECT payload FROM standing WHERE device = ?", (device,)).fetchone()
    return bytes(payload)


def stretches(store: Path, message: bytes) -> tuple[int, int]:
    """How many pieces of `_STRETCH` bytes of a message are in a store's files, and the number of pieces looked for.

    Only pieces with numbers count, not those of zeros alone. Before a device is forgotten all are found, except some
    that lie on two pages.
    """
    content = b"".join(path.read_bytes() for path in sorted(store.parent.glob(f"{store.name}*")))
    cut = [message[start : start + _STRETCH] for start in range(0, len(message) - _STRETCH, _STRETCH)]
    asked = [stretch for stretch in cut if len(set(stretch)) > _STRETCH // 4]
    return sum(stretch in content for stretch in asked), len(asked)


def _differing(one: ExactSum, other: ExactSum) -> int:
    numbers = (one.numbers.high != other.numbers.high) | (one.numbers.low != other.numbers.low)
    return int(numbers.sum() + (one.counts != other.counts).sum())
