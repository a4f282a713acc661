"""Until when certificates are good, read without a library; and when a link is to take up others, or to tell of it."""

from __future__ import annotations

import base64
import datetime
import os
import random
import tempfile
from pathlib import Path

import pytest
from certificates import issue
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protofleet.commands import doctor
from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.certificates import LOOK_S, SPREAD_S, CertificateWatch, Expiry, expiries, validity

DAY = 86_400.0
NOW = 1_800_000_000.0


def revocation_list(folder: Path, since: datetime.datetime, until: datetime.datetime) -> bytes:
    certificate, key = issue(folder, "ca")
    builder = x509.CertificateRevocationListBuilder().issuer_name(certificate.subject)
    builder = builder.last_update(since).next_update(until)
    for serial in (1, 2**150):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(since)
        builder = builder.add_revoked_certificate(entry.build())
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("year", [2026, 2049, 2050, 2400])  # two digits until 2049, four from then on
def test_dates_are_those_that_cryptography_reads(tmp_path: Path, year: int) -> None:
    since = datetime.datetime(2026, 2, 28, 23, 59, 59, tzinfo=datetime.UTC)
    until = datetime.datetime(year, 12, 31, 12, 0, 1, tzinfo=datetime.UTC)
    assert validity(revocation_list(tmp_path, since, until)) == [(since.timestamp(), until.timestamp())]
    certificate, _ = issue(tmp_path, "d1", issue(tmp_path, "ca"))
    span = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    early = revocation_list(tmp_path, since, since + datetime.timedelta(days=1))
    (tmp_path / "crl.pem").write_bytes(revocation_list(tmp_path, since, until) + early)
    (found,) = expiries(Address.parse("mqtts://h", crl_file=str(tmp_path / "crl.pem")))
    assert found.until == (since + datetime.timedelta(days=1)).timestamp()  # the first that ends shuts out
    both = (tmp_path / "d1.pem").read_bytes() + b"words between\n" + (tmp_path / "d1.key").read_bytes()
    assert validity(both * 2) == [span, span]


with tempfile.TemporaryDirectory() as _folder:
    _DER = issue(Path(_folder), "d1")[0].public_bytes(serialization.Encoding.DER)


def pem(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.b64encode(der) + b"\n-----END CERTIFICATE-----\n"


@given(at=st.integers(0, len(_DER) - 1), put=st.binary(max_size=4), cut=st.integers(0, 8))
@example(at=0, put=b"", cut=8)
@example(at=1, put=b"\xff", cut=1)
@example(at=1, put=b"\x80", cut=1)
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_certificate_are_left_out(at: int, put: bytes, cut: int) -> None:
    for since, until in validity(pem(_DER[:at] + put + _DER[at + cut :])):
        assert isinstance(since, float)
        assert isinstance(until, float)


def test_it_is_time_within_30_days_or_the_last_sixth() -> None:
    year, short = (Expiry("certificate", "d1.pem", NOW, NOW + days * DAY) for days in (365, 12))
    assert [year.is_soon(year.until - days * DAY) for days in (31, 29, -1)] == [False, True, True]
    assert [short.is_soon(short.until - days * DAY) for days in (2.1, 1.9, -1)] == [False, True, True]
    said = "certificate d1.pem expires in 3 days, on 2028-01-15: protofleet pki renew, and copying it here"
    assert year.line(year.until - 3 * DAY) == said
    assert year.line(year.until + 1).startswith("certificate d1.pem expired on 2028-01-15: ")


# ── while a connection lasts ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def address(tmp_path: Path) -> Address:
    """With certificates that are good for a day."""
    issue(tmp_path, "d1", issue(tmp_path, "ca"))
    return Address.parse(
        "mqtts://h", ca_file=f"{tmp_path}/ca.pem", cert_file=f"{tmp_path}/d1.pem", key_file=f"{tmp_path}/d1.key"
    )


def wall(address: Address) -> float:
    """Well before anything expires."""
    return min(each.until for each in expiries(address)) - 0.5 * DAY


def renewed(address: Address) -> None:
    folder = Path(str(address.ca_file)).parent
    issue(folder, "d1", issue(folder, "ca"))


def test_other_files_are_taken_up_once_within_two_minutes_and_not_by_all_at_once(address: Address) -> None:
    fleet = [CertificateWatch(address, random.Random(seed)) for seed in range(50)]
    for watch in fleet:
        watch.dialling(0.0)
        assert watch.look(0.0, wall(address)) == []
    renewed(address)
    taken_up = []
    for watch in fleet:
        assert watch.look(LOOK_S - 1, wall(address)) == []
        assert watch.look(LOOK_S, wall(address)) == []
        times = [at for at in range(int(LOOK_S), int(LOOK_S + SPREAD_S) + 2) if watch.renews(at)]
        assert len(times) == 1
        taken_up += times
        watch.dialling(300.0)
        watch.look(400.0, wall(address))
        assert not watch.renews(1e9)
    assert max(taken_up) - min(taken_up) > SPREAD_S / 2


def test_files_that_are_half_written_or_put_back_change_nothing(address: Address) -> None:
    watch, path = CertificateWatch(address, random.Random(1)), Path(str(address.cert_file))
    watch.dialling(0.0)
    before, stamp = path.read_bytes(), path.stat()
    path.write_bytes(before[:100])
    (line,) = watch.look(LOOK_S, wall(address))
    assert line.startswith(f"certificate files have changed, but cannot be used: TLS certificate {path}, expected")
    assert watch.look(2 * LOOK_S, wall(address)) == []  # told once
    assert not watch.renews(1e9)
    path.write_bytes(before)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert watch.look(3 * LOOK_S, wall(address)) == []
    assert not watch.renews(1e9)
    path.unlink()
    assert len(watch.look(4 * LOOK_S, wall(address))) == 1


def test_what_expires_is_told_once_a_day_until_it_is_renewed(address: Address) -> None:
    watch = CertificateWatch(address, random.Random(1))
    watch.dialling(0.0)
    late = wall(address) + 0.45 * DAY
    lines = watch.look(0.0, late)
    assert [line.split(" /")[0] for line in lines] == ["certificate", "authority"]
    assert [at for at in range(0, 200_000, 1_000) if watch.look(at, late)] == [87_000, 174_000]
    renewed(address)
    assert len(watch.look(200_000, late)) == 2
    assert CertificateWatch(Address("h", 1883), random.Random(1)).look(0.0, late) == []


def test_a_further_process_has_a_certificate_of_its_own_where_it_lies_there(address: Address, tmp_path: Path) -> None:
    assert address.of_process("rollout") == address
    (tmp_path / "d1.rollout.pem").write_bytes((tmp_path / "d1.pem").read_bytes() + (tmp_path / "d1.key").read_bytes())
    own = address.of_process("rollout")
    assert (own.cert_file, own.key_file) == (f"{tmp_path}/d1.rollout.pem", None)
    own.tls_context()
    assert Address("h", 1883).of_process("rollout") == Address("h", 1883)


def test_doctor_tells_until_when(address: Address, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ECHO_S", 0.2)
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=200)
    (tmp_path / "crl.pem").write_bytes(revocation_list(tmp_path, long_ago, long_ago + datetime.timedelta(days=180)))
    tls = (str(tmp_path / "ca.pem"), address.cert_file, address.key_file, str(tmp_path / "crl.pem"))
    found = {finding.check: finding for finding in doctor.examine(broker="mqtts://127.0.0.1:1", tls=tls)}
    assert found["broker"].state == "fault"
    assert found["certificate"].state == "good"
    assert "d1.pem expires in 24 h, on 20" in found["certificate"].found
    assert found["revocation list"].state == "fault"
    assert found["revocation list"].advice == "protofleet pki renew --crl, or nobody gets in any more"
