"""The values of `protofleet.contract.mqtt.connection`: its limits, its actions, and the events of a link."""

from __future__ import annotations

from dataclasses import dataclass

from protofleet.contract.errors import LinkError

__all__ = [
    "Acknowledge",
    "Action",
    "Connected",
    "Dial",
    "Disconnected",
    "Event",
    "Failed",
    "Hangup",
    "Limits",
    "Noticed",
    "Received",
    "Send",
    "Subscribe",
    "Tell",
    "Terms",
]

# ── for the owner ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Connected:
    """The broker accepted us and all subscriptions. `limit_bytes` is the largest payload it takes."""

    limit_bytes: int


@dataclass(frozen=True)
class Disconnected:
    """The connection ended or could not be made; the link tries again after `retry_s` seconds."""

    reason: str
    retry_s: float


@dataclass(frozen=True)
class Failed:
    """The link has given up: trying again cannot help."""

    error: LinkError


@dataclass(frozen=True)
class Received:
    """A message. Acknowledge it once its effect is durable: until then it takes room in the broker's window.

    Attributes:
        mid: its packet id; 0 at QoS 0, which is never acknowledged.
        connection: the number of the connection it came on.
    """

    topic: str
    payload: bytes
    retained: bool
    mid: int
    connection: int


@dataclass(frozen=True)
class Noticed:
    """A line for a person while the link goes on: a certificate expires, or cannot be used."""

    line: str


Event = Connected | Disconnected | Failed | Noticed | Received

# ── for the shell ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Dial:
    """Make connection number `connection`."""

    connection: int


@dataclass(frozen=True)
class Subscribe:
    """Ask for these topics at QoS 1."""

    topics: tuple[str, ...]


@dataclass(frozen=True)
class Send:
    """Publish at QoS 1; `published` with this ticket is the answer."""

    ticket: int
    topic: str
    payload: bytes
    retain: bool


@dataclass(frozen=True)
class Acknowledge:
    """Send the PUBACK of this packet id."""

    mid: int


@dataclass(frozen=True)
class Hangup:
    """End the connection; `polite` with a DISCONNECT, so that the last will is not published."""

    polite: bool


@dataclass(frozen=True)
class Tell:
    """An event for the owner."""

    event: Event


Action = Dial | Subscribe | Send | Acknowledge | Hangup | Tell

# ── what the connection goes by ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Terms:
    """The terms of the broker's CONNACK; MQTT's defaults where it names none."""

    receive_maximum: int = 65_535
    maximum_qos: int = 2
    packet_bytes: int = 1 << 28
    retains: bool = True
    shares: bool = True


@dataclass(frozen=True)
class Limits:
    """The settings of a link that its connections need.

    Attributes:
        broker, client_id: for errors.
        subscriptions: topic filters.
        echo_topic: one of the subscribed topics; what is published there must come back.
        receive_maximum: the number of unacknowledged messages that the broker may deliver.
        packet_bytes: the largest packet that it may deliver; no bound when None.
    """

    broker: str
    client_id: str
    subscriptions: tuple[str, ...]
    echo_topic: str | None = None
    receive_maximum: int = 65_535
    packet_bytes: int | None = None
