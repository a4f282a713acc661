"""What a device decides about roll-outs, as values and functions of them: no disk, no clock, no network.

A roll-out is an offer of a newer bundle. The bundle is for the same fleet (then it extends the bundle that runs) or for
another one. A state directory remembers its roll-outs as one `Rollouts`. Every change of it is one of these functions.
Each change is written as a whole (`rollout_file.py`), so that after kill -9 either the old record or the new one holds:

    considered       what to do about an offer: fetch it, wait, or leave it, and why
    activated        the new bundle runs, on probation; what ran before stays known
    started          a start on probation; too many in a row that did not get through end it
    got_through      this start did: it waits for work without an error
    proved           healthy: probation is over, and nothing older runs here again
    rolled_back      what ran before runs again, and the bundle that failed is remembered

Versions rise. A bundle that is older than what this state directory has run healthy is not taken from an offer. Where a
key is trusted, it is not taken from a file that a command names either (`given`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, cast

import msgspec

from protofleet.contract.errors import UsageError
from protofleet.contract.printable import printable
from protofleet.contract.wire.rollout_messages import Offer, RolloutReport, Word, bundle_tag
from protofleet.contract.wire.topics import ID_PATTERN

__all__ = [
    "FALL",
    "STARTS",
    "Failure",
    "InstalledBundle",
    "Probation",
    "Rollouts",
    "Verdict",
    "activated",
    "considered",
    "given",
    "got_through",
    "has_fallen",
    "installed_of",
    "instead",
    "proved",
    "refused",
    "rolled_back",
    "started",
    "tag",
    "with_accuracy",
    "word",
]

STARTS = 3  # in a row that a bundle on probation may need to get through
FALL = 0.10  # of the share of held-out photos that are named right: a bundle after which more is lost is given up,
# where it is more than chance: two standard deviations of a share of so many photos, at most 1/√n
_KEPT = 64  # failed bundles, and replaced ones

_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Directory = Annotated[str, msgspec.Meta(pattern=r"^(fleets/[a-z0-9-]+)?\Z")]
_FleetId = Annotated[str, msgspec.Meta(pattern=rf"^{ID_PATTERN}\Z")]


class InstalledBundle(msgspec.Struct, frozen=True):
    """A bundle that runs here, or ran.

    Attributes:
        sha256: hex.
        fleet: that it runs in.
        directory: of that fleet's journal, below the state directory; empty for that one itself.
    """

    sha256: _Sha256
    version: int
    fleet: _FleetId
    directory: _Directory = ""


class Failure(msgspec.Struct, frozen=True):
    """A bundle that was given up: its version, why, and which one (sha256, hex) took its place again."""

    version: int
    reason: str
    back_to: _Sha256


class Probation(msgspec.Struct, frozen=True):
    """Of the active bundle.

    Attributes:
        starts: in a row that have not got through.
        accuracy: share of held-out photos that the fleet's state named right before; None where it was not measured.
    """

    starts: int = 0
    accuracy: float | None = None


class Rollouts(msgspec.Struct, frozen=True):
    """What a state directory knows of roll-outs.

    Attributes:
        home: the fleet that the state directory itself is of; other fleets have a directory each below it.
        active: what runs in place of the file that the command names; None before the first roll-out.
        previous: what ran before it, for the way back.
        replaced: sha256 (hex) of bundles in whose place others came: a file of theirs is not what runs.
        floor: the highest version that has run healthy.
        failed: bundles that were given up, by sha256 (hex).
        probation: of the active one; None once it is healthy.
        accuracy: the share that the fleet's state named right when the device last tested itself.
        wrong: how often what was fetched of `fetching` (sha256, hex) had another hash.
        tries: self-tests of it that began and have not ended: whoever runs here was ended with them.

    Raises:
        ValueError: a bundle is on probation that has none before it to go back to.
    """

    home: str = ""
    active: InstalledBundle | None = None
    previous: InstalledBundle | None = None
    replaced: tuple[_Sha256, ...] = ()
    floor: int = 0
    failed: dict[_Sha256, Failure] = {}
    probation: Probation | None = None
    accuracy: float | None = None
    fetching: str = ""
    wrong: int = 0
    tries: int = 0

    def __post_init__(self) -> None:
        if self.probation is not None and None in (self.active, self.previous):
            raise ValueError("a probation, expected a bundle and the one before it, got none")


@dataclass(frozen=True)
class Verdict:
    """What to do about an offer: `fetch` it, `wait` until something else is decided, or `leave` it.

    Attributes:
        word: for the status, without the version; empty where there is nothing to say.
    """

    what: Literal["fetch", "wait", "leave"]
    word: str = ""


def tag(installed: InstalledBundle) -> str:
    """A bundle as the status names it."""
    return bundle_tag(installed.version, bytes.fromhex(installed.sha256))


def word(version: int, text: str) -> str:
    """The report of a roll-out as the status carries it.

    Args:
        text: a word, with its reason after a colon.
    """
    name, _, reason = text.partition(": ")
    return RolloutReport(version, cast(Word, name), printable(reason)).text


def considered(
    known: Rollouts, offer: Offer, running: InstalledBundle, *, in_stage: bool, trusts: bool, wanted: bool, budget: bool
) -> Verdict:
    """What to do about an offer.

    Args:
        running: what runs now.
        in_stage: whether this device is in the offer's stage.
        trusts: whether it has a key to check the bundle's signature with.
        wanted: whether its owner takes part in roll-outs.
        budget: whether a privacy budget is kept here, which is of one fleet.
    """
    sha256 = offer.sha256.hex()
    if sha256 == running.sha256:
        return Verdict("leave", "probation" if known.probation is not None else "healthy")
    failure = known.failed.get(sha256)
    if failure is not None:
        return Verdict("leave", f"failed: {failure.reason}")
    if not in_stage:
        return Verdict("leave")
    refusals = (
        (not wanted, "no roll-outs wanted here"),
        (not trusts, "no key"),
        (offer.version <= max(known.floor, running.version), f"not above {max(known.floor, running.version)}"),
        (budget and offer.fleet not in ("", running.fleet), "a privacy budget is of one fleet"),
    )
    for holds, why in refusals:
        if holds:
            return Verdict("leave", f"refused: {why}")
    return Verdict("wait") if known.probation is not None else Verdict("fetch", "fetching")


def installed_of(offer: Offer, running: InstalledBundle) -> InstalledBundle:
    """Where an offered bundle runs: in the same journal where it is for the same fleet, else in one of its own."""
    sha256 = offer.sha256.hex()
    if offer.fleet in ("", running.fleet):
        return InstalledBundle(sha256, offer.version, running.fleet, running.directory)
    return InstalledBundle(sha256, offer.version, offer.fleet, f"fleets/{offer.fleet}-{sha256[:8]}")


def activated(known: Rollouts, installed: InstalledBundle, running: InstalledBundle) -> Rollouts:
    """`installed` takes the place of what runs, on probation."""
    replaced = tuple(dict.fromkeys((*known.replaced, running.sha256)))[-_KEPT:]
    return msgspec.structs.replace(
        known,
        home=known.home or running.fleet,
        active=installed,
        previous=running,
        replaced=replaced,
        probation=Probation(accuracy=known.accuracy),
        fetching="",
        wrong=0,
        tries=0,
    )


def started(known: Rollouts) -> Rollouts:
    """One more start. On probation, one too many in a row that did not get through is the end of it."""
    if known.probation is None:
        return known
    if known.probation.starts >= STARTS:
        return rolled_back(known, f"{STARTS} starts did not get through")
    probation = msgspec.structs.replace(known.probation, starts=known.probation.starts + 1)
    return msgspec.structs.replace(known, probation=probation)


def got_through(known: Rollouts) -> Rollouts:
    """This start has come to where it waits for work."""
    if known.probation is None or not known.probation.starts:
        return known
    return msgspec.structs.replace(known, probation=msgspec.structs.replace(known.probation, starts=0))


def proved(known: Rollouts, running: InstalledBundle) -> Rollouts:
    """What runs is healthy: nothing older runs here again."""
    return msgspec.structs.replace(known, probation=None, floor=max(known.floor, running.version))


def has_fallen(known: Rollouts, accuracy: float, photos: int) -> bool:
    """Whether far fewer of so many held-out photos are named right than before the bundle on probation came."""
    before = None if known.probation is None else known.probation.accuracy
    return before is not None and accuracy < before - max(FALL, photos**-0.5)


def with_accuracy(known: Rollouts, accuracy: float) -> Rollouts:
    """The device has tested itself with the fleet's state; to the thousandth, so that little is written."""
    return msgspec.structs.replace(known, accuracy=round(accuracy, 3))


def rolled_back(known: Rollouts, reason: str) -> Rollouts:
    """The bundle on probation is given up, and what ran before it runs again."""
    installed, back = known.active, known.previous
    assert installed is not None
    assert back is not None
    failed = _with_failure(known, installed.sha256, Failure(installed.version, reason, back.sha256))
    accuracy = None if known.probation is None else known.probation.accuracy
    return msgspec.structs.replace(known, active=back, previous=None, failed=failed, probation=None, accuracy=accuracy)


def refused(known: Rollouts, sha256: str, version: int, reason: str, running: InstalledBundle) -> Rollouts:
    """What was fetched is not to be run here, whoever offers it again."""
    failed = _with_failure(known, sha256, Failure(version, reason, running.sha256))
    return msgspec.structs.replace(known, failed=failed, fetching="", wrong=0, tries=0)


def _with_failure(known: Rollouts, sha256: str, failure: Failure) -> dict[str, Failure]:
    """What has failed, this included: the newest are kept."""
    failed = {name: earlier for name, earlier in known.failed.items() if name != sha256} | {sha256: failure}
    return dict(list(failed.items())[-_KEPT:])


def instead(known: Rollouts, sha256: str, fleet: str) -> InstalledBundle | None:
    """What runs in place of the file that a command names; None where the file itself may run (see `given`).

    Args:
        sha256: of the file, in hex; empty where it cannot be read.
        fleet: that the command names.
    """
    active = known.active
    if active is None or fleet not in (known.home, active.fleet):
        return None
    return active if sha256 in ("", active.sha256, *known.replaced, *known.failed) else None


def given(known: Rollouts, named: InstalledBundle, *, trusts: bool, where: str) -> tuple[Rollouts, InstalledBundle]:
    """The file that a command names runs, and no roll-out's bundle any more.

    Args:
        named: its bundle, and the fleet that the command names.
        where: the file, for the error.

    Returns:
        what is known once it runs, and what runs.

    Raises:
        UsageError: a key is trusted, and the file is older than what has run here.
    """
    active = known.active
    lowest = max(known.floor, 0 if active is None else active.version)
    if trusts and named.version < lowest:
        raise UsageError(
            f"--bundle {where}",
            expected=f"version {lowest} or above, which has run here",
            got=f"version {named.version}",
            hint="the newer bundle, or another --state",
        )
    if active is None:
        return known, named
    if named.fleet == active.fleet:
        named = msgspec.structs.replace(named, directory=active.directory)
    replaced = tuple(dict.fromkeys((*known.replaced, active.sha256)))[-_KEPT:]
    return msgspec.structs.replace(known, active=None, previous=None, probation=None, replaced=replaced), named
