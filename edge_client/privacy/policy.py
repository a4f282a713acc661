"""What a device's owner lets it release, whatever it is asked: `policy.toml`, read once, when the device starts.

    methods          = ["ncm", "ffc"]   # rounds and standing sums of no other method
    statistics       = ["unit-means"]   # nothing made of another statistic
    encodings        = ["f32", "f16"]
    min_samples      = 5                # classes with fewer stay here; the larger of this and the announced one holds
    releases_per_day = 4                # 0.25 is one in four days
    blinded          = true             # no open sum: shares of sums alone, for the helper of client --helper-key
    figures          = ["accuracy"]     # of those in a status that are computed from samples
    joint_head       = true             # left out of a round, it and those that agree get a head of their sums
    page             = true             # client --page may show kept photos to a browser
    answers          = true             # client --home-assistant may publish what the camera's photos are answered
    proposals        = true             # classes that were proposed for photos, and for how many, go to the operator
    keep_photos      = false            # no photo of client --camera is kept on this device
    keep_photos_for  = "7d"             # kept ones are removed after so long
    epsilon          = 4.0              # over every release of any kind,
    delta            = 1e-6             # with this δ,
    neighbours       = "add-remove"     # for data that differs in one sample more or fewer; or "replace"
    ledger           = "/var/lib/protofleet-ledger/kitchen.sqlite"  # instead of in the state directory

- A key that is left out restricts nothing. `joint_head`, `page`, `answers` and `proposals` are the exceptions: they
  allow something, and left out they allow nothing.
- A file without any key is refused, because it is a policy that got lost.
- The terms of the last start are on record beside the ledger and in the journal. A start with looser terms (`looser`)
  is refused until the owner confirms them (`client --accept-looser-policy`).
- Announcements, bundles and roll-outs cannot change the policy. They can only be refused by it.

What has left so far is in the ledger (`ledger.py`). `releases.py` uses both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from protofleet.contract.console.durations import seconds
from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.files.atomic_files import read_toml
from protofleet.contract.methods import METHODS
from protofleet.contract.names import known
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.encodings import ENCODINGS
from protofleet.contract.wire.messages import MAX_ROUND, Announcement, Encoding

__all__ = [
    "FIGURES", "Figure", "Neighbours", "Policy", "Recorded", "Refusal", "looser", "read_policy", "read_record",
]  # fmt: skip

Neighbours = Literal["add-remove", "replace"]
Figure = Literal["accuracy", "calibration", "drift", "new-photos", "unknown"]
FIGURES: tuple[Figure, ...] = get_args(Figure)
_KEYS_OF_EPSILON = ("epsilon", "delta")


@dataclass(frozen=True)
class Refusal:
    """Why a release is not made: `word` is what the operator is told, `line` what the owner reads.

    Both follow from the policy, the announcement and the ledger, and from no sample.
    """

    word: str
    line: str


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may leave a device; see the beginning of this file for each. None restricts nothing.

    Attributes:
        figures: None for those that the client's own options tell; none of them where there is an ε.
    """

    methods: tuple[str, ...] | None = None
    statistics: tuple[str, ...] | None = None
    encodings: tuple[Encoding, ...] | None = None
    min_samples: int = 1
    releases_per_day: float | None = None
    blinded: bool = False
    joint_head: bool = False
    page: bool = False
    answers: bool = False
    proposals: bool = False
    keep_photos: bool = True
    keep_photos_for: str | None = None
    figures: tuple[Figure, ...] | None = None
    epsilon: float | None = None
    delta: float | None = None
    neighbours: Neighbours = "add-remove"
    ledger: str | None = None

    @property
    def is_private(self) -> bool:
        """Whether every release has to have its ε."""
        return self.epsilon is not None

    def allows_figure(self, figure: Figure) -> bool:
        """Whether this may stand in a status."""
        return not self.is_private and (self.figures is None or figure in self.figures)

    def refusal(self, asked: Announcement, statistic: type[Statistic]) -> Refusal | None:
        """Why what is announced is not made, as far as the announcement alone says; None where it may be."""
        wanted = (
            ("method", self.methods, asked.method),
            ("statistic", self.statistics, statistic.NAME),
            ("encoding", self.encodings, asked.encoding),
        )
        for what, allowed, got in wanted:
            if allowed is not None and got not in allowed:
                expected = " or ".join(allowed) or "none at all"
                return Refusal(f"{what} {got}", f"its {what} is {got}, the policy allows {expected}")
        if self.blinded and asked.helper is None:
            return Refusal("not blinded", "its sums are open, the policy allows blinded ones alone")
        return None

    def allows_encoding(self, encoding: str) -> bool:
        """Whether numbers may travel so."""
        return self.encodings is None or encoding in self.encodings

    @property
    def keeps_photos_for_s(self) -> float | None:
        """How long a camera's photo may be kept at most; None where that is not restricted."""
        return None if self.keep_photos_for is None else seconds("keep_photos_for", self.keep_photos_for)

    @property
    def window_s(self) -> float | None:
        """In how many seconds `most` releases may be made; None where that is not restricted."""
        return None if self.releases_per_day is None else 86_400.0 / min(self.releases_per_day, 1.0)

    @property
    def most(self) -> int:
        """How many releases a window may hold."""
        return max(int(self.releases_per_day or 0.0), 1)


def read_policy(file: str) -> Policy:
    """The policy of a TOML file. Methods of packages and of `--method` have to be loaded before.

    Raises:
        UsageError: it cannot be read, a key or a name in it is unknown, a value is of the wrong kind or out of range.
    """
    where = f"--policy {file}"
    values = read_toml(file, where)
    if not values:
        hint = "min_samples = 1, which restricts nothing, or no --policy"
        raise UsageError(where, expected="at least one of a policy's keys", got="none", hint=hint)
    known = Policy.__struct_fields__
    for name in values:
        if name not in known:
            raise UsageError(
                f"{where}: unknown key", expected="one of a policy's", got=name, hint=near_names(name, known)
            )
    _check_names(where, values)
    try:
        policy = msgspec.convert(values, Policy)
    except msgspec.ValidationError as error:
        raise UsageError(where, expected="values of the right kind", got=error) from None
    _check_ranges(where, policy)
    _check_budget(where, policy)
    _check_ledger(where, policy)
    return policy


class Recorded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The terms of a start, and how often terms had changed by then: of two records the later one counts."""

    change: int
    policy: Policy

    def text(self) -> str:
        """As it is kept."""
        return msgspec.json.encode(self, order="deterministic").decode()

    def followed_by(self, policy: Policy) -> Recorded:
        """The record of the next start."""
        return self if policy == self.policy else Recorded(self.change + 1, policy)


_RECORDS = msgspec.json.Decoder(Recorded)  # made here: see `protofleet.contract.bundle.bundle_file._MANIFESTS`


def read_record(text: str) -> Recorded:
    """What `Recorded.text` wrote.

    Raises:
        ValueError: it is none.
    """
    try:
        return _RECORDS.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"terms of a policy: {error}") from None


def looser(now: Policy, before: Policy) -> tuple[str, ...]:
    """The keys in which `now` lets more be released than `before`, or something else than `before`."""
    lists = ("methods", "statistics", "encodings", "figures")
    keys = [name for name in lists if _more_names(_allowed(now, name), _allowed(before, name))]
    keys += ["min_samples"] * (now.min_samples < before.min_samples)
    for name in ("releases_per_day", "epsilon", "delta"):
        most, limit = getattr(now, name), getattr(before, name)
        keys += [name] * (limit is not None and (most is None or most > limit))
    keys += ["joint_head"] * (now.joint_head and not before.joint_head)
    keys += ["page"] * (now.page and not before.page)
    keys += ["answers"] * (now.answers and not before.answers)
    keys += ["proposals"] * (now.proposals and not before.proposals)
    keys += ["keep_photos"] * (now.keep_photos and not before.keep_photos)
    longest, limit_s = now.keeps_photos_for_s, before.keeps_photos_for_s
    keys += ["keep_photos_for"] * (limit_s is not None and (longest is None or longest > limit_s))
    keys += ["blinded"] * (before.blinded and not now.blinded)
    keys += ["neighbours"] * (before.is_private and now.neighbours != before.neighbours)
    allows = {"ledger": None, "joint_head": False, "page": False, "answers": False, "proposals": False}
    restricts = msgspec.structs.replace(before, **allows) != Policy()
    return (*keys, *(["ledger"] * (restricts and now.ledger != before.ledger)))


def _allowed(policy: Policy, name: str) -> tuple[str, ...] | None:
    """The names of a list; None for all. With an ε no figure is told."""
    names: tuple[str, ...] | None = () if name == "figures" and policy.is_private else getattr(policy, name)
    return names


def _more_names(now: tuple[str, ...] | None, before: tuple[str, ...] | None) -> bool:
    return before is not None and (now is None or not set(now) <= set(before))


def _check_names(where: str, values: dict[str, Any]) -> None:
    """A misspelt name would forbid what its owner allows, or look as if it allowed something."""
    lists: dict[str, tuple[str, ...]] = {
        "methods": tuple(METHODS),
        "statistics": tuple(sorted({entry.statistic.NAME for entry in METHODS.values()})),
        "encodings": tuple(ENCODINGS),
        "figures": FIGURES,
    }
    for key, names in lists.items():
        given = values.get(key, [])
        if not isinstance(given, list):
            raise UsageError(f"{where}: {key}", expected='a list such as ["…"]', got=repr(given))
        for name in given:
            known(names, name, f"{where}: {key}", "known names")
    known(get_args(Neighbours), values.get("neighbours", "replace"), f"{where}: neighbours")


def _check_ranges(where: str, policy: Policy) -> None:
    limits: list[tuple[str, float | None, float, float]] = [
        ("min_samples", policy.min_samples, 1, MAX_ROUND),
        ("releases_per_day", policy.releases_per_day, 1e-4, 1e6),
        ("epsilon", policy.epsilon, 1e-6, 1e6),
        ("delta", policy.delta, 1e-15, 0.5),
    ]
    if policy.keep_photos_for is not None and not seconds(f"{where}: keep_photos_for", policy.keep_photos_for):
        got, hint = policy.keep_photos_for, "keep_photos = false"
        raise UsageError(f"{where}: keep_photos_for", expected="a duration above 0", got=got, hint=hint)
    for name, value, low, high in limits:
        if value is not None and not low <= value <= high:
            raise UsageError(f"{where}: {name}", expected=f"{low:g} to {high:g}", got=value)


def _check_ledger(where: str, policy: Policy) -> None:
    """From another folder a relative path would be another file, and its ledger an empty one."""
    given = policy.ledger
    if given is not None and not (Path(given).is_absolute() and given.isprintable()):
        hint = 'ledger = "/var/lib/protofleet-ledger/ledger.sqlite"'
        raise UsageError(f"{where}: ledger", expected="a path that begins with /", got=repr(given)[:80], hint=hint)


def _check_budget(where: str, policy: Policy) -> None:
    """ε and δ belong together, and nothing noises what a status says, or what is blinded."""
    given = [name for name in _KEYS_OF_EPSILON if getattr(policy, name) is not None]
    if len(given) == 1:
        (missing,) = set(_KEYS_OF_EPSILON) - set(given)
        raise UsageError(f"{where}: {given[0]}", expected=f"{missing} beside it", got="none", hint="delta = 1e-6")
    if policy.is_private and policy.figures:
        raise UsageError(
            f"{where}: figures with epsilon",
            expected="none of them, since no noise is added to what a status says",
            got=", ".join(policy.figures),
            hint="figures = [], or no epsilon",
        )
    if policy.proposals and policy.is_private:
        expected = "no epsilon, since no noise is added to how many photos a class was proposed for"
        raise UsageError(f"{where}: proposals", expected=expected, got="both")
    if policy.joint_head and (policy.is_private or policy.blinded):
        expected = "neither epsilon nor blinded, since nobody is compared there, and so nobody is left out"
        raise UsageError(f"{where}: joint_head", expected=expected, got="epsilon" if policy.is_private else "blinded")
    if policy.is_private and policy.blinded:
        expected = "one of the two, since no noise is added to sums that are blinded, and so there is no ε"
        raise UsageError(f"{where}: blinded with epsilon", expected=expected, got="both")
