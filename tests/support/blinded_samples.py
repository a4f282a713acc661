"""A blinded fleet in this process: devices' keys, their shares and signed seeds, a helper with a ledger."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from protofleet.aggregator.helper.ledger import Ledger
from protofleet.aggregator.helper.opening import Answer, Helper
from protofleet.aggregator.helper.witness import Witness
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.privacy.blinding import blind, share_digest
from protofleet.contract.privacy.sealing import HelperKey, seal
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.helper_messages import Opening, SealedSeed, set_digest

FLEET, RUN, METHOD, WORDS = "pets", b"run1", "ncm", 5
KEY = HelperKey(bytes([7]) * 32, bytes([8]) * 32)
PUBLIC = KEY.public


@cache
def signer(device: str) -> Signer:
    """A device's own key, made of its name."""
    return Signer(device.encode().ljust(32, b"."))


def enrolled(*devices: str) -> dict[str, bytes]:
    return {device: signer(device).public_key for device in devices}


def names(count: int) -> list[str]:
    return [f"d{index}" for index in range(count)]


def contributed(
    device: str, values: np.ndarray, *, round: int = 1, seed: bytes | None = None, by: str = "", **changed: object
) -> tuple[np.ndarray, bytes]:
    """A device's share of these words, and its signed seed; `by` signs in its place."""
    seed = seed or bytes([round % 256, len(device)]) + device.encode().ljust(30, b"-")
    share = blind(np.array(values, np.uint64), seed)
    plain = {"run": RUN, "round": round, "method": METHOD, "words": len(share), "share": share_digest(share)}
    bound = SealedSeed(**{**plain, "least": 2, "terms": bytes(32), "sealed": bytes(80), **changed})  # type: ignore[arg-type]
    bound = replace(bound, sealed=seal(seed, PUBLIC.seal, FLEET, device, bound))
    return share, signer(by or device).sign(topics.up(FLEET, device), encode(bound))


def opening(seeds: dict[str, bytes], *, round: int = 1, parts: int = 1) -> list[Opening]:
    """A set as it is asked for."""
    devices = list(seeds)
    cuts = [{device: seeds[device] for device in devices[n::parts]} for n in range(parts)]
    return [Opening(RUN, round, METHOD, set_digest(seeds), n, parts, cut) for n, cut in enumerate(cuts)]


def helper(ledger: Ledger, devices: dict[str, bytes], least: int) -> Helper:
    return Helper(ledger, KEY, FLEET, lambda: devices, least)


def ledger(path: Path) -> Ledger:
    return Ledger(path, fleet=FLEET, key=PUBLIC.seal, witness=Witness(path.with_name("key"), FLEET, PUBLIC.seal))


def ask(served: Helper, seeds: dict[str, bytes], *, round: int = 1) -> Answer:
    (part,) = opening(seeds, round=round)
    answer = served.take(part, 0.0)
    assert answer is not None
    return answer
