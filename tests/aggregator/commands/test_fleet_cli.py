"""`protofleet forget` and `protofleet fleet …` on a store that no aggregator has: what they show, record and refuse."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from aggregator_samples import BUNDLE
from commands import one_error_line, run
from fleets import stocked
from postgres_server import ON_FILES, Places

from protofleet.aggregator.enrolment.gate import Gate
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.standing_tables import Stands
from protofleet.contract.identity.signatures import Signer, invitation_key
from protofleet.contract.identity.tokens import read_token


@pytest.fixture
def store(places: Places) -> str:
    """Two devices stand, one has withdrawn."""
    path = places("s.sqlite")
    with DurableStore(path, BUNDLE, "fleet") as made:
        given = [Stands("kitchen", 1, b"sums", 4), Stands("porch", 7, b"sums", 4), Stands("shed", 3, None, 0)]
        made.standing.commit(given, {}, 1000.0)
    return path


def test_the_devices_are_listed_and_shown(store: str) -> None:
    done = run("fleet", "list", "--store", store)
    shown = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in done.stdout.splitlines()[2:]}
    assert shown["porch"].split() == ["sums", "7", "0"]
    assert shown["shed"].endswith("it withdrew what it had sent")
    listed = json.loads(run("fleet", "list", "--store", store, "--json", "-").stdout)["devices"]
    assert [(each["device"], each["generation"], each["present"]) for each in listed] == [
        ("kitchen", 1, True),
        ("porch", 7, True),
        ("shed", 3, False),
    ]
    lines = run("fleet", "show", "shed", "--store", store).stdout.splitlines()
    assert lines[0] == "shed: none since sums 3, 0 rounds"
    assert lines[-1].startswith("withdraw shed, asked by the device at 1970-01-01")


def test_in_a_fleet_of_rounds_nothing_is_said_of_sums_that_stand(tmp_path: Path) -> None:
    """There "none" would be read as: nothing is known of it."""
    store = str(stocked(tmp_path / "store"))
    assert run("fleet", "show", "d0", "--store", store).stdout.splitlines()[0] == "d0: 0 rounds"
    heads = run("fleet", "list", "--store", store).stdout.splitlines()[0].split()
    assert heads == ["device", "state", "heard", "rounds", "drift", "found", "refused"]


def test_an_order_is_recorded_and_says_that_nobody_is_there_to_do_it(store: str) -> None:
    done = run("forget", "kitchen", "--store", store, "--json", "-")
    assert done.returncode == 0
    why = "no aggregator runs on this store; the next one that is started on it does it"
    until = "Until then all that came from it is still held and still counts"
    assert done.stderr.endswith(f": NOT yet done: {why}. {until}\n")
    told = json.loads(done.stdout)
    assert (told["order"]["what"], told["order"]["done_at"], told["aggregator_runs"]) == ("forget", None, False)
    for words in (("admit", "shed"), ("remove", "newcomer"), ("pause",), ("resume",)):
        done = run("fleet", *words, "--store", store)
        assert done.returncode == 0
        assert f": NOT yet done: {why}" in done.stdout
    said = run("fleet", "log", "--store", store).stdout
    asked = [line.split(", ")[0] for line in said.splitlines()]
    assert asked == ["withdraw shed", "forget kitchen", "admit shed", "remove newcomer", "pause", "resume"]
    with DurableStore(store, BUNDLE, "fleet") as opened:
        assert opened.orders.next_order().what == "withdraw"


def test_an_order_that_an_aggregator_has_not_done_in_time_is_not_yet_done(store: str) -> None:
    with DurableStore(store, BUNDLE, "fleet"):  # an aggregator has the store, and is busy
        for words in (("forget", "kitchen"), ("fleet", "rollback"), ("fleet", "close-round")):
            done = run(*words, "--store", store, "--wait", "0.2")
            assert done.returncode == 0
            why = "the aggregator on this store has not done it within 0.2 s; protofleet fleet log tells when"
            assert f": NOT yet done: {why}" in done.stdout
    said = run("fleet", "log", "--store", store).stdout.splitlines()
    assert [line.endswith(": NOT yet done") for line in said[1:]] == [True, True, True]


def test_a_name_of_bytes_that_are_no_text_is_recorded_as_they_are(store: str) -> None:
    done = run("fleet", "pause", "--store", store, LOGNAME="ann\udcff")
    assert done.returncode == 0
    assert done.stdout.startswith("pause, asked by ann\\udcff at ")
    assert run("forget", "--class", "caf\udce9", "--store", store).returncode == 0


def test_how_far_to_go_back_is_recorded(store: str) -> None:
    for words in ((), ("--rounds", "3"), ("porch",)):
        assert run("fleet", "rollback", *words, "--store", store).returncode == 0
    said = run("fleet", "log", "--store", store).stdout
    assert [line.split(", ")[0] for line in said.splitlines()][1:] == ["rollback 1", "rollback 3", "rollback porch"]
    for words, line in (
        (("porch", "--rounds", "2"), "DEVICE and --rounds, expected one of them, got both"),
        (("--rounds", "0"), "--rounds, expected 1 or more, got 0"),
        (("nobody",), "a device that the store knows, got nobody"),
    ):
        assert line in one_error_line(run("fleet", "rollback", *words, "--store", store))


def test_devices_are_invited_enrolled_revoked_and_listed(store: str, tmp_path: Path) -> None:
    signer = Signer(bytes(range(32)))
    (tmp_path / "k.pub").write_bytes(signer.public_key)
    (tmp_path / "devices.toml").write_text(f'[devices]\nporch = "{Signer(bytes(32)).public_key.hex()}"\n')
    invited = run("fleet", "invite", "attic", "--store", store, "--expires", "90m")
    token = read_token(invited.stdout.strip())
    assert "within 90 min" in invited.stderr
    assert invited.stdout.strip() not in invited.stderr
    assert run("fleet", "enrol", "kitchen", "--key", tmp_path / "k.pub", "--store", store).returncode == 0
    assert run("fleet", "enrol", "--from", tmp_path / "devices.toml", "--store", store).returncode == 0
    assert run("fleet", "revoke", "porch", "--store", store).returncode == 0
    with DurableStore(store, BUNDLE, "fleet") as made:
        gate = Gate("fleet", made.enrolment)
        while (order := made.orders.next_order()) is not None:
            gate.obey(order, 1.0)
            made.orders.done(order, 1.0, "done", 0, 0)
        invitation, expires = made.enrolment.invitation("attic")
        gate.note("kitchen", "unsigned", "not signed", 5.0)
        gate.note("porch", "refuses", "it gets messages that no key which it trusts has signed", 5.5, messages=3)
        gate.note("porch", "second-process", "another process runs under its id", 5.6)
        gate.take_news(6.0)
    assert invitation == invitation_key(token)
    assert 5300 < expires - time.time() < 5500
    done = run("fleet", "list", "--store", store)
    rows = {line.split()[0]: line for line in done.stdout.splitlines()[2:]}
    assert signer.key_id.hex() in rows["kitchen"]
    assert "revoked" in rows["porch"]
    assert "intruder as kitchen: 1 message" in done.stderr + done.stdout
    shown = json.loads(run("fleet", "show", "kitchen", "--store", store, "--json", "-").stdout)
    assert (shown["key"], shown["intruders"][0]["cause"]) == (signer.key_id.hex(), "unsigned")
    done = run("fleet", "suspects", "--store", store, "--json", tmp_path / "suspects.json")
    assert "intruder as kitchen: 1 message, last at" in done.stdout
    assert "porch: 3 messages" in done.stdout  # what it refuses; nobody has posed as it
    assert done.stdout.endswith("suspected, 1 intruder turned away\n")
    named = json.loads((tmp_path / "suspects.json").read_text())["intruders"]
    said = {("porch", "refuses"), ("porch", "second-process")}
    assert {(each["device"], each["cause"]) for each in named} == {("kitchen", "unsigned"), *said}
    log = run("fleet", "log", "--store", store).stdout
    assert "invite attic, asked by" in log
    assert invitation.hex() not in log


@ON_FILES
def test_what_somebody_wrote_into_the_orders_by_hand_is_shown_as_it_is(store: str) -> None:
    with closing(sqlite3.connect(store)) as db, db:
        db.execute("INSERT INTO fleet_order (what, device, who, given_at) VALUES (x'ff', 'A/#', 7, 'soon')")
        db.execute("INSERT INTO fleet_order (what, device, who, given_at) VALUES ('pause', '', 'me', 1e300)")
    done = run("fleet", "log", "--store", store)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].startswith("b'\\xff' A/#, asked by 7 at 1970-01-01")
    assert done.stdout.splitlines()[2] == "pause, asked by me at an unknown time: NOT yet done"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("forget", "kitchn"), "a device that the store knows, got kitchn, try one of kitchen"),
        (("fleet", "admit", "nobody"), "a device that the store knows, got nobody"),
        (("fleet", "show", "nobody"), "a device that the store knows, got nobody"),
        (("fleet", "remove", "No Device"), "DEVICE"),
        (("fleet", "invite", "No Device"), "DEVICE"),
        (("fleet", "invite", "attic", "--expires", "0s"), "--expires, expected above 0"),
        (("fleet", "enrol", "attic"), "--key KEY, or --from TOML"),
        (("fleet", "enrol", "--from", "/nowhere"), "a TOML file"),
    ],
)
def test_a_device_that_is_none_is_one_line(store: str, words: tuple[str, ...], line: str) -> None:
    done = run(*words, "--store", store)
    assert (done.returncode, line in one_error_line(done)) == (2, True), done.stderr
    said = run("fleet", "log", "--store", store).stdout
    assert [line.split(",")[0] for line in said.splitlines()] == ["withdraw shed"]


def test_a_class_is_forgotten_by_its_name_and_backups_are_told(store: str, tmp_path: Path) -> None:
    assert run("fleet", "backup", tmp_path / "b.sqlite", "--store", store).returncode == 0
    done = run("forget", "--class", "Hamster", "--store", store, "--json", "-")
    assert (done.returncode, json.loads(done.stdout)["backups"]) == (0, [str(tmp_path / "b.sqlite")])
    assert done.stderr.startswith("forget class Hamster, asked by ")
    assert done.stderr.endswith(f"backups hold it until you destroy them: {tmp_path / 'b.sqlite'}\n")
    assert run("fleet", "admit", "--class", "Hamster", "--store", store).returncode == 0
    for words in ((), ("porch", "--class", "Hamster")):
        line = one_error_line(run("forget", *words, "--store", store))
        assert line.startswith("error: DEVICE and --class, expected one of them, got ")
    with DurableStore(store, BUNDLE, "fleet") as opened:
        order = opened.orders.next_order()
        opened.standing.class_done(order, ("Hamster",), {}, at=1.0, before=1, after=2, outcome="done")
    assert "forgotten classes: Hamster; protofleet fleet admit" in run("fleet", "list", "--store", store).stdout


@pytest.mark.parametrize("given", ["nan", "inf", "-1"])
def test_a_wait_that_has_no_end_is_one_line(store: str, given: str) -> None:
    line = one_error_line(run("fleet", "pause", "--store", store, "--wait", given))
    assert line.startswith("error: --wait, expected 0 to 1e+06 seconds, got ")
    assert run("fleet", "log", "--store", store).stdout.count("\n") == 1


def test_a_file_that_is_no_store_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no store" * 100)
    for path, code in ((tmp_path / "none", 1), (tmp_path / "text", 2)):
        done = run("forget", "a", "--store", path)
        assert (done.returncode, one_error_line(done)[:6]) == (code, "error:")


def test_nothing_is_done_that_could_not_be_told(tmp_path: Path) -> None:
    path, json = tmp_path / "s", ("--json", tmp_path / "none" / "told.json")
    DurableStore(path, BUNDLE, "fleet").close()
    assert run("fleet", "backup", tmp_path / "kept", "--store", path).returncode == 0
    for words in (("remove", "a"), ("backup", tmp_path / "other"), ("restore", tmp_path / "kept", "--force")):
        assert "expected a file that can be written" in one_error_line(run("fleet", *words, "--store", path, *json))
    assert not (tmp_path / "other").exists()
    log = run("fleet", "log", "--store", path).stdout.splitlines()
    assert [line.split(",")[0] for line in log] == ["backup"]


def test_a_wait_that_is_no_number_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    DurableStore(tmp_path / "s", BUNDLE, "fleet").close()
    assert one_error_line(run("fleet", "pause", "--store", tmp_path / "s", "--wait", "nan")).startswith("error: --wait")
    assert run("fleet", "log", "--store", tmp_path / "s").stdout == ""
