"""What the month's end is checked against: a second, real fleet in which none of it happened.

The devices that are left start once more, in another fleet on the same broker: with fresh state directories, the photos
that they have at the end, and the long list of classes from the start. The devices that were forgotten or withdrew
never were in it; nobody was killed, nobody slept. If nothing was lost or counted twice, if forgetting was exact, and if
the class that came later costs nothing, then both stores hold the same sums of each device, the same integers in all,
and the same head, bit for bit.

Beside it: the head against one made of all photos in one place, on each device what `protofleet predict --state`
answers against the figures of the page, and contributions sent against contributions committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.standing import ExactSum
from aggregator.store import DurableStore
from aggregator.store_schema import KIND
from contract.bundle import Bundle
from contract.messages import Contribution
from contract.methods import method
from contract.signed import inside
from contract.sqlite import read_only
from edge_client.knowledge import Knowledge
from edge_client.predictor import Predictor
from lab.demo.living.fleet import LivingFleet

__all__ = ["Held", "compare", "head_error", "predicted", "read_store", "stands_of", "stretches", "total_of"]

_STRETCH = 32


@dataclass(frozen=True, eq=False)
class Held:
    """What a store holds.

    Attributes:
        sums: of each device that stands, as integers.
        total: of all; None where nobody stands.
        head: (C, D) float32 as it was published.
        generations: of each device, also of those that were taken out.
    """

    sums: Mapping[str, ExactSum]
    total: ExactSum | None
    head: NDArray[np.float32]
    generations: Mapping[str, int]


def read_store(path: Path, bundle: Bundle, fleet: str) -> Held:
    """What an aggregator that has ended left in its store."""
    m, kind = bundle.manifest, method("ffc").statistic
    with DurableStore(path, bundle.sha256, fleet, extends=m.extended) as store:
        sums = {}
        for device, payload in store.standing.payloads():
            message = inside(payload)
            assert isinstance(message, Contribution)
            sums[device] = ExactSum.of(message.statistic(kind, m.classes, m.features))
        head, _ = store.state().dense("head", m.classes, m.features)
        return Held(sums, total_of(sums), head, store.standing.generations())


def total_of(sums: Mapping[str, ExactSum]) -> ExactSum | None:
    """The sum over devices, in any order."""
    total: ExactSum | None = None
    for each in sums.values():
        total = each if total is None else total.add(each)
    return total


def compare(month: Held, never: Held) -> dict[str, Any]:
    """The month's end beside the fleet in which none of it happened, as the summary says it."""
    assert month.total is not None
    assert never.total is not None
    return {
        "devices": sorted(never.sums),
        "integers": len(month.total.numbers) + len(month.total.counts),
        "differing_integers": _differing(month.total, never.total),
        "equal_devices": sum(name in month.sums and month.sums[name].equal(each) for name, each in never.sums.items()),
        "equal": sorted(month.sums) == sorted(never.sums) and month.total.equal(never.total),
        "digest": month.total.digest(),
        "head_numbers": int(month.head.size),
        "head_differing": int((month.head != never.head).sum()),
    }


def head_error(head: NDArray[np.floating], best: NDArray[np.float64]) -> float:
    """‖W − W*‖_F / ‖W*‖_F of two heads (C, D)."""
    return float(np.linalg.norm(head - best) / np.linalg.norm(best))


def predicted(fleet: LivingFleet, devices: Sequence[str], images: NDArray[np.uint8]) -> dict[str, NDArray[np.int64]]:
    """What `protofleet predict --state` answers about images (N, H, W, c) on each device, as class numbers (N,)."""
    found = {}
    for device in devices:
        bundle, known, _ = Knowledge.of_state(fleet.state(device))
        found[device] = Predictor(bundle, known)(images).classes
    return found


def stands_of(store: Path, device: str) -> bytes:
    """The message that stands of a device, from the store of an aggregator that runs."""
    with read_only(store, KIND) as db:
        (found,) = db.execute("SELECT payload FROM standing WHERE device = ?", (device,)).fetchone()
    return bytes(found)


def stretches(store: Path, message: bytes) -> tuple[int, int]:
    """How many stretches of `_STRETCH` bytes of a message are found anywhere in a store's files, and of how many: those
    that hold numbers, and not zeros alone. Before a device is forgotten all are, but some that lie on two pages."""
    content = b"".join(path.read_bytes() for path in sorted(store.parent.glob(f"{store.name}*")))
    cut = [message[at : at + _STRETCH] for at in range(0, len(message) - _STRETCH, _STRETCH)]
    asked = [each for each in cut if len(set(each)) > _STRETCH // 4]
    return sum(each in content for each in asked), len(asked)


def _differing(one: ExactSum, other: ExactSum) -> int:
    numbers = (one.numbers.high != other.numbers.high) | (one.numbers.low != other.numbers.low)
    return int(numbers.sum() + (one.counts != other.counts).sum())
