"""The shipped Mosquitto configuration: it starts, and a device can speak for nobody but itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import bundle_file, means
from brokers import Proxy
from commands import run
from edge_samples import fashion
from pki_samples import Authority, GuardedMosquitto
from talker import Talker

import protofleet
from protofleet.aggregator.server.broker import EmbeddedBroker
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt.link import Address, Disconnected, Link, Received
from protofleet.edge_client.answers.predictor import Answers
from protofleet.pki.x509 import new_member, revocation_list

DEPLOY = Path(__file__).parents[2] / "deploy"
FLEET = "pf/v2/fleet"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Two devices, and what else the page beside the configuration gives a certificate."""
    made = Authority(
        tmp_path_factory.mktemp("deploy") / "pki", {"d1": ("fleet", "tls"), "d2": ("fleet", "tls")}, ("fleet", "tls")
    )
    page = (DEPLOY / "README.md").read_text()
    for line in re.findall(r"^protofleet pki (other .*)$", page, re.M):
        words = line.replace("kitchen", "d1").replace("'", "").split()
        assert run("pki", *words, "--dir", made.folder).returncode == 0
    return made


@pytest.fixture(scope="module")
def broker(authority: Authority) -> Iterator[Authority]:
    running = GuardedMosquitto(authority)
    yield authority
    running.close()


def _link(authority: Authority, name: str, *topics: str) -> Link:
    link = Link(authority.address(name), f"test-{name}", subscriptions=topics).open()
    link.wait_connected(60)
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


def test_a_device_can_speak_for_nobody_but_itself(broker: Authority) -> None:
    aggregator = _link(
        broker, "aggregator", f"{FLEET}/up/+", f"{FLEET}/status/+", f"{FLEET}/round", f"{FLEET}/global/+"
    )
    other = _link(broker, "d2", f"{FLEET}/up/+", f"{FLEET}/down/+", f"{FLEET}/status/+")
    forbidden = (
        "up/d2",
        "status/d2",
        "round",
        "global/0",
        "down/d1",
        "down/d2",
        "up/aggregator",
        "status/aggregator",
        "up/d1/more",
    )
    for topic in forbidden:  # each on a connection of its own, which ends with the denial
        forger = _link(broker, "d1", f"{FLEET}/down/d1")
        forger.publish(f"{FLEET}/{topic}", b"forged")
        told = forger.receive(10.0)
        assert isinstance(told, Disconnected), topic
        assert "publish refused" in told.reason
        forger.close()
    device = _link(broker, "d1", f"{FLEET}/down/d1")
    for topic in ("up/d1", "status/d1"):
        device.publish(f"{FLEET}/{topic}", b"own")
    assert sorted(_heard(aggregator, 2)) == [(f"{FLEET}/status/d1", b"own"), (f"{FLEET}/up/d1", b"own")]
    assert _heard(other, 0) == []
    for link in (aggregator, other, device):
        link.close()


def test_a_device_publishes_its_own_answers_alone_and_is_told_when_it_may_not(
    broker: Authority, said: list[str]
) -> None:
    url, client = broker.url, _link(broker, "d1")  # whose session is not taken
    listener = _link(broker, "dashboard", "answers/+")
    files = {"ca": f"{broker.folder}/broker/ca.pem", "cert": str(broker.file("d1.answers"))}
    scores = np.array([[0.25, 0.75]])
    answer = Answers(("cat", "dog"), scores, np.zeros(1), np.array([False]), version=3, probabilities=scores**2)
    with protofleet.Publisher(f"{url}/answers/d1", **files) as own:
        own.put("a.jpg", answer)
    other = protofleet.Publisher(f"{url}/answers/d2", **files)
    other.put("b.jpg", answer)
    deadline = time.monotonic() + 60
    while not any("3 times now" in line for line in said) and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(protofleet.ProtofleetError, match=r"denies pf-answers-\w* what it needs, 3 times now"):
        other.put("b.jpg", answer)
    with pytest.raises(protofleet.ProtofleetError, match="answers were not published on answers/d2 at mqtts"):
        other.close(0.0)
    ((topic, payload),) = _heard(listener, 1)
    assert topic == "answers/d1"
    assert json.loads(payload) == {
        "schema": "protofleet.predict/1", "photo": "a.jpg", "label": "dog", "unknown": False, "probability": 0.5625,
        "novelty": 0.0, "global_version": 3, "top": [
            {"label": "dog", "score": 0.75, "probability": 0.5625},
            {"label": "cat", "score": 0.25, "probability": 0.0625},
        ],
    }  # fmt: skip
    assert client.receive(0) is None
    client.close()
    listener.close()


def test_the_aggregator_speaks_to_the_fleet_and_a_receipt_reaches_its_device_only(broker: Authority) -> None:
    devices = [_link(broker, n, f"{FLEET}/round", f"{FLEET}/global/+", f"{FLEET}/down/+") for n in ("d1", "d2")]
    aggregator = _link(broker, "aggregator", f"{FLEET}/up/+")
    for topic in ("round", "global/0", "down/d1"):
        aggregator.publish(f"{FLEET}/{topic}", b"from the aggregator")
    common = [f"{FLEET}/global/0", f"{FLEET}/round"]
    assert sorted(topic for topic, _ in _heard(devices[0], 3)) == [f"{FLEET}/down/d1", *common]
    assert sorted(topic for topic, _ in _heard(devices[1], 2)) == common
    for link in (aggregator, *devices):
        link.close()


def test_the_limit_of_the_configuration_reaches_the_link(broker: Authority) -> None:
    link = Link(broker.address("d1"), "test-limit", subscriptions=[f"{FLEET}/round"]).open()
    assert 65_536 < link.wait_connected(60).limit_bytes < 131_072
    with pytest.raises(LinkError, match="at most"):
        link.publish(f"{FLEET}/up/d1", bytes(200_000))
    link.close()


def test_a_run_over_tls(broker: Authority, tmp_path: Path) -> None:
    """The command with its certificate, and two devices with theirs."""
    bundle_file(tmp_path / "f.bundle")
    now, signer = int(time.time()), broker.signer()
    (tmp_path / "crl.pem").write_bytes(revocation_list(signer, {}, 99, now - 30 * 86_400, now + 86_400))
    mine = broker.folder / "aggregator.tls"
    command = (
        f"{sys.executable} -m protofleet aggregate --bundle {tmp_path}/f.bundle --broker {broker.url} --fleet tls "
    )
    command += (
        f"--store {tmp_path}/s --rounds 1 --no-calibrate --min-clients 2 --ca {mine}/ca.pem --crl {tmp_path}/crl.pem"
    )
    command = [*command.split(), "--cert", str(broker.file("aggregator.tls"))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    talkers = [Talker(broker.address(name), "tls", name, lambda a: means()) for name in ("d1", "d2")]
    for talker in talkers:
        talker.start()
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert "connected to mqtts://" in error
    assert re.search(
        r"^warning: revocation list \S+crl.pem expires in 24 h, on \S+: protofleet pki renew --crl", error, re.M
    )
    for talker in talkers:
        talker.join(5)
        assert talker.receipts == {(1, "fedproto"): ["committed"]}


def test_a_client_whose_certificate_does_not_fit_its_id_gives_up_in_one_line(
    broker: Authority, mnist_like_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """Mosquitto lets it in and denies each of its births: it reconnected for ever, and nobody was told why."""
    bundle = mnist_like_bundle()
    data = fashion(read_bundle(bundle), 20, (0, 1))
    np.savez(tmp_path / "train.npz", x=data.x, y=data.y)
    command = f"{sys.executable} -m protofleet client --until-finished --broker {broker.url} --id d1 --bundle {bundle} "
    command += f"--data {tmp_path}/train.npz --state {tmp_path}/state --ca {broker.folder}/broker/ca.pem"
    (tmp_path / "d2.pem").write_bytes(new_member(broker.signer(), "d2", int(time.time()) - 364 * 86_400, 365)[0])
    command = [*command.split(), "--cert", str(tmp_path / "d2.pem")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"certificate {tmp_path}/d2.pem expires in 24 h, on " in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "3 times now, got publish refused on" in last
    assert "try a certificate or user that fits the id" in last


def test_a_certificate_that_is_renewed_under_a_link_that_runs_is_used(broker: Authority, tmp_path: Path) -> None:
    """And while it is being written the connection is lost, not the link."""
    folder = broker.file("d1").parent
    files = {name: tmp_path / name for name in ("ca.pem", "d1.pem")}
    for name, path in files.items():
        path.write_bytes((folder / name).read_bytes())
    proxy = Proxy(broker.url)
    url = proxy.url.replace("mqtt:", "mqtts:")
    address = Address.parse(url, ca_file=str(files["ca.pem"]), cert_file=str(files["d1.pem"]))
    link = Link(address, "renewed", subscriptions=[f"{FLEET}/round"]).open()
    link.wait_connected(60)
    files["ca.pem"].write_bytes((folder / "ca.pem").read_bytes()[:100])
    proxy.cut()
    reasons = []
    for event in iter(lambda: link.receive(10), None):
        assert isinstance(event, Disconnected)
        reasons.append(event.reason)
        if "ca.pem" in event.reason:
            break
    assert "expected certificates of an authority in PEM" in reasons[-1]
    files["ca.pem"].write_bytes((folder / "ca.pem").read_bytes())
    link.wait_connected(60)
    link.close()
    proxy.close()


def test_a_plain_broker_is_not_taken_for_a_tls_one() -> None:
    with EmbeddedBroker() as plain:
        link = Link(Address.parse(plain.url.replace("mqtt:", "mqtts:")), "x", subscriptions=["a"]).open()
        with pytest.raises(LinkError):
            link.wait_connected(1.0)
        link.close()
