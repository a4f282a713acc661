"""The sets of devices that may be summed, so that nobody learns more than sums over k devices. No files, no clock.

**The danger.** A device's data hardly change from one round to the next. So the sums over two sets that differ by one
device show the data of that device. Sums and differences of many sets may show it, too.

**Blocks.** Two devices are in one block if every set that was opened has both of them or neither. Every result that can
be computed from the opened sums treats all devices of a block alike.

**Guarantee.** As long as

    every block has at least k devices

nobody can learn anything finer of unchanged data than sums over k devices each.

**The rule.** `breach` checks a new set:

1. Of each block, the set takes all devices; or it takes at least k and leaves at least k out; or it takes none.
2. Of the devices that no set had before, it takes none or at least k.
3. Where k was raised, a block may have fewer than k devices. It is in no set any more: sums that were opened before
   show the block, and another set with it or without it would be over fewer than k devices.

So two sets that were accepted are identical or differ by k devices or more, and so do their sums and differences.
`allowed` picks the largest such set of the devices that are present.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping

__all__ = ["Blocks", "allowed", "breach", "refined", "smaller"]

Blocks = Mapping[str, int]
"""The block of each device that was in an opened set."""


def breach(blocks: Blocks, chosen: Collection[str], least: int) -> dict[str, str]:
    """The reasons why a set may not be opened, by device; empty where it may be opened.

    Args:
        chosen: the devices of the set.
        least: k.
    """
    members, inside = _members(blocks), set(chosen)
    new = inside - blocks.keys()
    if len(inside) < least:
        return dict.fromkeys(inside, f"a sum takes {least} devices, here are {len(inside)}")
    wrong: dict[str, str] = {}
    if 0 < len(new) < least:
        wrong |= dict.fromkeys(new, f"waits until {least} that were in no sum come together, here are {len(new)}")
    for block in {blocks[device] for device in inside & blocks.keys()}:
        present, absent = members[block] & inside, members[block] - inside
        if len(members[block]) < least:
            wrong |= dict.fromkeys(present, f"its sums show {len(members[block])} devices, of fewer than {least}")
        elif absent and (len(present) < least or len(absent) < least):
            wrong |= dict.fromkeys(present, f"waits for {len(absent)} of the {len(members[block])} it was summed with")
    return wrong


def allowed(blocks: Blocks, present: Collection[str], least: int, most: int) -> set[str]:
    """The devices of the largest set of those present that may be opened; empty where there is none.

    Args:
        least, most: the bounds of how many devices a set has.
    """
    members, inside = _members(blocks), set(present)
    groups = [(members[block] & inside, members[block] - inside) for block in members]
    groups.append((inside - blocks.keys(), set()))
    chosen: set[str] = set()
    for members_present, absent in sorted(groups, key=lambda group: -len(group[0])):
        room = most - len(chosen)
        take = min(len(members_present), room)
        left = len(members_present) + len(absent) - take
        if left and members_present & blocks.keys():
            take = min(take, len(members_present) + len(absent) - least)
        if take >= least:
            chosen |= set(sorted(members_present, key=_order)[:take])
    return chosen


def refined(blocks: Blocks, chosen: Collection[str]) -> dict[str, int]:
    """The blocks after this set is opened, too."""
    inside = set(chosen)
    keys = {device: (blocks.get(device, 0), device in inside) for device in {*blocks, *inside}}
    numbers = {key: number for number, key in enumerate(sorted(set(keys.values())), 1)}
    return {device: numbers[key] for device, key in keys.items()}


def smaller(blocks: Blocks, least: int) -> int:
    """The number of devices in blocks of fewer than k. They are in no further set."""
    return sum(len(devices) for devices in _members(blocks).values() if len(devices) < least)


def _members(blocks: Blocks) -> dict[int, set[str]]:
    members: dict[int, set[str]] = defaultdict(set)
    for device, block in blocks.items():
        members[block].add(device)
    return members


def _order(device: str) -> bytes:
    """A sort key that does not follow the alphabet, so that no name is preferred."""
    return hashlib.sha256(device.encode()).digest()
