"""How good the fleet is, day by day, beside what it is compared with.

On each day the same test images of all ten classes are asked about, those of the class that comes later included: until
it is there nobody can be right about them. A device that sleeps is asked, too, and answers with what it had when it was
awake last. Compared on the same day:

- *all photos pooled*: every photo that is in the folder of a present device on that day, also of one that sleeps and
  has sent nothing of it, in one place, and the same kind of head made of them. What a fleet without a network, without
  sleep and without privacy would have;
- *a device alone*: a head of its own photos only; the mean over the present devices;
- *bundle as shipped*: the nearest of a device's own class means. Devices say it themselves, at the end of the month
  (decision 109).

All devices share one extractor, so features are computed once for each image; a device's answers are those of
`protofleet predict --state`, which a proof at the end checks (`proofs.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.answers import Answer, linear_answer
from contract.bundle import Bundle, Manifest
from contract.methods import method
from contract.methods.ffc import closed_form, prepared
from contract.state import GlobalState
from contract.statistics import FeatureGram
from edge_client.extractor import Extractor
from lab.demo.living.fleet import FORM
from lab.demo.story import Images

__all__ = ["Asked", "Day", "Figures"]

Answers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Asked:
    """What a head answers on the test images.

    Attributes:
        answers: (N,) class numbers.
        right: share of all that are right.
        new: share of those of the new class.
    """

    answers: Answers
    right: float
    new: float


@dataclass(frozen=True, eq=False)
class Day:
    """The figures of a day.

    Attributes:
        devices: what each present device answers; one that has nothing yet to answer with is not in it.
        pooled: all photos in one place.
        alone: each present device on its own.
        photos: in the folders of present devices.
        awake: which devices were.
        version: of the newest global state.
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
            float(np.mean([getattr(each, part) for each in self.devices.values()])) for part in ("right", "new")
        )
        return Asked(first.answers, right, new)


class Figures:
    """Heads in, figures out.

    Args:
        images: whose test images are asked about, and whose dealt ones devices have.
        bundle: of all classes.
    """

    def __init__(self, images: Images, bundle: Bundle) -> None:
        extractor = Extractor(bundle, bundle.params)
        self._manifest = bundle.manifest
        self._hyper = method("ffc").settled_in(bundle.manifest.hyper) | {"form": FORM}
        self._dealt, self._labels = extractor.features(images.dealt.x), images.dealt.y
        self._test, self._true = extractor.features(images.test.x), images.test.y
        self._new = images.classes - 1
        self._known: dict[tuple[int, ...], Asked] = {}

    def of_device(self, state: GlobalState, manifest: Manifest) -> Asked | None:
        """What a device with this state on its disk and this bundle answers; None where it knows no class."""
        known = method("ffc").shared_answers(
            state.below(manifest.classes), manifest.classes, manifest.features, self._hyper
        )
        return self._asked(known["linear"]) if known else None

    def of_photos(self, rows: Iterable[int]) -> Asked:
        """A head of these dealt photos, in one place."""
        key = tuple(sorted(rows))
        if key not in self._known:
            head, present = self.head_of(key)
            self._known[key] = self._asked(linear_answer(head, present=present, unit=True))
        return self._known[key]

    def head_of(self, rows: Iterable[int]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The head (C, D) of these dealt photos, and which classes (C,) they show."""
        chosen = np.array(sorted(rows), dtype=np.int64)
        z = prepared(self._dealt[chosen], self._hyper)
        sums = FeatureGram.of(z, self._labels[chosen], self._manifest.classes)
        return closed_form(sums, self._hyper), sums.counts > 0

    def _asked(self, answer: Answer) -> Asked:
        answers = answer(self._test)
        right = answers == self._true
        return Asked(answers, float(right.mean()), float(right[self._true == self._new].mean()))
