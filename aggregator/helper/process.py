"""The helper's loop: one thread that joins a link with `opening.py`.

It listens on one topic and publishes on one. A question is acknowledged once its answer was handed over. If the answer
is lost on the way, the aggregator asks again, and gets the same answer.
"""

from __future__ import annotations

import logging
import threading
import time

import numpy as np

from protofleet.aggregator.helper.opening import Answer, Helper
from protofleet.contract.console.logs import Changes, of_round
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import LinkError, UsageError, WireError
from protofleet.contract.identity.signatures import Keyring, Signer
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Failed, Link, Noticed, Received, client_id
from protofleet.contract.printable import counted
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import Signed
from protofleet.contract.wire.helper_messages import Opened, Opening, parts_of

__all__ = ["HelperServer"]

logger = logging.getLogger(__name__)

_LARGEST_BYTES = 65_536  # of what is answered
_AROUND_BYTES = 512  # of a message that is not words, with the signature around it
_TURN_S = 5.0
_HANGS_S = 120.0


class HelperServer:
    """Serves one fleet.

    Args:
        helper: decides.
        signer: signs answers.
        trusted: the keys whose signed questions are heard; None for all questions. The only risk of an unknown sender
            is that it could use up shares.
        stopping: ends `run` once it is set.
    """

    def __init__(
        self,
        helper: Helper,
        signer: Signer,
        address: Address,
        fleet: str,
        *,
        trusted: Keyring | None,
        stopping: threading.Event,
        manager: ServiceManager | None = None,
    ) -> None:
        self._helper, self._signer, self._trusted = helper, signer, trusted
        self._stopping, self._manager = stopping, manager or ServiceManager({})
        self._ask, self._answer = topics.helper_ask(fleet), topics.helper_answer(fleet)
        self._address, self._limit_bytes, self._changes = address, _LARGEST_BYTES, Changes(logger)
        self._link = Link(address, client_id(fleet, "helper"), subscriptions=[self._ask], largest_bytes=1 << 20)

    def run(self) -> None:
        """Serve until `stopping` is set.

        Raises:
            LinkError: the broker refuses us for good.
            StoreError: the disk refuses.
        """
        self._link.open()
        self._manager.ready()
        try:
            while not self._stopping.is_set():
                event = self._link.receive(_TURN_S)
                if event is not None:
                    self._take(event)
                if self._link.still_s < _HANGS_S:
                    self._manager.alive()
        finally:
            self._manager.stopping()
            self._link.close()

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._stopping.set()
        self._link.wake()

    def _take(self, event: object) -> None:
        if isinstance(event, Received):
            self._hear(event)
            self._link.acknowledge(event)
        elif isinstance(event, Connected):
            self._limit_bytes = min(event.limit_bytes, _LARGEST_BYTES)
            self._changes.say(f"connected to {self._address}")
        elif isinstance(event, Disconnected):
            self._changes.say(f"no connection ({event.reason})")
        elif isinstance(event, Noticed):
            logger.info(event.line)
        elif isinstance(event, Failed):
            raise event.error

    def _hear(self, received: Received) -> None:
        try:
            message = decode(received.payload)
            if isinstance(message, Signed):
                inner = message.payload if self._trusted is None else self._trusted.payload(message, self._ask)
                message = decode(inner)
            elif self._trusted is not None:
                raise WireError("what is asked", expected="the aggregator's signature", got="none")
            if not isinstance(message, Opening):
                raise WireError("message", expected="an opening", got=type(message).__name__.lower())
            answer = self._helper.take(message, time.time())
        except WireError as error:
            self._changes.say(f"skipped a message: {error}")
            return
        except UsageError as error:  # the list of devices, while somebody writes it: it is asked for again
            self._changes.say(f"not answered: {error}")
            return
        if answer is not None:
            self._tell(answer)

    def _tell(self, answer: Answer) -> None:
        a = answer.asked
        what = f"round {a.round} ({a.method}) of run {a.run.hex()}"
        extra = of_round((a.run, a.round, a.method))
        if answer.total is None:
            first = "; ".join(f"{device}: {why}" for device, why in list(answer.refused.items())[:3])
            logger.warning(f"{what}: not opened: {answer.reason}{f' ({first})' if first else ''}", extra=extra)
        elif answer.again:
            logger.info(f"{what}: told once more", extra=extra)
        else:
            logger.info(f"{what}: opened the sum of {counted(answer.devices, 'device')}", extra=extra)
        for part in self._parts(answer):
            payload = self._signer.sign(self._answer, encode(part))
            if not self._link.publish(self._answer, payload):
                return  # it is asked for again

    def _parts(self, answer: Answer) -> list[Opened]:
        a = answer.asked
        key = (a.run, a.round, a.method, a.digest)
        if answer.total is None:
            return [self._refusal(key, answer)]
        part_words = (self._limit_bytes - _AROUND_BYTES) // 8
        if part_words < 1:
            raise LinkError("broker", expected="room for an answer", got=f"{self._limit_bytes} bytes")
        count = parts_of(len(answer.total), part_words)
        cuts = [answer.total[n * part_words : (n + 1) * part_words] for n in range(count)]
        return [Opened(*key, n, count, "opened", words) for n, words in enumerate(cuts)]

    def _refusal(self, key: tuple[bytes, int, str, bytes], answer: Answer) -> Opened:
        """As many devices as a message holds are named; the next ones are once these are left out."""
        named, none = list(answer.refused.items()), np.zeros(0, np.uint64)
        while True:
            part = Opened(*key, 0, 1, "refused", none, answer.reason[:200], dict(named))
            if not named or len(encode(part)) + _AROUND_BYTES <= self._limit_bytes:
                return part
            named = named[: len(named) // 2]
