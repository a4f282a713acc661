"""The embedded MQTT 5 broker: rumqttd, from the PyPI package `iotcore`, in a child process.

It is for demos, tests and small fleets. It listens on loopback unless told otherwise, since it has no topic ACL and no
TLS here, and passwords only where it is given them. It forgets everything when it ends; end-to-end receipts make that
safe. Production uses Mosquitto with the shipped `deploy/mosquitto.conf`, or a broker cluster.

`iotcore`'s keyword arguments give an MQTT 3.1.1 listener with payloads up to 20 KB. MQTT 5 and larger payloads need a
TOML file, so one is written for the start. rumqttd cannot be stopped from within, so it runs in a child process. The
child ends by itself when this process ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from protofleet.contract.errors import LinkError, UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.mqtt.address import in_url
from protofleet.contract.settings.toml_text import toml_value

if TYPE_CHECKING:
    from iotcore import Broker

__all__ = ["MAX_PAYLOAD_BYTES", "EmbeddedBroker", "try_to_listen"]

MAX_PAYLOAD_BYTES = 8 << 20
_SEGMENT_BYTES = 32 << 20  # what rumqttd keeps in memory for each subscription filter: four of these

_TRIES = 3
_CONFIG = """
id = 0
[router]
id = 0
max_connections = 10010
max_outgoing_packet_count = 200
max_segment_size = {segment_bytes}
max_segment_count = 4
[v5.protofleet]
name = "protofleet"
listen = "{host}:{port}"
next_connection_delay_ms = 0
[v5.protofleet.connections]
connection_timeout_ms = 60000
max_payload_size = {payload_bytes}
max_inflight_count = 100
dynamic_filters = true
"""


class EmbeddedBroker:
    """A broker that runs from `start` to `stop`; a context manager.

    Args:
        host: the address to listen on.
        port: 0 for any free one.
        passwords: by user. Who gives none of them is not let in; where there are none, everybody is.

    Raises:
        UsageError: when `iotcore` is not installed, or the address cannot be listened on.
        LinkError: when the broker does not come up.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, passwords: Mapping[str, str] | None = None) -> None:
        self.host, self.port = host, port
        self._passwords = dict(passwords or {})
        self._broker: Broker | None = None

    @property
    def url(self) -> str:
        """`mqtt://host:port`, for a client on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"mqtt://{in_url(host)}:{self.port}"

    @property
    def running(self) -> bool:
        return self._broker is not None and self._broker.is_running

    @property
    def pid(self) -> int:
        """The child process."""
        process = self._broker._process if self._broker is not None else None
        if process is None:
            raise LinkError("broker", expected="a running broker", got="none")
        return int(process.pid)

    def start(self) -> EmbeddedBroker:
        """Start it and return once it accepts connections."""
        port = self.port
        for _ in range(1 if port else _TRIES - 1):  # another process may take a free port before the broker does
            try:
                return self._start_on(_free_port(self.host, port))
            except LinkError:
                if port:
                    raise
        return self._start_on(_free_port(self.host, port))

    def _start_on(self, port: int) -> EmbeddedBroker:
        broker_type = _import_broker()
        self.port = port
        with tempfile.TemporaryDirectory(prefix="protofleet-broker-") as folder:
            config = os.path.join(folder, "rumqttd.toml")
            with open(config, "w", encoding="utf-8") as file:
                file.write(
                    _CONFIG.format(
                        host=in_url(self.host),
                        port=self.port,
                        segment_bytes=_SEGMENT_BYTES,
                        payload_bytes=MAX_PAYLOAD_BYTES,
                    )
                    + _auth_table(self._passwords)
                )
            broker = broker_type(config_path=config)
            try:
                broker.start()
            except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                _stop(broker)
                raise LinkError(f"broker on {self.host}:{self.port}", expected="it to start", got=error) from None
        self._broker = broker
        return self

    def stop(self) -> None:
        """End it; what it held in memory is gone."""
        if self._broker is not None:
            _stop(self._broker)
            self._broker = None

    def __enter__(self) -> EmbeddedBroker:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _stop(broker: Broker) -> None:
    """End its process; one that was killed and takes long to go, on a machine that stands still, goes by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        broker.stop()


def _auth_table(passwords: Mapping[str, str]) -> str:
    if not passwords:
        return ""
    users = [f"{toml_value(user)} = {toml_value(password)}" for user, password in passwords.items()]
    return "\n".join(["[v5.protofleet.connections.auth]", *users, ""])


def _import_broker() -> type[Broker]:
    try:
        from iotcore import Broker
    except ModuleNotFoundError:
        raise UsageError(
            "the embedded broker needs a package that is not installed",
            expected="iotcore",
            got="nothing",
            hint=install_command("broker"),
        ) from None
    return Broker


def _free_port(host: str, port: int) -> int:
    """`port`, or a free one for 0, once it is sure that it can be listened on."""
    try:
        return try_to_listen(host, port)
    except OSError as error:
        raise UsageError(
            "--listen", expected="an address that is free", got=f"{host}:{port}: {error.strerror}", hint="another port"
        ) from None


def try_to_listen(host: str, port: int) -> int:
    """Listen there for a moment; returns the port, a free one for 0.

    Raises:
        OSError: the address cannot be listened on.
    """
    (family, kind, _, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with contextlib.closing(socket.socket(family, kind)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        return int(probe.getsockname()[1])
