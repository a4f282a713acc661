"""What one share of a blinded statistic can be asked by itself, before it is committed: whether it is one at all.

Its words are as good as random, so nothing can be said of the numbers: neither finite, nor plausible, nor small. What
can be checked is its length, that its seed speaks of it, and that the device was told what this round announces. Who
signed the seed the helper checks, by its own list.
"""

from __future__ import annotations

from dataclasses import dataclass

from contract.blinding import share_digest
from contract.envelopes import Signed
from contract.errors import WireError
from contract.helper_messages import SealedSeed
from contract.messages import Contribution
from contract.wire import decode

__all__ = ["ShareTerms", "check_share"]


@dataclass(frozen=True)
class ShareTerms:
    """What a blinded round asks of a share.

    Attributes:
        words: W, how many it has.
        least: k, as announced.
        terms: `contract.sealing.round_terms` of what is announced.
    """

    words: int
    least: int
    terms: bytes


def check_share(message: Contribution, terms: ShareTerms) -> None:
    """That a contribution carries a share of this round, and the seed of its pad.

    Raises:
        WireError: when it does not.
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
