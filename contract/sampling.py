"""Stateless sampling: a device decides by itself whether it takes part in a round. See docs/wire.md.

The aggregator announces a fraction and a seed; no message per device is needed to start a round.
"""

from __future__ import annotations

import hashlib

__all__ = ["sampled"]


def sampled(device: str, round_number: int, seed: int, fraction: float) -> bool:
    """Whether `device` takes part: its hash, uniform in [0, 1), is below `fraction`.

    The hash is the first 8 bytes, big-endian, of SHA-256 over the ASCII text `device|round|seed`, over 2^64.
    """
    digest = hashlib.sha256(f"{device}|{round_number}|{seed}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < fraction
