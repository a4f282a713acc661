"""From a set that anyone may have asked for to its sum, or to why there is none. No sockets, no clock of its own.

Parts of a set are put together. Once it is whole, in this order:

1. A set that was opened before gets the same answer again.
2. Each seed is checked: its device is enrolled with this helper and has signed it, it is of this round, its share is
   new, and its device was told to sum the same as the others.
3. The set is checked against the blocks of what was opened before (`contract/privacy/openable_sets.py`), with the
   helper's own k, or with a larger k that a device was told.
4. The seeds are unsealed and their pads added up.
5. The ledger opens the set, for good. Only then is there an answer.

When something is wrong with some devices, nothing is opened, and these devices are named: the set may be asked for
again without them. The aggregator that asks is not trusted in any of these steps.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from protofleet.aggregator.helper.ledger import Ledger, Share, Words
from protofleet.contract.errors import WireError
from protofleet.contract.identity.signatures import Keyring
from protofleet.contract.printable import counted
from protofleet.contract.privacy.blinding import MOST_DEVICES, add_pad
from protofleet.contract.privacy.openable_sets import allowed, breach
from protofleet.contract.privacy.sealing import HelperKey, unseal
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.envelopes import Signed
from protofleet.contract.wire.helper_messages import MAX_REFUSED, Opening, SealedSeed, set_digest

__all__ = ["Answer", "Helper"]

_SETS_AT_ONCE = 4
_LONGEST_SET_BYTES = 8 << 20  # of seeds
_MOST_WORDS = 1 << 24  # of a share; no aggregator takes one of more than half of that

Devices = Mapping[str, bytes]


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer about a set.

    Attributes:
        asked: any part of the set, for its key.
        total: (W,) the helper's sum; None when it is refused.
        reason: why it is refused; empty when it is open.
        refused: why, by device, as far as single devices are at fault.
        devices: how many devices the set has.
        again: whether the same answer was given before.
    """

    asked: Opening
    total: Words | None
    reason: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    devices: int = 0
    again: bool = False


class Helper:
    """Opens sets of one fleet.

    Args:
        key: its private keys.
        devices: gives the enrolled devices' Ed25519 public keys, by name, anew for each set.
        least: k: no sum over fewer devices is opened.
    """

    def __init__(self, ledger: Ledger, key: HelperKey, fleet: str, devices: Callable[[], Devices], least: int) -> None:
        self._ledger, self._key, self._fleet, self._devices, self._least = ledger, key, fleet, devices, least
        self._coming: OrderedDict[bytes, dict[int, Opening]] = OrderedDict()

    def take(self, part: Opening, at: float) -> Answer | None:
        """Take a part of a requested set; returns the answer once the set is whole.

        Args:
            at: seconds since the epoch, for the record.

        Raises:
            StoreError: the disk refuses; nothing was opened, and nothing may be answered.
            UsageError: the list of devices cannot be read.
            WireError: these are not the seeds of that set. Nothing may be answered: a refusal is final, and anybody
                could send this question in the aggregator's place.
        """
        if self._ledger.is_open(part.digest):
            return self._told_before(part)
        parts = self._coming.setdefault(part.digest, {})
        self._coming.move_to_end(part.digest)
        while len(self._coming) > _SETS_AT_ONCE:
            self._coming.popitem(last=False)
        if any((p.parts, p.run, p.round, p.method) != (part.parts, part.run, part.round, part.method)
               for p in parts.values()):  # fmt: skip
            parts.clear()
        parts[part.part] = part
        if sum(sum(map(len, p.seeds.values())) for p in parts.values()) > _LONGEST_SET_BYTES:
            del self._coming[part.digest]
            raise WireError("a set", expected=f"at most {_LONGEST_SET_BYTES >> 20} MiB of seeds", got="more")
        if len(parts) < part.parts:
            return None
        del self._coming[part.digest]
        seeds = {device: seed for p in parts.values() for device, seed in p.seeds.items()}
        if set_digest(seeds) != part.digest:
            raise WireError("a set", expected="the seeds of the digest that came with them", got="others")
        return self._decide(part, seeds, at)

    def _told_before(self, part: Opening) -> Answer:
        total = self._ledger.sum(part.digest)
        if total is None:
            return Answer(part, None, "this set was opened long ago, and its sum is not kept any more", again=True)
        return Answer(part, total, again=True)

    def _decide(self, opening: Opening, signed: Mapping[str, bytes], at: float) -> Answer:
        devices, seeds, refused = self._devices(), {}, {}
        for device, payload in signed.items():
            try:
                seeds[device] = self._seed(opening, device, payload, devices)
            except WireError as error:
                refused[device] = str(error)
        refused |= self._odd(seeds)
        if refused:
            return self._refusal(opening, refused, len(signed))
        least = max([self._least, *(seed.least for seed in seeds.values())])
        wrong = breach(self._ledger.blocks, seeds, least)
        if wrong or len(seeds) > MOST_DEVICES:
            able = allowed(self._ledger.blocks, seeds, least, MOST_DEVICES)
            refusals = {d: wrong.get(d, "waits for those it was summed with") for d in seeds if d not in able}
            return self._refusal(opening, refusals, len(signed))
        total = np.zeros(next(iter(seeds.values())).words, np.uint64)
        for device, seed in seeds.items():
            try:
                add_pad(total, unseal(self._key, self._fleet, device, seed))
            except WireError as error:
                refused[device] = str(error)
        if refused:
            return self._refusal(opening, refused, len(signed))
        shares = [self._share(seed, device) for device, seed in seeds.items()]
        self._ledger.open(opening.digest, shares, total, least=least, at=at)
        return Answer(opening, total, devices=len(seeds))

    def _seed(self, opening: Opening, device: str, payload: bytes, devices: Devices) -> SealedSeed:
        """What a device signed, if it did, for this round, and its share is new.

        Raises:
            WireError: it is refused.
        """
        key = devices.get(device) if topics.is_id(device) else None
        if key is None:
            raise WireError("device", expected="one of the helper's own list", got="another")
        message = decode(payload)
        if not isinstance(message, Signed):
            raise WireError("its seed", expected="a signed one", got=type(message).__name__.lower())
        seed = decode(Keyring([key]).payload(message, topics.up(self._fleet, device)))
        if not isinstance(seed, SealedSeed):
            raise WireError("its seed", expected="a sealed one", got=type(seed).__name__.lower())
        if (seed.run, seed.round, seed.method) != (opening.run, opening.round, opening.method):
            got = f"round {seed.round} ({seed.method}) of run {seed.run.hex()}"
            raise WireError("its seed", expected="one for this round", got=got)
        if seed.words > _MOST_WORDS:
            raise WireError("its share", expected=f"at most {_MOST_WORDS:,} words", got=f"{seed.words:,}")
        used = self._ledger.why_used(self._share(seed, device))
        if used:
            raise WireError("its seed", expected="a share that is new", got=used)
        return seed

    @staticmethod
    def _share(seed: SealedSeed, device: str) -> Share:
        return Share(seed.run, seed.round, seed.method, device, seed.share)

    def _odd(self, seeds: Mapping[str, SealedSeed]) -> dict[str, str]:
        """Devices with another device's share, or that were told to sum something else than most devices."""
        if not seeds:
            return {}
        odd: dict[str, str] = {}
        holders: dict[bytes, str] = {}
        usual = Counter((seed.words, seed.terms) for seed in seeds.values()).most_common(1)[0][0]
        for device, seed in seeds.items():
            first = holders.setdefault(seed.share, device)
            if first != device:
                odd[device] = f"it sent the very share of {first}"
            elif (seed.words, seed.terms) != usual:
                odd[device] = "it was told to sum something else than the others"
        return odd

    def _refusal(self, opening: Opening, refused: Mapping[str, str], total: int) -> Answer:
        named = dict(list(refused.items())[:MAX_REFUSED])
        reason = f"{counted(len(refused), 'device')} of {total} cannot be summed now"
        return Answer(opening, None, reason, {device: why[:200] for device, why in named.items()}, total)
