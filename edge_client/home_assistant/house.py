"""What a running client publishes for Home Assistant, and what a choice there does; in a thread of its own.

1. Connect: retained discovery, `online` and the state; the broker publishes `offline` by last will.
2. A photo came (`came`): the state is published where the answer is another one, and otherwise at most once a minute.
   So the photo that a choice is about stays for as long as nothing new is seen.
3. A choice names a photo. It is taken only for the photo that is shown now, and it does what a tap on the device's page
   does (`DevicePage.name`). What came of it is the entity "Last word".
4. `homeassistant/status` says `online`: all is said again.

Before the first answer of a day is published the ledger says so: one row for a day and broker. Where it cannot, no
answer is published.

That broker may belong to anybody. No trouble of this connection ends the client: a message that is larger than a choice
ends the connection, of many choices or `online` in short time `flood` lets few be done, and a broker that refuses us is
asked again, ever later.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from protofleet.contract.console.logs import Changes
from protofleet.contract.errors import ProtofleetError
from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.link import Connected, Disconnected, Failed, Link, Noticed, Received
from protofleet.contract.printable import printable
from protofleet.edge_client.answers.camera_answers import Answered, CameraAnswers
from protofleet.edge_client.home_assistant.discovery import LONGEST, STATUS, Topics, discovery
from protofleet.edge_client.home_assistant.flood import Flood
from protofleet.edge_client.home_assistant.steady import Steady
from protofleet.edge_client.page.device_page import DevicePage
from protofleet.edge_client.photos.kept_photo import ID
from protofleet.edge_client.photos.photo_ring import PhotoRing
from protofleet.edge_client.privacy.elapsed_time import moment
from protofleet.edge_client.privacy.ledger import Cost, Entry, Ledger, digest_of

__all__ = ["House", "Shown"]

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_PACE_S = 60.0  # between two states with the same answer
_LARGEST = 4096  # bytes of a choice
_CHOICES, _CHOICES_S = 20, 10.0  # that are done in so many seconds
_REPEAT_S = 5.0  # until all is said again once more
_AGAIN_S, _LATEST_AGAIN_S = 5.0, 300.0  # until a broker that has refused us is asked again: the first wait, the longest
_DAY_S = 86_400
_TOO_MANY = f"refused: more than {_CHOICES} choices in {_CHOICES_S:.0f} s"


@dataclass(frozen=True)
class Shown:
    """What of a client Home Assistant is shown.

    Attributes:
        classes: labels of the bundle.
        bundle: the beginning of its hash.
        left_bytes: how many bytes have left for the fleet.
        equal: so many equal answers before one is shown.
        photo: whether the last photo is published.
    """

    topics: Topics
    classes: tuple[str, ...]
    bundle: str
    left_bytes: Callable[[], int]
    equal: int
    photo: bool


class House:
    """The connection to the broker that Home Assistant is at.

    Args:
        page: names photos.
    """

    def __init__(
        self, address: Address, shown: Shown, camera: CameraAnswers, page: DevicePage, ring: PhotoRing, ledger: Ledger
    ) -> None:
        self._address, self._own, self._camera = address, shown, camera
        self._page, self._ring, self._ledger = page, ring, ledger
        self._labels = {label[:LONGEST]: label for label in reversed(shown.classes)}
        self._steady, self._lock = Steady(shown.equal), threading.Lock()
        self._is_up, self._closing, self._is_due = False, threading.Event(), False
        self._published: Answered | None = None
        self._published_s, self._recorded = float("-inf"), -1
        self._said, self._labelled, self._changes = "", ("", ""), Changes(logger)
        self._flood, self._again_s = Flood(_CHOICES, _CHOICES_S), _AGAIN_S
        self._repeats, self._repeat_at = False, float("-inf")
        self._is_refused = False
        self._link = self._made_link()
        self._thread = threading.Thread(target=self._run, name="home-assistant", daemon=True)

    def _made_link(self) -> Link:
        topics = self._own.topics
        return Link(
            self._address,
            f"pf-house-{os.urandom(6).hex()}",
            subscriptions=(topics.of("teach"), STATUS),
            will=(topics.of("available"), b"offline"),
            largest_bytes=_LARGEST,
            content_type="application/json",
        )

    def start(self) -> None:
        """Begin to connect."""
        self._link.open()
        self._thread.start()

    def stop(self) -> None:
        """Say that the device is gone, and end."""
        self._closing.set()
        self._link.wake()
        self._thread.join(10 * _LOOK_S)
        self._link.publish(self._own.topics.of("available"), b"offline", retain=True)
        self._link.close(timeout_s=1.0)

    def came(self) -> None:
        """A photo came; called in the camera's thread."""
        answered = self._camera.newest
        if answered is not None:
            with self._lock:
                self._steady.take(answered)
                self._is_due = True
            self._link.wake()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                if self._is_refused:
                    self._ask_again()
                else:
                    self._turn(self._link.receive(_LOOK_S))
            except ProtofleetError as error:
                self._changes.say(f"Home Assistant: {error}", level=logging.WARNING)
            except Exception as error:  # whatever comes from that broker, the client goes on
                self._changes.say(f"Home Assistant: {type(error).__name__}", level=logging.WARNING)
                logger.debug("the thread for Home Assistant", exc_info=True)

    def _ask_again(self) -> None:
        """Make the connection anew after a wait: a broker that asks Home Assistant refuses all until that has begun."""
        self._link.close(timeout_s=0.0)
        if not self._closing.wait(self._again_s):
            self._again_s = min(2 * self._again_s, _LATEST_AGAIN_S)
            self._link = self._made_link().open()  # where it cannot be made, that is tried again, too
            self._is_refused = False

    def _turn(self, event: object) -> None:
        if isinstance(event, Connected):
            self._is_up, self._repeats, self._again_s = True, True, _AGAIN_S
            self._repeat_at = float("-inf")
            self._changes.say(f"shown to Home Assistant at {self._address}")
        elif isinstance(event, Disconnected):
            self._is_up = False
            line = f"no connection to Home Assistant's broker {self._address} ({event.reason})"
            self._changes.say(line, level=logging.WARNING)
        elif isinstance(event, Noticed):
            self._changes.say(event.line)
        elif isinstance(event, Failed):
            self._is_up, self._is_refused = False, True
            self._changes.say(f"not shown to Home Assistant: {event.error}, trying again", level=logging.WARNING)
        elif isinstance(event, Received):
            self._link.acknowledge(event)
            if event.topic == STATUS:
                if event.payload == b"online" and not event.retained:  # a retained one is older than this connection
                    self._repeats = True
            elif not event.retained:  # a broker that keeps a choice would make it again and again
                self._choose(event.payload)
        if self._is_up and self._repeats and time.monotonic() >= self._repeat_at:
            self._repeats, self._repeat_at = False, time.monotonic() + _REPEAT_S
            self._say_all()
        self._tell()

    # ── what is said ────────────────────────────────────────────────────────────────────────────────────────────────

    def _say_all(self) -> None:
        own = self._own
        message = discovery(own.topics, own.classes, bundle=own.bundle, photo=own.photo)
        self._link.publish(own.topics.discovery, message, retain=True)
        self._link.publish(own.topics.of("available"), b"online", retain=True)
        self._published = None
        with self._lock:
            self._is_due = True

    def _tell(self) -> None:
        """Publish what is shown, where it is time."""
        with self._lock:
            shown, is_due = self._steady.shown, self._is_due
        if not (is_due and self._is_up) or shown is None:
            return
        before = self._published
        same = before is not None and (before.answer, before.is_unknown) == (shown.answer, shown.is_unknown)
        if same and time.monotonic() - self._published_s < _PACE_S:
            return
        self._record()
        with self._lock:
            self._is_due = self._steady.shown is not shown  # where another one has come meanwhile
        self._published, self._published_s = shown, time.monotonic()
        self._publish_state()
        if self._own.photo and (photo := self._ring.find(shown.id)) is not None:
            self._link.publish(self._own.topics.of("photo"), self._ring.image(photo))

    def _publish_state(self) -> None:
        shown = self._published
        if shown is None:
            return
        self._record()
        id, label = self._labelled
        state = {
            "answer": shown.answer[:LONGEST] or None,
            "probability": None if shown.probability is None else round(100 * shown.probability, 1),
            "unknown": "ON" if shown.is_unknown else "OFF",
            "photo": shown.id,
            "teach": label[:LONGEST] if id == shown.id else None,
            "said": self._said[:LONGEST] or None,
            "bundle": self._own.bundle,
            "left": self._own.left_bytes(),
        }
        payload = json.dumps(state, ensure_ascii=False, separators=(",", ":")).encode()
        self._link.publish(self._own.topics.of("state"), payload, retain=True)

    def _record(self) -> None:
        """Have the ledger say that answers leave on this day.

        Raises:
            StoreError: the disk refuses.
        """
        day = int(time.time() // _DAY_S)
        if day == self._recorded:
            return
        what = "answers and photos" if self._own.photo else "answers"
        words = f"{what} to {self._address.host}"[:60]
        fleet = self._own.topics.fleet
        digest = digest_of(b"answer", fleet.encode(), words.encode(), day.to_bytes(8, "big", signed=True))
        self._ledger.record(Entry("answer", fleet, b"", 0, "", words, "json", 1, 0, digest, Cost()), moment())
        self._recorded = day

    # ── what is chosen ──────────────────────────────────────────────────────────────────────────────────────────────

    def _choose(self, payload: bytes) -> None:
        if not self._flood.lets(time.monotonic()):
            if self._said != _TOO_MANY:  # which is said once
                self._said = _TOO_MANY
                self._changes.say(f"Home Assistant: {self._said}", level=logging.WARNING)
                self._publish_state()
            return
        try:
            self._said = self._taught(payload)
        except ProtofleetError as error:
            self._said = f"refused: {error}"
        except (ValueError, TypeError, RecursionError):
            self._said = "refused: expected JSON with photo and label"
        self._changes.say(f"Home Assistant: {self._said}")
        self._publish_state()

    def _taught(self, payload: bytes) -> str:
        """Do what a choice says; what came of it, in words."""
        given = json.loads(payload)
        if not isinstance(given, dict):
            raise TypeError
        id, shown = str(given.get("photo", "")), self._published
        label = self._labels.get(str(given.get("label", "")), "")
        if shown is None or not ID.fullmatch(id):
            return "refused: the choice names no photo"
        if id != shown.id:
            return f"refused: photo {id} is not shown any more, choose again for {shown.id}"
        if given.get("right") is True:
            label = shown.answer
        if not label:
            return f"refused: photo {id} has no such class"
        self._page.name([id], label)
        self._labelled = id, label
        return f"photo {id} is {printable(label)}"
