"""Stateless sampling: a device decides by itself whether it takes part in a round, or in a stage of a roll-out.

The aggregator announces a fraction and a seed. A round needs no message for each device to start. See docs/wire.md.
"""

from __future__ import annotations

import hashlib

from protofleet.contract.wire.rollout_messages import Offer

__all__ = ["in_stage", "place", "sampled"]


def sampled(device: str, round_number: int, seed: int, fraction: float) -> bool:
    """Whether `device` takes part: its hash, uniform in [0, 1), is below `fraction`.

    The hash is the first 8 bytes, big-endian, of SHA-256 over the ASCII text `device|round|seed`, over 2^64.
    """
    return fraction >= 1.0 or _number(device, round_number, seed) < fraction


def in_stage(offer: Offer, device: str) -> bool:
    """Whether `device` is among those that the offer is for: its place is below the offer's fraction."""
    return place(device, offer.version, offer.sha256) < offer.fraction


def place(device: str, version: int, sha256: bytes) -> float:
    """Where `device` stands in a roll-out of a bundle, in [0, 1): the stages take in the lowest first.

    It is drawn as for a round of the number `version`, with the first 4 bytes of the bundle's sha256, big-endian, as
    the seed: a larger fraction has all the devices of a smaller one, and each bundle begins with other devices.
    """
    return _number(device, version, int.from_bytes(sha256[:4], "big"))


def _number(device: str, number: int, seed: int) -> float:
    digest = hashlib.sha256(f"{device}|{number}|{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
