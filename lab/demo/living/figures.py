"""The fleet's accuracy, day by day, beside its baselines.

Every day has the same test images, of all ten classes. One class comes later: before that no answer about it can be
right. A sleeping device is tested, too. It answers with its state from the last time that it was awake. The baselines
of the same day:

- *all photos pooled*: the same kind of head from all photos in the folders of the present devices on that day, also
  from photos that a sleeping device has not sent. A fleet without network, sleep and privacy would have this head.
- *a device alone*: a head of its own photos only; the mean over the present devices.
- *bundle as shipped*: the nearest of a device's own class means. Devices report it themselves, at the end of the month
  (decision 109).

All devices share one extractor, so features are computed once for each image. A device's answers are those of
`protofleet predict --state`. A proof at the end checks this (`proofs.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.heads.answers import Answer, linear_answer
from protofleet.contract.methods import method
from protofleet.contract.methods.ffc import closed_form, prepared
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.global_state import GlobalState
from protofleet.edge_client.training.extractor import Extractor
from protofleet.lab.demo.living.fleet import FORM
from protofleet.lab.demo.story import Images

__all__ = ["Asked", "Day", "Figures"]

Answers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Asked:
    """A head's answers to the test images.

    Attributes:
        answers: (N,) class numbers.
        right: share of right answers to all images.
        new: share of right answers to images of the new class.
    """

    answers: Answers
    right: float
    new: float


@dataclass(frozen=True, eq=False)
class Day:
    """The figures of a day.

    Attributes:
        devices: answers of each present device; a device without any class yet is left out.
        pooled: answers by all photos in one place.
        alone: answers of each present device on its own.
        photos: number of photos in the folders of present devices.
        awake: names of the devices that are awake.
        version: version of the newest global state.
    """

    number: int
    devices: Mapping[str, Asked]
    pooled: Asked
    alone: Mapping[str, Asked]
    photos: Mapping[str, int]
    awake: tuple[str, ...]
    version: int

    @property
    def fleet(self) -> Asked:
        """The mean over devices; the answers are those of the first."""
        first = next(iter(self.devices.values()))
        right, new = (
            float(np.mean([getattr(asked, part) for asked in self.devices.values()])) for part in ("right", "new")
        )
        return Asked(first.answers, right, new)


class Figures:
    """Computes figures from heads.

    Args:
        images: their test images are the test, and their dealt images belong to devices.
        bundle: a bundle of all classes.
    """

    def __init__(self, images: Images, bundle: Bundle) -> None:
        extractor = Extractor(bundle, bundle.params)
        self._manifest = bundle.manifest
        self._hyper = method("ffc").resolved_in(bundle.manifest.hyper) | {"form": FORM}
        self._dealt, self._labels = extractor.features(images.dealt.x), images.dealt.y
        self._test, self._true = extractor.features(images.test.x), images.test.y
        self._new = images.classes - 1
        self._known: dict[tuple[int, ...], Asked] = {}

    def of_device(self, state: GlobalState, manifest: Manifest) -> Asked | None:
        """Answers of a device with this state on its disk and this bundle; None where it knows no class."""
        known = method("ffc").shared_answers(
            state.below(manifest.classes), manifest.classes, manifest.features, self._hyper
        )
        return self._asked(known["linear"]) if known else None

    def of_photos(self, rows: Iterable[int]) -> Asked:
        """Answers by a head of these dealt photos in one place."""
        key = tuple(sorted(rows))
        if key not in self._known:
            head, present = self.head_of(key)
            self._known[key] = self._asked(linear_answer(head, present=present, unit=True))
        return self._known[key]

    def head_of(self, rows: Iterable[int]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The head (C, D) of these dealt photos, and a mask (C,) of their classes."""
        chosen = np.array(sorted(rows), dtype=np.int64)
        z = prepared(self._dealt[chosen], self._hyper)
        sums = FeatureGram.of(z, self._labels[chosen], self._manifest.classes)
        return closed_form(sums, self._hyper), sums.counts > 0

    def _asked(self, answer: Answer) -> Asked:
        answers = answer(self._test)
        right = answers == self._true
        return Asked(answers, float(right.mean()), float(right[self._true == self._new].mean()))
