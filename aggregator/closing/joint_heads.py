"""A head for devices that a round left out and that agree among themselves, if their owners allow it.

A device that sees differently is left out, and its own photos may teach little. Other devices may see as it does. So at
the closing of a round in which nothing is trained:

1. The left-out devices whose owners gave leave (`joint_head` in a device's policy, reported in its status) are compared
   with each other, as all devices are with all (`contradictions.agreeing`).
2. The largest group that agrees, of at least `LEAST` devices, is merged as the round's method merges, as if it were a
   fleet.
3. The rows are in the store from the round's closing on, in its transaction. They go to the members of that group
   alone, on each one's own downward topic, until a round makes other rows.

In a group of two each would see the other's means. Where noise is added, sums stand, or a round is blinded, no devices
are compared, so there is no joint head. A joint head ends when one member is forgotten or withdraws its leave.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from protofleet.aggregator.merging.merge_round import Result, Some, merge_round
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.rounds.round_machine import MAX_DEVICES
from protofleet.aggregator.screening.contradictions import agreeing, has_means
from protofleet.aggregator.screening.outliers import Screening, Traits
from protofleet.aggregator.store.durable_store import Store, as_written
from protofleet.contract.methods import Method, Value
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.joint_heads import JOINT, LEAST, joint_kind
from protofleet.contract.wire.messages import Contribution, GlobalPart, Receipt

__all__ = ["META", "JointHead", "JointHeads", "joint_head"]

META = "joint head"  # of the store
_PART_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class JointHead:
    """The head of a group of devices.

    Attributes:
        members: their names, in order.
        state: its rows; its version and its round are the round's number.
    """

    members: tuple[str, ...]
    state: GlobalState

    def parts(self, limit_bytes: int) -> list[GlobalPart]:
        """As messages of at most `limit_bytes` each when encoded."""
        return [
            replace(part, kind=joint_kind(part.kind, len(self.members))) for part in self.state.parts(limit_bytes - 16)
        ]

    def written(self) -> str:
        """The form that the store keeps."""
        parts = [base64.b64encode(encode(part, "f32")).decode() for part in self.state.parts(_PART_BYTES)]
        return json.dumps({"members": self.members, "parts": parts})

    @classmethod
    def read(cls, written: str, run: bytes) -> JointHead | None:
        """The joint head that `written` gave; None without parts.

        Raises:
            ValueError, KeyError, WireError: the text is something else.
        """
        stored, collector, state = json.loads(written), GlobalCollector(), None
        for encoded in stored["parts"]:
            part = decode(base64.b64decode(encoded))
            if not isinstance(part, GlobalPart):
                raise ValueError("a joint head of no parts")
            state = collector.add(part)
        return None if state is None else cls(tuple(map(str, stored["members"])), replace(state, run=run))


class JointHeads:
    """Who may have a joint head, and the one that there is.

    Attributes:
        leave: the devices whose owners allow it.
        current: the joint head of the newest round; None without one.
    """

    def __init__(self, store: Store) -> None:
        self._meta, self._run = store.meta, store.run
        self.leave: set[str] = set()
        self.current: JointHead | None = None
        with as_written(store.standing.path):
            written = store.meta.get(META)
            self.current = JointHead.read(written, store.run) if written else None

    def hear(self, device: str, versions: Mapping[str, str]) -> None:
        """Take from a status whether a device's owner allows a joint head; a last will says nothing of it."""
        if not versions:
            return
        if JOINT not in versions:
            self.leave.discard(device)
            self.end(device)
        elif len(self.leave) < MAX_DEVICES:
            self.leave.add(device)

    def end(self, device: str | None = None) -> None:
        """The joint head is no longer given: that of this device, or any.

        Raises:
            StoreError: the disk refuses.
        """
        if self.current is not None and (device is None or device in self.current.members):
            self._meta.put(META, "")
            self.current = None

    def recorded(self, written: str) -> None:
        """The newest round has this joint head, as it is in the store; it ends if a member took its leave back."""
        self.current = JointHead.read(written, self._run) if written else None
        for device in () if self.current is None else set(self.current.members) - self.leave:
            self.end(device)

    def of(self, device: str, verdict: Receipt | None) -> JointHead | None:
        """The joint head that a device gets; None for none.

        Args:
            verdict: on the device, in the newest round that it took part in.
        """
        joint = self.current
        if joint is None or verdict is None or verdict.counts or device not in joint.members:
            return None
        return joint if (verdict.round, verdict.run) == (joint.state.round, joint.state.run) else None


def joint_head(
    method: Method,
    messages: Some,
    traits: Mapping[str, Traits],
    hyper: Mapping[str, Value],
    result: Result,
    leave: Collection[str],
    *,
    run: bytes,
    round: int,
    classes: int,
    width: int,
) -> JointHead | None:
    """The joint head of a round; None when no group is large enough.

    Args:
        messages, traits, hyper, classes, width: as of `merge_round`, of all devices of the round.
        result: of the round.
        leave: the devices whose owners allow it.
    """
    if method.trains or not has_means(method.statistic) or method.mechanism(hyper) is not None:
        return None
    candidates = {finding.device for finding in result.findings if finding.left_out and finding.device in leave}

    def statistics(devices: Collection[str]) -> Iterator[Statistic]:
        return (message.statistic(method.statistic, classes, width) for _, message in messages(devices))

    everyone = [device for device, trait in traits.items() if not trait.devices]
    group = agreeing(statistics, everyone, candidates) if len(candidates) >= LEAST else ()
    if len(group) < LEAST:
        return None
    of_group: dict[str, Traits] = {device: traits[device] for device in group}

    def sent() -> Iterator[tuple[str, Contribution]]:
        return messages(group)

    how = Screening(1.0, "ignore")
    merged = merge_round(method, sent, of_group, hyper, classes=classes, width=width, how=how)
    if any(finding.left_out for finding in merged.findings) or not merged.merged.present.any():
        return None
    state = next_global(GlobalState(run, 0, 0), method, merged.merged, round=round, hyper=hyper)
    return JointHead(group, replace(state, version=round))
