"""The messages of the wire, as values; `messages.cddl` is the same in RFC 8610's language. See docs/wire.md.

There are thirteen messages. What they can hold is the uplink policy:

- No message that a device sends has room for weights, gradients or samples. (A roll-out's pieces of a bundle go down.)
- The only arrays are class rows (rows of numbers for each class present) and the triangle of one symmetric matrix. The
  statistic of a method declares which of them the method sends (`contract/sums/statistics.py`).
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

Every value is validated when it is built, so a value that exists can be trusted.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import StatisticError, WireError
from protofleet.contract.sums.fixed_point import FRACTION_BITS, LARGEST_INTEGER, FixedPoint
from protofleet.contract.sums.plausibility import row_norms
from protofleet.contract.sums.statistics import MAX_FIELDS, MAX_GROUPS, Rows, Statistic
from protofleet.contract.wire.envelopes import SIGNATURE_BYTES, Enrolment, Mark, Signed
from protofleet.contract.wire.helper_messages import HelperTerms, Opened, Opening, SealedSeed
from protofleet.contract.wire.rollout_messages import Offer, Piece, Request

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

Encoding = Literal["f64", "f32", "f16", "int8", "int32"]
Phase = Literal["open", "closed", "finished", "standing"]
Standing = Literal["withdrawn", "present"]
ReceiptStatus = Literal["committed", "duplicate", "late", "rejected", "need-chunks"]


ADMITS = "lets it in again"  # how the reason ends where nothing of a device is taken, whatever it sends
MAX_ROUND = 2**32 - 1
MAX_CHUNKS = 65_535
MAX_TEXT = 200
MAX_ENTRIES = 32
MAX_NAME = 64  # characters of an entry's
MAX_VERSION = 64  # characters of an entry among the versions of a status
MAX_KIND = 32
MAX_BUNDLES = 256
LEAST_LIMIT_BYTES = 1_024
# One device's contribution, however hostile, cannot make the sum of a fleet of two million overflow.
MAX_COUNT = 2**32 - 1
MAX_MAGNITUDE = 1e30
MAX_SEED_BYTES = 512
MAX_HEARD = 4  # keys whose numbers a status tells


_ARRAYS = ("body", "counts", "triangle", "further", "share")  # of a contribution

Kind = TypeVar("Kind", bound=Statistic)


_require = WireError.unless


@dataclass(frozen=True, eq=False)
class ClassRows:
    """Rows of some classes. Prototypes, class means, cross sums and heads travel in this form.

    Attributes:
        classes: (K,) uint16, rising class numbers; in a contribution one may come up to 8 times, for several groups.
        rows: (K, D) float, one row for each of them.
    """

    classes: NDArray[np.uint16]
    rows: NDArray[np.floating]

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
class Announcement:
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
    """

    run: bytes
    round: int
    phase: Phase
    method: str
    bundle: bytes
    deadline_s: float = 0.0
    fraction: float = 1.0
    seed: int = 0
    global_version: int = 0
    encoding: Encoding = "f32"
    min_samples: int = 1
    limit_bytes: int = 65_536
    others: tuple[bytes, ...] = ()
    extractor: bytes = b""
    class_lists: tuple[bytes, ...] = ()
    offer: Offer | None = None
    withheld: tuple[int, ...] = ()
    issued: int = 0
    helper: HelperTerms | None = None
    epoch: int = 0
    max_samples: int = 0
    proof: bytes = b""

    def __post_init__(self) -> None:
        _run_and_round(self.run, self.round, lowest=0)
        _require(len(self.extractor) in (0, 32), "extractor", "32 bytes or none", len(self.extractor))
        _text(self.method, "method", 32)
        phases = ("open", "closed", "finished", "standing")
        _require(self.phase in phases, "phase", ", ".join(phases), self.phase)
        hashes = (self.bundle, *self.others)
        _require(len(hashes) <= MAX_BUNDLES, "bundles", f"at most {MAX_BUNDLES}", len(hashes))
        _require(all(len(sha256) == 32 for sha256 in hashes), "bundle", "32 bytes", "another length")
        _require(len(set(hashes)) == len(hashes), "bundles", "different ones", "one twice")
        lists = self.class_lists
        _require(len(lists) <= MAX_BUNDLES, "lists of classes", f"at most {MAX_BUNDLES}", len(lists))
        _require(all(len(digest) == 8 for digest in lists), "list of classes", "8 bytes", "another length")
        _require(len(set(lists)) == len(lists), "lists of classes", "different ones", "one twice")
        increasing = all(low < high for low, high in itertools.pairwise((-1, *self.withheld, 1 << 16)))
        _require(increasing, "withheld", "rising class numbers", "others")
        _require(math.isfinite(self.deadline_s) and self.deadline_s >= 0, "deadline_s", "0 or more", self.deadline_s)
        _require(0 < self.fraction <= 1, "fraction", "above 0, up to 1", self.fraction)
        _require(0 <= self.seed <= MAX_ROUND, "seed", f"0 to {MAX_ROUND}", self.seed)
        _require(0 <= self.global_version <= MAX_ROUND, "global_version", f"0 to {MAX_ROUND}", self.global_version)
        _require(self.encoding in get_args(Encoding), "encoding", "one of this wire", self.encoding)
        _require(1 <= self.min_samples <= MAX_ROUND, "min_samples", "1 or more", self.min_samples)
        _require(LEAST_LIMIT_BYTES <= self.limit_bytes <= 1 << 28, "limit_bytes", "1024 to 2^28", self.limit_bytes)
        _require(0 <= self.issued < 1 << 63, "issued", "0 to 2^63 - 1", self.issued)
        _require(0 <= self.epoch <= MAX_ROUND, "epoch", f"0 to {MAX_ROUND}", self.epoch)
        _require(0 <= self.max_samples <= MAX_ROUND, "max_samples", f"0 to {MAX_ROUND}", self.max_samples)
        _require(len(self.proof) in (0, SIGNATURE_BYTES), "proof", f"{SIGNATURE_BYTES} bytes or none", len(self.proof))


@dataclass(frozen=True, eq=False)
class GlobalPart:
    """Part `part` of `parts` of global state `version`: some class rows of one kind.

    Attributes:
        kind: `prototypes`, `head`, or another kind that the method declares.
    """

    run: bytes
    version: int
    round: int
    part: int
    parts: int
    kind: str
    body: ClassRows

    def __post_init__(self) -> None:
        _run_and_round(self.run, self.round)
        _require(1 <= self.version <= MAX_ROUND, "version", f"1 to {MAX_ROUND}", self.version)
        _require(
            1 <= self.parts <= MAX_CHUNKS and 0 <= self.part < self.parts, "part", f"below {self.parts}", self.part
        )
        _text(self.kind, "kind", MAX_KIND)
        _check_groups(self.body.classes, 1)


@dataclass(frozen=True, eq=False)
class Contribution:
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
    """

    run: bytes
    round: int
    method: str
    bundle: bytes
    body: ClassRows
    counts: NDArray[np.uint64]
    triangle: NDArray[np.floating] | None = None
    further: tuple[NDArray[np.floating], ...] = ()
    extractor: bytes = b""
    standing: Standing | None = None
    class_list: bytes = b""
    share: NDArray[np.uint64] | None = None
    seed: bytes = b""
    devices: int = 0

    def __post_init__(self) -> None:
        _run_and_round(self.run, self.round)
        _text(self.method, "method", 32)
        _require((self.share is None) == (not self.seed), "a share", "its seed beside it", "one without the other")
        if self.share is not None:
            bare = not (len(self.counts) or self.body.rows.size or self.further or self.triangle is not None)
            _require(bare and self.standing is None, "a share", "nothing of the statistic beside it", "some")
            plain = self.share.ndim == 1 and self.share.dtype == np.uint64 and len(self.share) > 0
            _require(plain, "a share", "64-bit words", f"{self.share.dtype} {self.share.shape}")
            _require(len(self.seed) <= MAX_SEED_BYTES, "a seed", f"at most {MAX_SEED_BYTES} bytes", len(self.seed))
        _require(self.standing in (None, "withdrawn", "present"), "standing", "withdrawn or present", self.standing)
        self._check_devices()
        if self.standing == "withdrawn":
            empty = not (len(self.counts) or self.body.rows.size or self.further or self.triangle is not None)
            _require(empty, "a withdrawal", "no class and no number", "some")
        _require(len(self.bundle) == 4, "bundle", "4 bytes", len(self.bundle))
        _require(len(self.extractor) in (0, 4), "extractor", "4 bytes or none", len(self.extractor))
        _require(len(self.class_list) in (0, 4), "list of classes", "4 bytes or none", len(self.class_list))
        _require(self.counts.shape == self.body.classes.shape, "counts", f"{len(self.body.classes)}", len(self.counts))
        if self.triangle is not None:
            width = self.body.rows.shape[1]
            packed = self.triangle.shape == (width * (width + 1) // 2,)
            _require(packed, "triangle", f"the triangle of width {width}", self.triangle.shape)
        _require(len(self.further) < MAX_FIELDS, "class rows", f"at most {MAX_FIELDS} fields", 1 + len(self.further))
        for rows in self.further:
            expected = len(self.body.classes)
            _require(rows.ndim == 2 and len(rows) == expected, "class rows", f"{expected} rows", rows.shape)
        self._check_numbers()

    def _check_devices(self) -> None:
        _require(0 <= self.devices <= MAX_ROUND, "devices", f"0 to {MAX_ROUND}", self.devices)
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
        names = (attribute.name for attribute in fields(self))
        return {name: getattr(self, name) for name in names if name not in _ARRAYS}

    @property
    def says_nothing(self) -> bool:
        """Whether it has no class and no number of any kind: the device took part, and says nothing of its samples.

        It stands for a statistic of no samples, of any kind.
        """
        return not (len(self.body.classes) or self.further) and self.triangle is None and self.share is None

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
        )

    def holds(self, classes: Collection[int]) -> bool:
        """Whether any of its rows is of one of these classes."""
        return bool(np.isin(self.body.classes, list(classes)).any())

    def without(self, classes: Collection[int]) -> Contribution:
        """The contribution without the rows of these classes. It must have no triangle, which is of all classes."""
        assert self.triangle is None
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
        if len(tables) != len(fields) or (self.triangle is None) == kind.has_triangle():
            raise WireError(f"round of {self.method}", expected=kind.NAME, got="another statistic")
        for declared, table in zip(fields, tables, strict=True):
            _check_fit(numbers, table, classes, declared.columns(classes, width))
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
            return kind.travelled(dense, self.triangle, counts)
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
        return [next(tables) if isinstance(field, Rows) else np.asarray(self.triangle) for field in kind.FIELDS]

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
class Chunk:
    """Slice `index` of `count` of one encoded Contribution of `total_bytes` with hash prefix `digest`."""

    run: bytes
    round: int
    method: str
    index: int
    count: int
    total_bytes: int
    digest: bytes
    data: bytes

    def __post_init__(self) -> None:
        _run_and_round(self.run, self.round)
        _text(self.method, "method", 32)
        _require(
            1 <= self.count <= MAX_CHUNKS and 0 <= self.index < self.count,
            "chunk",
            f"index below {self.count}",
            self.index,
        )
        _require(1 <= len(self.data) <= self.total_bytes <= 1 << 32, "chunk", "1 byte to the total", len(self.data))
        _require(len(self.digest) == 8, "digest", "8 bytes", len(self.digest))


@dataclass(frozen=True)
class Receipt:
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

    run: bytes
    round: int
    method: str
    status: ReceiptStatus
    reason: str = ""
    missing: bytes = b""
    digest: bytes = b""
    held: int = 0
    counts: bool | None = None
    why: str = ""

    @property
    def refuses_the_device(self) -> bool:
        """Whether the device itself was refused by an operator, and not only what it sent."""
        return self.status == "rejected" and self.reason.endswith(ADMITS)

    def __post_init__(self) -> None:
        _run_and_round(self.run, self.round)
        _text(self.method, "method", 32)
        _require(0 <= self.held <= MAX_ROUND, "held", f"0 to {MAX_ROUND}", self.held)
        _require(len(self.digest) in (0, 8), "digest", "8 bytes or none", len(self.digest))
        statuses = ("committed", "duplicate", "late", "rejected", "need-chunks")
        _require(self.status in statuses, "status", ", ".join(statuses), self.status)
        _require(len(self.reason) <= MAX_TEXT, "reason", f"at most {MAX_TEXT} characters", len(self.reason))
        _require(len(self.why) <= MAX_TEXT, "why", f"at most {MAX_TEXT} characters", len(self.why))
        _require(
            len(self.missing) <= MAX_CHUNKS // 8 + 1, "missing", "a bitmap of at most 65535 bits", len(self.missing)
        )


@dataclass(frozen=True)
class Rival:
    """Another process under the same device id, in the status of a process that stays or leaves because of it.

    Attributes:
        instance: the `instance` of the other process.
        age_s: for how long the sender of the status has been running.
        boot, board: what the other process has said of itself.
    """

    instance: bytes
    age_s: int
    boot: int
    board: str = ""

    def __post_init__(self) -> None:
        _require(len(self.instance) == 8, "instance", "8 bytes", len(self.instance))
        _require(0 <= self.age_s <= MAX_ROUND, "age", f"0 to {MAX_ROUND} s", self.age_s)
        _require(0 <= self.boot <= MAX_ROUND, "boot", f"0 to {MAX_ROUND}", self.boot)
        _require(len(self.board) <= MAX_TEXT, "board", f"at most {MAX_TEXT} characters", len(self.board))


@dataclass(frozen=True)
class Status:
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
    """

    online: bool
    instance: bytes
    boot: int
    profile: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    issued: int = 0
    heard: tuple[Mark, ...] = ()
    rival: Rival | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.issued < 1 << 63, "issued", "0 to 2^63 - 1", self.issued)
        _require(len(self.heard) <= MAX_HEARD, "heard", f"at most {MAX_HEARD} numbers", len(self.heard))
        rising = all(first.key_id < second.key_id for first, second in itertools.pairwise(self.heard))
        _require(rising, "heard", "rising keys", "others")
        _require(len(self.instance) == 8, "instance", "8 bytes", len(self.instance))
        _require(0 <= self.boot <= MAX_ROUND, "boot", f"0 to {MAX_ROUND}", self.boot)
        _require(len(self.profile) <= MAX_TEXT, "profile", f"at most {MAX_TEXT} characters", len(self.profile))
        _entries(self.versions, "versions", lambda value: isinstance(value, str) and len(value) <= MAX_VERSION)
        _entries(self.metrics, "metrics", lambda value: isinstance(value, float) and math.isfinite(value))


Message = (
    Announcement
    | GlobalPart
    | Contribution
    | Chunk
    | Receipt
    | Status
    | Request
    | Piece
    | Signed
    | Enrolment
    | Opening
    | Opened
    | SealedSeed
)


def _run_and_round(run: bytes, round_number: int, lowest: int = 1) -> None:
    _require(len(run) == 4, "run", "4 bytes", len(run))
    if not lowest <= round_number <= MAX_ROUND:
        raise WireError("round", expected=f"{lowest} to {MAX_ROUND}", got=round_number)


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


def _text(value: str, what: str, limit: int) -> None:
    if not 1 <= len(value) <= limit:
        raise WireError(what, expected=f"1 to {limit} characters", got=len(value))


def _entries(entries: Mapping[str, object], what: str, valid: Callable[[object], bool]) -> None:
    _require(len(entries) <= MAX_ENTRIES, what, f"at most {MAX_ENTRIES} entries", len(entries))
    for name, value in entries.items():
        _require(1 <= len(name) <= MAX_NAME and valid(value), what, "short names and plain values", name[:MAX_NAME])
