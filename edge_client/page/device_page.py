"""What the page shows, and what a tap does: a value for the browser, and changes that are on the disk when they return.

A tap is confirmed only when the label is on the disk (`edge_client/data/learned.py`), so a kill after it loses nothing.
`undo` takes back the last change of this process. Before a photo is shown to a browser the ledger says so.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.bundle.class_names import check_proposed
from protofleet.contract.errors import DataError
from protofleet.contract.page.site import Content, Site
from protofleet.contract.page.visitors import Visitor
from protofleet.edge_client.answers.camera_answers import CameraAnswers
from protofleet.edge_client.answers.label_report import report_of
from protofleet.edge_client.answers.photos_to_name import ToName, photos_to_name
from protofleet.edge_client.data.learned import Learned, LearnedFile, example_of
from protofleet.edge_client.hardware import process_metrics
from protofleet.edge_client.photos.kept_photo import ID, KeptPhoto, id_of
from protofleet.edge_client.photos.naming import name_photos, proposed_classes
from protofleet.edge_client.photos.photo_ring import PhotoRing
from protofleet.edge_client.privacy.elapsed_time import moment
from protofleet.edge_client.privacy.ledger import BESIDE, Cost, Entry, Ledger, digest_of, read_ledger

__all__ = ["DevicePage", "Owned"]

_NEWEST, _WANTED, _RANKED = 24, 12, 300  # photos shown as they came; to name; and those that are ranked for it
_UNDOES = 50
_MOST_AT_ONCE = 200
_MOST_SHOWN = 1024  # photos more that visitors may look at, before those that have left are struck off
_MOST_COUNTS = 16  # of photos that a visitor was shown, by hour and address


@dataclass(frozen=True)
class Owned:
    """What of a client the page is about.

    Attributes:
        directory: the state directory, with what the device is taught.
        ledger_path: of `ledger`.
        cost: what all releases have cost, in words.
        basis: what answers rest on, in words.
        on_change: called after each change.
        tells_proposed: whether the fleet's operator is told of classes that are proposed here.
        profiled: figures of `profile --measure`.
    """

    name: str
    fleet: str
    directory: Path
    manifest: Manifest
    ring: PhotoRing
    camera: CameraAnswers
    ledger: Ledger
    ledger_path: Path
    cost: Callable[[], str]
    basis: Callable[[], str]
    on_change: Callable[[], None]
    tells_proposed: bool = False
    profiled: Mapping[str, float] = field(default_factory=dict)


class DevicePage(Site):
    """The page of one client; from any thread."""

    PACKAGE: ClassVar[str] = __package__
    ABOUT: ClassVar[str] = "what it sees"
    CODE_AT: ClassVar[str] = "the terminal of protofleet client"

    def __init__(self, own: Owned) -> None:
        super().__init__()
        self._own = own
        self._learned = Learned(own.directory)
        self._file = LearnedFile(own.directory, own.manifest.labels)
        self._lock = threading.RLock()
        self._undo: deque[list[tuple[KeptPhoto, str | None]]] = deque(maxlen=_UNDOES)  # as of `_did`
        self._shown: WeakKeyDictionary[Visitor, Counter[tuple[int, str]]] = WeakKeyDictionary()  # by hour and address
        self._shown_at: WeakKeyDictionary[Visitor, str] = WeakKeyDictionary()  # the address that was shown some last
        self._unstruck = 0  # photos that were shown since those that have left were struck off
        self._state: dict[str, Any] = {}
        self._of = (-1, 0)  # the version and the ring's commits of others that `_state` is of

    @property
    def title(self) -> str:
        return self._own.name

    def state(self, visitor: Visitor) -> dict[str, Any]:
        """What a browser shows. Its photos may be looked at by this visitor from then on.

        Raises:
            StoreError: the disk refuses.
        """
        with self._lock:
            of = (self.version, self._own.ring.commits_of_others)
            if self._of != of:
                self._state = self._made()
                self._of = of
            state = self._state
            self._show(visitor, state["pixels"])
        return {name: value for name, value in state.items() if name != "pixels"}

    def first(self, visitor: Visitor) -> str:
        return json.dumps(self.state(visitor))

    def event(self, visitor: Visitor, known: int) -> tuple[int, str]:
        return self.version, json.dumps(self.state(visitor))

    def get(self, visitor: Visitor, path: str, query: Mapping[str, str]) -> Content | None:
        """A photo, `/photo/ID.jpg`."""
        if not (path.startswith("/photo/") and path.endswith(".jpg") and ID.fullmatch(path[7:-4])):
            return None
        image = self.image(visitor, path[7:-4])
        return None if image is None else Content(image, "image/jpeg")

    def post(self, visitor: Visitor, path: str, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What a tap does: `/name`, `/aside`, `/erase` or `/undo`."""
        ids = [str(id) for id in given.get("photos", [])]
        if path == "/name":
            count = self.name(ids, str(given.get("label", "")))
        elif path == "/aside":
            count = self.set_aside(ids, str(given.get("why", "")), str(given.get("proposed", "")))
        elif path == "/erase":
            count = self.erase(ids)
        elif path == "/undo":
            count = self.undo()
        else:
            return None
        return {"count": count, "state": self.state(visitor)}

    def image(self, visitor: Visitor, id: str) -> bytes | None:
        """The JPEG of a photo that was shown to this visitor at its address; None for any other."""
        photo = self._own.ring.find(id)
        if photo is None or photo.pixels not in visitor.shown or self._shown_at.get(visitor) != visitor.who:
            return None
        return self._own.ring.image(photo)

    def name(self, ids: Sequence[str], label: str) -> int:
        """Name photos; all is on the disk on return. Gives how many.

        Raises:
            DataError: there is no such class, or none of the photos any more.
            StoreError: the disk refuses.
        """
        own = self._own
        if label not in own.manifest.labels:
            raise DataError("the label", expected="a class of the fleet's", got=repr(label)[:80])
        with self._lock:
            photos, before = self._photos(ids), self._labels()
            done: list[tuple[KeptPhoto, str | None]] = []
            try:
                for photo in name_photos(own.ring, self._file, own.manifest, photos, label):
                    done.append((photo, before.get(photo.pixels, "")))
            finally:
                self._did(done)
        return len(done)

    def set_aside(self, ids: Sequence[str], why: str, proposed: str = "") -> int:
        """Say of photos that they are not named: `unsure`, or `none` of the classes, with a class that they are of.

        Raises:
            UsageError: no class can be called that, or one is.
            StoreError: the disk refuses.
        """
        proposed = proposed.strip()
        if proposed:
            check_proposed(proposed, self._own.manifest.labels)
        with self._lock:
            photos = self._photos(ids)
            self._own.ring.set_aside(photos, why, proposed)
            self._did([(photo, None) for photo in photos])
        return len(photos)

    def erase(self, ids: Sequence[str]) -> int:
        """Erase photos, and what the device learned of them, for good; gives how many were there.

        What was learned of a photo that has left the ring since is erased, too. Another process may erase the same.

        Raises:
            StoreError: the disk refuses.
        """
        erased: set[bytes] = set()
        with self._lock:
            try:
                for id in ids[:_MOST_AT_ONCE]:
                    erased |= self._erase(id)
            finally:
                changes = ([one for one in change if one[0].pixels not in erased] for change in self._undo)
                self._undo = deque(filter(None, changes), maxlen=_UNDOES)
                self._notify()
        return len(erased)

    def _erase(self, id: str) -> set[bytes]:
        """Erase one photo; the hash of its pixels, if something of it was there."""
        found = {pixels for pixels in self._labels() if id_of(pixels) == id}
        for pixels in found:
            with contextlib.suppress(DataError):  # another process has unlearned it just now
                self._file.unlearn_hashed(pixels)
        photo = self._own.ring.find(id)
        if photo is not None:
            self._own.ring.remove(photo.pixels)
            found.add(photo.pixels)
        return found

    def undo(self) -> int:
        """Take back the last change; gives of how many photos."""
        with self._lock:
            if not self._undo:
                return 0
            last, now = self._undo.pop(), self._labels()
            for photo, before in last:
                if before:
                    if self._own.ring.find(photo.id) is not None:  # else its owner has unlearned it meanwhile
                        image = self._own.ring.image(photo, "png")
                        self._file.learn(example_of(image, self._own.manifest), before)
                elif before is not None and photo.pixels in now:
                    self._file.unlearn_hashed(photo.pixels)
            self._own.ring.no_longer_named([photo for photo, before in last if before == ""])
            self._own.ring.said_before([photo for photo, _ in last])
            self._notify()
        return len(last)

    def _did(self, done: list[tuple[KeptPhoto, str | None]]) -> None:
        """Remember what `undo` takes back: photos as they were, and their labels; empty without, None if that stays."""
        if done:
            self._undo.append(done)
            self._notify()

    def _notify(self) -> None:
        self.came()
        self._own.on_change()

    def _photos(self, ids: Sequence[str]) -> list[KeptPhoto]:
        found = [photo for id in ids[:_MOST_AT_ONCE] if (photo := self._own.ring.find(id)) is not None]
        if not found:
            raise DataError("the photos", expected="photos that are kept", got="none, or some that have left")
        return found

    def _labels(self) -> dict[bytes, str]:
        self._learned.look()
        return dict(zip(self._learned.hashes, self._learned.labels, strict=True))

    def _show(self, visitor: Visitor, pixels: Sequence[bytes]) -> None:
        """Write into the ledger how many photos this visitor is shown in this hour at its address, before it is.

        At another address all are shown anew: a cookie may be somebody else's there.
        """
        who = visitor.who
        if self._shown_at.get(visitor, who) != who:
            visitor.shown.clear()
        new = [each for each in pixels if each not in visitor.shown]
        if not new:
            return
        now, own = moment(), self._own
        hour, counts = int(now.wall_s // 3600), self._shown.setdefault(visitor, Counter())
        count = counts[hour, who] + len(new)
        statistic = f"{count} photos to {who}"[:60]
        digest = digest_of(b"shown", visitor.token.encode(), hour.to_bytes(8, "big"), who.encode())
        own.ledger.record_more(Entry("shown", own.fleet, b"", 0, "", statistic, "jpeg", 1, 0, digest, Cost()), now)
        counts[hour, who], self._shown_at[visitor] = count, who
        visitor.shown.update(new)
        while len(counts) > _MOST_COUNTS:  # of a page that is open for days
            del counts[next(iter(counts))]
        self._unstruck += len(new)
        if self._unstruck > _MOST_SHOWN:
            self._strike_off()

    def _strike_off(self) -> None:
        """Forget of all visitors, those that went away too, which photos they were shown that are no longer kept."""
        self._unstruck, kept = 0, {photo.pixels for photo in self._own.ring.photos()}
        for visitor in list(self._shown_at):
            visitor.shown.intersection_update(kept)

    def _made(self) -> dict[str, Any]:
        own, labels = self._own, self._labels()
        photos, features = own.ring.features(_RANKED)
        wanted, unknown = photos_to_name(photos, features, set(labels), _WANTED)
        newest = sorted(photos, key=lambda photo: -photo.last_s)[:_NEWEST]  # one that was seen again, too
        report = report_of(own.manifest.labels, self._learned.asked_before())
        shown = [*newest, *(one.photo for one in (*wanted, *unknown))]
        return {
            "device": own.name,
            "fleet": own.fleet,
            "classes": list(own.manifest.labels),
            "newest": [_shown(photo, labels) for photo in newest],
            "wanted": [_to_name(one, labels) for one in wanted],
            "unknown": [_to_name(one, labels) for one in unknown],
            "proposed": proposed_classes(own.ring, own.manifest.labels),
            "tells_proposed": own.tells_proposed,
            "report": asdict(report),
            "left": self._left(),
            "health": self._health(own.ring.count()),
            "undoes": len(self._undo),
            "pixels": list(dict.fromkeys(photo.pixels for photo in shown)),
        }

    def left_bytes(self) -> int:
        """How many bytes have left for the fleet."""
        return sum(entry.payload_bytes for entry in _sent(read_ledger(self._own.ledger_path)[0]))

    def _left(self) -> dict[str, Any]:
        entries, _, terms = read_ledger(self._own.ledger_path)
        sent = _sent(entries)
        return {
            "releases": len(sent),
            "bytes": sum(entry.payload_bytes for entry in sent),
            "last": [
                {"what": f"{entry.what} {entry.method}".rstrip(), "bytes": entry.payload_bytes, "at": entry.at}
                for entry in sent[:-6:-1]
            ],
            "shown": [{"what": entry.statistic, "at": entry.at} for entry in entries[::-1] if entry.what == "shown"][
                :5
            ],
            "cost": self._own.cost(),
            "epsilon": terms.epsilon,
            "delta": terms.delta,
        }

    def _health(self, kept: int) -> dict[str, Any]:
        camera = self._own.camera
        return {
            "camera": camera.camera.shown,
            "taken": camera.taken,
            "newest": camera.newest_s,
            "kept": kept,
            "basis": self._own.basis(),
            "refused": self._own.ring.refused,
            "peak_rss_bytes": process_metrics.peak_rss_bytes(),
            "predicted_bytes": self._own.profiled.get("profile_memory_at_most_bytes"),
        }


def _sent(entries: Sequence[Entry]) -> list[Entry]:
    """What went to the fleet."""
    return [entry for entry in entries if entry.what not in BESIDE]


def _shown(photo: KeptPhoto, labels: dict[bytes, str]) -> dict[str, Any]:
    return {
        "id": photo.id,
        "at": photo.last_s,
        "answer": photo.answer,
        "probability": photo.probability,
        "unknown": photo.is_unknown,
        "label": labels.get(photo.pixels, ""),
        "aside": photo.aside,
        "waits": photo.waits > 0,
    }


def _to_name(one: ToName, labels: dict[bytes, str]) -> dict[str, Any]:
    return {**_shown(one.photo, labels), "times": one.times, "why": one.why}
