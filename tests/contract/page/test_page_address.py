"""Which address a page says that it is at."""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
import sys

import pytest

from protofleet.contract.page.page_address import read_page

ASK = "from protofleet.contract.page.page_address import read_page; print(read_page('0.0.0.0:80').reached_at)"


def test_a_given_address_is_said_as_it_is() -> None:
    assert read_page("8080").reached_at == "127.0.0.1"
    assert read_page("192.0.2.7:80").reached_at == "192.0.2.7"
    assert read_page("[::1]:80").reached_at == "[::1]"


def test_all_addresses_are_said_as_one_that_others_reach() -> None:
    found = ipaddress.ip_address(read_page("0.0.0.0:80").reached_at)
    assert not found.is_loopback


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_without_a_way_out_it_is_the_interfaces_address() -> None:
    """A camera's network that has no router: an interface with an address, and no default route."""
    make = "ip link add v0 type veth peer name v1 && ip addr add 10.9.8.7/24 dev v0 && ip link set v0 up"
    if shutil.which("ip") is None or subprocess.run(["unshare", "-rn", "sh", "-c", make], check=False).returncode:
        pytest.skip("no network namespace of one's own")
    script = f'{make} && exec "$0" -c "$1"'
    said = subprocess.run(["unshare", "-rn", "sh", "-c", script, sys.executable, ASK], capture_output=True, text=True)
    assert said.stdout.strip() == "10.9.8.7", said.stderr
