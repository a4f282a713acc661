"""The events of an aggregator, as values: the server passes them to its listeners, and prints nothing itself."""

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
    """The broker is connected; `limit_bytes` is the largest message that both the broker and this aggregator take."""

    address: str
    limit_bytes: int


@dataclass(frozen=True)
class ListsCounted:
    """The fleet's list of classes has grown. Contributions of bundles with its first `shorter` classes count, too."""

    classes: int
    shorter: tuple[int, ...]


@dataclass(frozen=True)
class LinkDown:
    """The broker went away; the link tries again after `retry_s` seconds."""

    reason: str
    retry_s: float


@dataclass(frozen=True)
class StoreAway:
    """The store's server is gone; after `retry_s` seconds everything begins again from the store's content."""

    reason: str
    retry_s: float


@dataclass(frozen=True)
class Waiting:
    """Between rounds: `online` of `needed` devices are here. With `unsampled`, no tried sample has so many.

    `opens_in_s` is None where only devices are missing, or news of them.
    """

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
    """The round lacks contributions and no device is left to send one, although `online` devices are here.

    The contributions of `refused` devices were rejected for good: these devices are not asked again.
    """

    round: int
    committed: int
    needed: int
    online: int
    refused: int


@dataclass(frozen=True)
class Answering:
    """The run was finished before we started. Receipts are answered for `seconds`, for devices that still lack one."""

    seconds: float


@dataclass(frozen=True)
class Refused:
    """A device's message was not taken."""

    device: str
    reason: str


@dataclass(frozen=True)
class Decided:
    """What became of one message of a device.

    `method` is empty, and `round` 0, when they are unknown. `cause` is why it was refused, as one of few names
    (`aggregator/ingest/ingest.py`).
    """

    device: str
    outcome: str
    round: int
    method: str
    reason: str
    cause: str = ""


@dataclass(frozen=True)
class BatchTaken:
    """A batch of messages was decided on, and its accepted contributions are durable, after `seconds`."""

    messages: int
    seconds: float


@dataclass(frozen=True)
class Ended:
    """The link is closed: how many connections it had, and how many messages at QoS 0 found no room."""

    connections: int
    dropped: int


@dataclass(frozen=True)
class RoundExtended:
    """Too few contributions are in. The round continues for `deadline_s`, or a window until enough are in."""

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
    """A blinded round takes no more contributions. The helper is asked for the sum over so many devices."""

    round: int
    devices: int


@dataclass(frozen=True)
class HelperAwaited:
    """The helper has not answered yet, and is asked again."""

    round: int
    devices: int


@dataclass(frozen=True)
class AccuracyTold:
    """The accuracy that devices reported after a round, on photos that they did not train on; fractions.

    It comes when all of the round's `contributors` have reported, or with the present reports when the next round
    closes or the run ends. Without any report it does not come. Later reports are in the summary.

    Attributes:
        devices: how many reported; `samples` is all their test photos.
        mean: by name of the figure (`protofleet.contract.accuracy`), the plain mean over devices, also of `classes`
            and `own`.
        pooled: shares weighted by their test photos.
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
    """Where sums stand: a new head was made of them.

    Attributes:
        devices, samples, classes: of the sums.
        told: which choices were made, in words.
        doubt: why it may be bad; empty when nothing speaks against it.
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
    """An order of an operator, or of a device about itself, has taken effect, or cannot.

    Attributes:
        detail: for an order about a roll-out: which bundle, or which stage.
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
    """A class departs from itself, where sums stand: its added samples lie farther from the earlier ones than usual.

    See `aggregator/monitoring/class_drift.py`.
    """

    name: str
    now: float
    usual: float


@dataclass(frozen=True)
class IntruderTold:
    """`messages` under a device's name, or the aggregator's own, were forged (`aggregator/enrolment/gate.py`).

    Or the device reports that it receives such messages.
    """

    device: str
    cause: str
    reason: str
    messages: int


@dataclass(frozen=True)
class NumbersLost:
    """Devices have heard announcements of our key up to number `heard`, but the store knows only up to `issued`.

    `issued` is 0 for none. The store was lost, or is an older copy, or the clock was set back. Numbering continues
    above `heard`; with `is_new_run`, as a new run of the store.
    """

    heard: int
    issued: int
    is_new_run: bool = False


@dataclass(frozen=True)
class RolloutWidened:
    """A bundle is offered to a larger fraction of the devices; `devices` of them are known."""

    version: int
    fraction: float
    devices: int


@dataclass(frozen=True)
class RolloutHalted:
    """The offer of a bundle has ended: it failed on too many devices of the stage."""

    version: int
    fraction: float
    reason: str


@dataclass(frozen=True)
class RolloutCompleted:
    """All `devices` known devices use the bundle and are healthy."""

    version: int
    devices: int


@dataclass(frozen=True)
class RolloutTold:
    """A device's report on an offered bundle: a word of `protofleet.contract.wire.rollout_messages.WORDS`, and why."""

    device: str
    version: int
    word: str
    reason: str


@dataclass(frozen=True)
class RolloutDeaf:
    """The devices' reports in the fleet that they go over to cannot be heard."""

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
