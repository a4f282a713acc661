"""A device's standing sums on their way: the present samples become the next generation, and receipts say what counts.

`edge_client/standing/sample_choice.py` decides what goes out, and when. Here the device's core makes the sums, and the
journal keeps them. `edge_client/standing/generations.py` reads the receipts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.methods import method
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import MAX_ROUND, Announcement, Receipt
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.samples import sample_keys
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal, Key, Report
from protofleet.edge_client.privacy.releases import Releases
from protofleet.edge_client.standing.generations import Generations
from protofleet.edge_client.standing.sample_choice import Choice, choose, joined, left_in, separated

__all__ = ["NewGeneration", "StandingSums", "is_complete"]


@dataclass(frozen=True, eq=False)
class NewGeneration:
    """A generation that is in the journal.

    Attributes:
        line: what was done, for a person.
        older: what it takes the place of, and had no receipt.
        exposed: what it shows of single photos, for its owner (`exposure.py`).
    """

    report: Report
    payload: bytes
    line: str
    older: list[Key]
    exposed: str


class StandingSums:
    """The standing sums of one device.

    Args:
        device: its core.
        journal: its open state directory.
        device_id: as in the topics.
        releases: what all that leaves passes.
        seal: signs what is sent, if the device signs.
    """

    def __init__(
        self,
        device: Device,
        journal: Journal,
        device_id: str,
        releases: Releases,
        seal: Callable[[bytes], bytes] = lambda payload: payload,
    ) -> None:
        self._device, self._journal, self._id, self._releases = device, journal, device_id, releases
        self._seal = seal
        self._known: tuple[LocalData, list[bytes]] | None = None
        self._idle_look: tuple[object, ...] | None = None  # where the last look found nothing to send
        self._held_back = self._staying = 0
        self._waits = ""
        self._generations = Generations(journal.standing)
        self._withheld: tuple[int, ...] = ()  # as announced when it was last looked

    def make(self, a: Announcement, boot: int, now_s: float) -> NewGeneration | None:
        """The next generation, if enough has changed since the one that was sent last; None when not.

        Args:
            a: the announcement under which sums stand.
            boot: how often the device has started.
        """
        self._waits = ""
        if a.withheld != self._withheld:  # what was refused may have been for a class that was forgotten meanwhile
            self._withheld, self._generations.again_at_s = a.withheld, float("-inf")
        if now_s < self._generations.again_at_s:
            self._waits = "refused by the aggregator: waiting to be admitted again"
            return None
        generation, counts = self._journal.standing.newest(a.run)
        if not counts and self._journal.standing.withdraws(a.run):
            self._waits = "waiting for the receipt of this device's withdrawal"
            return None
        if generation >= MAX_ROUND:
            self._waits = f"sums {generation} were the last: no higher number is left, give this device another --id"
            return None
        keys = self._keys()
        looked = (self._known, a.run, a.method, a.min_samples, a.withheld, generation, counts)
        if looked != self._idle_look:
            choice = self._choice(a, keys)
            if choice.rows is not None:
                if self._releases.wait_s():
                    self._waits = f"sums {generation + 1} wait until the policy allows another release"
                    return None
                new = self._make_generation(a, generation + 1, choice.rows, joined(choice.keys), choice.waiting, boot)
                if new is not None:
                    return new
            self._idle_look, self._held_back = looked, choice.waiting
            self._staying = len(keys) - len(left_in(keys, a.withheld))
        kept = f", {self._staying:,} samples of forgotten classes stay here" if self._staying else ""
        back = f", {self._held_back:,} changes are too few of their class to be told" if self._held_back else ""
        self._waits = f"sums {generation} stand{back}{kept}: waiting for photos to change"
        return None

    def _choice(self, a: Announcement, keys: list[bytes]) -> Choice:
        """Which samples to send.

        The sums that were sent last may hold a class that is forgotten since. Of those the aggregator has removed the
        rows of that class. What is summed over all classes together it has dropped as a whole, and it wants it again
        without that class.
        """
        kept = self._journal.standing.samples(a.run)
        sent = None if kept is None else separated(kept)
        left = None if sent is None else left_in(sent, a.withheld)
        holds_forgotten = sent is not None and left is not None and len(left) < len(sent)
        again = holds_forgotten and method(a.method).statistic.has_triangle()
        choice = choose(keys, sent, a.min_samples, withheld=a.withheld, again=again)
        if holds_forgotten and left is not None and choice.rows is None:
            self._journal.standing.keep_samples(a.run, joined(left))
        return choice

    def waits_for(self) -> str:
        """What is waited for, for a person; empty where there are rounds."""
        return self._waits

    def take_receipt(self, receipt: Receipt, now_s: float) -> None:
        """Take a receipt in. It has an effect if it is for the newest generation, or ends the wait of a refused one."""
        self._generations.take_receipt(receipt, now_s)

    def _keys(self) -> list[bytes]:
        """Of the samples that are here, computed once for them."""
        data = self._device.samples
        if self._known is None or self._known[0] is not data:
            self._known = (data, sample_keys(data))
        return self._known[1]

    def _make_generation(
        self, a: Announcement, generation: int, rows: NDArray[np.bool_], samples: bytes, waiting: int, boot: int
    ) -> NewGeneration | None:
        """The generation, in ledger and journal; None where its numbers fit no encoding that may be."""
        began_s = time.monotonic()
        result = self._device.stand(a, generation, rows)
        encoded = self._releases.encoded(result.contribution, a)
        if encoded is None:
            return None
        payload, encoding = encoded
        counts = self._device.samples.counts(self._device.classes)
        self._releases.made(replace(a, round=generation), encoding, payload, counts)
        payload = self._seal(payload)
        key, older = (a.run, generation, a.method), self._journal.standing.pending(a.run)
        metrics = {
            "device": self._id,
            "boot": boot,
            "standing": generation,
            "global_version": a.global_version,
            "loss": None,
            "seconds": round(time.monotonic() - began_s, 3),
            "samples": result.samples,
            "steps": 0,
            "step_ms": None,
            "payload_bytes": len(payload),
        }
        self._journal.standing.commit(key, samples=samples, payload=payload, limit_bytes=a.limit_bytes, metrics=metrics)
        wait = f", {waiting:,} wait until there are {a.min_samples} of a class" if waiting else ""
        line = f"sums {generation} ({a.method}): {result.samples:,} samples, {len(payload):,} bytes to send{wait}"
        return NewGeneration(Report(key, metrics), payload, line, older, self._device.exposed(result.contribution, a))


def is_complete(report: Report, outcome: tuple[str, int] | None, state: GlobalState | None) -> bool:
    """Whether a generation's outcome is here, and, where it counts, a global state that it is in."""
    if outcome is None or outcome[0] not in ("committed", "duplicate"):
        return outcome is not None
    return state is not None and state.version > report.metrics["global_version"]
