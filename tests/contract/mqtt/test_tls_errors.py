"""What a person is told where TLS lets nobody in, by a real Mosquitto with the files that `protofleet pki` writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from pki_samples import Authority, GuardedMosquitto

from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt.link import Address, Link
from protofleet.pki.authority import Office

HERE, ELSEWHERE = "here", "elsewhere"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Authority]]:
    folder = tmp_path_factory.mktemp("words")
    made = {name: Authority(folder / name, {"kitchen": ("fleet",), "stolen": ("fleet",)}) for name in (HERE, ELSEWHERE)}
    with Office.open(made[HERE].folder) as office:
        office.revoke("stolen")
    broker = GuardedMosquitto(made[HERE])
    yield made
    broker.close()


def _as(cert: str, ca: str | None) -> Callable[[dict[str, Authority]], Address]:
    def address(authorities: dict[str, Authority]) -> Address:
        of, _, name = cert.partition("/")
        ca_file = None if ca is None else str(authorities[ca].folder / "broker" / "ca.pem")
        cert_file = str(authorities[of].file(name)) if cert else None
        return Address.parse(authorities[HERE].url, ca_file=ca_file, cert_file=cert_file)

    return address


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (_as("here/stolen", HERE), "the broker refuses our certificate: it is revoked"),
        (_as("elsewhere/kitchen", HERE), "it is of an authority that the broker does not know"),
        (_as("", HERE), "the broker asks for a certificate: --cert"),
        (_as("here/kitchen", ELSEWHERE), "the broker's certificate is of another authority than --ca"),
        (_as("here/kitchen", None), "the broker's certificate is of another authority than --ca"),
    ],
)
def test_who_is_not_let_in_is_told_why(authorities, address, said):
    """All but the last two were "a peer that hangs up without an answer", and these a line of openssl's source."""
    link = Link(address(authorities), "somebody", subscriptions=()).open()
    began = time.monotonic()
    with pytest.raises(LinkError) as caught:
        link.wait_connected(1.0)
    while said not in str(caught.value) and time.monotonic() < began + 30:
        with pytest.raises(LinkError) as caught:
            link.wait_connected(2.0)
    link.close(timeout_s=0.1)
    assert said in str(caught.value)
    assert "_ssl.c" not in str(caught.value)
    assert "try protofleet pki list" in str(caught.value)
