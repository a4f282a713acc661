"""Which broker Home Assistant is at, and how a device is taken out of it: `client --remove-home-assistant`.

What a broker retains of the device is replaced by empty messages. Home Assistant then removes its entities.
"""

from __future__ import annotations

import logging
import os
import time

from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.link import Link
from protofleet.edge_client.home_assistant.discovery import Topics
from protofleet.edge_client.settings import FLEETS_BROKER, ClientSettings

__all__ = ["address_of", "remove"]

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_LOOK_S = 0.05


def address_of(settings: ClientSettings) -> Address:
    """The broker of `--home-assistant`.

    Raises:
        UsageError: it is no address, or a certificate file is missing.
    """
    files = {"ca_file": settings.ca, "cert_file": settings.cert, "key_file": settings.key}
    if settings.home_assistant == FLEETS_BROKER:
        return Address.parse(settings.broker, **files).of_process("home-assistant")
    url = settings.home_assistant or ""
    ca_file = settings.ca if url.lower().startswith("mqtts") else None
    return Address.parse(url, ca_file=settings.home_assistant_ca or ca_file)


def remove(settings: ClientSettings) -> None:
    """Take the device out of Home Assistant; returns once the broker has confirmed it.

    Raises:
        LinkError: no broker within a minute, or it refuses.
        UsageError: the address is none.
    """
    address, topics = address_of(settings), Topics(settings.fleet, settings.id)
    link = Link(address, f"pf-house-{os.urandom(6).hex()}", subscriptions=(), content_type="application/json").open()
    try:
        link.wait_connected(_PATIENCE_S)
        for topic in topics.retained:
            link.publish(topic, b"", retain=True)
        deadline = time.monotonic() + _PATIENCE_S
        while not link.idle:
            if time.monotonic() > deadline:
                raise LinkError(f"the broker at {address}", expected="three confirmations", got="none within a minute")
            time.sleep(_LOOK_S)
    finally:
        link.close()
    logger.info(f"{settings.id} is taken out of Home Assistant at {address}")
