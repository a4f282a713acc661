"""A real Mosquitto with the files that `protofleet pki` writes, attacked by those whom they are to keep out."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import paho.mqtt.client as mqtt
import pytest
from certificates import issue
from pki_samples import Authority, GuardedMosquitto, certificate, knock

from protofleet.commands import doctor
from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt import certificates as certificates_module
from protofleet.contract.mqtt.certificates import expiries
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Failed, Link, Noticed, Received
from protofleet.contract.wire import topics
from protofleet.pki.authority import Office
from protofleet.pki.register import Member
from protofleet.pki.x509 import new_member

PETS = "pf/v2/pets"
DEVICES = {"kitchen": ("pets",), "hall": ("pets",), "stolen": ("pets",), "stranger": ("cows",)}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority(tmp_path_factory.mktemp("attacked") / "pki", DEVICES, ("pets", "cows"))
    with Office.open(made.folder) as office:
        office.admit("helper", Member(role="helper", fleets=("pets",)))
    return made


@pytest.fixture(scope="module")
def broker(authority: Authority) -> Iterator[GuardedMosquitto]:
    broker = GuardedMosquitto(authority)
    yield broker
    broker.close()


def linked(authority: Authority, name: str, *filters: str, client_id: str = "") -> Link:
    link = Link(authority.address(name), client_id or f"test-{name}", subscriptions=filters).open()
    link.wait_connected(60)
    return link


def heard(link: Link, until: str) -> list[tuple[str, bytes]]:
    """What came on a link before a message on the topic `until`."""
    found: list[tuple[str, bytes]] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        event = link.receive(1.0)
        assert not isinstance(event, Disconnected | Failed), event
        if isinstance(event, Received):
            link.acknowledge(event)
            if event.topic == until:
                return found
            found.append((event.topic, event.payload))
    raise AssertionError(f"nothing on {until}, but {found}")


def denied(authority: Authority, name: str, topic: str, payload: bytes = b"forged") -> bool:
    """Whether a publication is refused."""
    link = linked(authority, name)
    link.publish(topic, payload, retain=True)
    told = link.receive(60)
    link.close()
    return isinstance(told, Disconnected) and "publish refused" in told.reason


class Stranger:
    """A client of paho's with a member's certificate, which does what ours never do."""

    def __init__(
        self,
        address: Address,
        *,
        client_id: str = "",
        protocol: mqtt.MQTTProtocolVersion = mqtt.MQTTv5,
        will: str = "",
        filters: Sequence[str] = (),
    ) -> None:
        self.heard: list[tuple[str, bytes]] = []
        self._answers = threading.Semaphore(0)
        self._client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2, client_id, protocol=protocol, reconnect_on_failure=False
        )
        self._client.tls_set_context(address.tls_context())
        if will:
            self._client.will_set(will, b"forged", qos=1, retain=True)
        self._client.on_message = lambda client, _, message: self.heard.append((message.topic, message.payload))
        for name in ("on_connect", "on_subscribe", "on_publish"):
            setattr(self._client, name, lambda *told: self._answers.release())
        self._client.connect(address.host, address.port)
        self._client.loop_start()
        assert self._answers.acquire(timeout=60)
        for topic in filters:
            self._client.subscribe(topic, 1)
            assert self._answers.acquire(timeout=60)

    def publish(self, topic: str, *, retain: bool = True) -> None:
        """Acknowledged by the broker, whether or not it heeds it."""
        self._client.publish(topic, b"forged", qos=1, retain=retain)
        assert self._answers.acquire(timeout=60)

    def vanish(self) -> None:
        """Without a goodbye."""
        sock = self._client.socket()
        assert sock is not None
        sock.shutdown(socket.SHUT_RDWR)
        self._client.disconnect()
        self._client.loop_stop()


def test_nobody_takes_anothers_session_by_its_client_id(authority: Authority, broker: GuardedMosquitto) -> None:
    """A device's certificate took over the aggregator's session 62 times in 40 s."""
    aggregator = linked(authority, "aggregator", f"{PETS}/up/+", client_id="pf-pets-aggregator-1a2b3c4d")
    hall = linked(authority, "hall", f"{PETS}/round", client_id="pf-pets-hall-0102030405060708")
    for asked in ("pf-pets-aggregator-1a2b3c4d", "aggregator", "pf-pets-hall-0102030405060708", "hall", ""):
        assert knock(authority.address("kitchen"), asked) == 0  # let in, as itself
    assert "as kitchen (p5" in broker.log
    assert "as pf-pets" not in broker.log
    hall.publish(f"{PETS}/up/hall", b"still here")
    assert heard(aggregator, f"{PETS}/up/hall") == []
    for link in (aggregator, hall):
        assert link.receive(0) is None  # the connection that it was
        link.close()


def test_a_device_of_another_fleet_neither_reads_nor_writes_this_ones(
    authority: Authority, broker: GuardedMosquitto
) -> None:
    """It was committed, and moved the global state to 1e6."""
    wanted = (f"{PETS}/round", f"{PETS}/global/+", f"{PETS}/down/+", "pf/v2/+/status/+", f"{PETS}/up/+", "#", "$SYS/#")
    spy = linked(authority, "stranger", *wanted, "pf/v2/cows/round")
    aggregator, other = linked(authority, "aggregator", f"{PETS}/up/+"), linked(authority, "aggregator.cows")
    for topic in ("round", "global/0", "down/kitchen"):
        aggregator.publish(f"{PETS}/{topic}", b"of pets", retain=topic != "down/kitchen")
    while not aggregator.idle:
        time.sleep(0.01)
    other.publish("pf/v2/cows/round", b"of cows")
    assert heard(spy, "pf/v2/cows/round") == []
    spy.close()
    for topic in ("up/stranger", "up/kitchen", "status/stranger", "round", "global/0"):
        assert denied(authority, "stranger", f"{PETS}/{topic}"), topic
    assert denied(authority, "aggregator.cows", f"{PETS}/round")
    for link in (aggregator, other):
        link.close()


def test_the_announcement_that_is_retained_is_nobodys_to_overwrite(
    authority: Authority, broker: GuardedMosquitto
) -> None:
    aggregator = linked(authority, "aggregator")
    aggregator.publish(f"{PETS}/round", b"true", retain=True)
    while not aggregator.idle:
        time.sleep(0.01)
    for payload in (b"forged", b""):  # an empty one would clear it
        assert denied(authority, "kitchen", f"{PETS}/round", payload)
    assert denied(authority, "kitchen", topics.status("pets", topics.AGGREGATOR))
    late = linked(authority, "hall", f"{PETS}/round", f"{PETS}/down/hall")
    aggregator.publish(f"{PETS}/down/hall", b"end")
    assert heard(late, f"{PETS}/down/hall") == [(f"{PETS}/round", b"true")]
    for link in (aggregator, late):
        link.close()


def test_a_wildcard_shows_a_device_nothing_of_its_neighbours(authority: Authority, broker: GuardedMosquitto) -> None:
    spy = linked(authority, "kitchen", "#", f"{PETS}/up/+", f"{PETS}/down/+", f"{PETS}/status/+", f"{PETS}/helper/#")
    hall, aggregator = linked(authority, "hall"), linked(authority, "aggregator")
    hall.publish(f"{PETS}/up/hall", b"prototypes")
    hall.publish(f"{PETS}/status/hall", b"birth", retain=True)
    aggregator.publish(f"{PETS}/down/hall", b"receipt")
    aggregator.publish(f"{PETS}/helper/ask", b"shares")
    while not (hall.idle and aggregator.idle):
        time.sleep(0.01)
    aggregator.publish(f"{PETS}/down/kitchen", b"end")
    told = heard(spy, f"{PETS}/down/kitchen")
    assert {topic for topic, _ in told} <= {f"{PETS}/round", f"{PETS}/global/0"}
    assert denied(authority, "kitchen", f"{PETS}/helper/answer")
    assert denied(authority, "kitchen", f"{PETS}/helper/ask")
    for link in (spy, hall, aggregator):
        link.close()


def test_no_will_older_protocol_or_shared_subscription_is_a_way_around(
    authority: Authority, broker: GuardedMosquitto
) -> None:
    """A client that is not ours: what MQTT has beside what we use."""
    aggregator, hall = linked(authority, "aggregator", f"{PETS}/up/+", f"{PETS}/status/+"), linked(authority, "hall")
    aggregator.publish(f"{PETS}/round", b"true", retain=True)
    while not aggregator.idle:
        time.sleep(0.01)
    for topic in ("round", "global/0", "status/hall", "status/aggregator", "up/hall"):
        Stranger(authority.address("kitchen"), will=f"{PETS}/{topic}").vanish()
    old = Stranger(authority.address("kitchen"), client_id="hall", protocol=mqtt.MQTTv311)  # is told of no refusal
    for topic in ("round", "up/hall", "up/kitchen/hall"):
        old.publish(f"{PETS}/{topic}")
    old.vanish()
    shared = [f"$share/g/{PETS}/{each}" for each in ("#", "up/+", "down/+")]
    spy = Stranger(authority.address("kitchen"), filters=shared)
    aggregator.publish(f"{PETS}/down/hall", b"a receipt")
    hall.publish(f"{PETS}/up/hall", b"prototypes")
    assert b"forged" not in {payload for _, payload in heard(aggregator, f"{PETS}/up/hall")}
    spy.publish(f"{PETS}/up/kitchen", retain=False)
    assert heard(aggregator, f"{PETS}/up/kitchen") == []
    hall.close()
    late = linked(authority, "hall", f"{PETS}/round", f"{PETS}/global/+", f"{PETS}/status/hall", f"{PETS}/down/hall")
    aggregator.publish(f"{PETS}/down/hall", b"end")
    told = heard(late, f"{PETS}/down/hall")
    assert (f"{PETS}/round", b"true") in told
    assert b"forged" not in {payload for _, payload in told}
    assert {topic for topic, _ in spy.heard} <= {f"{PETS}/round", f"{PETS}/global/0"}
    spy.vanish()
    for link in (aggregator, late):
        link.close()


def test_the_helper_hears_what_it_is_asked_and_answers_and_no_more(
    authority: Authority, broker: GuardedMosquitto
) -> None:
    helper = linked(authority, "helper", "#", f"{PETS}/+/+", f"{PETS}/helper/ask")
    aggregator = linked(authority, "aggregator", f"{PETS}/helper/answer")
    hall = linked(authority, "hall")
    hall.publish(f"{PETS}/up/hall", b"a contribution")
    hall.close()
    aggregator.publish(f"{PETS}/down/hall", b"a receipt")
    aggregator.publish(f"{PETS}/helper/ask", b"a set")
    assert heard(helper, f"{PETS}/helper/ask") == []
    helper.publish(f"{PETS}/helper/answer", b"its sum")
    assert heard(aggregator, f"{PETS}/helper/answer") == []
    for link in (helper, aggregator):
        link.close()
    for topic in ("helper/ask", "round", "up/hall", "down/hall"):
        assert denied(authority, "helper", f"{PETS}/{topic}"), topic


def test_an_aggregators_second_connection_hears_the_other_fleet_and_takes_no_session(
    authority: Authority, broker: GuardedMosquitto
) -> None:
    """A roll-out to another fleet: with the first one's certificate it would throw itself out."""
    first = linked(authority, "aggregator", f"{PETS}/up/+")
    own = authority.address("aggregator").of_process("rollout")
    second = Link(own, "x", subscriptions=["pf/v2/cows/status/+"]).open()
    second.wait_connected(60)
    other = linked(authority, "stranger")
    other.publish("pf/v2/cows/status/stranger", b"healthy")
    assert heard(second, "pf/v2/cows/status/stranger") == []
    assert first.receive(0) is None
    for link in (first, second, other):
        link.close()
    assert denied(authority, "aggregator.rollout", f"{PETS}/round")


def test_without_a_certificate_of_this_authority_nobody_gets_in(
    authority: Authority, broker: GuardedMosquitto, tmp_path: Path
) -> None:
    ca = str(authority.folder / "broker" / "ca.pem")
    for name, signed_by in (("aggregator", None), ("kitchen", issue(tmp_path, "their-own"))):
        issue(tmp_path, name, signed_by)
        forged = Address.parse(
            authority.url, ca_file=ca, cert_file=f"{tmp_path}/{name}.pem", key_file=f"{tmp_path}/{name}.key"
        )
        assert knock(forged) is None, name
    assert knock(authority.address(None)) is None
    assert knock(authority.address("broker")) is None  # a server's certificate is no client's
    assert knock(authority.address("kitchen")) == 0


def test_a_certificate_that_has_expired_is_of_no_use(
    authority: Authority, broker: GuardedMosquitto, tmp_path: Path
) -> None:
    signer = authority.signer()
    (tmp_path / "kitchen.pem").write_bytes(new_member(signer, "kitchen", int(time.time()) - 90_000, 1)[0])
    ca = str(authority.folder / "broker" / "ca.pem")
    expired = Address.parse(authority.url, ca_file=ca, cert_file=str(tmp_path / "kitchen.pem"))
    assert knock(expired) is None
    link = Link(expired, "x", subscriptions=[]).open()
    with pytest.raises(LinkError, match=r"got .*; certificate \S+kitchen.pem expired on \S+: protofleet pki renew"):
        link.wait_connected(1.0)
    link.close()


def test_a_clock_that_is_wrong_is_named(tmp_path: Path) -> None:
    """A board without a clock of its own starts in 1970, until the network has told it."""
    for ahead, said in ((2 * 86_400, "is not valid yet"), (-400 * 86_400, "has expired")):
        made = Authority(tmp_path / f"pki{ahead}", {"kitchen": ("fleet",)}, now=int(time.time()) + ahead)
        broker = GuardedMosquitto(made)
        link = Link(made.address("kitchen"), "x", subscriptions=[]).open()
        with pytest.raises(LinkError, match=f"the broker's certificate.* {said}, or this machine's clock is wrong"):
            link.wait_connected(0.3)
        link.close()
        broker.close()


def test_a_devices_certificate_does_not_make_a_broker(authority: Authority) -> None:
    """A device that sits between another and the broker shows the only certificate that it has."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.file("stolen"))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as plain, contextlib.suppress(OSError):
                context.wrap_socket(plain, server_side=True).close()

        thread = threading.Thread(target=serve)
        thread.start()
        ours = authority.address("kitchen").tls_context()
        ours.check_hostname = False  # the names in it do not fit either: it is the purpose that is asked about
        refused = pytest.raises(ssl.SSLError, match="certificate purpose")
        with socket.create_connection(server.getsockname()) as plain, refused:
            ours.wrap_socket(plain)
        thread.join(60)


def resumes(context: ssl.SSLContext, port: int, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession | None]:
    """Whether the broker goes on with an earlier TLS session, and the session that it gives a ticket for now."""
    connect = b"\x10\x0e\0\4MQTT\5\2\0\x3c\0\0\1x"
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        contextlib.suppress(OSError),
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as sock,
    ):
        sock.sendall(connect)
        if sock.recv(64)[:1] == b"\x20":
            return bool(sock.session_reused), sock.session
    return False, None


def test_who_is_revoked_is_out_at_once_and_nobody_else_notices(authority: Authority, broker: GuardedMosquitto) -> None:
    context = authority.address("stolen").tls_context()  # with the certificate as it is now
    _, session = resumes(context, authority.port, None)
    assert resumes(context, authority.port, session)[0]
    thief = linked(authority, "stolen", f"{PETS}/round", f"{PETS}/down/stolen")
    bystander, aggregator = linked(authority, "hall", f"{PETS}/down/hall"), linked(authority, "aggregator")
    with Office.open(authority.folder) as office:
        office.revoke("stolen")
    broker.reload()
    aggregator.publish(f"{PETS}/down/stolen", b"a receipt")
    aggregator.publish(f"{PETS}/round", b"announced")
    aggregator.publish(f"{PETS}/down/hall", b"end")
    assert heard(bystander, f"{PETS}/down/hall") == []
    assert thief.publish(f"{PETS}/up/stolen", b"prototypes")  # on the connection that it still has
    told = next(event for event in iter(lambda: thief.receive(60), None) if not isinstance(event, Received))
    assert isinstance(told, Disconnected)
    assert "publish refused" in told.reason
    assert knock(authority.address("stolen")) is None
    thief.close()
    with Office.open(authority.folder) as office:  # the board that takes its place
        office.admit("stolen", Member(role="device", fleets=("pets",)))
    broker.reload()
    assert knock(authority.address("stolen")) == 0
    assert resumes(context, authority.port, session) == (False, None)  # nor by a session of before
    for link in (bystander, aggregator):
        assert link.receive(0) is None
        link.close()


def test_a_renewed_certificate_is_taken_up_by_a_link_that_runs(
    authority: Authority, broker: GuardedMosquitto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a quiet moment, and the last will stays where it is."""
    monkeypatch.setattr(certificates_module, "LOOK_S", 0.2)
    monkeypatch.setattr(certificates_module, "SPREAD_S", 0.5)
    watcher = linked(authority, "aggregator", f"{PETS}/status/+", f"{PETS}/up/+")
    will = topics.status("pets", "kitchen"), b"last will"
    address = authority.address("kitchen")
    link = Link(address, "x", subscriptions=[f"{PETS}/down/kitchen"], will=will, keepalive_s=1).open()
    link.wait_connected(60)
    shown = authority.file("kitchen").read_bytes()
    authority.file("kitchen").write_bytes(shown[:300])
    told = link.receive(60)
    assert isinstance(told, Noticed)
    assert "certificate files have changed, but cannot be used: TLS certificate" in told.line
    watcher.publish(f"{PETS}/down/kitchen", b"waits for its acknowledgement")
    held = link.receive(60)
    assert isinstance(held, Received)
    with Office.open(authority.folder) as office:
        office.renew("kitchen")
    assert link.receive(3.0) is None  # not while something is on its way
    link.acknowledge(held)
    left, back = link.receive(60), link.receive(60)
    assert left == Disconnected("its certificates are others now", 0.0)
    assert isinstance(back, Connected)
    link.publish(f"{PETS}/up/kitchen", b"end")
    assert will not in heard(watcher, f"{PETS}/up/kitchen")
    link.close()
    watcher.close()


def test_a_rotation_loses_nobody_and_ends_the_old_authority(authority: Authority, broker: GuardedMosquitto) -> None:
    """Also the two revocations and lists that a test before this made: Mosquitto believes the newest."""
    known = {name: authority.file(name).read_bytes() for name in ("kitchen", "hall")}
    ca_before = (authority.folder / "broker" / "ca.pem").read_bytes()
    steady = linked(authority, "hall", f"{PETS}/down/hall")
    with Office.open(authority.folder) as office:
        office.rotate(30)
        office.renew("kitchen")
    broker.reload()
    assert authority.file("kitchen").read_bytes() != known["kitchen"]
    assert (authority.folder / "broker" / "ca.pem").read_bytes().endswith(ca_before)
    for name in ("kitchen", "stranger"):  # of the new authority and of the old one
        assert knock(authority.address(name)) == 0, name
    with Office.open(authority.folder) as office:
        for name in office.left_behind():
            if "rollout" not in name:
                office.renew(name)
        assert office.finish_rotation() == []
    broker.reload()
    ca, old = str(authority.folder / "broker" / "ca.pem"), authority.folder.parent / "hall-old.pem"
    old.write_bytes(known["hall"])
    assert knock(authority.address("hall")) == 0
    assert knock(Address.parse(authority.url, ca_file=ca, cert_file=str(old))) is None
    steady.close()


def test_an_expired_revocation_list_shuts_everyone_out_and_was_warned_of(tmp_path: Path) -> None:
    """An authority that nobody has looked after for 340 days: certificates are good for 365, the list for 180."""
    now = int(time.time())
    forgotten = Authority(tmp_path / "pki", {"kitchen": ("fleet",)}, now=now - 340 * 86_400)
    crl = forgotten.folder / "broker" / "crl.pem"
    address = Address.parse(forgotten.url, ca_file=str(forgotten.folder / "broker/ca.pem"), crl_file=str(crl))
    (ends,) = (each for each in expiries(address) if each.what == "revocation list")
    assert [ends.is_soon(ends.until - days * 86_400) for days in (31, 29)] == [False, True]
    assert "or nobody gets in any more" in ends.line(ends.until - 86_400)
    broker = GuardedMosquitto(forgotten)
    assert knock(forgotten.address("kitchen")) is None
    out = Link(forgotten.address("kitchen"), "x", subscriptions=[]).open()
    with pytest.raises(LinkError, match=r"revocation list has( expired)?: protofleet pki renew --crl"):
        out.wait_connected(1.0)
    out.close()
    with Office.open(forgotten.folder) as office:
        office.renew_lists()
    broker.reload()
    link = Link(forgotten.address("kitchen"), "x", subscriptions=[]).open()
    link.wait_connected(60)
    told = [event.line for event in (link.receive(60), link.receive(60)) if isinstance(event, Noticed)]
    assert [re.sub(r" \S*[/]\S* ", " … ", line).split(", on")[0] for line in sorted(told)] == [
        "broker's certificate … expires in 24 days",  # which TLS has shown
        "certificate … expires in 24 days",
    ]
    assert link.broker_certificate is not None
    assert link.broker_certificate.until == certificate(forgotten.file("broker")).not_valid_after_utc.timestamp()
    link.close()
    tls = (address.ca_file, str(forgotten.file("kitchen")), None, None)
    found = {each.check: each for each in doctor.examine(broker=forgotten.url, device="kitchen", tls=tls)}
    assert (found["broker"].state, found["broker's certificate"].state) == ("good", "note")
    assert found["broker's certificate"].advice == "protofleet pki renew broker, or nobody gets in any more"
    broker.close()
