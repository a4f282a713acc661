"""The device's own photos over the years: read at the start, looked at between rounds, read again when they changed.

- `look` lists what `--data` names, and decodes nothing. It finds out which photos are there now, and how many of them
  are in no contribution yet.
- `newer` reads the samples again, if a photo came, went or was written again since the last reading, or if an example
  was learned, unlearned or corrected (`data/learned.py`).
- Photos that can no longer be read are an error until they change once more. So a device never goes on with photos
  that its owner has taken away.
- The test photos of `--test` are read again only when learned examples have to be left out of them.

What is held out for testing follows one of three rules (`HoldOut`):

1. Without noise: the same share of each class.
2. Where noise protects what is sent: each photo is drawn by itself (`data/draws.py`). So one photo more moves no other
   photo.
3. Where the noise takes the number of photos of each class as known: nothing is held out.

`STATE/photos-sent` remembers which photos the last contribution was made from. It has 8 bytes for each photo: a hash of
its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import DataError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.files.sqlite import Watch
from protofleet.contract.methods import method
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.draws import Draws
from protofleet.edge_client.data.learned import FILE, ExampleGoneError, Learned
from protofleet.edge_client.data.load import from_arrays, hold_back, load_data, load_held_out
from protofleet.edge_client.data.sources import list_source, source_of
from protofleet.edge_client.data.splits import ranks_of
from protofleet.edge_client.settings import ClientSettings

__all__ = ["HOLD_OUT", "LEAST", "HoldOut", "OwnSamples", "Samples"]

logger = logging.getLogger(__name__)

HoldOut = Literal["of each class", "each alone", "nothing"]

HOLD_OUT = 0.1  # of the labelled samples, where nobody says otherwise and no test samples are given
LEAST = 5  # a class with fewer labelled samples has none held out, where a share of each class is

_Ranks = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a device, divided.

    Attributes:
        data: to train on.
        test: to test with; None for nothing.
        held: held out of training, to check a trained tail with; None for nothing.
    """

    data: LocalData
    test: LocalData | None
    held: LocalData | None


class OwnSamples:
    """The samples of one device.

    Args:
        state: the directory that keeps decoded images.
        learned: the state directory, with what the device was taught; `state` when None.
        arrays: images (N, H, W, c) and class numbers (N,) in memory, instead of what `settings.data` names.
        draw_key: 32 bytes of the device's own, by which photos are drawn one by one.
        rule: what is held out.

    Attributes:
        rule: as given; another one holds from the next reading on.
        new: photos that are there and in no contribution yet, and photos of the last one that are gone; None where
            that cannot be told: arrays in memory, and files of many images.
    """

    def __init__(
        self,
        settings: ClientSettings,
        manifest: Manifest,
        state: Path,
        arrays: tuple[NDArray[Any], NDArray[Any]] | None = None,
        learned: Path | None = None,
        draw_key: bytes = bytes(32),
        rule: HoldOut = "of each class",
    ) -> None:
        self._settings, self._manifest, self._arrays = settings, manifest, arrays
        self._cache, self._path, self._draws = state / "images", state / "photos-sent", Draws(draw_key, state)
        self.rule: HoldOut = rule
        self.learned = Learned(learned or state)
        self._taught_path = (learned or state) / FILE
        self._taught, self._had_taught = Watch(self._taught_path), False
        self._test: LocalData | None = None
        self._test_beside: bytes | None = None  # which examples it was read beside
        self._at_last_look: tuple[bytes, _Ranks | None] = b"", None  # at the last look: a stamp, and which photos
        self._at_last_read: tuple[bytes, _Ranks | None] = b"", None  # when they were read
        self._unreadable: DataError | None = None
        self.new: int | None = None

    def read(self) -> Samples:
        """All samples, for the first time.

        Raises:
            DataError, UsageError: as `protofleet.edge_client.data.load`.
        """
        self.was_taught()
        self._at_last_look = self._listed()
        self._count_new()
        return self._settled()

    def look(self) -> None:
        """See which photos are there now. If they cannot be listed, a round finds that out when it needs them."""
        with contextlib.suppress(DataError):
            self._at_last_look = self._listed()
            self._count_new()

    def newer(self) -> Samples | None:
        """The samples as they are now; None where nothing has changed since they were read.

        Raises:
            DataError, UsageError: they cannot be read.
        """
        try:
            self._at_last_look = self._listed()
            self._count_new()
            if self._at_last_look[0] == self._at_last_read[0]:
                if self._unreadable is not None:
                    raise self._unreadable
                return None
            samples = self._settled()
            self._unreadable = None
            return samples
        except DataError as error:
            self._at_last_read, self._unreadable = self._at_last_look, error
            raise

    def was_taught(self) -> bool:
        """Whether any process has learned or unlearned something since the last call, or removed the file of it.

        It takes microseconds.
        """
        had, self._had_taught = self._had_taught, self._taught_path.exists()
        return self._taught.changed() or (had and not self._had_taught)

    @property
    def has_changed(self) -> bool:
        """Whether the last look found something else than what was read, or what was read last could not be."""
        return self._at_last_look[0] != self._at_last_read[0] or self._unreadable is not None

    def sent(self) -> None:
        """A contribution was made from the samples of the last reading.

        If the disk refuses to record this, the only effect is that some photos are counted as new twice.
        """
        ranks = self._at_last_read[1]
        if ranks is not None:
            with contextlib.suppress(OSError), whole_file(self._path) as file:
                file.write(ranks.astype("<u8").tobytes())
            self._count_new()

    def _count_new(self) -> None:
        ranks = self._at_last_look[1]
        if ranks is None:
            self.new = None
            return
        try:
            sent = np.frombuffer(self._path.read_bytes(), "<u8")
        except (OSError, ValueError):
            sent = np.empty(0, "<u8")
        self.new = len(np.setxor1d(ranks, sent))

    def _settled(self) -> Samples:
        """The samples as they were listed, or, where an example was unlearned meanwhile, as they are listed then."""
        while True:
            self._at_last_read = self._at_last_look
            try:
                return self._divided()
            except ExampleGoneError:
                self._at_last_look = self._listed()
                self._count_new()

    def _listed(self) -> tuple[bytes, _Ranks | None]:
        """What is there now, learned examples included: a stamp that changes when anything does, and each photo."""
        self.learned.look()
        stamp, ranks = (b"", None) if self._arrays is not None else self._listed_data()
        if ranks is not None:
            ranks = np.concatenate([ranks, np.frombuffer(self.learned.mark, "<u8")])
        return self.rule.encode() + stamp + self.learned.mark, ranks

    def _listed_data(self) -> tuple[bytes, _Ranks | None]:
        """What `--data` names now."""
        path = Path(self._settings.data)
        if files := source_of(path).files(path):  # one file of many images: listing it reads it
            with contextlib.suppress(OSError):
                looks = [(str(file), (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
                return hashlib.sha256(repr(looks).encode()).digest(), None
        listing = list_source(path, each_alone=self.rule != "of each class")
        ranks = ranks_of((listing.name(row) for row in range(len(listing))), len(listing), 0)
        return listing.stamp, ranks

    def _divided(self) -> Samples:
        """Divide the samples: to train on, to test with, and held out.

        The test samples are those of `--test`, or else a share of `--data`, or none. The held-out samples are the same
        share; a trained tail is checked with them, and no test set replaces them.
        """
        settings, m, cache = self._settings, self._manifest, self._cache
        share = settings.hold_out
        if share is None:
            share = HOLD_OUT if settings.test is None or m.cut else 0.0
        if share and self.rule == "nothing":
            logger.info(
                "no photo is held out: this bundle's noise takes it to be known how many of each class are summed"
            )
        share = 0.0 if self.rule == "nothing" else share
        draws = None if self.rule == "of each class" else self._draws
        options: dict[str, Any] = {"cache": cache, "learned": self.learned}
        if settings.test is not None and self._test_beside != self.learned.mark:
            test = load_data(settings.test, m, purpose="test", **options)
            self._test, self._test_beside = test if len(test) else None, self.learned.mark
        held_out: LocalData | None = None
        if self._arrays is not None:
            has_none = settings.camera is not None and not len(self._arrays[1])  # but what it is taught
            whole = LocalData(*self._arrays) if has_none else from_arrays(*self._arrays, m)
            data, held_out = self.learned.added(*hold_back(whole, share=share, least=LEAST, draws=draws), m)
        elif share or draws is not None:
            data, held_out = load_held_out(settings.data, m, share=share, least=LEAST, draws=draws, **options)
        else:
            data = load_data(settings.data, m, **options)
        if not len(data) and method(m.method).trains:  # all of them are held out
            if settings.camera is not None and not settings.data:
                expected = "a method that trains no network, or labelled photos beside the camera"
                raise DataError("--camera without --data", expected=expected, got=m.method, hint="--data FOLDER")
            raise DataError(
                settings.data, expected="photos to train on", got="few, and all held out", hint="more photos"
            )
        if not share:
            return Samples(data, self._test, None)
        if held_out is None or not len(held_out):
            lost = "accuracy stays unknown; --test" if self._test is None else "nothing shows whether training helps"
            few = f"too few photos to hold {share:.0%} out of classes of {LEAST} or more"
            if len(data):  # a camera's labels are still to come
                logger.info(f"{few if draws is None else 'no photo is drawn to be held out'}: {lost}")
            return Samples(data, self._test, None)
        return Samples(data, held_out if self._test is None else self._test, held_out)
