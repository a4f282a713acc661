"""Whether one share of a blinded statistic is a share at all: checks that need only this share, before it is committed.

The words of a share look random, so nothing is known of its numbers: not whether they are finite, plausible or small.
Three things can be checked: its length, that its seed names it, and that the device was told what this round announces.
The helper checks by its own list which device signed the seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from protofleet.contract.errors import WireError
from protofleet.contract.privacy.blinding import share_digest
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.envelopes import Signed
from protofleet.contract.wire.helper_messages import SealedSeed
from protofleet.contract.wire.messages import Contribution

__all__ = ["ShareTerms", "check_share"]


@dataclass(frozen=True)
class ShareTerms:
    """What a blinded round asks of a share.

    Attributes:
        words: W, how many words it has.
        least: k, as announced.
        terms: `protofleet.contract.privacy.sealing.round_terms` of the announcement.
    """

    words: int
    least: int
    terms: bytes


def check_share(message: Contribution, terms: ShareTerms) -> None:
    """Check that a contribution carries a share of this round, and the seed of its pad.

    Raises:
        WireError: it does not.
    """
    assert message.share is not None
    if len(message.share) != terms.words:
        raise WireError("share", expected=f"{terms.words} words", got=len(message.share))
    signed = decode(message.seed)
    seed = decode(signed.payload) if isinstance(signed, Signed) else signed
    if not isinstance(seed, SealedSeed):
        raise WireError("the seed of a share", expected="a signed sealed seed", got=type(seed).__name__.lower())
    if (seed.run, seed.round, seed.method) != (message.run, message.round, message.method):
        raise WireError(
            "the seed of a share", expected="one of the same round", got=f"round {seed.round} ({seed.method})"
        )
    if (seed.words, seed.least, seed.terms) != (terms.words, terms.least, terms.terms):
        raise WireError("the seed of a share", expected="one made as announced now", got="one for other terms")
    if seed.share != share_digest(message.share):
        raise WireError("the seed of a share", expected="one of this share", got="that of another")
