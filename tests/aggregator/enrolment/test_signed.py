"""An aggregator that signs, over a real broker that anyone may write to: who poses as it ends and hides nothing."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aggregator_samples import BUNDLE, contribution
from aggregator_server_samples import FLEET, SETTINGS, Listener, Running, wait
from brokers import Embedded

from protofleet.aggregator.enrolment import signed_publisher as signed_voice
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.identity.signatures import Keyring, Signer
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, Receipt, Signed, Status

AGGREGATOR, DEVICE = Signer(bytes(range(32))), Signer(b"o" * 32)
UP, ROUND = topics.up(FLEET, "a"), topics.round_(FLEET)
SEAT = topics.status(FLEET, topics.AGGREGATOR)


@pytest.fixture
def url() -> Iterator[str]:
    broker = Embedded()
    broker.start()
    yield broker.url
    broker.stop()


def test_who_poses_as_the_aggregator_is_named_and_overwritten(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signed_voice, "_MEND_EACH_S", 0.5)
    ring, forged = Keyring([AGGREGATOR.public_key]), Announcement(b"evil", 9, "finished", "ncm", BUNDLE)
    with DurableStore(tmp_path / "s", BUNDLE, FLEET) as store, Listener(url, ROUND, SEAT) as hostile:
        running = Running(url, store, BUNDLE, SETTINGS, signer=AGGREGATOR)
        first = hostile.until(lambda m: isinstance(m, Signed) and isinstance(decode(m.payload), Announcement))
        assert isinstance(first, Signed)
        assert decode(ring.payload(first, ROUND)).issued > 1e12  # type: ignore[union-attr]
        hostile.link.publish(SEAT, encode(Status(True, b"evilevil", 2**32 - 1)), retain=True)
        for overwrites in (encode(forged), b""):  # a forged one, and none
            hostile.link.publish(ROUND, overwrites, retain=True)
            assert hostile.until(lambda m: m == first) == first  # the very same: nothing has changed
        wait(lambda: running.told(events.IntruderTold))
        assert {told.device for told in running.told(events.IntruderTold)} == {topics.AGGREGATOR}  # type: ignore[attr-defined]
        assert not running.ended


def test_a_flood_in_a_devices_name_takes_none_of_its_answers(url: str, tmp_path: Path) -> None:
    down = topics.down(FLEET, "a")
    with DurableStore(tmp_path / "s", BUNDLE, FLEET) as store, Listener(url, down) as device:
        store.enrolment.enrol("a", DEVICE.public_key, time.time())
        running = Running(url, store, BUNDLE, SETTINGS)
        wait(lambda: running.told(events.LinkUp))
        said = [encode(contribution(run=b"run%d" % number)) for number in range(5)]
        for number in range(60):
            device.link.publish(UP, said[number % 4])
        mine = DEVICE.sign(UP, said[4])
        device.link.publish(UP, mine)
        digest = hashlib.sha256(mine).digest()[:8]
        answer = device.until(lambda m: isinstance(m, Receipt) and m.digest == digest)
        assert "this aggregator's is" in answer.reason  # type: ignore[union-attr]
        refused = [m for _, m in device.heard if isinstance(m, Receipt) and m.digest != digest]
        assert 1 <= len(refused) <= 10  # of sixty
