"""A roll-out at a device: the device is offered a bundle, fetches it, tries it, and hands over to it.

1. An announcement offers a bundle. `rollout_decisions.considered` says whether it is for this device. The answer stands
   in the status (`versions`, `rollout`).
2. Pieces are asked for and appended to a file (`download.py`). The bytes are hashed at the end. If the hash is wrong,
   the download begins again, `_ATTEMPTS` times at most.
3. Between two other tasks of the client, the bundle is tried in a process of its own (`bundle_trial.py`).
4. When no contribution waits for a receipt, the bundle is activated: its file gets its name, then one transaction makes
   it what runs, on probation (`probation.py`).
5. `is_over` then tells the client to end. `service.py` goes on with the new bundle in the same process.

Killed at any moment, the device goes on with the bundle that the record names. When an offer is withdrawn, all of this
stops where it is, and the bytes are kept.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import StoreError
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Offer, Piece
from protofleet.contract.wire.sampling import in_stage
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.rollout import rollout_decisions
from protofleet.edge_client.rollout.download import Download
from protofleet.edge_client.rollout.probation import ProbationWatch
from protofleet.edge_client.rollout.rollout_decisions import InstalledBundle, Verdict
from protofleet.edge_client.rollout.rollout_file import RolloutFile, bundle_file, part_file
from protofleet.edge_client.trials.bundle_trial import Trial, some_photos, tried_apart

__all__ = ["RolloutTerms", "RolloutWork"]

logger = logging.getLogger(__name__)

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
        installed, bundle: what runs; `path` is where its file lies.
        samples: gives the device's labelled samples, of which some are used in the self-test.
        manager: is told that the device gets on.
        stopping: ends a self-test that is under way.

    Attributes:
        probation: of the bundle that runs.
    """

    def __init__(
        self,
        file: RolloutFile,
        installed: InstalledBundle,
        bundle: Bundle,
        path: Path,
        *,
        device_id: str,
        terms: RolloutTerms,
        samples: Callable[[], LocalData],
        manager: ServiceManager,
        stopping: threading.Event,
    ) -> None:
        self._file, self._installed, self._bundle, self._path, self._id = file, installed, bundle, path, device_id
        self._terms, self._samples, self._manager = terms, samples, manager
        self._stopping = stopping
        self.probation = ProbationWatch(file)
        self._offer: Offer | None = None
        self._run = bytes(4)
        self._download: Download | None = None
        self._connected_at_s: float | None = None
        self._is_right, self._tested, self._activated = False, False, False
        self._paused_until_s = float("-inf")  # a disk that refused
        self._waits = False  # for what is on probation
        self._word, self._last_error = "", ""

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
        """What the status says: the bundle that runs, and the state of the offered roll-out, or of the last one."""
        installed, offer = self._installed, self._offer
        report = self._word or self._remembered()
        if offer is not None and offer.sha256.hex() == installed.sha256:
            report = rollout_decisions.word(installed.version, "probation" if self.probation.is_on else "healthy")
        return {"bundle": rollout_decisions.tag(installed)} | ({"rollout": report} if report else {})

    # ── what arrives ────────────────────────────────────────────────────────────────────────────────────────────────

    def announced(self, announcement: Announcement) -> None:
        """The newest announcement, with or without an offer."""
        self._offer, self._run = announcement.offer, announcement.run
        self._consider()

    def take(self, piece: Piece, now_s: float) -> None:
        """A piece arrived. On return its bytes are in the file, or lost because the disk refused."""
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
        pause_s = self._paused_until_s - now_s
        if pause_s > 0:
            return pause_s
        return None if self._download is None or self._connected_at_s is None else self._download.wait_s(now_s)

    # ── what is done ────────────────────────────────────────────────────────────────────────────────────────────────

    def work(self, *, is_settled: bool) -> bool:
        """Do one thing, between two others of the client; False when there is nothing.

        Args:
            is_settled: whether no contribution waits for a receipt.
        """
        now_s = time.monotonic()
        if now_s < self._paused_until_s or self._stopping.is_set():
            return False
        try:
            if self._download is None:
                return self._begin_late()
            if not self._download.is_whole:
                return False
            if not self._is_right:
                self._check_hash(self._download)
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
        """The client waits for work. The arguments are those of `ProbationWatch.rested`.

        If a roll-out took the device to another fleet, and nobody announces anything there for this bundle, it goes
        back.
        """
        self.probation.rested(announcement, settled=settled, plausible=plausible)
        before, at_s = self._file.known.previous, self._connected_at_s
        if announcement is not None or at_s is None or before is None or before.fleet == self._installed.fleet:
            return
        if time.monotonic() - at_s > _NOBODY_S:
            self.probation.fail(f"no aggregator for it in fleet {self._installed.fleet}")

    def _begin_late(self) -> bool:
        """Begin what had to wait: for a disk, or for the end of a probation."""
        if self._paused_until_s == float("-inf") and (not self._waits or self.probation.is_on):
            return False
        self._paused_until_s, self._waits = float("-inf"), False
        self._consider()
        return True

    def _consider(self) -> None:
        """What to do about the offer, and what to say of it."""
        offer, now_s = self._offer, time.monotonic()
        verdict = Verdict("leave") if offer is None else self._verdict(offer)
        self._waits = verdict.what == "wait"
        if offer is not None and verdict.word and (verdict.what != "fetch" or now_s >= self._paused_until_s):
            self._say(offer, "testing" if self._is_right and verdict.what == "fetch" else verdict.word)
        download = self._download
        if download is not None and (offer is None or verdict.what != "fetch" or download.offer.sha256 != offer.sha256):
            logger.info(f"bundle {download.offer.version} is not offered any more: {download.have:,} bytes are kept")
            self.close()
        if offer is not None and verdict.what == "fetch" and self._download is None and now_s >= self._paused_until_s:
            try:
                self._download = self._begun_download(offer)
            except StoreError as error:
                self._hold(error, now_s)

    def _verdict(self, offer: Offer) -> Verdict:
        terms = self._terms
        return rollout_decisions.considered(
            self._file.known,
            offer,
            self._installed,
            in_stage=in_stage(offer, self._id),
            trusts=bool(terms.public_keys),
            wanted=terms.wanted,
            budget=terms.budget,
        )

    def _remembered(self) -> str:
        """The last word, where nothing is offered: of what a roll-out brought, or of what failed here."""
        known = self._file.known
        if known.active is not None and known.active.sha256 == self._installed.sha256:
            back = [failure for failure in known.failed.values() if failure.back_to == self._installed.sha256]
            if known.probation is not None:
                return rollout_decisions.word(self._installed.version, "probation")
            if back:
                return rollout_decisions.word(back[-1].version, f"failed: {back[-1].reason}")
            return rollout_decisions.word(self._installed.version, "healthy")
        return ""

    def _begun_download(self, offer: Offer) -> Download:
        """Begin to fetch, or go on.

        Raises:
            StoreError: the disk has no room, or refuses.
        """
        state, sha256 = self._file.state, offer.sha256.hex()
        self._file.tidy(sha256, self._installed.sha256)
        self._file.keep(self._path, self._installed.sha256)
        if self._file.known.fetching != sha256:
            self._file.put(msgspec.structs.replace(self._file.known, fetching=sha256, wrong=0, tries=0))
        whole, part = bundle_file(state, sha256), part_file(state, sha256)
        try:
            if whole.is_file():  # of a process that was killed before it ran, or by hand: the hash is looked at again
                os.replace(whole, part)
            download = Download(part, offer, random.Random())
        except OSError as error:
            raise StoreError(f"cannot use {part.parent}", expected="a writable folder", got=error.strerror) from None
        done = f", {download.have:,} of them here" if download.have else ""
        logger.info(f"bundle {offer.version} is offered: fetching {offer.size_bytes:,} bytes{done}")
        return download

    def _check_hash(self, download: Download) -> None:
        """See whether what was fetched is what was offered."""
        offer = download.offer
        if not download.is_right(self._manager.alive):
            known = self._file.known
            self._file.put(msgspec.structs.replace(known, wrong=known.wrong + 1))
            logger.warning(f"bundle {offer.version}: what was fetched is not what was offered")
            download.begin_again()
            if known.wrong + 1 >= _ATTEMPTS:
                self._refuse(offer, "wrong bytes")
            return
        self._is_right = True
        self._say(offer, "testing")
        logger.info(f"bundle {offer.version} is here: trying it")

    def _test(self, download: Download, now_s: float) -> None:
        """Try the bundle; meanwhile the device does nothing else, because it has memory for one.

        A test that ends the device, or its whole board, is made `_ATTEMPTS` times at most. So it is counted before it
        begins.

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
        extends = rollout_decisions.installed_of(offer, self._installed).fleet == self._installed.fleet
        trial = Trial(
            path=os.fspath(part_file(self._file.state, sha256)),
            public_keys=terms.public_keys,
            version=offer.version,
            extends=self._installed.sha256 if extends else "",
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
        self._file.change(rollout_decisions.refused, offer.sha256.hex(), offer.version, reason, self._installed)
        logger.warning(f"bundle {offer.version} is not taken: {reason}")
        self.close()
        self._file.tidy(self._installed.sha256)
        self._consider()

    def _activate(self, download: Download) -> None:
        """Its file gets its name, and then it is what runs: that is one transaction."""
        offer, state, sha256 = download.offer, self._file.state, download.offer.sha256.hex()
        try:
            os.replace(part_file(state, sha256), bundle_file(state, sha256))
            _sync(state / "bundles")
        except OSError as error:
            raise StoreError(f"cannot use {state}", expected="a writable folder", got=error.strerror) from None
        self._file.change(
            rollout_decisions.activated, rollout_decisions.installed_of(offer, self._installed), self._installed
        )
        self.close()
        self._activated = True
        logger.info(f"bundle {offer.version} takes over, on probation")

    def _hold(self, error: StoreError | str, now_s: float, why: str = "the disk takes no more") -> None:
        """The disk refused, or the system: go on later."""
        if str(error) != self._last_error:
            logger.warning(str(error))
        self._last_error = str(error)
        if self._offer is not None:
            self._word = rollout_decisions.word(self._offer.version, f"refused: {why}")
        self.close()
        self._paused_until_s = now_s + _AGAIN_S

    def _say(self, offer: Offer, word: str) -> None:
        line = rollout_decisions.word(offer.version, word)
        if word.startswith("refused") and line != self._word:
            logger.info(f"bundle {offer.version} is offered: {word}")
        self._word = line


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
