"""An authority and its files for tests, a Mosquitto that runs with them, and somebody who knocks at its door."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import time
from pathlib import Path

from brokers import free_port, require_mosquitto, wait_for_port
from cryptography import x509

from protofleet.contract.mqtt.address import Address
from protofleet.pki.authority import Office, establish
from protofleet.pki.register import Member, read_book
from protofleet.pki.x509 import Signer

HOSTS = ("127.0.0.1", "localhost")
ENV = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin"}


class Authority:
    """`protofleet pki` in a folder, for devices of fleets; without the command line."""

    def __init__(
        self,
        folder: Path,
        devices: dict[str, tuple[str, ...]],
        fleets: tuple[str, ...] = ("fleet",),
        now: int | None = None,
    ) -> None:
        self.folder, self.port = folder, free_port()
        establish(folder, HOSTS, fleets, port=self.port, place=str(folder / "broker"), now=now)
        with Office.open(folder, now) as office:
            for name, of in devices.items():
                office.admit(name, Member(role="device", fleets=of))

    @property
    def url(self) -> str:
        return f"mqtts://127.0.0.1:{self.port}"

    def file(self, name: str) -> Path:
        """Certificate and key of a member."""
        return Office(self.folder, read_book(self.folder), 0).file(name)

    def signer(self) -> Signer:
        """The authority itself."""
        book = read_book(self.folder)
        return Office(self.folder, book, 0)._signer(book.authorities[-1])

    def address(self, name: str | None, url: str | None = None) -> Address:
        """Of the broker, as a member that has copied its folder; or as somebody without a certificate."""
        cert = None if name is None else str(self.file(name))
        return Address.parse(url or self.url, ca_file=str(self.folder / "broker" / "ca.pem"), cert_file=cert)


class GuardedMosquitto:
    """Mosquitto with the files of an authority and nothing changed but where it listens and keeps its database."""

    def __init__(self, authority: Authority) -> None:
        require_mosquitto()
        self._authority, self._reloads = authority, 0
        place = authority.folder.parent / f"{authority.folder.name}-mosquitto"
        place.mkdir()
        text = (authority.folder / "broker" / "mosquitto.conf").read_text()
        text = text.replace(f"listener {authority.port}", f"listener {authority.port} 127.0.0.1")
        text = text.replace("persistence_location /var/lib/mosquitto/", f"persistence_location {place}/")
        if os.geteuid() == 0:
            text += "user root\n"  # Mosquitto drops its rights, and the folder of a test is another user's
        (place / "mosquitto.conf").write_text(text)
        self._log = place / "log"
        with self._log.open("wb") as log:
            command = ["mosquitto", "-c", str(place / "mosquitto.conf"), "-v"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=ENV)
        wait_for_port(authority.port, self._process)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def reload(self) -> None:
        """SIGHUP, as `systemctl reload mosquitto` sends it, until it has been dealt with."""
        self._reloads += 1
        self._process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 60
        while len(re.findall("Reloading config", self.log)) < self._reloads and time.monotonic() < deadline:
            time.sleep(0.02)
        knock(self._authority.address(None))  # answered by a loop that has gone round since

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)


def knock(address: Address, client_id: str = "somebody") -> int | None:
    """The reason code of the CONNACK, 0 for welcome; None where the broker hangs up in the handshake."""
    name = client_id.encode()
    body = b"\0\4MQTT\5\2\0\x3c\0" + struct.pack(">H", len(name)) + name
    with socket.create_connection((address.host, address.port), timeout=60) as plain:
        try:
            with address.tls_context().wrap_socket(plain, server_hostname=address.host) as sock:
                sock.sendall(bytes((0x10, len(body))) + body)
                answer = sock.recv(64)
        except (ssl.SSLError, ConnectionError):
            return None
    return answer[3] if answer[:1] == b"\x20" else None


def certificate(path: Path) -> x509.Certificate:
    """The first one in a PEM file."""
    return x509.load_pem_x509_certificate(path.read_bytes())


def revoked(directory: Path) -> set[int]:
    """Serial numbers in the revocation lists that an authority has for its broker."""
    lists = re.findall(rb"-----BEGIN.*?END X509 CRL-----\n", (directory / "broker/crl.pem").read_bytes(), re.DOTALL)
    return {entry.serial_number for each in lists for entry in x509.load_pem_x509_crl(each)}
