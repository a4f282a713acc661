"""A roll-out at a device: it is offered a bundle, fetches it, tries it, and hands over to it.

1. An announcement offers a bundle. Whether it is for this device, `rollout.considered` says; the answer stands in the
   status (`versions`, `rollout`).
2. Pieces are asked for and appended to a file (`download.py`). The bytes are hashed at the end; if they are others than
   what was offered, it begins again, `_ATTEMPTS` times at most.
3. Between two things that the client does, the bundle is tried in a process of its own (`self_test.py`).
4. When in addition no contribution waits for a receipt, it is activated: its file gets its name, then one transaction
   makes it what runs, on probation (`probation.py`). `is_over` then tells the client to end; `service.py` goes on with
   the new bundle in the same process.

Killed at any moment, the device goes on with the bundle that the record names. An offer that is withdrawn stops all of
this where it is, and keeps the bytes.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from contract.bundle import Bundle
from contract.errors import StoreError
from contract.messages import Announcement, Offer, Piece
from contract.sampling import in_stage
from contract.service_manager import ServiceManager
from contract.wire import encode
from edge_client import rollout
from edge_client.data import LocalData
from edge_client.download import Download
from edge_client.probation import ProbationWatch
from edge_client.rollout import Seat, Verdict
from edge_client.rollout_file import RolloutFile, bundle_file, part_file
from edge_client.self_test import Trial, some_photos, tried_apart

__all__ = ["RolloutTerms", "RolloutWork"]

_ATTEMPTS = 3  # to fetch bytes that hash to what was offered, and to try these
_NOBODY_S = 900.0  # connected in another fleet, without an announcement: what is announced is retained
_AGAIN_S = 600.0  # until a disk that refused is asked again


@dataclass(frozen=True)
class RolloutTerms:
    """On what terms a device takes part in roll-outs.

    Attributes:
        public_keys: of whoever signs bundles; none where no key is trusted, and nothing is taken.
        wanted: whether its owner takes part.
        budget: whether a privacy budget is kept.
        threads: within an operator, for the self-test.
        method: of the device's own, as `--method` takes it; empty for none.
        in_parts: whether the self-test trains in parts where the bundle can: memory is bounded here.
    """

    public_keys: tuple[bytes, ...] = ()
    wanted: bool = True
    budget: bool = False
    threads: int = 1
    method: str = ""
    in_parts: bool = False


class RolloutWork:
    """Of one process of a device, as long as one bundle runs.

    Args:
        file: what the state directory knows of roll-outs.
        seat, bundle: what runs; `path` is where its file lies.
        samples: gives the device's labelled samples, of which some are used in the self-test.
        manager: is told that the device gets on.
        stopping: ends a self-test that is under way.
        log: takes a line for a person.

    Attributes:
        probation: of the bundle that runs.
    """

    def __init__(
        self,
        file: RolloutFile,
        seat: Seat,
        bundle: Bundle,
        path: Path,
        *,
        device_id: str,
        terms: RolloutTerms,
        samples: Callable[[], LocalData],
        manager: ServiceManager,
        stopping: threading.Event,
        log: Callable[[str], None],
    ) -> None:
        self._file, self._seat, self._bundle, self._path, self._id = file, seat, bundle, path, device_id
        self._terms, self._samples, self._manager = terms, samples, manager
        self._stopping, self._log = stopping, log
        self.probation = ProbationWatch(file, log)
        self._offer: Offer | None = None
        self._run = bytes(4)
        self._download: Download | None = None
        self._connected_at_s: float | None = None
        self._is_right, self._tested, self._activated = False, False, False
        self._held_until_s = float("-inf")  # a disk that refused
        self._waits = False  # for what is on probation
        self._word, self._said = "", ""

    @property
    def is_over(self) -> bool:
        """Whether another bundle has to run now: the client is to end."""
        return self._activated or self.probation.is_over

    def close(self) -> None:
        """Let go of what is being fetched; its bytes stay."""
        if self._download is not None:
            self._download.close()
        self._download, self._is_right, self._tested = None, False, False

    def versions(self) -> dict[str, str]:
        """What the status says: the bundle that runs, and how it goes with the one that is offered, or was."""
        seat, offer = self._seat, self._offer
        found = self._word or self._remembered()
        if offer is not None and offer.sha256.hex() == seat.sha256:
            found = rollout.word(seat.version, "probation" if self.probation.is_on else "healthy")
        return {"bundle": rollout.tag(seat)} | ({"rollout": found} if found else {})

    # ── what arrives ────────────────────────────────────────────────────────────────────────────────────────────────

    def announced(self, announcement: Announcement) -> None:
        """The newest announcement, with or without an offer."""
        self._offer, self._run = announcement.offer, announcement.run
        self._consider()

    def take(self, piece: Piece, now_s: float) -> None:
        """A piece arrived; what it holds is in the file on return, or lost with the disk that refused."""
        if self._download is None:
            return
        try:
            self._download.take(piece, now_s)
        except StoreError as error:
            self._hold(error, now_s)

    def connected(self) -> None:
        """A new connection: what was asked for may be asked for again."""
        self._connected_at_s = time.monotonic()
        if self._download is not None:
            self._download.connected()

    def disconnected(self) -> None:
        """The connection is gone."""
        self._connected_at_s = None

    # ── what goes out ───────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, publish: Callable[[bytes], object], now_s: float) -> None:
        """Ask the aggregator for bytes, if it is time.

        Args:
            publish: takes an encoded message, and gives something true if it goes out.
        """
        if self._download is None or self._connected_at_s is None:
            return
        request = self._download.request(self._run, now_s)
        if request is not None and publish(encode(request)):
            self._download.asked(request, now_s)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until there is something to do; None where that waits for a message."""
        held_s = self._held_until_s - now_s
        if held_s > 0:
            return held_s
        return None if self._download is None or self._connected_at_s is None else self._download.wait_s(now_s)

    # ── what is done ────────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, *, is_settled: bool) -> bool:
        """Do one thing, between two others of the client; False when there is nothing.

        Args:
            is_settled: whether no contribution waits for a receipt.
        """
        now_s = time.monotonic()
        if now_s < self._held_until_s or self._stopping.is_set():
            return False
        try:
            if self._download is None:
                return self._begin_late()
            if not self._download.is_whole:
                return False
            if not self._is_right:
                self._look_through(self._download)
                return True
            if not self._tested:
                self._test(self._download, now_s)
                return True
            if is_settled:
                self._activate(self._download)
                return True
        except StoreError as error:
            self._hold(error, now_s)
        return False

    def rested(self, announcement: Announcement | None, *, settled: bool, plausible: bool) -> None:
        """The client waits for work; arguments as of `ProbationWatch.rested`. Where a roll-out took it to another
        fleet, and nobody announces anything there for this bundle, it goes back."""
        self.probation.rested(announcement, settled=settled, plausible=plausible)
        before, at_s = self._file.known.previous, self._connected_at_s
        if announcement is not None or at_s is None or before is None or before.fleet == self._seat.fleet:
            return
        if time.monotonic() - at_s > _NOBODY_S:
            self.probation.fail(f"no aggregator for it in fleet {self._seat.fleet}")

    def _begin_late(self) -> bool:
        """Begin what had to wait: for a disk, or for the end of a probation."""
        if self._held_until_s == float("-inf") and (not self._waits or self.probation.is_on):
            return False
        self._held_until_s, self._waits = float("-inf"), False
        self._consider()
        return True

    def _consider(self) -> None:
        """What to do about the offer, and what to say of it."""
        offer, now_s = self._offer, time.monotonic()
        verdict = Verdict("leave") if offer is None else self._verdict(offer)
        self._waits = verdict.what == "wait"
        if offer is not None and verdict.word and (verdict.what != "fetch" or now_s >= self._held_until_s):
            self._say(offer, "testing" if self._is_right and verdict.what == "fetch" else verdict.word)
        held = self._download
        if held is not None and (offer is None or verdict.what != "fetch" or held.offer.sha256 != offer.sha256):
            self._log(f"bundle {held.offer.version} is not offered any more: {held.have:,} bytes are kept")
            self.close()
        if offer is not None and verdict.what == "fetch" and self._download is None and now_s >= self._held_until_s:
            try:
                self._download = self._begun(offer)
            except StoreError as error:
                self._hold(error, now_s)

    def _verdict(self, offer: Offer) -> Verdict:
        terms = self._terms
        return rollout.considered(
            self._file.known,
            offer,
            self._seat,
            in_stage=in_stage(offer, self._id),
            trusts=bool(terms.public_keys),
            wanted=terms.wanted,
            budget=terms.budget,
        )

    def _remembered(self) -> str:
        """The last word, where nothing is offered: of what a roll-out brought, or of what failed here."""
        known = self._file.known
        if known.active is not None and known.active.sha256 == self._seat.sha256:
            back = [each for each in known.failed.values() if each.back_to == self._seat.sha256]
            if known.probation is not None:
                return rollout.word(self._seat.version, "probation")
            if back:
                return rollout.word(back[-1].version, f"failed: {back[-1].reason}")
            return rollout.word(self._seat.version, "healthy")
        return ""

    def _begun(self, offer: Offer) -> Download:
        """Begin to fetch, or go on.

        Raises:
            StoreError: the disk has no room, or refuses.
        """
        state, sha256 = self._file.state, offer.sha256.hex()
        self._file.tidy(sha256, self._seat.sha256)
        self._file.keep(self._path, self._seat.sha256)
        if self._file.known.fetching != sha256:
            self._file.put(msgspec.structs.replace(self._file.known, fetching=sha256, wrong=0, tries=0))
        whole, part = bundle_file(state, sha256), part_file(state, sha256)
        try:
            if whole.is_file():  # of a process that was killed before it ran, or by hand: the hash is looked at again
                os.replace(whole, part)
            found = Download(part, offer, random.Random())
        except OSError as error:
            raise StoreError(f"cannot use {part.parent}", expected="a writable folder", got=error.strerror) from None
        done = f", {found.have:,} of them here" if found.have else ""
        self._log(f"bundle {offer.version} is offered: fetching {offer.size_bytes:,} bytes{done}")
        return found

    def _look_through(self, download: Download) -> None:
        """See whether what was fetched is what was offered."""
        offer = download.offer
        if not download.is_right(self._manager.alive):
            known = self._file.known
            self._file.put(msgspec.structs.replace(known, wrong=known.wrong + 1))
            self._log(f"bundle {offer.version}: what was fetched is not what was offered")
            download.begin_again()
            if known.wrong + 1 >= _ATTEMPTS:
                self._refuse(offer, "wrong bytes")
            return
        self._is_right = True
        self._say(offer, "testing")
        self._log(f"bundle {offer.version} is here: trying it")

    def _test(self, download: Download, now_s: float) -> None:
        """Try it; meanwhile the device does nothing else, since it has memory for one. A test that takes the device
        down with it, its whole board maybe, is made `_ATTEMPTS` times at most, so it is counted before it begins.

        Raises:
            StoreError: the disk refuses the count.
        """
        offer, sha256, before = download.offer, download.offer.sha256.hex(), self._file.known.tries
        if before >= _ATTEMPTS:
            self._refuse(offer, f"{_ATTEMPTS} self-tests ended this device")
            return
        self._file.put(msgspec.structs.replace(self._file.known, tries=before + 1))
        photos, terms = some_photos(self._samples()), self._terms
        assert terms.public_keys
        extends = rollout.seat_of(offer, self._seat).fleet == self._seat.fleet
        trial = Trial(
            path=os.fspath(part_file(self._file.state, sha256)),
            public_keys=terms.public_keys,
            version=offer.version,
            extends=self._seat.sha256 if extends else "",
            extractor=self._bundle.manifest.extractor,
            threads=terms.threads,
            method=terms.method,
            in_parts=terms.in_parts,
            labels=tuple(int(label) for label in photos.y),
        )
        try:
            why = tried_apart(trial, photos.x, on_look=self._manager.alive, stopping=self._stopping)
        except OSError as error:  # too many processes or files, or no memory for one: nothing of the bundle's
            self._file.put(msgspec.structs.replace(self._file.known, tries=before))
            self._hold(
                f"bundle {offer.version} cannot be tried yet: {error.strerror}", now_s, "no room for its self-test"
            )
            return
        if why:
            self._refuse(offer, why)
        else:
            self._tested = why == ""
            self._file.put(msgspec.structs.replace(self._file.known, tries=before if why is None else 0))

    def _refuse(self, offer: Offer, reason: str) -> None:
        """Not to be run here, whoever offers it again."""
        self._file.change(rollout.refused, offer.sha256.hex(), offer.version, reason, self._seat)
        self._log(f"bundle {offer.version} is not taken: {reason}")
        self.close()
        self._file.tidy(self._seat.sha256)
        self._consider()

    def _activate(self, download: Download) -> None:
        """Its file gets its name, and then it is what runs: that is one transaction."""
        offer, state, sha256 = download.offer, self._file.state, download.offer.sha256.hex()
        try:
            os.replace(part_file(state, sha256), bundle_file(state, sha256))
            _sync(state / "bundles")
        except OSError as error:
            raise StoreError(f"cannot use {state}", expected="a writable folder", got=error.strerror) from None
        self._file.change(rollout.activated, rollout.seat_of(offer, self._seat), self._seat)
        self.close()
        self._activated = True
        self._log(f"bundle {offer.version} takes over, on probation")

    def _hold(self, error: StoreError | str, now_s: float, why: str = "the disk takes no more") -> None:
        """The disk refused, or the system: go on later."""
        if str(error) != self._said:
            self._log(str(error))
        self._said = str(error)
        if self._offer is not None:
            self._word = rollout.word(self._offer.version, f"refused: {why}")
        self.close()
        self._held_until_s = now_s + _AGAIN_S

    def _say(self, offer: Offer, said: str) -> None:
        line = rollout.word(offer.version, said)
        if said.startswith("refused") and line != self._word:
            self._log(f"bundle {offer.version} is offered: {said}")
        self._word = line


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
