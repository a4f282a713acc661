"""`protofleet pki`, killed in the middle of any write: nothing is half, and the same command does it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from pki_samples import certificate, revoked

import protofleet.pki.authority as office_module
import protofleet.pki.register as book_module
from protofleet.pki.authority import Office, establish
from protofleet.pki.broker import access_rules
from protofleet.pki.register import Member


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority and a device."""
    folder = tmp_path_factory.mktemp("made")
    establish(folder / "pki", ["broker"], ["fleet"])
    with Office.open(folder / "pki") as office:
        office.admit("d1", Member(role="device", fleets=("fleet",)))
    return folder


def _killed(at: int, action: Callable[[], object]) -> bool:
    """Run it in a child that ends without a word in the middle of its write number `at`; whether it came to it."""
    child = os.fork()
    if child == 0:
        count, whole = 0, office_module.write_secret

        def write(path: Path, content: bytes) -> None:
            nonlocal count
            count += 1
            if count == at:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_name(f"{path.name}.partial").write_bytes(content[: len(content) // 2])
                os._exit(9)
            whole(path, content)

        office_module.write_secret = write
        book_module.write_secret = write
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def _is_whole(directory: Path) -> None:
    """What the next command makes up for: everything follows from the book, and every file is one that fits."""
    with Office.open(directory) as office:
        office.renew_lists()
        book = office.book
        trusted = x509.load_pem_x509_certificates((directory / "broker/ca.pem").read_bytes())
        assert len(trusted) == len(book.authorities)
        for name in book.live():
            shown = certificate(office.file(name))
            known = [each for each in book.issued if int(each.serial, 16) == shown.serial_number]
            assert [each.name for each in known] == [name]
            assert any(shown.issuer == each.subject for each in trusted)
        assert (directory / "broker/acl").read_text() == access_rules(book)
        assert len(list((directory / "authority").iterdir())) == 2 * len(book.authorities)
    gone = {int(each.serial, 16) for each in book.issued if each.revoked is not None}
    assert revoked(directory) == gone


def _renews(directory: Path) -> None:
    with Office.open(directory) as office:
        office.renew("d1")


def _revokes(directory: Path) -> None:
    with Office.open(directory) as office:
        if not office.book.is_revoked("d1"):
            office.revoke("d1")


def _rotates(directory: Path) -> None:
    with Office.open(directory) as office:
        if len(office.book.authorities) == 1:
            office.rotate(1_825)
        office.finish_rotation(leave_behind=True)


@pytest.mark.parametrize(("action", "step"), [(_renews, 1), (_revokes, 1), (_rotates, 5)])
def test_killed_at_any_write_nothing_is_half_and_the_same_command_does_it(
    made: Path, tmp_path: Path, action: Callable[[Path], None], step: int
) -> None:
    for at in range(1, 60, step):
        place = tmp_path / f"{at}"
        shutil.copytree(made / "pki", place / "pki")
        if not _killed(at, lambda place=place: action(place / "pki")):  # type: ignore[misc]
            break
        if action is not _rotates:  # whose end leaves others' certificates of an authority that went
            _is_whole(place / "pki")
        action(place / "pki")
        assert not list(place.rglob("*.partial"))
    assert 3 < at < 59


def test_an_init_that_was_killed_is_begun_again(tmp_path: Path) -> None:
    for at in (1, 5, 16):
        place = tmp_path / f"{at}"
        place.mkdir()
        assert _killed(at, lambda place=place: establish(place / "pki", ["b"], ["fleet"]))  # type: ignore[misc]
        assert not (place / "pki").exists()
        establish(place / "pki", ["b"], ["fleet"])
        assert [path.name for path in place.iterdir()] == ["pki"]
    _is_whole(place / "pki")
