"""Which sets of devices may be summed, so that nobody learns more than sums over k of them. No files, no clock.

A device's data hardly change from one round to the next. So the sums over two sets that differ by one device show what
that device has, and so may sums and differences of many sets. What all sums that were ever opened can show together is
decided by their **blocks**: two devices are of one block when every set that was opened has both of them or neither.
Whatever is computed from these sums takes all devices of a block alike, so as long as

    every block has at least k devices

nothing finer can be learned of unchanged data than sums over k devices each. `breach` holds a new set to that. Two sets
that it lets through are identical or differ by k devices or more, and so are their sums and differences.

A set takes of each block all, or leaves at least k out and takes at least k; and of devices that no set had before,
none or at least k. Where k was raised, a block that has fewer is in no set any more: sums that were opened before show
it, and another set with it or without it would be over fewer than k devices. `allowed` picks the largest such set of
those who are there.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping

__all__ = ["Blocks", "allowed", "breach", "refined", "smaller"]

Blocks = Mapping[str, int]
"""The block of each device that is in a set that was opened."""


def breach(blocks: Blocks, chosen: Collection[str], least: int) -> dict[str, str]:
    """Why a set may not be opened, by device; empty where it may.

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
        here, away = members[block] & inside, members[block] - inside
        if len(members[block]) < least:
            wrong |= dict.fromkeys(here, f"its sums show {len(members[block])} devices, of fewer than {least}")
        elif away and (len(here) < least or len(away) < least):
            wrong |= dict.fromkeys(here, f"waits for {len(away)} of the {len(members[block])} it was summed with")
    return wrong


def allowed(blocks: Blocks, present: Collection[str], least: int, most: int) -> set[str]:
    """The devices of the largest set of those present that may be opened; empty where there is none.

    Args:
        least, most: how many devices a set has.
    """
    members, inside = _members(blocks), set(present)
    groups = [(members[block] & inside, members[block] - inside) for block in members]
    groups.append((inside - blocks.keys(), set()))
    chosen: set[str] = set()
    for here, away in sorted(groups, key=lambda group: -len(group[0])):
        room = most - len(chosen)
        take = min(len(here), room)
        left = len(here) + len(away) - take
        if left and here & blocks.keys():
            take = min(take, len(here) + len(away) - least)
        if take >= least:
            chosen |= set(sorted(here, key=_order)[:take])
    return chosen


def refined(blocks: Blocks, chosen: Collection[str]) -> dict[str, int]:
    """The blocks once this set is opened, too."""
    inside = set(chosen)
    keys = {device: (blocks.get(device, 0), device in inside) for device in {*blocks, *inside}}
    numbers = {key: number for number, key in enumerate(sorted(set(keys.values())), 1)}
    return {device: numbers[key] for device, key in keys.items()}


def smaller(blocks: Blocks, least: int) -> int:
    """How many devices are in blocks of fewer than k, and so in no further set."""
    return sum(len(devices) for devices in _members(blocks).values() if len(devices) < least)


def _members(blocks: Blocks) -> dict[int, set[str]]:
    members: dict[int, set[str]] = defaultdict(set)
    for device, block in blocks.items():
        members[block].add(device)
    return members


def _order(device: str) -> bytes:
    """An order that no name is first in by its name."""
    return hashlib.sha256(device.encode()).digest()
