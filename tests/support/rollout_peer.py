"""An aggregator's side of a roll-out, played by a test: it offers a bundle, and answers requests with pieces."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from edge_peer import FLEET, Peer

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Message, Piece, Request
from protofleet.contract.wire.rollout_messages import MAX_PIECES, Offer

SEED = bytes(range(32))


def trusted(folder: Path) -> Path:
    """A file of the public key of `SEED`."""
    path = folder / "key.pub"
    path.write_bytes(Ed25519PrivateKey.from_private_bytes(SEED).public_key().public_bytes_raw())
    return path


def offer_of(path: Path, fleet: str = "", **fields: object) -> Offer:
    """An offer of this bundle to all devices."""
    found = read_bundle(path)
    named = {"sha256": found.sha256, "version": found.manifest.version, "size_bytes": path.stat().st_size}
    return Offer(**{**named, "fleet": fleet, **fields})  # type: ignore[arg-type]


class RolloutPeer(Peer):
    """`requests` keeps every request; `lost` says which pieces, by their number, do not arrive."""

    signer = Signer(SEED)

    def __init__(self, url: str, bundle: Bundle, *, piece_bytes: int = 20_000) -> None:
        self.requests: list[Request] = []
        self.blobs: dict[bytes, bytes] = {}
        self.lost: Callable[[int], bool] = lambda number: False
        self._piece_bytes, self._sent, self._offer = piece_bytes, 0, None
        super().__init__(url, bundle)

    def offer(self, path: Path, fleet: str = "") -> None:
        """From the next announcement on."""
        self._offer = offer_of(path, fleet)
        self.blobs[self._offer.digest] = path.read_bytes()

    def announce(self, number: int, method: str = "ffc", **fields: object) -> None:  # type: ignore[override]
        super().announce(number, method, **{"offer": self._offer, **fields})  # type: ignore[arg-type]

    def receive(self, timeout_s: float = 0.1) -> Message | None:
        message = super().receive(timeout_s)
        if isinstance(message, Request):
            self.requests.append(message)
            self._answer(message)
        return message

    def told(self, name: str) -> str:
        """What the newest birth says."""
        online = [status for status in self.statuses if status.online]
        return online[-1].versions.get(name, "") if online else ""

    def wait_for(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Receive until it holds."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, [status.versions for status in self.statuses[-3:]]
            self.receive()

    def _answer(self, asked: Request) -> None:
        blob, at = self.blobs[asked.bundle], asked.offset
        end = min(asked.offset + asked.wanted_bytes, len(blob))
        for _ in range(MAX_PIECES):
            data = blob[at : min(at + self._piece_bytes, end)]
            if not data:
                return
            self._sent += 1
            if not self.lost(self._sent):
                self.publish(topics.down(FLEET, "pi-1"), encode(Piece(asked.run, asked.bundle, at, data)))
            at += len(data)


__all__ = ["SEED", "Announcement", "RolloutPeer", "offer_of", "trusted"]
