"""The shipped Mosquitto configuration: it starts, and a device can speak for nobody but itself."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from aggregator_samples import bundle_file
from brokers import free_port, require_mosquitto, wait_for_port
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from aggregator.broker import EmbeddedBroker
from contract.errors import LinkError
from contract.link import Address, Disconnected, Link, Received

DEPLOY = Path(__file__).parent.parent / "deploy"
FLEET = "pf/v2/fleet"


def _issue(folder: Path, name: str, authority: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None):
    """A certificate and key in PEM files; signed by itself when there is no authority yet."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority[0].subject if authority else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    )
    certificate = builder.sign(authority[1] if authority else key, hashes.SHA256())
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, key


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The shipped files with nothing changed but the paths and the port; its URL and the folder of certificates."""
    require_mosquitto()
    folder, port = tmp_path_factory.mktemp("deploy"), free_port()
    authority = _issue(folder, "ca", None)
    for name in ("broker", "aggregator", "d1", "d2"):
        _issue(folder, name, authority)
    _issue(folder, "stranger", _issue(folder, "other-authority", None))
    config = (DEPLOY / "mosquitto.conf").read_text()
    assert len(re.findall(r"^[a-z_]*file ", config, flags=re.M)) == 4
    config = config.replace("/etc/mosquitto/protofleet/acl", str(DEPLOY / "acl"))
    config = config.replace("/etc/mosquitto/protofleet", str(folder)).replace("/var/lib/mosquitto/", f"{folder}/")
    config = config.replace("listener 8883", f"listener {port} 127.0.0.1")
    if os.geteuid() == 0:
        config += "user root\n"  # Mosquitto drops its rights, and the folder of a test is another user's
    (folder / "mosquitto.conf").write_text(config)
    process = subprocess.Popen(
        ["mosquitto", "-c", str(folder / "mosquitto.conf")],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin"},
    )
    wait_for_port(port, process)
    yield f"mqtts://127.0.0.1:{port}", folder
    process.terminate()
    process.wait()


def _address(broker: tuple[str, Path], name: str | None) -> Address:
    url, folder = broker
    files = {} if name is None else {"cert_file": f"{folder / name}.pem", "key_file": f"{folder / name}.key"}
    return Address.parse(url, ca_file=str(folder / "ca.pem"), **files)


def _link(broker: tuple[str, Path], name: str, *topics: str) -> Link:
    link = Link(_address(broker, name), f"test-{name}", subscriptions=topics).open()
    link.wait_connected(8)
    return link


def _heard(link: Link, expected: int) -> list[tuple[str, bytes]]:
    """What comes on a link: as many messages as expected, however slow the machine, and whatever follows soon."""
    heard: list[tuple[str, bytes]] = []
    while (event := link.receive(10.0 if len(heard) < expected else 1.0)) is not None:
        if isinstance(event, Received):
            heard.append((event.topic, event.payload))
            link.acknowledge(event)
        assert not isinstance(event, Disconnected), event
    return heard


def test_a_device_can_speak_for_nobody_but_itself(broker: tuple[str, Path]) -> None:
    aggregator = _link(
        broker, "aggregator", f"{FLEET}/up/+", f"{FLEET}/status/+", f"{FLEET}/round", f"{FLEET}/global/+"
    )
    other = _link(broker, "d2", f"{FLEET}/up/+", f"{FLEET}/down/+", f"{FLEET}/status/+")
    device = _link(broker, "d1", f"{FLEET}/down/d1")
    forbidden = ("up/d2", "status/d2", "round", "global/0", "down/d1", "down/d2", "up/aggregator", "up/d1/more")
    for topic in forbidden:
        device.publish(f"{FLEET}/{topic}", b"forged")
    for topic in ("up/d1", "status/d1"):
        device.publish(f"{FLEET}/{topic}", b"own")
    assert sorted(_heard(aggregator, 2)) == [(f"{FLEET}/status/d1", b"own"), (f"{FLEET}/up/d1", b"own")]
    assert _heard(other, 0) == []
    for link in (aggregator, other, device):
        link.close()


def test_the_aggregator_speaks_to_the_fleet_and_a_receipt_reaches_its_device_only(broker: tuple[str, Path]) -> None:
    devices = [_link(broker, n, f"{FLEET}/round", f"{FLEET}/global/+", f"{FLEET}/down/+") for n in ("d1", "d2")]
    aggregator = _link(broker, "aggregator", f"{FLEET}/up/+")
    for topic in ("round", "global/0", "down/d1"):
        aggregator.publish(f"{FLEET}/{topic}", b"from the aggregator")
    common = [f"{FLEET}/global/0", f"{FLEET}/round"]
    assert sorted(topic for topic, _ in _heard(devices[0], 3)) == [f"{FLEET}/down/d1", *common]
    assert sorted(topic for topic, _ in _heard(devices[1], 2)) == common
    for link in (aggregator, *devices):
        link.close()


@pytest.mark.parametrize("name", [None, "stranger"])
def test_without_a_certificate_of_the_authority_nobody_gets_in(broker: tuple[str, Path], name: str | None) -> None:
    link = Link(_address(broker, name), "intruder", subscriptions=["#"]).open()
    with pytest.raises(LinkError, match="no broker at mqtts"):
        link.wait_connected(1.5)
    link.close()


def test_the_limit_of_the_configuration_reaches_the_link(broker: tuple[str, Path]) -> None:
    link = Link(_address(broker, "d1"), "test-limit", subscriptions=[f"{FLEET}/round"]).open()
    assert 65_536 < link.wait_connected(8).limit_bytes < 131_072
    with pytest.raises(LinkError, match="at most"):
        link.publish(f"{FLEET}/up/d1", bytes(200_000))
    link.close()


def test_a_run_over_tls(broker: tuple[str, Path], tmp_path: Path) -> None:
    """The command with its certificate, and two devices with theirs."""
    import sys

    from aggregator_samples import means
    from talker import Talker

    url, folder = broker
    bundle_file(tmp_path / "f.bundle")
    command = [sys.executable, "-m", "protofleet", "aggregate", "--bundle", str(tmp_path / "f.bundle"), "--broker", url]
    command += [
        "--store",
        str(tmp_path / "s"),
        "--rounds",
        "1",
        "--no-calibrate",
        "--min-clients",
        "2",
        "--fleet",
        "tls",
    ]
    command += ["--ca", f"{folder}/ca.pem", "--cert", f"{folder}/aggregator.pem", "--key", f"{folder}/aggregator.key"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    talkers = [Talker(_address(broker, name), "tls", name, lambda a: means()) for name in ("d1", "d2")]
    for talker in talkers:
        talker.start()
    error = process.communicate(timeout=30)[1]
    assert process.returncode == 0, error
    assert "connected to mqtts://" in error
    for talker in talkers:
        talker.join(5)
        assert talker.receipts == {(1, "fedproto"): ["committed"]}


def test_a_plain_broker_is_not_taken_for_a_tls_one() -> None:
    with EmbeddedBroker() as plain:
        link = Link(Address.parse(plain.url.replace("mqtt:", "mqtts:")), "x", subscriptions=["a"]).open()
        with pytest.raises(LinkError):
            link.wait_connected(1.0)
        link.close()
