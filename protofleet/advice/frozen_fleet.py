"""A fleet over a frozen backbone, in this process: real devices, real messages, real merging, and no broker.

1. `features_of` runs the device's own extractor over the photos, once. Nothing is trained, so all ways use the same
   features.
2. `deal` assigns the photos to devices.
3. `FrozenFleet.outcomes` runs one round of a method as in the field. Each device summarises
   (`protofleet.edge_client.device.device`). Its contribution is encoded to the wire's bytes and decoded. The aggregator
   screens and merges (`aggregator`). The global state is encoded and decoded, too. Then the answers to the held-out
   photos are compared with their labels.

Two things differ from the field: there is no MQTT, and features are computed once instead of in each round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.merging.merge_round import merge_round
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.screening.outliers import Screening, Traits
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.uplink_bytes import Rung
from protofleet.contract.errors import BundleError, DataError, UsageError
from protofleet.contract.heads.answers import Answer
from protofleet.contract.identity.signatures import inside
from protofleet.contract.methods import method
from protofleet.contract.methods.base import Merged
from protofleet.contract.printable import counted
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState, least_limit_bytes
from protofleet.contract.wire.messages import Announcement, Contribution, GlobalPart
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.answer_choice import known_answers
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training.compiled_graphs import GivenGraphs
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.local_samples import Remembered

__all__ = ["FrozenFleet", "Outcome", "deal", "features_of", "shipped_head"]

# How many devices are measured alone, below width WIDE and from it on: a head costs D³, for one device or for all.
ALONE, ALONE_WIDE, WIDE = 5, 2, 512
_LIMIT_BYTES = 65_536  # of a message, an aggregator's default

Rows = NDArray[np.int64]
Right = NDArray[np.float64]


# ── photos to features, and who holds them ──────────────────────────────────────────────────────────────────────────


def features_of(
    bundle: Bundle, data: LocalData, threads: int = 1, on_done: Callable[[int], None] = lambda photos: None
) -> LocalData:
    """`data` with features (N, D) float32 where its images were, as devices of this bundle compute them.

    Args:
        on_done: called again and again with the number of photos done so far.

    Raises:
        BundleError: the graph cannot be run, or its features are useless: not finite, or the same for all photos.
    """
    extractor = Extractor(bundle, bundle.params, threads)
    out = np.empty((len(data), extractor.width), np.float32)
    for rows, features in extractor.blocks(data.x, samples=max(bundle.manifest.batch, 64)):
        out[rows] = features
        on_done(rows.stop)
    if not np.isfinite(out).all():
        raise BundleError("features of the bundle", expected="finite numbers", got="others")
    if len(out) > 1 and not np.ptp(out, axis=0).any():
        raise BundleError("features of the bundle", expected="some that differ", got=f"{len(out)} photos all alike")
    return LocalData(out, data.y)  # type: ignore[arg-type]  # what stands for images here is features


def deal(labels: Rows, devices: int, *, classes_each: int | None = None, seed: int = 0) -> list[Rows]:
    """Rows of `labels` (N,) for each device. A class is shuffled and divided equally among the devices that hold it.

    Every device holds every class, or with `classes_each` that many classes, in turn. For example, with ten classes and
    three on each device, the first device has 0 to 2, the second 3 to 5, and the fourth 9, 0 and 1.

    Raises:
        UsageError: the devices cannot hold all classes, or a device would have no photo.
    """
    classes, rng = np.unique(labels), np.random.default_rng(seed)
    per_device = len(classes) if classes_each is None else classes_each
    if not 1 <= per_device <= len(classes) or per_device * devices < len(classes):
        least = -(-len(classes) // devices)
        raise UsageError("--classes-per-device", expected=f"{least} to {len(classes)}", got=per_device)
    parts: list[list[Rows]] = [[] for _ in range(devices)]
    for place, label in enumerate(classes):
        holders = [device for device in range(devices) if (place - device * per_device) % len(classes) < per_device]
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        for turn, part in enumerate(np.array_split(shuffled, len(holders))):
            parts[holders[(place + turn) % len(holders)]].append(
                part
            )  # so that the larger parts go to different devices
    dealt = [np.concatenate(part) for part in parts]
    if not all(map(len, dealt)):
        raise UsageError(
            "--devices",
            expected="photos enough that each gets one",
            got=f"{counted(len(labels), 'photo')} to deal to {devices}",
            hint="fewer devices",
        )
    return dealt


# ── one round ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one way of answering.

    Attributes:
        way: the name of the way of answering.
        right: (n,) 1 for each held-out photo with a right answer, 0 for the others.
        alone: (n,) the same for a device alone, as the mean over some devices.
        uplink_bytes: size of the largest contribution of a device.
        told, doubt: the aggregator's lines about the result; empty where there are none.
    """

    way: str
    right: Right
    alone: Right
    uplink_bytes: int
    told: str
    doubt: str


class FrozenFleet:
    """Devices of one bundle, with features in place of photos.

    Args:
        shares: features and labels of each device, as `features_of` gives them.
        held_out: features and labels of the photos that no device learns from.
        min_samples: a device withholds classes with fewer photos.
        run: 4 bytes, the run's id.
        secrets: for each device the seed of its groups and its noise; derived from `run` when None.
    """

    def __init__(
        self,
        bundle: Bundle,
        shares: Sequence[LocalData],
        held_out: LocalData,
        *,
        min_samples: int = 1,
        run: bytes = bytes(4),
        secrets: Sequence[bytes] | None = None,
    ) -> None:
        self._bundle, self._shares, self._held_out = bundle, shares, held_out
        self._min_samples, self._run = min_samples, run
        drawn = [hashlib.sha256(run + b"device %d" % number).digest() for number in range(len(shares))]
        self._secrets = drawn if secrets is None else secrets

    def outcomes(self, rung: Rung) -> list[Outcome]:
        """Run one round, measured on the held-out photos. Returns one outcome for each way of answering.

        Raises:
            DataError: no device has `min_samples` photos of a class.
        """
        bundle = rung.of_bundle(self._bundle)
        m, largest, alone = bundle.manifest, 0, []
        width = rung.method.row_width(rung.hyper, m.features)
        traits: dict[str, Traits] = {}
        asked = ALONE if self._bundle.manifest.features < WIDE else ALONE_WIDE
        for number, payload in enumerate(self._payloads(bundle, rung)):
            message = _contribution(payload)
            traits[f"device-{number + 1}"] = Traits.of(message, rung.method.mechanism(rung.hyper))
            largest = max(largest, len(payload))
            if len(alone) < asked and message.samples:
                one = message.statistic(rung.method.statistic, m.classes, width)
                alone.append(self._right(rung, rung.method.merge(lambda sent=one: iter([sent]), "mean", rung.hyper)))
        if not any(trait.samples for trait in traits.values()):
            raise DataError("photos of a device", expected=f"{self._min_samples} of some class", got="fewer of each")

        def messages() -> Iterator[tuple[str, Contribution]]:
            return zip(traits, map(_contribution, self._payloads(bundle, rung)), strict=True)

        result = merge_round(
            rung.method, messages, traits, rung.hyper, classes=m.classes, width=width, how=Screening(suspects="ignore")
        )
        return [
            Outcome(way, right, np.mean([one[way] for one in alone], axis=0), largest, result.told, result.doubt)
            for way, right in self._right(rung, result.merged).items()
        ]

    def right(self, answer: Answer) -> Right:
        """(n,) 1 for each held-out photo that `answer` gets right."""
        return (answer(self._held_out.x) == self._held_out.y).astype(np.float64)  # type: ignore[arg-type]

    def _payloads(self, bundle: Bundle, rung: Rung) -> Iterator[bytes]:
        """Each device's encoded contribution. It is the same in every pass, so none is kept in memory."""
        announced = Announcement(
            run=self._run,
            round=1,
            phase="open",
            method=rung.method.name,
            bundle=bundle.sha256,
            encoding=rung.method.encoding,
            factors=rung.method.statistic.takes_factor(),
            min_samples=self._min_samples,
            extractor=bundle.extractor(rung.method),
        )
        for number, (share, secret) in enumerate(zip(self._shares, self._secrets, strict=True)):
            device = Device(bundle, share, f"device-{number + 1}", graphs=GivenGraphs(bundle), secret=secret)
            yield encode(device.run_round(announced, None).contribution, announced.encoding)

    def answers(self, rung: Rung) -> dict[str, Answer]:
        """Run one round; how devices answer with its result, by way of answering. No device is left out."""
        bundle = rung.of_bundle(self._bundle)
        m = bundle.manifest
        width = rung.method.row_width(rung.hyper, m.features)

        def statistics() -> Iterator[Statistic]:
            sent = (_contribution(payload) for payload in self._payloads(bundle, rung))
            return (one.statistic(rung.method.statistic, m.classes, width) for one in sent if one.samples)

        return self._answers(rung, rung.method.merge(statistics, "mean", rung.hyper))

    def _answers(self, rung: Rung, merged: Merged) -> dict[str, Answer]:
        """How devices answer with the merged result, by way of answering."""
        m = self._bundle.manifest
        first = GlobalState(self._run, 0, 0)
        state = _travelled(next_global(first, rung.method, merged, round=1, hyper=rung.hyper))
        return rung.method.shared_answers(state, m.classes, m.features, rung.hyper)

    def _right(self, rung: Rung, merged: Merged) -> dict[str, Right]:
        """The right answers of devices with the merged result, by way of answering."""
        return {way: self.right(answer) for way, answer in self._answers(rung, merged).items()}


def shipped_head(bundle: Bundle) -> Answer | None:
    """The answer by the head in the bundle; None where the bundle has none."""
    m = bundle.manifest
    own = Remembered(m.classes, m.features, method(m.method).resolved_in(m.hyper), bundle.params, None)
    head = known_answers(m, own, None).get("head")
    return None if head is None else head.answer


def _contribution(payload: bytes) -> Contribution:
    message = inside(payload)
    assert isinstance(message, Contribution)
    return message


def _travelled(state: GlobalState) -> GlobalState:
    """The state as devices have it: rounded as on the wire."""
    collector, arrived = GlobalCollector(), None
    widest = max((rows.rows.shape[1] for rows in state.rows.values()), default=0)
    for part in state.parts(max(_LIMIT_BYTES, least_limit_bytes(widest))):
        received = decode(encode(part))
        assert isinstance(received, GlobalPart)
        arrived = collector.add(received)
    assert arrived is not None
    return arrived
