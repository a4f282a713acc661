"""The messages of the wire, as values; `messages.cddl` is the same in RFC 8610's language. See docs/wire.md.

There are thirteen messages. What they can hold is the uplink policy:

- No message that a device sends has room for weights, gradients or samples. (A roll-out's pieces of a bundle go down.)
- The only arrays are class rows (rows of numbers for each class present) and the triangle of one symmetric matrix, or
  a factor of that matrix, which is smaller. The statistic of a method declares which of them the method sends
  (`contract/sums/statistics.py`).
- In a blinded round, one share of all of them replaces them (`contract/privacy/blinding.py`).

    Announcement   aggregator → all       a round is open, closed, or the run is finished; or sums stand, without rounds
    GlobalPart     aggregator → all       some class rows of the prototypes or of the head
    Contribution   device → aggregator    a statistic for a round, or one that stands until it is replaced
    Chunk          device → aggregator    a slice of an encoded Contribution that is too large for one message
    Receipt        aggregator → device    what became of a contribution
    Status         device → aggregator    birth, death, and what the device measured of itself
    Request        device → aggregator    a request for some bytes of the bundle that the announcement offers
    Piece          aggregator → device    those bytes
    Signed         either way             any other of these, encoded, with a signature
    Enrolment      device → aggregator    the device's public key, by a one-time token
    Opening        aggregator → helper    signed seeds of a set whose sum is to be opened
    Opened         helper → aggregator    its sum, or why it is not opened
    SealedSeed     device → helper        the seed of a blinded contribution, signed and within it

Request, Piece and the offer are in `contract/wire/rollout_messages.py`, Signed and Enrolment in
`contract/wire/envelopes.py`, the last three in `contract/wire/helper_messages.py`.

A field is one line, from which its checks and its bytes follow (`contract/wire/fields.py`). Every value is validated
when it is built, so a value that exists can be trusted.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import StatisticError, WireError
from protofleet.contract.sums import statistics
from protofleet.contract.sums.factor import MAX_BITS, Factor
from protofleet.contract.sums.fixed_point import FRACTION_BITS, LARGEST_INTEGER, FixedPoint
from protofleet.contract.sums.plausibility import row_norms
from protofleet.contract.sums.statistics import MAX_GROUPS, Statistic
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration, CalibrationReport
from protofleet.contract.wire.envelopes import Enrolment, Issued, Mark, Signature, Signed
from protofleet.contract.wire.fields import (
    MAX_FLOAT,
    MAX_PARTS,
    MAX_TEXT,
    MAX_UINT,
    Fraction,
    Key,
    Keys,
    Limits,
    Message,
    MethodName,
    Part,
    PartCount,
    PartIndex,
    Positive,
    Run,
    Sha256,
    ShortText,
    table_of,
)
from protofleet.contract.wire.helper_messages import HelperTerms, Opened, Opening, SealedSeed, SignedSeed
from protofleet.contract.wire.rollout_messages import Offer, Piece, Request
from protofleet.contract.wire.tensors import (
    CLASS_NUMBERS,
    COUNTS,
    FACTOR,
    RISING_CLASSES,
    ROWS,
    TRIANGLE,
    WORDS,
    Encoding,
)

__all__ = [
    "Announcement",
    "Chunk",
    "ClassRows",
    "Contribution",
    "Encoding",
    "Enrolment",
    "GlobalPart",
    "HelperTerms",
    "Mark",
    "Message",
    "Offer",
    "Opened",
    "Opening",
    "Piece",
    "Receipt",
    "ReceiptStatus",
    "Request",
    "Rival",
    "SealedSeed",
    "Signed",
    "Standing",
    "Status",
]

Phase = Literal["open", "closed", "finished", "standing"]
Standing = Literal["withdrawn", "present"]
ReceiptStatus = Literal["committed", "duplicate", "late", "rejected", "need-chunks"]


ADMITS = "lets it in again"  # how the reason ends where nothing of a device is taken, whatever it sends
MAX_ROUND = MAX_UINT
MAX_ENTRIES = 32
MAX_NAME = 64  # characters of an entry's
MAX_VERSION = 64  # characters of an entry among the versions of a status
MAX_KIND = 32
MAX_BUNDLES = 256
LEAST_LIMIT_BYTES = 1_024
# One device's contribution, however hostile, cannot make the sum of a fleet of two million overflow.
MAX_COUNT = 2**32 - 1
MAX_MAGNITUDE = 1e30
MAX_HEARD = 4  # keys whose numbers a status tells
MAX_PROPOSED = 16  # classes that a status tells of

EntryName = Annotated[str, Limits(1, MAX_NAME)]
VersionText = Annotated[str, Limits(0, MAX_VERSION)]
Figure = Annotated[float, Limits(-MAX_FLOAT, MAX_FLOAT)]
ListDigest = Annotated[bytes, Limits(8, 8)]
Table = Annotated[NDArray[np.floating], ROWS]

Kind = TypeVar("Kind", bound=Statistic)


_require = WireError.unless


@dataclass(frozen=True, eq=False)
class ClassRows:
    """Rows of some classes. Prototypes, class means, cross sums and heads travel in this form.

    Attributes:
        classes: (K,) uint16, rising class numbers; in a contribution one may come up to 8 times, for several groups.
        rows: (K, D) float, one row for each of them.
    """

    classes: Annotated[NDArray[np.uint16], CLASS_NUMBERS]
    rows: Annotated[NDArray[np.floating], ROWS]

    def __post_init__(self) -> None:
        if self.classes.ndim != 1 or self.rows.ndim != 2:
            raise WireError("class rows", expected="classes [K] and rows [K,D]", got="another shape")
        if len(self.classes) != len(self.rows):
            raise WireError("class rows", expected=f"{len(self.classes)} rows", got=len(self.rows))
        if not self.differ:
            rising = bool((self.classes[1:] >= self.classes[:-1]).all())
            _require(rising, "class numbers", "rising", "another order")
            _check_groups(self.classes, MAX_GROUPS)
        _numbers(self.rows, "class rows")

    @functools.cached_property
    def differ(self) -> bool:
        """Whether the class numbers rise and no class comes twice."""
        numbers = self.classes.tolist()
        return all(map(operator.lt, numbers, numbers[1:]))

    def dense(self, classes: int, width: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """(C, D) float64 rows, zero where absent, and (C,) which are present.

        Raises:
            WireError: when a class number or the width is not of this fleet.
        """
        _check_fit(self.classes, self.rows, classes, width)
        _check_groups(self.classes, 1)
        present = np.zeros(classes, dtype=bool)
        present[self.classes] = True
        return _spread(_places(self.classes, 1), self.rows.astype(np.float64), classes), present

    @classmethod
    def of(cls, rows: NDArray[np.floating], present: NDArray[np.bool_]) -> ClassRows:
        """From dense rows (C, D) and which of them are present (C,)."""
        return cls(np.flatnonzero(present).astype(np.uint16), rows[present])


@dataclass(frozen=True)
class Announcement(Message, number=1, grows=True):
    """The present task of the fleet. It is retained, so a device that wakes up gets it at once.

    Attributes:
        run: 4 bytes, drawn when the aggregator's store was made. So rounds of different runs never mix.
        round: 1, 2, …; 0 before the first.
        phase: `open` for contributions, `closed` between rounds, `finished` at the end of the run. `standing` where
            there are no rounds: what a device sends stands until the device sends anew.
        method: the method of this round: the bundle's own, or one that trains nothing.
        bundle: sha256 of the bundle, 32 bytes.
        others: sha256 of further bundles of the fleet, where devices have several backbones.
        deadline_s: seconds that the round stays open, 0 for no limit. For information: only the aggregator decides.
        fraction, seed: stateless sampling, see `protofleet.contract.wire.sampling`.
        global_version: the global state that this round starts from; 0 for none yet.
        encoding: how tensors should travel up.
        min_samples: classes with fewer local examples are withheld.
        limit_bytes: the largest message the aggregator takes; larger contributions travel in chunks.
        extractor: sha256 of the extractor whose features the round's statistic is over, if devices share one. Empty in
            rounds over the devices' own features. A device with another bundle but this extractor may take part.
        class_lists: where there is an extractor, the digest of each list of classes of the fleet: its own, and the
            shorter ones that it began with (`protofleet.contract.bundle.fleet_compatibility.list_digest`). A device
            with another list does not belong to the fleet.
        offer: the bundle that is being rolled out; None if there is none.
        withheld: the numbers, rising, of classes that were forgotten. Devices leave out the samples of these classes.
        issued: a number above that of every announcement that the same key signed before, so that an old announcement
            that is sent again is recognised. It is milliseconds since the epoch, or one more than the last number; 0
            where nothing is signed.
        helper: the terms of a blinded round, with the key of the helper that opens its sum; None in open rounds.
        epoch: the number of this leader among the processes that have led this run. A lower number is of a leader that
            another one has replaced. 0 where only one process can have the store.
        max_samples: for gateways, the most samples that one device may claim; 0 where no bound is told.
        proof: 64 bytes: the key's signature of `issued` alone, which a device hands back as a `Mark`. Empty where
            nothing is signed.
        calibration: how scores of answers become probabilities, from what devices report; None where no reports are
            asked for.
        factors: whether a factor of a triangle may be sent in its place.
        proposals: whether devices may tell which classes were proposed for their photos, and the share of their photos
            that is unknown. An older aggregator asks for neither, and refuses a status that has `proposed`.
    """

    run: Annotated[Run, Key(2)]
    round: Annotated[int, Key(3)]
    phase: Annotated[Phase, Key(4)]
    method: Annotated[MethodName, Key(5)]
    bundle: Annotated[Sha256, Key(6)]
    deadline_s: Annotated[float, Limits(0), Key(7)] = 0.0
    fraction: Annotated[Fraction, Key(8)] = 1.0
    seed: Annotated[int, Key(9)] = 0
    global_version: Annotated[int, Key(10)] = 0
    encoding: Annotated[Encoding, Key(11)] = "f32"
    min_samples: Annotated[Positive, Key(12)] = 1
    limit_bytes: Annotated[int, Limits(LEAST_LIMIT_BYTES, 1 << 28), Key(13)] = 65_536
    others: Annotated[tuple[Sha256, ...], Limits(1, MAX_BUNDLES - 1), Key(14, optional=True)] = ()
    extractor: Annotated[Sha256, Key(15, optional=True)] = b""
    class_lists: Annotated[tuple[ListDigest, ...], Limits(1, MAX_BUNDLES), Key(16, optional=True)] = ()
    offer: Annotated[Offer | None, Key(17, optional=True)] = None
    withheld: Annotated[tuple[int, ...], RISING_CLASSES, Key(18, optional=True)] = ()
    issued: Annotated[Issued, Key(19, optional=True)] = 0
    helper: Annotated[HelperTerms | None, Key(20, optional=True)] = None
    epoch: Annotated[Positive, Key(21, optional=True)] = 0
    max_samples: Annotated[Positive, Key(22, optional=True)] = 0
    proof: Annotated[Signature, Key(24, optional=True)] = b""
    calibration: Annotated[AnnouncedCalibration | None, Key(26, optional=True)] = None
    factors: Annotated[bool, Key(27, optional=True)] = False
    proposals: Annotated[bool, Key(28, optional=True)] = False

    def check_together(self) -> None:
        _require(self.bundle not in self.others, "bundles", "different ones", "one twice")


@dataclass(frozen=True, eq=False)
class GlobalPart(Message, number=2, grows=True):
    """Part `part` of `parts` of global state `version`: some class rows of one kind.

    Attributes:
        kind: `prototypes`, `head`, or another kind that the method declares.
    """

    run: Annotated[Run, Key(2)]
    version: Annotated[Positive, Key(4)]
    round: Annotated[Positive, Key(3)]
    part: Annotated[PartIndex, Key(5)]
    parts: Annotated[PartCount, Key(6)]
    kind: Annotated[str, Limits(1, MAX_KIND), Key(7)]
    body: Annotated[ClassRows, Keys((8, 9))]

    def check_together(self) -> None:
        _require(self.part < self.parts, "part", f"below {self.parts}", self.part)
        _require(self.body.rows.dtype.kind == "f", "class rows", "floats", self.body.rows.dtype)
        _check_groups(self.body.classes, 1)


@dataclass(frozen=True, eq=False)
class Contribution(Message, number=3):
    """A statistic for a round.

    Its key is (device, round, method); the device is in the topic. It carries the fields of the method's statistic:
    class rows, further rows for the same classes, and a triangle. There are no rows if a method sends only that the
    round was done.

    A gateway (docs/gateway.md) sends one contribution for all devices behind it: their sums as whole numbers of 2⁻⁴⁰
    (`contract/sums/fixed_point.py`), so that no number is rounded a second time. Its arrays are int64. Its rows are
    sums, also where the rows of a device would be means.

    Attributes:
        bundle: the first 4 bytes of the bundle's sha256.
        body: the first field of class rows (K, D), or (K, 0) where there is none.
        counts: (K,) examples of each class, 1 to 2^32 − 1.
        triangle: (D(D+1)/2,) the packed upper triangle of a symmetric matrix, or None.
        further: (K, …) the other fields of class rows, in order, each with a row for each row of `body`.
        extractor: the first 4 bytes of the extractor's sha256, if the statistic is over features of the extractor that
            devices share. Empty if it is over the device's own features.
        standing: `present` if it replaces the device's former sums at the aggregator; `withdrawn` if these are to be
            taken out, and then it carries no numbers. `round` is then the device's own generation, which rises with
            each contribution. None in rounds.
        class_list: the first 4 bytes of the digest of the device's list of classes, if its bundle is none of those
            announced. Empty otherwise.
        share: (W,) uint64, in a blinded round: one share of the whole statistic. There is nothing else of it then.
        seed: the signed `SealedSeed` of the other share, encoded; empty where there is no share.
        devices: the number of devices for which a gateway sends it; 0 if a device sends it for itself.
        factor: (r, D) int16, r from 0 to D: in place of the triangle, rows whose products are its numbers, in units of
            2^-factor_bits (`contract/sums/factor.py`); None where there is none.
        factor_bits: 0 to 20.
    """

    run: Annotated[Run, Key(2)]
    round: Annotated[Positive, Key(3)]
    method: Annotated[MethodName, Key(4)]
    bundle: Annotated[bytes, Limits(4, 4), Key(5)]
    body: Annotated[ClassRows, Keys((6, 8))]
    counts: Annotated[NDArray[np.uint64], COUNTS, Key(7)]
    triangle: Annotated[NDArray[np.floating] | None, TRIANGLE, Key(9, optional=True)] = None
    further: Annotated[tuple[Table, ...], Keys((10, 11, 12))] = ()
    extractor: Annotated[bytes, Limits(4, 4), Key(13, optional=True)] = b""
    standing: Annotated[Standing | None, Key(15, optional=True)] = None
    class_list: Annotated[bytes, Limits(4, 4), Key(16, optional=True)] = b""
    share: Annotated[NDArray[np.uint64] | None, WORDS, Key(17, optional=True)] = None
    seed: Annotated[SignedSeed, Key(18, optional=True)] = b""
    devices: Annotated[Positive, Key(19, optional=True)] = 0
    factor: Annotated[NDArray[np.int16] | None, FACTOR, Key(20, optional=True)] = None
    factor_bits: Annotated[int, Limits(0, MAX_BITS), Key(21, optional=True)] = 0

    def check_together(self) -> None:
        _require((self.share is None) == (not self.seed), "a share", "its seed beside it", "one without the other")
        is_bare = not (len(self.counts) or self.body.rows.size or self.further or self.has_products)
        if self.share is not None:
            _require(is_bare and self.standing is None, "a share", "nothing of the statistic beside it", "some")
            _require(len(self.share) > 0, "a share", "64-bit words", "none")
        _require(is_bare or self.standing != "withdrawn", "a withdrawal", "no class and no number", "some")
        self._check_devices()
        _require(self.counts.shape == self.body.classes.shape, "counts", f"{len(self.body.classes)}", len(self.counts))
        if self.triangle is not None:
            width = self.body.rows.shape[1]
            packed = self.triangle.shape == (width * (width + 1) // 2,)
            _require(packed, "triangle", f"the triangle of width {width}", self.triangle.shape)
        if self.factor is not None:
            width = self.body.rows.shape[1]
            _require(self.triangle is None and not self.devices, "a factor", "no triangle beside it", "one")
            fits = self.factor.shape[1] == width and len(self.factor) <= width
            _require(fits, "factor", f"at most {width} rows of {width}", self.factor.shape)
        _require(self.factor is not None or not self.factor_bits, "factor bits", "a factor", "none")
        for rows in self.further:
            expected = len(self.body.classes)
            _require(rows.ndim == 2 and len(rows) == expected, "class rows", f"{expected} rows", rows.shape)
        self._check_numbers()

    def _check_devices(self) -> None:
        kind, what = ("i", "exact sums") if self.devices else ("f", "numbers of a device")
        _require(all(table.dtype.kind == kind for table in self._all_tables()), "contribution", what, "others")
        _require(not self.devices or self.standing != "withdrawn", "a withdrawal", "no devices", self.devices)

    def _check_numbers(self) -> None:
        """Check what depends on the numbers in the arrays, and not on the arrays' types and shapes."""
        if len(self.counts):
            counts = self.counts.tolist()
            _require(min(counts) > 0, "counts", "positive counts", "a zero")
            _require(max(counts) <= MAX_COUNT, "counts", f"at most {MAX_COUNT}", "more")
        if self.triangle is not None:
            _numbers(self.triangle, "triangle")
        for rows in self.further:
            _numbers(rows, "class rows")
        for table in self._all_tables() if self.devices else ():
            fits = not len(table.ravel()) or max(int(table.max()), -int(table.min())) <= LARGEST_INTEGER
            _require(fits, "exact sums", f"integers up to {LARGEST_INTEGER}", "larger ones")

    def _all_tables(self) -> list[NDArray[Any]]:
        return [self.body.rows, *self.further, *([] if self.triangle is None else [self.triangle])]

    @classmethod
    def in_words(cls, words: Mapping[str, Any], **arrays: Any) -> Contribution:
        """A contribution with the `words` of another one and with other arrays. Only the numbers are checked.

        Args:
            words: the property `words` of the other contribution.
            arrays: arrays with the types and shapes of the other contribution's.
        """
        contribution = object.__new__(cls)
        contribution.__dict__.update(words, **arrays)
        contribution._check_numbers()
        return contribution

    @property
    def words(self) -> dict[str, Any]:
        """All its attributes that are no arrays, by name."""
        names = {attribute.name for attribute in fields(self)} - table_of(Contribution).tensor_fields
        return {name: getattr(self, name) for name in names}

    @property
    def says_nothing(self) -> bool:
        """Whether it has no class and no number of any kind: the device took part, and says nothing of its samples.

        It stands for a statistic of no samples, of any kind.
        """
        return not (len(self.body.classes) or self.further or self.has_products) and self.share is None

    @property
    def has_products(self) -> bool:
        """Whether it carries the products of all classes' samples, as a triangle or as a factor."""
        return self.triangle is not None or self.factor is not None

    @property
    def as_factor(self) -> Factor | None:
        """Its factor, if it has one."""
        return None if self.factor is None else Factor(self.factor, self.factor_bits)

    @functools.cached_property
    def _multiplied(self) -> NDArray[np.float64]:
        """The triangle that the factor stands for. It is multiplied out once: checking and adding both need it."""
        assert self.as_factor is not None
        return self.as_factor.triangle()

    @functools.cached_property
    def norms(self) -> NDArray[np.float64]:
        """(K,) the norms of the rows of `body`."""
        return row_norms(self.body.rows)

    @functools.cached_property
    def longest(self) -> float:
        """The largest of `norms`; 0 where there is none."""
        return float(self.norms.max(initial=0.0))

    @functools.cached_property
    def samples(self) -> int:
        """The number of examples that it claims in all."""
        return sum(self.counts.tolist())

    @classmethod
    def withdrawal(cls, *, run: bytes, round: int, method: str, bundle: bytes, extractor: bytes = b"") -> Contribution:
        """The message of a device whose sums are to be taken out; `bundle` and `extractor` are whole sha256."""
        nothing = ClassRows(np.zeros(0, np.uint16), np.zeros((0, 0)))
        none = np.zeros(0, np.uint64)
        return cls(run, round, method, bundle[:4], nothing, none, extractor=extractor[:4], standing="withdrawn")

    @classmethod
    def of(
        cls,
        statistic: Statistic,
        *,
        run: bytes,
        round: int,
        method: str,
        bundle: bytes,
        extractor: bytes = b"",
        standing: Standing | None = None,
        class_list: bytes = b"",
    ) -> Contribution:
        """The contribution that carries `statistic`; `bundle` and `extractor` are whole sha256, and `class_list` is a
        whole digest."""
        present = statistic.present
        rows = [statistic.as_sent(field)[present] for field in statistic.row_fields()]
        numbers = (np.flatnonzero(present) // statistic.GROUPS).astype(np.uint16)
        factor = statistic.factor
        return cls(
            run=run,
            round=round,
            method=method,
            bundle=bundle[:4],
            body=ClassRows(numbers, rows[0] if rows else np.zeros((len(numbers), 0))),
            counts=statistic.counts[present].astype(np.uint64),
            triangle=statistic.triangle,
            further=tuple(rows[1:]),
            extractor=extractor[:4],
            standing=standing,
            class_list=class_list[:4],
            factor=None if factor is None else factor.rows,
            factor_bits=0 if factor is None else factor.bits,
        )

    def holds(self, classes: Collection[int]) -> bool:
        """Whether any of its rows is of one of these classes."""
        return bool(np.isin(self.body.classes, list(classes)).any())

    def without(self, classes: Collection[int]) -> Contribution:
        """The contribution without the rows of these classes. It must have no products, which are of all classes."""
        assert not self.has_products
        stays = ~np.isin(self.body.classes, list(classes))
        return replace(
            self,
            body=ClassRows(self.body.classes[stays], self.body.rows[stays]),
            counts=self.counts[stays],
            further=tuple(rows[stays] for rows in self.further),
        )

    def check(self, kind: type[Statistic], classes: int, width: int) -> None:
        """Check that its fields are those of this kind of statistic, for a fleet of C classes and width D.

        Raises:
            WireError: when they are not.
        """
        fields, tables, numbers = kind.row_fields(), self._tables(), self.body.classes
        if self.says_nothing:
            return
        if len(tables) != len(fields) or self.has_products != kind.has_triangle():
            raise WireError(f"round of {self.method}", expected=kind.NAME, got="another statistic")
        for declared, table in zip(fields, tables, strict=True):
            _check_fit(numbers, table, classes, declared.columns(classes, width))
        if self.factor is not None and not kind.takes_factor():
            raise WireError(f"round of {self.method}", expected="a triangle", got="a factor")
        if not self.body.differ:
            _check_groups(numbers, kind.GROUPS)
        if not fields and len(numbers) and int(numbers[-1]) >= classes:
            raise WireError("class numbers", expected=f"below {classes}", got=int(numbers[-1]))

    def _tables(self) -> list[NDArray[np.floating]]:
        """Its fields of class rows, (K, …) each. A single empty field means that there is none."""
        return [] if not self.further and not self.body.rows.shape[1] else [self.body.rows, *self.further]

    def statistic(self, kind: type[Kind], classes: int, width: int) -> Kind:
        """The statistic of this kind, for a fleet of C classes and width D.

        Raises:
            WireError: when the fields are not of that kind, or do not fit that fleet.
        """
        self.check(kind, classes, width)
        if self.says_nothing:
            return kind.zero(classes, width)
        dense, counts, rows = self._tables(), self.counts.astype(np.int64), classes * kind.GROUPS
        if len(counts) < rows:  # some are absent
            places = _places(self.body.classes, kind.GROUPS)
            dense, counts = [_spread(places, table, rows) for table in dense], _spread(places, counts, rows)
        try:
            if self.devices:
                return kind.build([np.ldexp(sums, -FRACTION_BITS) for sums in self._in_order(kind, dense)], counts)
            if not kind.has_checks():  # then there is nothing that it could refuse: what is here was looked at
                return kind.of_checked(dense, counts)
            return kind.travelled(dense, self.triangle if self.factor is None else self._multiplied, counts)
        except StatisticError as error:
            raise WireError(f"contribution: {error}") from None

    def exact(self, kind: type[Statistic], classes: int, width: int) -> FixedPoint:
        """The sums of a gateway, the fields of their statistic one after another, for a fleet of C classes, width D.

        Raises:
            WireError: when the fields are not of that kind, or do not fit that fleet.
        """
        self.check(kind, classes, width)
        rows = classes * kind.GROUPS
        places = _places(self.body.classes, kind.GROUPS)
        dense = []
        for table in self._tables():
            spread = np.zeros((rows, table.shape[1]), np.int64)
            spread[places] = table
            dense.append(spread)
        return FixedPoint.of_integers(np.concatenate([sums.ravel() for sums in self._in_order(kind, dense)]))

    def _in_order(self, kind: type[Statistic], dense: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Its arrays, in the order of the statistic's fields."""
        tables = iter(dense)
        return [
            next(tables) if isinstance(field, statistics.Rows) else np.asarray(self.triangle) for field in kind.FIELDS
        ]

    def plain(self, kind: type[Statistic], classes: int, width: int) -> Contribution:
        """A gateway's contribution as one device with all the samples would send it: rounded, and checked as usual.

        Raises:
            WireError: when the fields are not of that kind, or do not fit that fleet.
        """
        statistic = self.statistic(kind, classes, width)
        key = {"run": self.run, "round": self.round, "method": self.method}
        plain = Contribution.of(statistic, bundle=self.bundle, **key)  # type: ignore[arg-type]
        attributes = {"extractor": self.extractor, "class_list": self.class_list, "standing": self.standing}
        return replace(plain, **attributes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Chunk(Message, number=4):
    """Slice `index` of `count` of one encoded Contribution of `total_bytes` with hash prefix `digest`."""

    run: Annotated[Run, Key(2)]
    round: Annotated[Positive, Key(3)]
    method: Annotated[MethodName, Key(4)]
    index: Annotated[PartIndex, Key(5)]
    count: Annotated[PartCount, Key(6)]
    total_bytes: Annotated[int, Limits(1, 1 << 32), Key(7)]
    digest: Annotated[bytes, Limits(8, 8), Key(8)]
    data: Annotated[bytes, Limits(1), Key(9)]

    def check_together(self) -> None:
        _require(self.index < self.count, "chunk", f"index below {self.count}", self.index)
        _require(len(self.data) <= self.total_bytes, "chunk", f"at most {self.total_bytes} bytes", len(self.data))


@dataclass(frozen=True)
class Receipt(Message, number=5, grows=True):
    """What became of the contribution (this device, `round`, `method`) of run `run`.

    Attributes:
        reason: why it was rejected, in words; empty otherwise.
        missing: for `need-chunks`, a bitmap of the chunks not yet here, lowest bit first.
        digest: for `rejected`, the first 8 bytes of the SHA-256 of the encoded contribution that was rejected; else
            empty. If the device's present contribution has another digest, that one was not rejected.
        held: for `late` where sums stand, the generation that the aggregator holds of this device. So a device that has
            lost its state can go on above it. 0 otherwise.
        counts: of a closed round, whether the contribution is part of the result; None where that is not said.
        why: why it is not part of the result, in words; empty otherwise.
    """

    run: Annotated[Run, Key(2)]
    round: Annotated[Positive, Key(3)]
    method: Annotated[MethodName, Key(4)]
    status: Annotated[ReceiptStatus, Key(5)]
    reason: Annotated[ShortText, Key(6)] = ""
    missing: Annotated[bytes, Limits(0, MAX_PARTS // 8 + 1), Key(7)] = b""
    digest: Annotated[bytes, Limits(8, 8), Key(8, optional=True)] = b""
    held: Annotated[Positive, Key(9, optional=True)] = 0
    counts: Annotated[bool | None, Key(10, optional=True)] = None
    why: Annotated[str, Limits(1, MAX_TEXT), Key(11, optional=True)] = ""

    @property
    def refuses_the_device(self) -> bool:
        """Whether the device itself was refused by an operator, and not only what it sent."""
        return self.status == "rejected" and self.reason.endswith(ADMITS)


@dataclass(frozen=True)
class Rival(Part):
    """Another process under the same device id, in the status of a process that stays or leaves because of it.

    Attributes:
        instance: the `instance` of the other process.
        age_s: for how long the sender of the status has been running.
        boot, board: what the other process has said of itself.
    """

    instance: Annotated[bytes, Limits(8, 8), Key(0)]
    age_s: Annotated[int, Limits(0, MAX_UINT, unit="s"), Key(1)]
    boot: Annotated[int, Key(2)]
    board: Annotated[ShortText, Key(3)] = ""


@dataclass(frozen=True)
class Status(Message, number=6):
    """A device's birth or death, and what it measured of itself. Retained; the death is the last will.

    Attributes:
        online: False in the last will and at a clean end.
        instance: 8 random bytes of this process, so that two processes with one id differ.
        boot: how often this device's state directory was opened.
        profile: the board's own name.
        versions: of the software, by package.
        metrics: measured figures by name, units in the name.
        issued: in a signed birth, a number above that of every birth that the same key signed before, so that an old
            birth that is sent again is recognised. In an aggregator's last will, the number of the process's connection
            that it belongs to. 0 elsewhere.
        heard: the highest announcement number that this device has heard from each key that it trusts, in the order of
            the keys' ids.
        rival: another process under the same id that this status answers: the later process leaves. None for none.
        calibration: what its held-out photos say of the calibration of answers; None where it is told nothing, or not
            asked.
        proposed: classes that its owner has proposed, with how many photos each; None where it is told nothing, or not
            asked.
    """

    online: Annotated[bool, Key(2)]
    instance: Annotated[bytes, Limits(8, 8), Key(3)]
    boot: Annotated[int, Key(4)]
    profile: Annotated[ShortText, Key(5)] = ""
    versions: Annotated[Mapping[EntryName, VersionText], Limits(0, MAX_ENTRIES), Key(6)] = field(default_factory=dict)
    metrics: Annotated[Mapping[EntryName, Figure], Limits(0, MAX_ENTRIES), Key(7)] = field(default_factory=dict)
    issued: Annotated[Issued, Key(8, optional=True)] = 0
    heard: Annotated[tuple[Mark, ...], Limits(1, MAX_HEARD), Key(9, optional=True)] = ()
    rival: Annotated[Rival | None, Key(10, optional=True)] = None
    calibration: Annotated[CalibrationReport | None, Key(11, optional=True)] = None
    proposed: Annotated[Mapping[EntryName, Positive] | None, Limits(1, MAX_PROPOSED), Key(12, optional=True)] = None


def _check_fit(numbers: NDArray[np.uint16], rows: NDArray[np.floating], classes: int, width: int) -> None:
    """Check that rows (K, …) of the classes `numbers` (K,) fit a fleet of C classes and this width."""
    last = int(numbers[-1]) if len(numbers) else -1
    if rows.shape[1] != width or last >= classes:
        raise WireError(
            "class rows",
            expected=f"classes below {classes} and width {width}",
            got=f"class {last} and width {rows.shape[1]}",
        )


def _check_groups(numbers: NDArray[np.uint16], groups: int) -> None:
    """Check that no class number comes more than `groups` times among rising numbers (K,)."""
    if not bool((numbers[groups:] > numbers[:-groups]).all()):
        times = "once" if groups == 1 else f"{groups} times"
        raise WireError("class numbers", expected=f"each {times} at most", got="one more often")


def _places(numbers: NDArray[np.uint16], groups: int) -> NDArray[np.int64]:
    """(K,) the positions of rows of these classes among C · groups rows: class after class, in the order given."""
    wide = numbers.astype(np.int64)
    if groups == 1:
        return wide
    return wide * groups + np.arange(len(wide)) - np.searchsorted(wide, wide)


def _spread(places: NDArray[np.int64], rows: NDArray[Any], count: int) -> NDArray[Any]:
    """(count, …) of rows (K, …) at their places: zero elsewhere."""
    dense = np.zeros((count, *rows.shape[1:]), rows.dtype)
    dense[places] = rows
    return dense


def _numbers(values: NDArray[np.floating], what: str) -> None:
    largest = float(np.abs(values).max(initial=0.0))  # NaN where there is one, and then the comparison fails too
    if not largest <= MAX_MAGNITUDE:
        raise WireError(what, expected=f"finite numbers up to {MAX_MAGNITUDE:g}", got=largest)
