"""Whether the content of a contribution can be true, before it is committed: checks that need only one message.

Every class has at least the announced `min_samples` examples, and the device no more than `max_samples` in all. The
other checks follow from the fields of the method's statistic (`contract/sums/statistics.py`):

- features: no mean is longer than is plausible (`contract/sums/plausibility.py`), also where sums travel;
- probabilities: means from 0 to 1, and a row sums to 1, except for rounding and for the noise that the bundle declares;
- noised sums of unit features, and noisy counts: no more than `max_samples` and the noise can give; a row of every
  class that was not forgotten, each counted once, and no `min_samples`, because the noise hides which classes a device
  has, and how many samples of each;
- a triangle and sums of unit features (FFC): as follows.

These are sums over unit features z with one-hot labels y. With u = (z, y), the matrix

    M = Σ u uᵀ = [[A, B], [Bᵀ, diag n]]

has no negative eigenvalue, whatever the data. So a device whose M has an eigenvalue below −τ lies; τ is what the
encoding may have rounded away.

M + τI has a Cholesky factor exactly when its Schur complement A + τI − B diag(n + τ)⁻¹ Bᵀ has one, which is only D × D.
τ also prevents a division by zero for classes without samples.

The trace of A is the number of features that are not zero: at most n (less where features are projected, since they
are shorter then). Together these bounds limit every entry. Scaled-up sums, cross sums at their limit and counts below
the truth each break one of them. Scaled-down sums break none, and have no more effect than the fewer samples that they
could come from.

What only a comparison of devices can show is in `aggregator/screening/outliers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.ingest.blinded_shares import ShareTerms, check_share
from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.bundle.fleet_compatibility import announced_lists
from protofleet.contract.errors import WireError
from protofleet.contract.methods import method as method_of
from protofleet.contract.privacy.mechanism import Mechanism
from protofleet.contract.privacy.noised_sums import SumNoise
from protofleet.contract.sums.factor import COARSEST
from protofleet.contract.sums.plausibility import INT8_STEPS, LARGEST_NORM, improbable, row_norms
from protofleet.contract.sums.statistics import FeatureGram, Participation
from protofleet.contract.wire.encodings import ENCODINGS, encoding_of
from protofleet.contract.wire.messages import Contribution, Encoding

__all__ = ["MAX_SAMPLES", "ClassLists", "Terms", "check_content", "check_sums"]

MAX_SAMPLES = 1_000_000
_ARITHMETIC = 1e-6  # of the samples: what a device that computes features in float32 may be off by

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class ClassLists:
    """The lists of classes that devices of a fleet may have: the fleet's own list, and the shorter lists it began with.

    Attributes:
        by_bundle: how many classes a bundle of the fleet has, by the first 4 bytes of its sha256.
        by_digest: the same, by the first 4 bytes of the list's digest.
        digests: the digests of the lists, 8 bytes each, longest list first.
    """

    by_bundle: Mapping[bytes, int]
    by_digest: Mapping[bytes, int]
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, manifest: Manifest, bundle: bytes, shorter: Mapping[bytes, int]) -> Self:
        """The lists of a fleet's bundle and of the bundles that it extends."""
        sizes = sorted({manifest.classes, *shorter.values()}, reverse=True)
        digests = announced_lists(manifest, shorter)
        return cls(
            {sha256[:4]: size for sha256, size in {**shorter, bundle: manifest.classes}.items()},
            {digest[:4]: size for digest, size in zip(digests, sizes, strict=False)},
            digests,
        )

    def classes(self, message: Contribution) -> int:
        """How many classes the sender of a contribution knows.

        Raises:
            WireError: its list of classes is not one of the fleet's, or is not named.
        """
        count = self.by_bundle.get(message.bundle) or self.by_digest.get(message.class_list)
        if count is None:
            got = f"{message.class_list.hex()}… of another bundle" if message.class_list else "another bundle's, untold"
            expected = " or ".join(f"{digest.hex()}…" for digest in list(self.by_digest)[:4])
            raise WireError("list of classes", expected=expected, got=got)
        return count


@dataclass(frozen=True)
class Terms:
    """What the open round asks of a contribution, beside its shape.

    Attributes:
        encoding: as announced; a tensor may come in a finer one.
        min_samples: as announced.
        max_samples: the most samples that a device may say it has.
        noise: what the bundle declares; None for none.
        extractor: sha256 of the extractor whose features are summed; empty where each device has its own.
        standing: whether sums stand, and there are no rounds.
        lists: where there is an extractor, the lists of classes that devices may have; None for any.
        withheld: the numbers of the forgotten classes.
        blinded: what a share must be, unless a device abstains; None in open rounds.
        devices: how many devices a contribution is for; each of them may have `max_samples`.
        rounded: by how much the factors of these devices may have raised a trace, a share of the samples.
    """

    encoding: Encoding = "f64"
    min_samples: int = 1
    max_samples: int = MAX_SAMPLES
    noise: Mechanism | None = None
    extractor: bytes = b""
    standing: bool = False
    lists: ClassLists | None = None
    withheld: tuple[int, ...] = ()
    blinded: ShareTerms | None = None
    devices: int = 1
    rounded: float = 0.0


def check_content(message: Contribution, terms: Terms, *, bundles: tuple[bytes, ...], classes: int, width: int) -> None:
    """Check that the round can merge the statistic in `message`.

    Args:
        bundles: sha256 of the fleet's bundles.
        classes, width: C, and the width of the round's rows.

    Raises:
        WireError: the contribution was made with another bundle, is not the method's, or cannot be what it says it is.
    """
    _check_origin(message, terms, bundles)
    if (message.standing is not None) != terms.standing:
        expected, got = (
            ("one that stands", "one of a round") if terms.standing else ("one of a round", "one that stands")
        )
        raise WireError("contribution", expected=expected, got=got)
    if message.standing == "withdrawn":
        return
    if (message.share is not None) != (terms.blinded is not None) and not message.says_nothing:
        expected, got = ("a share", "the numbers") if terms.blinded else ("the numbers", "a share of them")
        raise WireError(f"round of {message.method}", expected=expected, got=got)
    if message.says_nothing:  # as a device does whose owner's policy refuses the round
        return
    if message.devices:  # of a gateway: held to what devices are, all of them together
        plain = message.plain(method_of(message.method).statistic, classes, width)
        together = replace(terms, devices=message.devices, rounded=COARSEST)
        check_content(plain, together, bundles=bundles, classes=classes, width=width)
        return
    if terms.blinded is not None:
        check_share(message, terms.blinded)
        return
    kind = method_of(message.method).statistic
    if issubclass(kind, Participation) and len(message.body.classes):
        raise WireError(f"round of {message.method}", expected="no class rows", got="class rows")
    class_count = classes if terms.lists is None or not terms.extractor else terms.lists.classes(message)
    message.check(kind, class_count, width)
    if kind.COUNTED:
        _check_counts(message, terms)
    else:
        _check_silent(message, class_count - sum(number < class_count for number in terms.withheld))
    if terms.withheld and message.has_products and message.holds(terms.withheld):
        raise WireError("sums", expected="none of a class that was forgotten", got="its samples, with the others'")
    statistic = message.statistic(kind, classes, width) if kind.has_checks() else None
    if isinstance(statistic, FeatureGram):
        factor = message.as_factor
        if factor is not None and not factor.is_fine(message.samples):
            expected = "a finer one, or the triangle: its rounding may add to the trace"
            raise WireError("factor", expected=expected, got=f"units of 2^-{factor.bits}")
        rounded = terms.rounded * message.samples if factor is None else factor.slack(message.samples)
        check_sums(statistic, _coarser(message, terms.encoding), rounded)
        return
    for field, sent in zip(kind.row_fields(), (message.body.rows, *message.further), strict=False):
        rows = field.means(sent, message.counts)
        if field.holds == "probabilities":
            _check_probabilities(message, rows, terms)
        elif field.holds == "noised":
            _check_noised(message, rows, terms)
        else:
            _check_norms(message, rows, terms, 1.0 if field.holds == "unit-features" else LARGEST_NORM)


def check_sums(statistic: FeatureGram, encoding: Encoding, rounded: float = 0.0) -> None:
    """Check that some unit features can have these sums, which `encoding` has rounded.

    Args:
        rounded: by how much the rounding of a factor may have raised the trace, beside that.

    Raises:
        WireError: no unit features can have them.
    """
    samples, trace = float(statistic.counts.sum()), _trace(statistic)
    if not samples and statistic.gram.any():  # a matrix whose diagonal alone is zero has the trace of no samples, too
        raise WireError("gram", expected="zeros, as the sum of no samples", got="other numbers")
    slack = _slack(statistic, encoding)
    if trace > samples + slack + rounded:
        raise WireError("gram", expected=f"a trace of at most {samples:g}, one for each feature", got=f"{trace:g}")
    if samples and not _has_factor(statistic, slack):
        raise WireError(
            "gram and cross sums", expected="those of unit features", got="an eigenvalue that no data can have"
        )


def _check_origin(message: Contribution, terms: Terms, bundles: tuple[bytes, ...]) -> None:
    """That it was made with a bundle of the fleet, or, where features of one extractor are summed, with that."""
    if terms.extractor:
        if message.extractor != terms.extractor[:4]:
            got = f"{message.extractor.hex()}…" if message.extractor else "none"
            raise WireError("extractor", expected=f"sha256 {terms.extractor[:4].hex()}…", got=got)
        return
    if message.extractor:
        raise WireError("extractor", expected=f"none in a round of {message.method}", got=f"{message.extractor.hex()}…")
    if not any(message.bundle == sha256[:4] for sha256 in bundles):
        known = " or ".join(f"{sha256[:4].hex()}…" for sha256 in bundles[:4])
        raise WireError("bundle", expected=f"sha256 {known}", got=f"{message.bundle.hex()}…")


def _check_silent(message: Contribution, class_count: int) -> None:
    """That the counts say nothing: 1 of each of the classes that there are."""
    if (message.counts != 1).any():
        raise WireError("counts", expected="1 of every class, since they are to say nothing", got="others")
    if len(message.counts) != class_count:
        raise WireError("class rows", expected="one of every class, whatever there is", got=f"{len(message.counts)}")


def _check_counts(message: Contribution, terms: Terms) -> None:
    if terms.min_samples > 1 and int(message.counts.min(initial=terms.min_samples)) < terms.min_samples:
        index = int(message.counts.argmin())
        raise WireError(
            f"class {int(message.body.classes[index])}",
            expected=f"at least {terms.min_samples} examples, as announced",
            got=f"{int(message.counts[index])}",
        )
    samples, most = message.samples, terms.max_samples * terms.devices
    if samples > most:
        senders = "one device" if terms.devices == 1 else f"{terms.devices:,} devices"
        raise WireError("counts", expected=f"at most {most:,} samples of {senders}", got=f"{samples:,}")


def _check_norms(message: Contribution, means: NDArray[np.floating], terms: Terms, longest: float) -> None:
    """Lengths of class means (K, D), at most `longest`. int8 may lengthen a row by half a step in every coordinate."""
    norms = message.norms if means is message.body.rows else row_norms(means)
    width = means.shape[1]
    slack = 1.001 + math.sqrt(width) / INT8_STEPS
    if terms.noise is None:
        if (message.longest if norms is message.norms else norms.max(initial=0.0)) <= longest * slack:
            return
        limits = np.full(len(norms), longest * slack)
    else:
        limits = np.minimum(longest, terms.noise.largest_norm(message.counts, width)) * slack
    if (norms > limits).any():
        worst = int((norms / limits).argmax())
        reason = ", since its features have length 1" if longest == 1.0 else ""
        raise WireError(
            f"the mean of class {int(message.body.classes[worst])}",
            expected=f"a norm of at most {limits[worst]:.3g}{reason}",
            got=f"{norms[worst]:.3g}",
        )


def _check_noised(message: Contribution, rows: NDArray[np.floating], terms: Terms) -> None:
    """Sums (K, W) of vectors no longer than 1, with noise, and the triangle beside them: of `max_samples` at most."""
    assert isinstance(terms.noise, SumNoise)
    limit = 1.001 * (terms.max_samples + terms.noise.longest(rows.shape[1]))
    norms = row_norms(rows)
    if (norms > limit).any():
        worst = int(norms.argmax())
        expected = f"a norm of at most {limit:.4g}, with {terms.max_samples:,} samples"
        raise WireError(
            f"a sum of class {int(message.body.classes[worst])}", expected=expected, got=f"{norms[worst]:.4g}"
        )
    if message.triangle is not None:
        limit = 1.001 * (terms.max_samples + terms.noise.longest(message.triangle.size))
        norm = float(np.linalg.norm(message.triangle.astype(np.float64)))
        if norm > limit:
            raise WireError("gram", expected=f"a norm of at most {limit:.4g}", got=f"{norm:.4g}")


def _check_probabilities(message: Contribution, rows: NDArray[np.floating], terms: Terms) -> None:
    """Mean soft predictions (K, C)."""
    noise = np.zeros(len(rows)) if terms.noise is None else terms.noise.soft_slack(message.counts)  # (K,)
    wrong = improbable(rows, noise)
    if wrong.any():
        raise WireError(
            f"soft predictions of class {int(message.body.classes[int(wrong.argmax())])}",
            expected="probabilities that sum to 1",
            got="other numbers",
        )


def _coarser(message: Contribution, announced: Encoding) -> Encoding:
    """The coarser of what was announced and what a triangle came in; int8 arrives as float32 and must be announced.

    A factor has its own rounding.
    """
    if message.triangle is None:
        return announced
    return max(encoding_of(message.triangle), announced, key=lambda name: ENCODINGS[name].rank)


def _slack(statistic: FeatureGram, encoding: Encoding) -> float:
    """τ: how far below zero an eigenvalue of M, or above n the trace, may come by arithmetic and by the encoding.

    An entry that is rounded by a share ε of itself moves eigenvalues by at most ε·(‖A‖_F + ‖B‖_F), and neither norm is
    above n.
    """
    return _ARITHMETIC * float(statistic.counts.sum()) + ENCODINGS[encoding].slack(statistic)


def _trace(statistic: FeatureGram) -> float:
    rows = np.arange(statistic.width)
    return float(statistic.gram[rows * statistic.width - rows * (rows - 1) // 2].sum())  # the packed diagonal


def _has_factor(statistic: FeatureGram, slack: float) -> bool:
    """Whether M + τI is positive, by the Cholesky factor of its Schur complement."""
    schur = statistic.matrix  # (D, D)
    schur[np.diag_indices(statistic.width)] += slack
    scaled = statistic.cross / np.sqrt(statistic.counts + slack)[:, None]  # (C, D)
    schur -= scaled.T @ scaled
    try:
        np.linalg.cholesky(schur)
    except np.linalg.LinAlgError:
        return False
    return True
