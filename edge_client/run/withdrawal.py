"""A device takes its sums out of the fleet's standing sums: `protofleet client --withdraw`.

It needs the state directory only, neither samples nor a network. The next generation is numbered and kept there:

1. Wait for the announcement under which sums stand.
2. Write the withdrawal into the journal. It takes the place of what is still on its way.
3. Send it. Send it again after each reconnection and every few seconds, until the aggregator's receipt is in the
   journal, too.

The aggregator removes what it holds of this device, and makes the sums again without it. It refuses the device until an
operator admits it again. Where a roll-out took the device to another fleet, the device withdraws from both fleets. The
withdrawal is signed with the device's key, where it has one.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from protofleet.contract.errors import LinkError, UsageError, WireError
from protofleet.contract.identity.signing_keys import read_public_keys
from protofleet.contract.methods import load_method
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Failed, Link, Noticed, Received, client_id
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import MAX_ROUND, Announcement, Contribution, Receipt
from protofleet.edge_client.identity.signing_identity import Identity, identity_of
from protofleet.edge_client.identity.trust import Trust
from protofleet.edge_client.journal.journal import FILE, Journal, Key
from protofleet.edge_client.rollout.active_bundle import find_active_bundle
from protofleet.edge_client.rollout.rollout_decisions import InstalledBundle
from protofleet.edge_client.rollout.rollout_file import RolloutFile
from protofleet.edge_client.settings import ClientSettings

__all__ = ["withdraw"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Credentials:
    """The keys that the device trusts, and the key it signs with."""

    trusted: tuple[bytes, ...]
    identity: Identity


_AGAIN_S, _PATIENCE_S = 5.0, 60.0


def withdraw(settings: ClientSettings) -> None:
    """Withdraw this device's sums; returns once the aggregator has confirmed it.

    Raises:
        LinkError: no broker, no aggregator or no receipt within the patience; what was begun goes on the next time.
        UsageError: the fleet has rounds, and no standing sums.
        StoreError: the state directory cannot be used.
    """
    address = Address.parse(settings.broker, ca_file=settings.ca, cert_file=settings.cert, key_file=settings.key)
    if settings.method is not None:
        load_method(settings.method)
    keys = () if settings.trust is None else read_public_keys(settings.trust)
    credentials = _Credentials(keys, identity_of(settings))
    with RolloutFile(Path(settings.state), make=False) as file:
        active = find_active_bundle(settings, file, keys, starts=False)
        try:
            with active.journal() as journal:
                _Withdrawal(active.settings, journal, address, credentials).run()
        finally:
            _withdraw_before(settings, file, active.installed, address, credentials)


def _withdraw_before(
    settings: ClientSettings,
    file: RolloutFile,
    installed: InstalledBundle,
    address: Address,
    credentials: _Credentials,
) -> None:
    """Withdraw also in the fleet that a roll-out took the device from, if sums of it may stand there."""
    before = file.known.previous
    if (
        before is None
        or before.directory == installed.directory
        or not (file.state / before.directory / FILE).is_file()
    ):
        return
    owner = {"fleet": before.fleet, "device": settings.id, "bundle": bytes.fromhex(before.sha256)}
    with Journal(file.state / before.directory, **owner) as journal:  # type: ignore[arg-type]
        if journal.standing.may_stand():
            logger.info(f"a roll-out took this device from fleet {before.fleet}")
            _Withdrawal(replace(settings, fleet=before.fleet), journal, address, credentials).run()


class _Withdrawal:
    def __init__(
        self,
        settings: ClientSettings,
        journal: Journal,
        address: Address,
        credentials: _Credentials,
    ) -> None:
        self._settings, self._journal, self._address = settings, journal, address
        self._patience_s = _PATIENCE_S if settings.patience is None else settings.patience
        self._key: Key | None = None
        self._payload = b""
        self._done = False
        fleet, device = settings.fleet, settings.id
        self._identity = credentials.identity
        self._trust = Trust(credentials.trusted, credentials.identity, journal.issued, fleet=fleet, device_id=device)
        self._up, self._down, self._round = topics.up(fleet, device), topics.down(fleet, device), topics.round_(fleet)
        self._link = Link(address, client_id(fleet, device), subscriptions=[self._round, self._down])

    def run(self) -> None:
        self._link.open()
        try:
            self._link.wait_connected(self._patience_s)
            deadline_s, again_s = time.monotonic() + self._patience_s, float("-inf")
            while not self._done:
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    raise self._too_late()
                if self._key is not None and now_s >= again_s and self._link.publish(self._up, self._payload):
                    again_s = now_s + _AGAIN_S
                known = self._key
                self._handle(self._link.receive(0.2))
                if self._key != known or known is None:
                    again_s = float("-inf")
        finally:
            self._link.close()
        fleet = self._settings.fleet
        logger.info(
            f"withdrawn: nothing of this device is in fleet {fleet}'s sums any more, and it is refused until admitted; "
            "a client that is started here again sends its sums again"
        )

    def _handle(self, event: object) -> None:
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Noticed):
            logger.info(event.line)
        if isinstance(event, Connected | Disconnected) or not isinstance(event, Received):
            return
        try:
            message = self._trust.opened(event) if event.payload else None
        except WireError as error:
            logger.warning(f"skipped a message on {event.topic}: {error}")
            message = None
        if isinstance(message, Announcement) and event.topic == self._round:
            self._announced(message)
        elif isinstance(message, Receipt) and event.topic == self._down:
            self._received(message)
        self._link.acknowledge(event)

    def _announced(self, a: Announcement) -> None:
        if a.phase != "standing":
            raise UsageError(
                "--withdraw",
                expected="a fleet whose sums stand",
                got=f"one with rounds ({a.method})",
                hint="protofleet forget, where its aggregator's store is",
            )
        if self._key is None or self._key[0] != a.run:
            self._begin(a.run, a.method, a.bundle, a.extractor, a.limit_bytes)

    def _begin(self, run: bytes, method: str, bundle: bytes, extractor: bytes, limit_bytes: int) -> None:
        """Number the withdrawal above all that was sent, and keep it."""
        generation, _ = self._journal.standing.newest(run)
        if generation >= MAX_ROUND:
            raise UsageError(
                "--withdraw",
                expected=f"sums numbered below {MAX_ROUND}",
                got=f"{generation}, above which there is no number",
                hint="protofleet forget, where its aggregator's store is",
            )
        self._key = key = (run, generation + 1, method)
        withdrawal = Contribution.withdrawal(run=run, round=key[1], method=method, bundle=bundle, extractor=extractor)
        self._payload = self._identity.sealed(self._up, encode(withdrawal))
        self._again = (method, bundle, extractor, limit_bytes)
        metrics = {"standing": key[1], "withdrawn": True, "payload_bytes": len(self._payload)}
        self._journal.standing.commit(
            key, samples=None, payload=self._payload, limit_bytes=limit_bytes, metrics=metrics
        )
        logger.info(f"withdrawing this device's sums from run {run.hex()}")

    def _received(self, receipt: Receipt) -> None:
        if self._key is None or (receipt.run, receipt.round, receipt.method) != self._key:
            return
        is_mine = receipt.digest in (b"", hashlib.sha256(self._payload).digest()[:8])
        if receipt.status == "rejected" and not is_mine:  # of other bytes, which somebody sent in this device's name
            return
        self._journal.record_receipt(receipt, len(self._payload))
        if receipt.status == "late":  # the aggregator holds a newer generation: this state directory is an old one
            self._journal.standing.unsent(receipt.run, receipt.held)
            self._begin(receipt.run, *self._again)
        elif receipt.status == "rejected":
            raise LinkError("--withdraw", expected="the aggregator to take it", got=f"refused: {receipt.reason}")
        elif receipt.status in ("committed", "duplicate"):
            self._done = True

    def _too_late(self) -> LinkError:
        patience_s = self._patience_s
        if self._key is None:
            refused = self._trust.refused
            got, hint = "no announcement, so NOT yet withdrawn", "starting its aggregator"
            if refused:
                got, hint = f"{refused} messages that no trusted key has signed", "protofleet aggregate --sign KEY"
        else:
            got, hint = "no receipt, so NOT yet withdrawn", "the same command again: the withdrawal is kept"
        expected = f"an answer of the fleet's aggregator within {patience_s:g} s"
        return LinkError(f"--withdraw at {self._address}", expected=expected, got=got, hint=hint)
