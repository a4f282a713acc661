"""A gateway's connection up, beside a bystander that speaks for the aggregator above."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from aggregator_server_samples import Listener
from brokers import Embedded
from gateway_samples import whole

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Message, Status
from protofleet.contract.wire.rollout_messages import APART
from protofleet.edge_client.settings import ClientSettings
from protofleet.gateway.uplink import Uplink

__all__ = ["whole"]

FLEET = "fleet"
ROUND, STATUS = topics.round_(FLEET), topics.status(FLEET, "site")


@pytest.fixture
def url() -> Iterator[str]:
    broker = Embedded()
    broker.start()
    yield broker.url
    broker.stop()


def test_a_gateway_says_that_the_bundle_above_does_not_fit_until_it_does(
    url: str, tmp_path: Path, whole: Bundle
) -> None:
    """Once for each change, as a device does: the aggregator above awaits it no more."""
    settings = ClientSettings(bundle="", broker=url, id="site", state=str(tmp_path / "up"), fleet=FLEET)
    uplink = Uplink(settings, whole)
    foreign = Announcement(run=b"run1", round=1, phase="open", method="fedproto", bundle=b"x" * 32)

    with Listener(url, STATUS) as above:

        def says(apart: str | None) -> bool:
            def found(message: Message) -> bool:
                return isinstance(message, Status) and message.online and message.versions.get(APART) == apart

            for _ in range(300):
                uplink.turn(None, 0.02)
                try:
                    above.until(found, 0.02)
                except AssertionError:
                    continue
                return True
            return False

        uplink.open()
        try:
            assert says(None)
            above.link.publish(ROUND, encode(foreign), retain=True)
            assert says("another bundle")
            told = len(above.heard)
            for _ in range(20):
                uplink.turn(None, 0.02)
            above.link.publish(ROUND, encode(replace(foreign, bundle=whole.sha256)), retain=True)
            assert says(None)
            assert sum(isinstance(message, Status) for _, message in above.heard[told:]) == 1
        finally:
            uplink.close()
