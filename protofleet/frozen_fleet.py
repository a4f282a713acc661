"""A fleet over a frozen backbone, in this process: real devices, real messages, real merging, and no broker.

1. `features_of` runs the device's own extractor over photos, once; nothing is trained, so every way starts from these.
2. `deal` says which device holds which of them.
3. `FrozenFleet.outcomes` goes through one round of a method as it goes in the field: each device summarises
   (`edge_client.device`), its contribution is encoded to the wire's bytes and decoded, the aggregator screens and
   merges (`aggregator`), the global state travels back, and the answers to the held-out photos are looked at.

What differs from the field: there is no MQTT between them, and features are computed once instead of in each round.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from aggregator.merging import merge_round
from aggregator.outliers import Screening, Traits
from aggregator.state import next_global
from contract.answers import Answer
from contract.bundle import Bundle
from contract.errors import BundleError, DataError, UsageError
from contract.messages import Announcement, Contribution, GlobalPart
from contract.methods import method
from contract.methods.base import Merged
from contract.signed import inside
from contract.state import GlobalCollector, GlobalState, least_limit_bytes
from contract.terminal import counted
from contract.uplink_bytes import Rung
from contract.wire import decode, encode
from edge_client.answering import known_answers
from edge_client.compiled_graphs import CompiledGraphs
from edge_client.data import LocalData
from edge_client.device import Device
from edge_client.extractor import Extractor, GivenFeatures
from edge_client.local import Remembered

__all__ = ["FrozenFleet", "Outcome", "deal", "features_of", "shipped_head"]

# Devices that are asked how they would do alone, and from which width on: a head costs D³, for one device or for all.
ALONE, ALONE_WIDE, WIDE = 5, 2, 512
_LIMIT_BYTES = 65_536  # of a message, as aggregators have it by default

Rows = NDArray[np.int64]
Right = NDArray[np.float64]


# ── photos to features, and who holds them ──────────────────────────────────────────────────────────────────────────


def features_of(
    bundle: Bundle, data: LocalData, threads: int = 1, on_done: Callable[[int], None] = lambda photos: None
) -> LocalData:
    """`data` with features (N, D) float32 where its images were, as devices of this bundle compute them.

    Args:
        on_done: called with how many photos have been through, again and again.

    Raises:
        BundleError: the graph cannot be run, or gives features that say nothing: not finite, or the same for all.
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
    """Rows of `labels` (N,) for each device: every class in equal parts, shuffled, among the devices that hold it.

    Every device holds every class, or with `classes_each` so many of them, in turn: of ten classes and three each the
    first device has 0 to 2, the second 3 to 5, and the fourth 9, 0 and 1.

    Raises:
        UsageError: the devices cannot hold all classes, or some device is left without a photo.
    """
    classes, rng = np.unique(labels), np.random.default_rng(seed)
    each = len(classes) if classes_each is None else classes_each
    if not 1 <= each <= len(classes) or each * devices < len(classes):
        least = -(-len(classes) // devices)
        raise UsageError("--classes-per-device", expected=f"{least} to {len(classes)}", got=each)
    parts: list[list[Rows]] = [[] for _ in range(devices)]
    for place, label in enumerate(classes):
        holders = [device for device in range(devices) if (place - device * each) % len(classes) < each]
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        for turn, part in enumerate(np.array_split(shuffled, len(holders))):
            parts[holders[(place + turn) % len(holders)]].append(part)  # the larger parts not always to the same
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
    """What one way of answering came to.

    Attributes:
        way: of answering, by name.
        right: (n,) 1 for each held-out photo that was named right, 0 for the others.
        alone: (n,) the same where a device had been the only one: the mean over some devices.
        uplink_bytes: of the largest contribution of a device.
        told, doubt: what the aggregator would say of the result; empty where nothing.
    """

    way: str
    right: Right
    alone: Right
    uplink_bytes: int
    told: str
    doubt: str


class FrozenFleet:
    """Devices of one bundle whose photos have been made features.

    Args:
        shares: features and labels of each device, as `features_of` gives them.
        held: those that nobody learns from.
        min_samples: classes of which a device has fewer are withheld.
        run: 4 bytes, the run's id.
        secrets: of each device, what it draws its groups and its noise from; drawn from `run` when None.
    """

    def __init__(
        self,
        bundle: Bundle,
        shares: Sequence[LocalData],
        held: LocalData,
        *,
        min_samples: int = 1,
        run: bytes = bytes(4),
        secrets: Sequence[bytes] | None = None,
    ) -> None:
        self._bundle, self._shares, self._held = bundle, shares, held
        self._min_samples, self._run = min_samples, run
        drawn = [hashlib.sha256(run + b"device %d" % number).digest() for number in range(len(shares))]
        self._secrets = drawn if secrets is None else secrets

    def outcomes(self, rung: Rung) -> list[Outcome]:
        """One round of a way, measured on the held-out photos; one outcome for each way of answering that it gives.

        Raises:
            DataError: no class has as many photos on a device as may be told of.
        """
        bundle = _exported_for(self._bundle, rung)
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
        if not any(found.samples for found in traits.values()):
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
        """(n,) which held-out photos a way of answering names right."""
        return (answer(self._held.x) == self._held.y).astype(np.float64)  # type: ignore[arg-type]

    def _payloads(self, bundle: Bundle, rung: Rung) -> Iterator[bytes]:
        """What each device sends, encoded; the same at every pass, so that none has to be kept."""
        announced = Announcement(
            run=self._run,
            round=1,
            phase="open",
            method=rung.method.name,
            bundle=bundle.sha256,
            encoding=rung.method.encoding,
            min_samples=self._min_samples,
            extractor=bundle.extractor(rung.method),
        )
        for number, (share, secret) in enumerate(zip(self._shares, self._secrets, strict=True)):
            device = Device(bundle, share, f"device-{number + 1}", graphs=_Kept(bundle), secret=secret)
            yield encode(device.run_round(announced, None).contribution, announced.encoding)

    def _right(self, rung: Rung, merged: Merged) -> dict[str, Right]:
        """By way of answering: what devices would name right with what comes back."""
        found, m = rung.method, self._bundle.manifest
        first = GlobalState(self._run, 0, 0)
        state = _travelled(next_global(first, found, merged, round=1, hyper=rung.hyper))
        answers = found.shared_answers(state, m.classes, m.features, rung.hyper)
        return {way: self.right(answer) for way, answer in answers.items()}


def shipped_head(bundle: Bundle) -> Answer | None:
    """How a device answers by the head that the bundle came with; None where it has none."""
    m = bundle.manifest
    own = Remembered(m.classes, m.features, method(m.method).settled_in(m.hyper), bundle.params, None)
    found = known_answers(m, own, None).get("head")
    return None if found is None else found.answer


def _exported_for(bundle: Bundle, rung: Rung) -> Bundle:
    """The bundle as `export --method … --set …` of the same backbone would have made it, as far as a round asks."""
    found = rung.method
    return dataclasses.replace(
        bundle,
        manifest=msgspec.structs.replace(
            bundle.manifest, method=found.name, head=found.heads[0], hyper=dict(rung.hyper)
        ),
    )


def _contribution(payload: bytes) -> Contribution:
    message = inside(payload)
    assert isinstance(message, Contribution)
    return message


def _travelled(state: GlobalState) -> GlobalState:
    """The state as devices have it: rounded to what the wire carries."""
    collector, arrived = GlobalCollector(), None
    widest = max((rows.rows.shape[1] for rows in state.rows.values()), default=0)
    for part in state.parts(max(_LIMIT_BYTES, least_limit_bytes(widest))):
        received = decode(encode(part))
        assert isinstance(received, GlobalPart)
        arrived = collector.add(received)
    assert arrived is not None
    return arrived


class _Kept(CompiledGraphs):
    """The graphs of a device whose samples are features already."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self._given = GivenFeatures(bundle.manifest.features)

    def shared_extractor(self) -> Extractor:
        return self._given
