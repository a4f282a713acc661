"""Late contributions that stand in for their device in the next round, where the method allows. No files, no clock.

Where what is summed are features of the extractor that all devices share, a contribution that missed its window is as
true in the next one: it stands for what its device had then. It is answered `late`, since the round that it was for is
closed, and kept. When the next round of that method closes without anything of that device's own, it is counted there,
and forgotten whether it was or not. So a device counts once in a round, by its own contribution if there is one.

Nothing was promised for it, so it is kept in memory alone and lost in a restart, and it does not help a round to close.
One that came in chunks does not stand in: its device stops sending once it hears `late`. Nor does one for other
devices: a gateway tells them that they count in no round, and who is no gateway may not speak for others, late or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aggregator.forgotten_classes import as_kept, left_of
from aggregator.ingest import Decision, View
from aggregator.store import Accepted
from aggregator.validation import check_content
from contract.errors import WireError
from contract.messages import Contribution
from contract.signed import inside

__all__ = ["StandIns"]

_BUDGET_BYTES = 64 << 20


class StandIns:
    """Those of one aggregator.

    Args:
        budget_bytes: for all that are kept; beyond it no more are.
    """

    def __init__(self, budget_bytes: int = _BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._kept: dict[str, Accepted] = {}
        self._stood: tuple[int, frozenset[str]] = 0, frozenset()

    def hear(self, decision: Decision, payload: bytes, view: View) -> None:
        """What was decided on `payload`, when the last round was that of `view`."""
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
        left = left_of(message, terms.withheld)
        if left is None:
            return
        payload = payload if left is message else as_kept(left)
        before = self._kept.get(decision.device)
        if before is not None and before.round >= message.round:
            return
        others = sum(len(kept.payload) for device, kept in self._kept.items() if device != decision.device)
        if others + len(payload) <= self._budget_bytes:
            found = Accepted(message.round, message.method, decision.device, payload, len(payload))
            self._kept[decision.device] = found

    def forget(self, device: str) -> None:
        """Nothing of this device stands in."""
        self._kept.pop(device, None)

    def clear(self) -> None:
        """Nothing stands in."""
        self._kept.clear()

    def due(self, round: int, method: str, lacks: Callable[[str], bool]) -> list[Accepted]:
        """What stands in in a round that closes, as contributions to it; nothing of its method is kept after that.

        Args:
            lacks: whether the round may count a device and has nothing of its own.
        """
        kept = [each for device, each in sorted(self._kept.items()) if each.method == method and lacks(device)]
        self._kept = {device: each for device, each in self._kept.items() if each.method != method}
        self._stood = round, frozenset(each.device for each in kept)
        return [replace(each, round=round) for each in kept if each.round < round]

    def stood(self, round: int, device: str) -> bool:
        """Whether what the store holds of a device in a round is of an earlier one."""
        return self._stood[0] == round and device in self._stood[1]
