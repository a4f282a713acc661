"""`protofleet pki`: what it writes, what it refuses, and what is left when it is killed."""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from commands import Done, one_error_line, run, run_process
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from pki_samples import certificate, revoked

from protofleet.contract.errors import InUseError, UsageError
from protofleet.contract.extras import install_command
from protofleet.pki import names
from protofleet.pki.authority import Office, establish
from protofleet.pki.register import Member, locked, read_book, write_book
from protofleet.pki.x509 import new_authority, read_signer

DEPLOY = Path(__file__).parents[3] / "deploy"
DAY = 86_400


def pki(folder: Path, *words: object) -> Done:
    """The command, with the authority in `folder`/pki."""
    where = (folder / "pki",) if words[0] == "init" else ()
    after = () if words[0] == "init" else ("--dir", folder / "pki")
    return run("pki", words[0], *where, *words[1:], *after)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with two devices, that tests copy."""
    folder = tmp_path_factory.mktemp("made")
    before = os.umask(0)
    try:
        for words in (("init", "--broker", "broker.example.org,192.0.2.10"), ("device", "d1"), ("device", "d2")):
            done = pki(folder, *words)
            assert (done.returncode, done.stderr) == (0, ""), done.stderr
    finally:
        os.umask(before)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "pki", tmp_path / "pki")
    return tmp_path


# ── what is written ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_worker_has_a_certificate_of_its_own(folder: Path) -> None:
    """The broker takes the name for the client id: with one certificate two workers would throw each other out."""
    done = pki(folder, "aggregator", "--workers", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert pki(folder, "aggregator", "--workers", 2).returncode == 0
    line = one_error_line(pki(folder, "aggregator", "--workers", 2))
    assert "--workers, expected one more, got 2, who have certificates" in line
    rules = (folder / "pki" / "broker" / "acl").read_text()
    of = {name: rules.split(f"user {name}\n")[1].split("\n\n")[0] for name in ("aggregator", "aggregator.worker-2")}
    assert of["aggregator"] == of["aggregator.worker-2"]
    for name in ("aggregator.worker-1", "aggregator.worker-2", "aggregator.worker-2.rollout"):
        assert (
            certificate(folder / "pki" / "aggregator" / f"{name}.pem").subject.rfc4514_string().endswith(f"CN={name}")
        )
    line = one_error_line(pki(folder, "aggregator", "--fleet", "worker-1"))
    assert "--fleet, expected a name that is free" in line
    assert pki(folder, "revoke", "aggregator.worker-1").returncode == 0
    assert "user aggregator.worker-1" not in (folder / "pki" / "broker" / "acl").read_text()


def test_files_are_their_owners_alone_whatever_the_umask(made: Path) -> None:
    there = [made / "pki", *(made / "pki").rglob("*")]
    assert {f"{path.stat().st_mode & 0o777:o}" for path in there if path.is_dir()} == {"700"}
    assert {f"{path.stat().st_mode & 0o777:o}" for path in there if path.is_file()} == {"600"}
    assert not [path for path in made.rglob("*") if path.name.endswith(".partial")]


def test_certificates_are_standard_ones_for_one_purpose(made: Path) -> None:
    (signed_by,) = (made / "pki/authority").glob("*.pem")
    authority, broker, device = map(
        certificate, (signed_by, made / "pki/broker/broker.pem", made / "pki/devices/d1/d1.pem")
    )
    for each in (authority, broker, device):
        assert isinstance(each.public_key(), ec.EllipticCurvePublicKey)
        assert each.public_key().curve.name == "secp256r1"  # type: ignore[union-attr]
        late = datetime.datetime.now(datetime.UTC) - each.not_valid_before_utc
        assert 300 <= late.total_seconds() < 600
        assert each.serial_number.bit_length() > 100
        each.verify_directly_issued_by(authority)

    def extension(each: x509.Certificate, kind: type) -> object:
        return each.extensions.get_extension_for_class(kind).value

    assert extension(authority, x509.BasicConstraints) == x509.BasicConstraints(ca=True, path_length=0)
    assert extension(authority, x509.KeyUsage).key_cert_sign  # type: ignore[attr-defined]
    for each, side in ((broker, ExtendedKeyUsageOID.SERVER_AUTH), (device, ExtendedKeyUsageOID.CLIENT_AUTH)):
        assert extension(each, x509.BasicConstraints) == x509.BasicConstraints(ca=False, path_length=None)
        assert list(extension(each, x509.ExtendedKeyUsage)) == [side]  # type: ignore[call-overload]
        assert each.not_valid_after_utc < authority.not_valid_after_utc
    san = broker.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in san] == ["broker.example.org", "192.0.2.10"]
    assert len({each.serial_number for each in (authority, broker, device)}) == 3


def test_openssl_agrees_strictly(folder: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    assert pki(folder, "revoke", "d2").returncode == 0
    ours = folder / "pki/broker"
    common = [
        "openssl",
        "verify",
        "-x509_strict",
        "-crl_check",
        "-CAfile",
        ours / "ca.pem",
        "-CRLfile",
        ours / "crl.pem",
    ]
    for path, purpose, good in (
        ("broker/broker.pem", "sslserver", True),
        ("broker/broker.pem", "sslclient", False),
        ("devices/d1/d1.pem", "sslclient", True),
        ("devices/d1/d1.pem", "sslserver", False),
        ("devices/d2/d2.pem", "sslclient", False),
    ):
        done = subprocess.run([*common, "-purpose", purpose, folder / "pki" / path], capture_output=True, text=True)
        assert (done.returncode == 0) is good, (path, purpose, done.stderr)
    assert "certificate revoked" in done.stderr


def test_the_brokers_files_in_deploy_are_what_pki_writes(tmp_path: Path) -> None:
    establish(tmp_path / "pki", ["broker.example.org"], ["fleet"])
    with Office.open(tmp_path / "pki") as office:
        for name in ("kitchen", "hall"):
            office.admit(name, Member(role="device", fleets=("fleet",)))
    for name in ("acl", "mosquitto.conf"):
        assert (DEPLOY / name).read_text() == (tmp_path / "pki/broker" / name).read_text(), name


def test_a_device_moves_between_fleets_without_another_certificate(folder: Path) -> None:
    before = (folder / "pki/devices/d1/d1.pem").read_bytes()
    assert (
        "try one of fleet, or protofleet pki aggregator --fleet cows"
        in pki(folder, "device", "d1", "--fleet", "cows").stderr
    )
    assert pki(folder, "aggregator", "--fleet", "cows").returncode == 0
    assert "d1: in fleet, cows from now on" in pki(folder, "device", "d1", "--fleet", "fleet", "--fleet", "cows").stdout
    assert (folder / "pki/devices/d1/d1.pem").read_bytes() == before
    acl = (folder / "pki/broker/acl").read_text()
    of_d1 = acl.split("user d1\n")[1].split("\n\n")[0].splitlines()
    assert {"topic write pf/v2/fleet/up/d1", "topic write pf/v2/cows/up/d1"} <= set(of_d1)
    assert not any("d2" in line or "+/" in line for line in of_d1)
    assert "cows/up" not in acl.split("user aggregator\n")[1].split("\n\n")[0]


# ── revoking, renewing, rotating ────────────────────────────────────────────────────────────────────────────────────


def test_whoever_is_revoked_is_so_with_all_certificates_and_processes(folder: Path) -> None:
    assert pki(folder, "other", "d1.answers", "--write", "answers/d1").returncode == 0
    first = certificate(folder / "pki/devices/d1/d1.pem").serial_number
    assert pki(folder, "renew", "d1").returncode == 0
    second = certificate(folder / "pki/devices/d1/d1.pem").serial_number
    beside = certificate(folder / "pki/others/d1.answers/d1.answers.pem").serial_number
    assert pki(folder, "revoke", "d1").returncode == 0
    assert revoked(folder / "pki") == {first, second, beside}
    assert "user d1" not in (folder / "pki/broker/acl").read_text()
    assert "got one that was revoked before" in one_error_line(pki(folder, "revoke", "d1"))
    assert "try protofleet pki device" in one_error_line(pki(folder, "renew", "d1"))
    assert pki(folder, "device", "d1").returncode == 0  # the board that takes its place
    assert certificate(folder / "pki/devices/d1/d1.pem").serial_number not in revoked(folder / "pki")
    assert revoked(folder / "pki") == {first, second, beside}


def test_each_revocation_list_is_newer_than_the_one_before_by_a_second_at_least(folder: Path) -> None:
    """Mosquitto keeps those that it has read, and OpenSSL believes the one that says to be newest."""
    since = []
    for words in (("revoke", "d1"), ("revoke", "d2"), ("renew", "--crl")):
        assert pki(folder, *words).returncode == 0
        since.append(x509.load_pem_x509_crl((folder / "pki/broker/crl.pem").read_bytes()).last_update_utc)
    assert since[0] < since[1] < since[2] < datetime.datetime.now(datetime.UTC)


def test_what_expires_is_warned_of_by_every_command_and_renewed_where_it_is_due(tmp_path: Path) -> None:
    long_ago = int(time.time()) - 340 * DAY
    establish(tmp_path / "pki", ["broker"], ["fleet"], now=long_ago)
    done = pki(tmp_path, "list")
    assert done.returncode == 0
    warned = [line.partition(": ")[2] for line in done.stderr.splitlines()]
    assert any(line.startswith("revocation list expired on") and "nobody gets in" in line for line in warned)
    assert any(
        re.match(r"the certificate of the broker expires on \S+: protofleet pki renew broker", line) for line in warned
    )
    assert pki(tmp_path, "renew", "--due").returncode == 0
    listed = json.loads(pki(tmp_path, "list", "--json", "-").stdout)
    assert {entry["state"] for entry in listed["entries"]} == {"good"}
    assert len(listed["entries"]) == 5
    assert pki(tmp_path, "list").stderr == ""


def test_one_certificate_is_good_for_as_long_as_was_asked(folder: Path) -> None:
    def days_left(device: str) -> int:
        made = certificate(folder / f"pki/devices/{device}/{device}.pem")
        return (made.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days

    assert pki(folder, "device", "guest", "--days", 30).returncode == 0
    assert days_left("guest") == 29
    assert pki(folder, "renew", "guest", "--days", 90).returncode == 0
    assert days_left("guest") == 89
    assert pki(folder, "renew", "guest").returncode == 0
    assert days_left("guest") == 364
    assert "try protofleet pki renew guest --days 7" in one_error_line(pki(folder, "device", "guest", "--days", 7))


def test_no_certificate_outlives_its_authority(tmp_path: Path) -> None:
    establish(tmp_path / "pki", ["broker"], ["fleet"], now=int(time.time()) - 1_800 * DAY)
    done = pki(tmp_path, "device", "d1")
    assert "authority" in done.stderr
    assert "protofleet pki rotate-ca" in done.stderr
    left = certificate(tmp_path / "pki/devices/d1/d1.pem").not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert left < datetime.timedelta(days=25)


def test_a_rotation_trusts_both_until_all_have_been_renewed(folder: Path) -> None:
    old = certificate(folder / "pki/broker/ca.pem")
    assert "expected a rotation that has begun" in one_error_line(pki(folder, "rotate-ca", "--finish"))
    assert pki(folder, "rotate-ca").returncode == 0
    assert "expected one authority, got two" in one_error_line(pki(folder, "rotate-ca"))
    new, still = x509.load_pem_x509_certificates((folder / "pki/devices/d1/ca.pem").read_bytes())
    assert still == old
    assert pki(folder, "renew", "d1", "broker").returncode == 0
    certificate(folder / "pki/devices/d1/d1.pem").verify_directly_issued_by(new)
    certificate(folder / "pki/broker/broker.pem").verify_directly_issued_by(old)  # whom everybody knows
    assert len(x509.load_pem_x509_certificates((folder / "pki/broker/ca.pem").read_bytes())) == 2
    refused = one_error_line(pki(folder, "rotate-ca", "--finish"))
    assert "got not aggregator, aggregator.rollout, d2" in refused
    assert pki(folder, "renew", "--due").returncode == 0
    assert pki(folder, "rotate-ca", "--finish").returncode == 0
    assert x509.load_pem_x509_certificates((folder / "pki/broker/ca.pem").read_bytes()) == [new]
    for path in ("broker/broker.pem", "devices/d2/d2.pem", "aggregator/aggregator.rollout.pem"):
        certificate(folder / "pki" / path).verify_directly_issued_by(new)
    assert len(list((folder / "pki/authority").iterdir())) == 2  # the old key is gone
    listed = json.loads(pki(folder, "list", "--json", "-").stdout)["entries"]
    assert {entry["state"] for entry in listed} == {"good"}


def test_who_is_left_behind_is_named_and_shut_out(folder: Path) -> None:
    assert pki(folder, "rotate-ca").returncode == 0
    done = pki(folder, "rotate-ca", "--finish", "--leave-behind")
    assert "shut out until they are renewed: aggregator, aggregator.rollout, d1, d2" in done.stdout
    assert "of an authority that went" in pki(folder, "list").stdout


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("init", "--broker", "b"), "expected a new directory, got an authority, try another DIR"),
        (("device", "d1"), "got one that has, try protofleet pki renew d1"),
        (("device", "aggregator"), "got aggregator, which is reserved"),
        (("device", "broker"), "got broker, which is reserved"),
        (("device", "helper"), "got helper, which is reserved"),
        (("device", "Kitchen"), "expected 1 to 64 of a-z, 0-9 and -"),
        (("device", "d1/+"), "expected 1 to 64 of a-z, 0-9 and -"),
        (("device", "a\nuser b"), "expected 1 to 64 of a-z, 0-9 and -"),
        (("device", "x" * 65), "expected 1 to 64 of a-z, 0-9 and -"),
        (("device", "d3", "--fleet", "#"), "expected a fleet that has an aggregator"),
        (("aggregator", "--fleet", "A"), "--fleet, expected 1 to 64 of a-z"),
        (("aggregator", "--fleet", "x" * 60), "expected at most 64 characters in a certificate"),
        (("aggregator",), "got one that has, try protofleet pki renew aggregator"),
        (("aggregator", "--fleet", "rollout"), "expected a name that is free, got rollout, try rollout-1"),
        (("other", "d1", "--read", "answers/+"), "expected a name that is free, got that of the device"),
        (("other", "aggregator.x", "--read", "a"), "aggregator is reserved"),
        (("other", "dash", "--read", "pf/v2/#"), "expected a topic filter outside of pf/"),
        (("other", "dash", "--read", "#"), "expected a topic filter outside of pf/"),
        (("other", "dash", "--read", "+/v2/fleet/round"), "expected a topic filter outside of pf/"),
        (("other", "dash", "--write", "a\ntopic readwrite pf/#"), "expected a topic filter outside of pf/"),
        (("other", "dash"), "expected --read or --write, got neither"),
        (("revoke", "d9"), "expected somebody who has a certificate, got an unknown name, try one of"),
        (("revoke", "broker"), "try protofleet pki rotate-ca: devices read no revocation list"),
        (("renew", "d9"), "got an unknown name"),
        (("renew",), "expected a name, --due or --crl, got none"),
        (("renew", "--crl", "--days", "9"), "expected a name or --due beside it, got --crl alone"),
        (("device", "d3", "--days", "0"), "--days"),
        (("rotate-ca", "--leave-behind"), "expected --finish beside it"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_changes_nothing(folder: Path, words: tuple[str, ...], said: str) -> None:
    before = {path: path.read_bytes() for path in (folder / "pki").rglob("*") if path.is_file()}
    done = pki(folder, *words)
    assert done.returncode == 2
    assert said in one_error_line(done)
    assert {path: path.read_bytes() for path in (folder / "pki").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("host", ["", "mqtt://b", "b:8883", "a b", "-b", "*.b", "1.2.3", "[::1]", "b/", "b\0"])
def test_what_is_no_host_is_refused(tmp_path: Path, host: str) -> None:
    assert "--broker" in one_error_line(pki(tmp_path, "init", "--broker", host))
    assert list(tmp_path.iterdir()) == []


def test_a_book_of_0_2_is_read_and_written_as_it_was(folder: Path) -> None:
    """A later name of the file that reads it changes nothing in an operator's directory."""
    path = folder / "pki" / "pki.json"
    written = path.read_bytes()
    assert json.loads(written)["schema"] == "protofleet.pki.book/1"
    write_book(path.parent, read_book(path.parent))
    assert path.read_bytes() == written


def test_init_does_not_touch_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "pki").mkdir()
    (tmp_path / "pki/letter").write_text("dear")
    assert "got something else" in one_error_line(pki(tmp_path, "init", "--broker", "b"))
    assert (tmp_path / "pki/letter").read_text() == "dear"
    assert "try protofleet pki init" in one_error_line(pki(tmp_path, "list"))
    assert [path.name for path in tmp_path.iterdir()] == ["pki"]


def test_without_the_authoritys_key_it_looks_and_issues_nothing(folder: Path) -> None:
    (key,) = (folder / "pki/authority").glob("*.key")
    taken = key.read_bytes()
    key.unlink()
    assert pki(folder, "list").returncode == 0
    book = (folder / "pki/pki.json").read_bytes()
    for words in (("device", "d3"), ("revoke", "d1"), ("renew", "--crl"), ("rotate-ca",)):
        said = one_error_line(pki(folder, *words))
        assert f"{key}, expected a file of the authority, got No such file or directory" in said
    key.write_bytes(taken[: len(taken) // 2])
    assert "expected an authority's certificate and its key" in one_error_line(pki(folder, "device", "d3"))
    assert (folder / "pki/pki.json").read_bytes() == book


def test_a_clock_that_went_back_is_noticed(folder: Path) -> None:
    told = pytest.raises(UsageError, match="this machine's clock, expected a time after")
    with told, Office.open(folder / "pki", int(time.time()) - DAY):
        pass


def test_an_authority_is_read_with_its_own_key_and_signs_itself(folder: Path) -> None:
    (pem,), (key,) = ((folder / "pki/authority").glob(f"*.{end}") for end in ("pem", "key"))
    other, device = new_authority("other", int(time.time()), 10), (folder / "pki/devices/d1/d1.pem").read_bytes()
    assert read_signer(pem.read_bytes(), key.read_bytes(), "x").pem == pem.read_bytes()
    for certificates, keys in ((pem.read_bytes(), other.key_pem), (device, device)):
        with pytest.raises(UsageError, match="expected an authority's certificate and its key"):
            read_signer(certificates, keys, "x")


def test_what_was_deleted_or_changed_for_the_broker_is_there_again(folder: Path) -> None:
    rules, trusted = folder / "pki/broker/acl", folder / "pki/devices/d1/ca.pem"
    before = rules.read_bytes(), trusted.read_bytes()
    rules.write_text("user d2\ntopic readwrite #\n")
    trusted.unlink()
    with Office.open(folder / "pki"):
        assert (rules.read_bytes(), trusted.read_bytes()) == before


def test_an_authority_that_has_expired_and_a_book_of_another_kind_issue_nothing(folder: Path) -> None:
    later = int(time.time()) + 6 * 365 * DAY
    with (
        Office.open(folder / "pki", later) as office,
        pytest.raises(UsageError, match="expected one that is good, got one that has expired"),
    ):
        office.renew("d1")
    book = json.loads((folder / "pki/pki.json").read_text())
    for changed in ({"schema": "another/1"}, {"authorities": []}, {"authorities": 3 * book["authorities"]}):
        (folder / "pki/pki.json").write_text(json.dumps(book | changed))
        with pytest.raises(UsageError, match="a release that knows it"):
            read_book(folder / "pki")


def test_the_aggregator_is_given_the_brokers_revocation_list(folder: Path) -> None:
    before = x509.load_pem_x509_crl((folder / "pki/broker/crl.pem").read_bytes())
    assert pki(folder, "revoke", "d1").returncode == 0
    after = x509.load_pem_x509_crl((folder / "pki/broker/crl.pem").read_bytes())
    number, newer = (each.extensions.get_extension_for_class(x509.CRLNumber).value for each in (before, after))
    assert newer.crl_number > number.crl_number
    lists = [(folder / "pki" / name / "crl.pem").read_bytes() for name in ("broker", "aggregator")]
    assert lists[0] == lists[1]
    assert len(revoked(folder / "pki")) == 1


def test_whose_certificate_has_expired_is_not_left_behind(folder: Path) -> None:
    assert pki(folder, "rotate-ca").returncode == 0
    with Office.open(folder / "pki") as office:
        assert "d1" in office.left_behind()
        office.book.newest("d1").until = int(time.time()) - 1  # type: ignore[union-attr]
        assert "d1" not in office.left_behind()


def test_one_command_at_a_time(folder: Path) -> None:
    with locked(folder / "pki"), pytest.raises(InUseError, match="one command at a time"), Office.open(folder / "pki"):
        pass


def test_without_cryptography_one_line_says_what_to_install() -> None:
    done = run_process("pki", "list", code="import sys; sys.modules['cryptography'] = None")
    assert done.returncode == 2
    assert f"try {install_command('security')}" in one_error_line(done)


def test_names_that_a_certificate_can_have() -> None:
    assert names.of_fleet("aggregator", "pets", "pets") == "aggregator"
    assert names.of_fleet("helper", "cows", "pets") == "helper.cows"
    assert names.check_other("kitchen.answers") == "kitchen.answers"
    assert names.check_topic("answers/+/#") == "answers/+/#"
    assert names.check_host("Broker.Local") == "broker.local"
    assert str(names.check_host("2001:db8::1")) == "2001:db8::1"


def test_names_that_no_certificate_can_have() -> None:
    assert len(names.of_fleet("aggregator", "f" * 53, "pets")) == 64
    for wrong in (lambda: names.of_fleet("aggregator", "f" * 54, "pets"), lambda: names.check_topic("$SYS/broker")):
        with pytest.raises(UsageError):
            wrong()
