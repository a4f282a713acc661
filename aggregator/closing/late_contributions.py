"""Late contributions that stand in for their device in the next round, where the method allows. No files, no clock.

Where all devices share the extractor whose features are summed, a contribution that missed its round is as true in the
next one: it stands for the device's data of that time.

1. It is answered `late`, since its round is closed, and kept.
2. When the next round of that method closes without a contribution of that device, the late one is counted there.
3. It is then forgotten, whether it was counted or not.

So a device counts once in a round, by its own contribution if there is one.

A late contribution was never promised anything. So it is kept in memory alone, is lost in a restart, and does not help
a round to close.

Two kinds do not stand in. A contribution in chunks: its device stops sending once it hears `late`. A contribution for
other devices: a gateway tells its devices that they count in no round, and any other device may not speak for others,
late or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from protofleet.aggregator.ingest.ingest import Decision, View
from protofleet.aggregator.ingest.validation import check_content
from protofleet.aggregator.merging.forgotten_classes import as_kept, left_of
from protofleet.aggregator.store.records import Accepted
from protofleet.contract.errors import WireError
from protofleet.contract.identity.signatures import inside
from protofleet.contract.wire.messages import Contribution

__all__ = ["LateContributions"]

_BUDGET_BYTES = 64 << 20


class LateContributions:
    """The late contributions of one aggregator.

    Args:
        budget_bytes: for all of them; beyond it no more are kept.
    """

    def __init__(self, budget_bytes: int = _BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._late: dict[str, Accepted] = {}
        self._stood: tuple[int, frozenset[str]] = 0, frozenset()

    def hear(self, decision: Decision, payload: bytes, view: View) -> None:
        """Take the decision on `payload`, made when the last round was that of `view`."""
        terms = view.terms
        if decision.outcome != "late" or not terms.extractor or terms.noise is not None:
            return
        try:
            message = inside(payload)
            if not isinstance(message, Contribution) or message.method != view.method or message.devices:
                return
            check_content(message, terms, bundles=(view.bundle, *view.others), classes=view.classes, width=view.width)
        except WireError:
            return
        reduced = left_of(message, terms.withheld)
        if reduced is None:
            return
        payload = payload if reduced is message else as_kept(reduced)
        before = self._late.get(decision.device)
        if before is not None and before.round >= message.round:
            return
        others_bytes = sum(len(late.payload) for device, late in self._late.items() if device != decision.device)
        if others_bytes + len(payload) <= self._budget_bytes:
            contribution = Accepted(message.round, message.method, decision.device, payload, len(payload))
            self._late[decision.device] = contribution

    def forget(self, device: str) -> None:
        """Drop the late contribution of this device."""
        self._late.pop(device, None)

    def clear(self) -> None:
        """Drop all late contributions."""
        self._late.clear()

    def due(self, round: int, method: str, lacks: Callable[[str], bool]) -> list[Accepted]:
        """The late contributions that stand in for a round that closes, as contributions to it.

        Nothing of its method is kept after that.

        Args:
            lacks: whether the round may count a device and has no contribution of its own.
        """
        due = [late for device, late in sorted(self._late.items()) if late.method == method and lacks(device)]
        self._late = {device: late for device, late in self._late.items() if late.method != method}
        self._stood = round, frozenset(late.device for late in due)
        return [replace(late, round=round) for late in due if late.round < round]

    def stood(self, round: int, device: str) -> bool:
        """Whether the stored contribution of a device in a round is from an earlier one."""
        return self._stood[0] == round and device in self._stood[1]
