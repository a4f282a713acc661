"""What a device asks of a blinded round, and how its statistic leaves it there: as a share, and a sealed seed.

A device with a helper's key takes part only in rounds that this helper opens. So an aggregator can neither use a helper
of its own, nor go back to open rounds. A device without such a key takes part in open rounds only.

A share is made once. It goes into the journal with the round, before anything is sent. The same bytes are sent until a
receipt comes. The seed is drawn anew for each share, and is kept only in the sealed seed.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.errors import PrivacyError, StatisticError
from protofleet.contract.identity.signatures import Signer, inside
from protofleet.contract.methods import Method, method
from protofleet.contract.printable import counted
from protofleet.contract.privacy.blinding import SCALE_BITS, SEED_BYTES, blind, share_digest, words_of
from protofleet.contract.privacy.sealing import HelperPublic, round_terms, seal
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, ClassRows, Contribution, SealedSeed

__all__ = ["Blinding"]


class Blinding:
    """What one device asks of blinded rounds, and its shares.

    Args:
        helper: whose rounds it takes part in; None for open rounds.
        signer: the device's own key, which the helper has in its list.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        fleet: str,
        device: str,
        helper: HelperPublic | None = None,
        signer: Signer | None = None,
    ) -> None:
        self._manifest, self._helper, self._signer = manifest, helper, signer
        self._fleet, self._device = fleet, device

    @property
    def is_on(self) -> bool:
        """Whether it takes part in blinded rounds alone."""
        return self._helper is not None

    def permits(self, payload: bytes) -> bool:
        """Whether a contribution that an earlier process left may be sent.

        An open contribution that says something of samples may be sent only in open rounds.
        """
        message = inside(payload) if self.is_on else None
        return not isinstance(message, Contribution) or message.share is not None or message.says_nothing

    def check(self, announcement: Announcement) -> None:
        """Check that the device may take part in an announced round.

        Raises:
            PrivacyError: it may not.
        """
        a, helper = announcement, announcement.helper
        if self._helper is None:
            if helper is not None:
                raise PrivacyError(
                    "the round is blinded", expected="its helper's key", got="none", hint="client --helper-key"
                )
            return
        if helper is None:
            raise PrivacyError("the round", expected="one that the helper of --helper-key opens", got="an open one")
        if helper.key != self._helper.seal:
            got = f"{helper.key.hex()[:12]}…, of another"
            raise PrivacyError("the round's helper", expected=f"{self._helper.seal.hex()[:12]}…", got=got)
        if self._signer is None:
            hint = "client --identity, or --token"
            raise PrivacyError("a blinded round", expected="a key to sign with", got="none", hint=hint)
        round_method = method(a.method)
        wrong = self._unfit(a, round_method)
        if wrong:
            raise PrivacyError("a blinded round", expected=wrong[0], got=wrong[1])

    def _unfit(self, a: Announcement, round_method: Method) -> tuple[str, str] | None:
        """What a blinded round must be, and what this one is instead; None where it is all right."""
        assert a.helper is not None
        if (
            not round_method.stands
            or round_method.mechanism(round_method.resolved_in(self._manifest.hyper)) is not None
        ):
            return "a method whose sums add up: ncm or ffc, without noise", a.method
        if a.helper.scale_bits != SCALE_BITS:
            return f"a scale of {SCALE_BITS} bits", str(a.helper.scale_bits)
        if a.min_samples != 1:
            return "min_samples 1, announced and in the policy", f"{a.min_samples}, which would show who has how many"
        if a.withheld:
            return "samples of all classes", "some withheld, which would show those classes beside an earlier sum"
        if a.class_lists and a.class_lists[0] != list_digest(self._manifest.labels):
            return "this device's bundle to know all of the fleet's classes", "a shorter list"
        return None

    def warning(self, announcement: Announcement, samples: int) -> str:
        """What a blinded round's sum would still show, if all devices have as many samples as this one.

        It is empty if that is no more than any sum shows. A Gram matrix of fewer samples than features has a direction
        of its own for each sample. So anyone who holds a photo can tell for certain whether it is in the sum, but not
        whose it is.
        """
        a, round_method = announcement, method(announcement.method)
        width = round_method.row_width(round_method.resolved_in(self._manifest.hyper), self._manifest.features)
        if a.helper is None or not round_method.statistic.has_triangle() or a.helper.least * samples >= width:
            return ""
        few = f"{a.helper.least} devices of {counted(samples, 'sample')} are fewer than the {width:,} features"
        return f"warning: a sum of {few}: who has it and a photo can tell whether that is in it"

    def blinded(self, contribution: Contribution, announcement: Announcement) -> Contribution:
        """What is sent instead of a contribution: all of it in an open round, a share of it in a blinded one.

        Raises:
            PrivacyError: its numbers are too large to be summed so.
        """
        helper = announcement.helper
        if helper is None:
            return contribution
        assert self._helper is not None
        assert self._signer is not None
        m, c, round_method = self._manifest, contribution, method(contribution.method)
        width = round_method.row_width(round_method.resolved_in(m.hyper), m.features)
        try:
            words = words_of(c.statistic(round_method.statistic, m.classes, width))
        except StatisticError as error:
            raise PrivacyError(f"round {c.round}", expected=error.expected, got=error.got) from None
        seed = os.urandom(SEED_BYTES)
        share = blind(words, seed)
        terms = round_terms(announcement)
        bound = SealedSeed(c.run, c.round, c.method, len(share), share_digest(share), helper.least, terms, bytes(80))
        sealed = replace(bound, sealed=seal(seed, self._helper.seal, self._fleet, self._device, bound))
        signed = self._signer.sign(topics.up(self._fleet, self._device), encode(sealed))
        nothing = ClassRows(np.zeros(0, np.uint16), np.zeros((0, 0)))
        none = np.zeros(0, np.uint64)
        return replace(c, body=nothing, counts=none, triangle=None, further=(), share=share, seed=signed)
