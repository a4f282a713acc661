"""Mosquitto's configuration and access rules, as text that follows from the book.

The rules name every user, that is, every certificate. A user without a rule may do nothing. Three things follow:

- The rules bind a fleet to its members, and names do not.
- A device may be in several fleets while it moves from one to another.
- A revoked member loses its rights as soon as Mosquitto reads the rules again, also on an open connection. Mosquitto
  itself checks the revocation list only when a client connects.
"""

from __future__ import annotations

from collections.abc import Iterator

from protofleet.contract.wire.topics import PREFIX
from protofleet.pki.names import AGGREGATOR, HELPER, ROLLOUT
from protofleet.pki.register import Book, Member

__all__ = ["access_rules", "configuration"]

_CONFIGURATION = """\
# Mosquitto (2.0 or later) for Protofleet, as `protofleet pki` writes it: whoever connects is what its certificate says.
# deploy/README.md says how to install it. Made anew by the same command: put lines of yours into a file of your own.

# One listener, TLS only. Nothing listens without it.
listener {port}
cafile {place}/ca.pem
certfile {place}/broker.pem
keyfile {place}/broker.pem
crlfile {place}/crl.pem
tls_version tlsv1.2

# The certificate's name (CN) becomes the user, to whom `acl` gives its topics, and the client id, whatever id was asked
# for: nobody can take another's session, and there is one session for each certificate.
require_certificate true
use_identity_as_username true
use_username_as_clientid true
allow_anonymous false
acl_file {place}/acl

# Retained announcements, the global state and the births of devices survive a restart; sessions are not kept by ours.
# What is lost when the power goes within the interval is sent again by those who have no receipt for it.
persistence true
persistence_location /var/lib/mosquitto/
autosave_interval 60
persistent_client_expiration 7d

# Protofleet's messages are at most 64 KiB unless --limit-bytes says otherwise; a client learns this limit when it
# connects, and never sends more. Everything a client can make the broker hold is bounded.
max_packet_size 131072
max_inflight_messages 20
max_queued_messages 10000
max_queued_bytes 67108864
max_keepalive 300
max_connections 12000
max_topic_alias 0
retain_available true

log_dest stderr
log_type error
log_type warning
log_type notice
connection_messages true
"""


def configuration(book: Book) -> str:
    """`mosquitto.conf`."""
    return _CONFIGURATION.format(port=book.port, place=book.place.rstrip("/"))


def access_rules(book: Book) -> str:
    """`acl`: a section for each member that is not revoked."""
    head = [
        "# Who may do what, as `protofleet pki` writes it: a user is the CN of a certificate, and what is not allowed",
        "# here is denied. Read again on SIGHUP (systemctl reload mosquitto), and no connection is dropped.",
    ]
    live = {name: member for name, member in sorted(book.live().items()) if member.role != "broker"}
    sections = ["\n".join(["", f"user {name}", *_topics(book, name, member)]) for name, member in live.items()]
    return "\n".join([*head, *sections]) + "\n"


def _topics(book: Book, name: str, member: Member) -> Iterator[str]:
    for fleet in member.fleets:
        topic = f"{PREFIX}/{fleet}"
        if member.role == "device":
            yield f"topic read {topic}/round"
            yield f"topic read {topic}/global/+"
            yield f"topic read {topic}/down/{name}"
            yield f"topic readwrite {topic}/status/{name}"
            yield f"topic write {topic}/up/{name}"
        elif member.role == HELPER:
            yield f"topic read {topic}/helper/ask"
            yield f"topic write {topic}/helper/answer"
        elif member.role == AGGREGATOR and name.endswith(f".{ROLLOUT}"):
            yield from (f"topic read {PREFIX}/{any_fleet}/status/+" for any_fleet in book.fleets)
        elif member.role == AGGREGATOR:
            yield f"topic readwrite {topic}/round"
            yield f"topic readwrite {topic}/global/+"
            yield f"topic write {topic}/down/+"
            yield f"topic readwrite {topic}/status/+"
            yield f"topic read {topic}/up/+"
            yield f"topic write {topic}/helper/ask"
            yield f"topic read {topic}/helper/answer"
    yield from (f"topic read {topic}" for topic in member.read)
    yield from (f"topic write {topic}" for topic in member.write)
