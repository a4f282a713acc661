"""A head of those that a round left out and that agree among themselves, for them alone, where their owners allow it.

A device that sees differently is left out, and its own photos may teach little. Others may see as it does: so at the
closing of a round in which nothing is trained,

1. those that were left out and whose owners gave leave (`joint_head` in a device's policy, told in its status) are
   compared with each other as all are with all (`contradictions.agreeing`);
2. the largest group that agrees, of `LEAST` at least, is merged as the round's method merges, as if it were a fleet;
3. the rows are in the store from the round's closing on, in its transaction, and go to the members of that group alone,
   on each one's own downward topic, until a round makes others.

Of two each would see the other's means. Where noise is added, sums stand, or a round is blinded, nobody is compared,
and so there is no such head. One member that is forgotten, or takes its leave back, ends it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from aggregator.contradictions import agreeing, has_means
from aggregator.merging import Result, Some, merge_round
from aggregator.outliers import Screening, Traits
from aggregator.state import next_global
from contract.joint import LEAST, joint_kind
from contract.messages import Contribution, GlobalPart
from contract.methods import Method, Value
from contract.state import GlobalCollector, GlobalState
from contract.statistics import Statistic
from contract.wire import decode, encode

__all__ = ["META", "JointHead", "joint_head"]

META = "joint head"  # of the store
_PART_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class JointHead:
    """What a group of devices is given.

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
        """As the store keeps it."""
        parts = [base64.b64encode(encode(part, "f32")).decode() for part in self.state.parts(_PART_BYTES)]
        return json.dumps({"members": self.members, "parts": parts})

    @classmethod
    def read(cls, written: str, run: bytes) -> JointHead | None:
        """What `written` gave; None of no part.

        Raises:
            ValueError, KeyError, WireError: something else.
        """
        kept, collector, state = json.loads(written), GlobalCollector(), None
        for each in kept["parts"]:
            part = decode(base64.b64decode(each))
            if not isinstance(part, GlobalPart):
                raise ValueError("a joint head of no parts")
            state = collector.add(part)
        return None if state is None else cls(tuple(map(str, kept["members"])), replace(state, run=run))


def joint_head(
    found: Method,
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
    """The joint head of a round; None where no group is large enough.

    Args:
        messages, traits, hyper, classes, width: as of `merge_round`, of all of the round.
        result: what the round came to.
        leave: whose owners allow it.
    """
    if found.trains or not has_means(found.statistic) or found.mechanism(hyper) is not None:
        return None
    asked = {finding.device for finding in result.findings if finding.left_out and finding.device in leave}

    def statistics(devices: Collection[str]) -> Iterator[Statistic]:
        return (message.statistic(found.statistic, classes, width) for _, message in messages(devices))

    everyone = [device for device, each in traits.items() if not each.devices]
    group = agreeing(statistics, everyone, asked) if len(asked) >= LEAST else ()
    if len(group) < LEAST:
        return None
    of_group: dict[str, Traits] = {device: traits[device] for device in group}

    def sent() -> Iterator[tuple[str, Contribution]]:
        return messages(group)

    how = Screening(1.0, "ignore")
    merged = merge_round(found, sent, of_group, hyper, classes=classes, width=width, how=how)
    if any(finding.left_out for finding in merged.findings) or not merged.merged.present.any():
        return None
    state = next_global(GlobalState(run, 0, 0), found, merged.merged, round=round, hyper=hyper)
    return JointHead(group, replace(state, version=round))
