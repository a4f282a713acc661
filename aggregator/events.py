"""What happens in an aggregator, as values: the server tells them to whoever follows it, and prints nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = [
    "AccuracyTold",
    "Answering",
    "BatchTaken",
    "ClassDriftSuspected",
    "ContributionsIn",
    "Decided",
    "DriftSuspected",
    "Ended",
    "Event",
    "HeadMade",
    "HelperAwaited",
    "IntruderTold",
    "LinkDown",
    "LinkUp",
    "Listener",
    "ListsCounted",
    "MetricsServed",
    "Nobody",
    "Noticed",
    "NumbersLost",
    "OrderDone",
    "PolicyRefused",
    "Refused",
    "RolloutCompleted",
    "RolloutDeaf",
    "RolloutHalted",
    "RolloutTold",
    "RolloutWidened",
    "RoundClosed",
    "RoundExtended",
    "RoundOpened",
    "RunFinished",
    "Screened",
    "Silent",
    "StillAwaited",
    "StoreAway",
    "SumAsked",
    "SumsStand",
    "Waiting",
    "Warned",
]


@dataclass(frozen=True)
class LinkUp:
    """The broker is connected; `limit_bytes` is the largest message that fits both it and us."""

    address: str
    limit_bytes: int


@dataclass(frozen=True)
class ListsCounted:
    """The fleet's list of classes has grown: contributions of bundles with its first `shorter` classes count, too."""

    classes: int
    shorter: tuple[int, ...]


@dataclass(frozen=True)
class LinkDown:
    """The broker went away; the link tries again after `retry_s` seconds."""

    reason: str
    retry_s: float


@dataclass(frozen=True)
class StoreAway:
    """The server that has the store is gone; after `retry_s` seconds all begins again from what it holds."""

    reason: str
    retry_s: float


@dataclass(frozen=True)
class Waiting:
    """Between rounds: `online` of `needed` devices are here; with `unsampled`, no sample that was tried has so many.
    `opens_in_s` is None where only devices are missing, or news of them."""

    round: int
    online: int
    needed: int
    unsampled: bool = False
    opens_in_s: float | None = None


@dataclass(frozen=True)
class RoundOpened:
    round: int
    rounds: int
    method: str
    awaited: int
    resumed: int = 0
    window_s: float = 0.0


@dataclass(frozen=True)
class ContributionsIn:
    """`committed` contributions are durable, and `awaited` more devices are online and expected to send theirs."""

    round: int
    committed: int
    awaited: int


@dataclass(frozen=True)
class StillAwaited:
    """Nothing has changed for a while: some of the `awaited` devices by name, and what the round has and needs."""

    round: int
    committed: int
    needed: int
    awaited: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Silent:
    """`silent` devices, some of them by name, said nothing through a whole deadline: they are not awaited any more."""

    round: int
    silent: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Nobody:
    """The round lacks contributions and nobody is left to send one; `online` devices are here all the same. Of
    `refused` devices the contribution was rejected for good: they are not asked again."""

    round: int
    committed: int
    needed: int
    online: int
    refused: int


@dataclass(frozen=True)
class Answering:
    """The run was finished before we started: receipts are answered for `seconds`, for whoever still lacks one."""

    seconds: float


@dataclass(frozen=True)
class Refused:
    """A device's message was not taken."""

    device: str
    reason: str


@dataclass(frozen=True)
class Decided:
    """What became of one message of a device. `method` is empty, and `round` 0, where they cannot be told.
    `cause` is why it was refused, as one of few names (`aggregator/ingest.py`)."""

    device: str
    outcome: str
    round: int
    method: str
    reason: str
    cause: str = ""


@dataclass(frozen=True)
class BatchTaken:
    """So many messages of devices were decided on, and what was accepted of them is durable, after `seconds`."""

    messages: int
    seconds: float


@dataclass(frozen=True)
class Ended:
    """The link is closed: how many connections it had, and how many messages at QoS 0 found no room."""

    connections: int
    dropped: int


@dataclass(frozen=True)
class RoundExtended:
    """Too few contributions are in: the round goes on for `deadline_s`, or a window until they are there."""

    round: int
    committed: int
    needed: int
    deadline_s: float
    is_window: bool = False


@dataclass(frozen=True)
class RoundClosed:
    """A round's result is durable."""

    round: int
    method: str
    committed: int
    classes: int
    uplink_bytes: int
    seconds: float
    global_version: int
    told: str = ""


@dataclass(frozen=True)
class SumAsked:
    """A blinded round takes no more: the helper is asked for the sum over so many devices."""

    round: int
    devices: int


@dataclass(frozen=True)
class HelperAwaited:
    """The helper has not answered yet, and is asked once more."""

    round: int
    devices: int


@dataclass(frozen=True)
class AccuracyTold:
    """How good devices said they are after a round, on photos that they did not train on; fractions.

    It comes when all of the round's `contributors` have said it, or with what there is when the next round closes or
    the run ends; not at all where nobody said anything. What comes later is in the summary.

    Attributes:
        devices: how many said it; `samples` is all their test photos.
        mean: by name of the figure (`contract.accuracy`), the plain mean over devices, also of `classes` and `own`.
        pooled: shares weighted by the test photos that they are of.
        worst: the device that names the fewest right, and `worst_share` how many of its photos.
    """

    round: int
    devices: int
    contributors: int
    samples: int
    mean: Mapping[str, float]
    pooled: Mapping[str, float]
    worst: str
    worst_share: float


@dataclass(frozen=True)
class Screened:
    """Something speaks against a device's contribution to the round that has just closed.

    Attributes:
        verdict: what became of it: "left out", "counts as less", or "suspected", which counts in full.
    """

    round: int
    device: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class Warned:
    """Something about a round's result that a person should know."""

    round: int
    words: str


@dataclass(frozen=True)
class Noticed:
    """Something about the link that a person should see to: a certificate that expires, or cannot be used."""

    line: str


@dataclass(frozen=True)
class RunFinished:
    rounds: int
    committed: int
    uplink_bytes: int


@dataclass(frozen=True)
class HeadMade:
    """Where sums stand: what comes back was made of them.

    Attributes:
        devices, samples, classes: that they are of.
        told: what was chosen in its making, in words.
        doubt: why it may be bad; empty where nothing speaks against it.
    """

    global_version: int
    devices: int
    samples: int
    classes: int
    told: str = ""
    doubt: str = ""


@dataclass(frozen=True)
class SumsStand:
    """Where sums stand: how many devices are in them, and how many are online."""

    devices: int
    online: int


@dataclass(frozen=True)
class OrderDone:
    """What an operator, or a device of itself, asked for has taken effect, or cannot.

    Attributes:
        detail: of what is about a roll-out: which bundle, or which stage.
    """

    what: str
    device: str
    who: str
    outcome: str
    global_version: int
    detail: str = ""


@dataclass(frozen=True)
class PolicyRefused:
    """The policy of a device's owner refuses what is asked of it."""

    device: str
    word: str


@dataclass(frozen=True)
class DriftSuspected:
    """A device departs from itself: its last reports of this `figure` (`contract/drift.py`) are beyond its usual."""

    device: str
    figure: str
    now: float
    usual: float


@dataclass(frozen=True)
class ClassDriftSuspected:
    """A class departs from itself, where sums stand: what came of it lies farther from what its devices had than it
    usually does (`aggregator/class_drift.py`)."""

    name: str
    now: float
    usual: float


@dataclass(frozen=True)
class IntruderTold:
    """`messages` under a device's name, or the aggregator's own, were not its own (`aggregator/enrolment.py`); or the
    device says that it gets such."""

    device: str
    cause: str
    reason: str
    messages: int


@dataclass(frozen=True)
class NumbersLost:
    """Devices have heard announcements of our key up to number `heard`, and the store knows of `issued`, 0 for none: it
    was lost, or is an older copy, or the clock was set back. It goes on above, `is_new_run` as a new run of it."""

    heard: int
    issued: int
    is_new_run: bool = False


@dataclass(frozen=True)
class RolloutWidened:
    """A bundle is offered to a larger fraction of the devices, of which `devices` are known."""

    version: int
    fraction: float
    devices: int


@dataclass(frozen=True)
class RolloutHalted:
    """A bundle is offered to nobody any more: it failed on too many devices of the stage."""

    version: int
    fraction: float
    reason: str


@dataclass(frozen=True)
class RolloutCompleted:
    """All `devices` that are known use the bundle and are healthy."""

    version: int
    devices: int


@dataclass(frozen=True)
class RolloutTold:
    """What becomes of an offered bundle on a device: a word of `contract.offers.WORDS`, and why."""

    device: str
    version: int
    word: str
    reason: str


@dataclass(frozen=True)
class RolloutDeaf:
    """What devices say in the fleet that they go over to cannot be heard."""

    fleet: str
    reason: str


@dataclass(frozen=True)
class MetricsServed:
    """Metrics can be fetched at `url`; `is_local` by this machine alone."""

    url: str
    is_local: bool


Event = (
    AccuracyTold
    | LinkUp
    | ListsCounted
    | LinkDown
    | StoreAway
    | Waiting
    | RoundOpened
    | ContributionsIn
    | StillAwaited
    | Silent
    | Nobody
    | Answering
    | Refused
    | BatchTaken
    | Decided
    | Ended
    | RoundExtended
    | Screened
    | Warned
    | Noticed
    | RoundClosed
    | SumAsked
    | HelperAwaited
    | RunFinished
    | HeadMade
    | SumsStand
    | OrderDone
    | IntruderTold
    | NumbersLost
    | RolloutCompleted
    | RolloutDeaf
    | RolloutHalted
    | RolloutTold
    | RolloutWidened
    | MetricsServed
    | ClassDriftSuspected
    | DriftSuspected
    | PolicyRefused
)
Listener = Callable[[Event], None]
