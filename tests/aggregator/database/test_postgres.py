"""A store on a real PostgreSQL server: what it refuses in one line, what it never shows, and what survives its death.

That it keeps what a file keeps is in the store's own tests, which run with both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aggregator_samples import BUNDLE, bundle_file, means
from aggregator_server_samples import wait
from brokers import make_broker
from commands import ROOT, one_error_line, run, run_process
from postgres_server import PostgresServer, need_postgres, own_server
from talker import Talker

from protofleet.aggregator.database import beside, is_taken, place_of, read_only, watch
from protofleet.aggregator.database import postgres as engine
from protofleet.aggregator.database import postgres_connection as connection
from protofleet.aggregator.monitoring.events import LinkUp, StoreAway
from protofleet.aggregator.server.service import Service
from protofleet.aggregator.settings import AggregateSettings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.records import Accepted
from protofleet.aggregator.store.schema import KIND
from protofleet.aggregator.store.standing_tables import Stands
from protofleet.aggregator.workers.store_outage import StoreOutage
from protofleet.contract.console.interrupt import Terminated
from protofleet.contract.errors import InUseError, StoreAwayError, StoreError, StoreLostError, UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.wire.global_state import GlobalState

SECRET = "s3cret"


@pytest.fixture
def server() -> PostgresServer:
    return need_postgres()


@pytest.fixture
def place(server: PostgresServer) -> str:
    return server.new_place()


def _accepted(device: str, payload: bytes = b"payload", round: int = 1) -> Accepted:
    return Accepted(round, "fedproto", device, payload, len(payload))


# ── what is shown ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:s3cret@db/pets", "postgresql://me@db/pets"),
        ("postgres://me:s3cret@db:5433/pets?sslmode=require", "postgres://me@db:5433/pets?sslmode=require"),
        ("postgresql://me:s3cret:x#y@db/pets", "postgresql://me@db/pets"),  # not escaped, as people write it
        ("postgresql://db/pets?user=me&password=s3cret&x=1", "postgresql://db/pets?user=me&password=…&x=…"),
        ("postgresql://db/pets?sslPassword=s3cret", "postgresql://db/pets?sslPassword=…"),
        ("postgresql://me%40corp.example:s3cret@db/pets", "postgresql://me%40corp.example@db/pets"),
        ("postgresql://db/pets?x=1&%70assword=s3cret", "postgresql://db/pets?x=…&%70assword=…"),
        ("postgresql://db/pets?scram_client_key=s3cret", "postgresql://db/pets?scram_client_key=…"),
        ("postgresql://db/pets?oauth_client_secret=s3cret", "postgresql://db/pets?oauth_client_secret=…"),
        ("postgresql://me@db:5432/pets?options=-csearch_path%3Da", "postgresql://me@db:5432/pets?options=-csearch_path%3Da"),
    ],
)  # fmt: skip
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    place = place_of(url)
    assert str(place) == shown
    assert SECRET not in repr(place)


@pytest.mark.parametrize(
    "text",
    [
        "Postgresql://me:s3cret@db/pets",
        "postgresql+psycopg://me:s3cret@db/pets",
        "postgresql:/me:s3cret@db/pets",
        " postgresql://me:s3cret@db/pets",
        "mysql://me:s3cret@db/pets",
        "host=db user=me password=s3cret",
        "postgresql://me:s3cret@x:y/z@db/pets",  # libpq would look up a piece of the password
        "postgresql://me:s3cret?x@db/pets",
        "postgresql://me@corp.example:s3cret@db/pets",
        "postgresql://me/a:s3\ncret@db/pets",
        "me:s3cret@db/pets",
    ],
)
def test_nor_is_what_is_no_url_of_libpqs_taken_for_a_file(text: str) -> None:
    line = one_error_line(run("fleet", "list", "--store", text))
    assert line.startswith("error: --store, expected a file, or postgresql://USER@HOST[:PORT]/DATABASE, other ")
    assert SECRET not in line
    for name in ("a:b/c.sqlite", "postgres.sqlite", "C:/store"):
        assert place_of(name) == Path(name)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cret@127.0.0.1:1/pets",
        "postgresql://me:s3cret@[/pets",
        "postgresql://me@127.0.0.1:s3cret@127.0.0.1:1/pets",
    ],
)
@pytest.mark.parametrize("words", [("fleet", "list"), ("forget", "a"), ("rollout",), ("fleet", "backup", "b")])
def test_nor_by_a_command_that_fails(url: str, words: tuple[str, ...]) -> None:
    need_postgres()
    line = one_error_line(run(*words, "--store", url))
    assert SECRET not in line
    assert "Connection refused" in line or "postgresql://USER@HOST" in line


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    line = one_error_line(run("fleet", "list", "--store", f"postgresql://me:{SECRET}@db/pets"))
    assert line == (
        f"error: --store postgresql://me@db/pets, expected psycopg 3, got none, try {install_command('scale')}"
    )


def test_it_is_loaded_only_when_it_is_asked_for(tmp_path: Path) -> None:
    DurableStore(tmp_path / "s", BUNDLE, "fleet").close()
    told = "import atexit, sys; atexit.register(lambda: print('psycopg' in sys.modules))"
    done = run_process("fleet", "log", "--store", tmp_path / "s", code=told)
    assert (done.returncode, done.stdout) == (0, "False\n")


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def _refused(place: str) -> str:
    with pytest.raises((StoreError, UsageError)) as caught:
        DurableStore(place, BUNDLE, "fleet").close()
    return str(caught.value)


def test_a_schema_of_others_or_of_a_newer_release_is_left_alone(server: PostgresServer, place: str) -> None:
    name = place.rsplit("%3D", 1)[1]
    with server.connect() as db:
        db.execute(f"CREATE TABLE {name}.customers (x int)")
        assert "expected a schema with a store or with no table, got one with the table customers" in _refused(place)
        assert db.execute("SELECT count(*) FROM pg_tables WHERE schemaname = %s", (name,)).fetchone() == (1,)
        assert "got a search path without one" in _refused(server.url("nowhere"))
        with pytest.raises(StoreError, match="expected a store, got a schema without one"), read_only(place, KIND):
            pass
        db.execute(f"DROP TABLE {name}.customers")
        DurableStore(place, BUNDLE, "fleet").close()
        db.execute(f"UPDATE {name}.protofleet SET version = 99")
    assert "got version 99, of a newer Protofleet, try a newer Protofleet" in _refused(place)
    assert "version 99" in one_error_line(run("fleet", "list", "--store", place))


def test_an_older_store_is_brought_up_in_one_transaction(server: PostgresServer, place: str) -> None:
    from dataclasses import replace

    older = replace(KIND, steps=KIND.steps[:-1])
    engine.PostgresDatabase(place_of(place), older).close()
    assert "try starting what runs on it" in one_error_line(run("fleet", "list", "--store", place))
    broken = replace(KIND, steps=(*KIND.steps, "CREATE TABLE newer (x INTEGER); CREATE TABLE meta (x INTEGER)"))
    with pytest.raises(StoreError, match="already exists"):
        engine.PostgresDatabase(place_of(place), broken)
    with server.connect() as db:
        found = db.execute("SELECT 1 FROM pg_tables WHERE tablename = 'newer'").fetchone()
        assert found is None
    assert run("fleet", "pause", "--store", place).returncode == 0
    with DurableStore(place, BUNDLE, "fleet") as store:
        assert store.orders.next_order().what == "pause"


def test_a_server_that_cannot_be_used_is_one_line(
    server: PostgresServer, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "expected a server that takes writes, got one that is read only" in _refused(
        f"{place}%20-cdefault_transaction_read_only%3Don"
    )
    with server.connect() as db:
        db.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
    assert "expected a database in UTF-8, got LATIN1" in _refused(server.url().replace("/postgres?", "/latin?"))
    assert 'database "none" does not exist' in _refused(server.url().replace("/postgres?", "/none?"))
    assert "expected a PostgreSQL server that lets us in" in _refused("postgresql://x@127.0.0.1:1/pets")
    monkeypatch.setattr(connection, "OLDEST", 99)
    with server.connect() as db:
        major, minor = divmod(db.info.server_version, 10_000)
    assert f"expected PostgreSQL 99 or newer, got {major}.{minor}" in _refused(place)


@pytest.mark.parametrize("limit", ["lock_timeout", "statement_timeout", "idle_session_timeout", "transaction_timeout"])
def test_limits_that_a_role_has_end_nothing_of_ours(server: PostgresServer, place: str, limit: str) -> None:
    with server.connect() as db:
        known = db.execute("SELECT 1 FROM pg_settings WHERE name = %s", (limit,)).fetchone()
        if known is None:
            assert limit == "transaction_timeout"
            assert db.info.server_version < 170_000
            return
    writes, done = threading.Event(), threading.Event()

    def hold() -> None:
        with beside(place, KIND):
            writes.set()
            done.wait(0.3)

    with DurableStore(f"{place}%20-c{limit}%3D100", BUNDLE, "fleet") as store:
        thread = threading.Thread(target=hold)
        thread.start()
        writes.wait()
        store.commit([_accepted("a")], {})  # waits for the other
        done.wait(0.2)
        with store._file.transaction():
            done.wait(0.2)
        thread.join()
        assert len(list(store.contributions(1, "fedproto"))) == 1


def test_what_is_committed_is_on_the_disk_whatever_the_role_says(place: str) -> None:
    with DurableStore(f"{place}%20-csynchronous_commit%3Doff", BUNDLE, "fleet") as store:
        assert store._db.execute("SHOW synchronous_commit").fetchone() == ("on",)


def test_text_is_utf_8_whatever_the_environment_says(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "SQL_ASCII")
    with DurableStore(place, BUNDLE, "küche") as store:
        store.commit([_accepted("a")], {})
        assert store.taken(1, "fedproto")[0] == ["a"]


def test_a_role_without_the_rights_is_one_line_that_says_which(server: PostgresServer, place: str) -> None:
    """Who does not own the tables could use them, but PostgreSQL would skip what erases for good, and only warn."""
    name = place.rsplit("%3D", 1)[1]
    theirs = place.replace("protofleet@", f"user_{name}@")
    with server.connect() as db:
        db.execute(f"CREATE ROLE user_{name} LOGIN; GRANT USAGE ON SCHEMA {name} TO user_{name}")
        try:
            line = _refused(theirs)
            assert f"expected a role with a right to it, got permission denied for schema {name}, try " in line
            assert "GRANT USAGE, CREATE ON SCHEMA" in line
            DurableStore(place, BUNDLE, "fleet").close()
            db.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {name} TO user_{name}")
            assert "expected the role that owns its tables, got another" in _refused(theirs)
            assert run("fleet", "list", "--store", theirs).returncode == 0
            db.execute(f"GRANT protofleet TO user_{name}")
            DurableStore(theirs, BUNDLE, "fleet").close()
        finally:
            db.execute(f"DROP OWNED BY user_{name}; DROP ROLE user_{name}")


def test_a_statement_that_is_cancelled_is_a_server_that_is_away(server: PostgresServer, place: str) -> None:
    with DurableStore(place, BUNDLE, "fleet") as store, server.connect() as db:
        pid = store._file.connection.link.info.backend_pid  # type: ignore[attr-defined]
        cancel = threading.Timer(0.2, lambda: db.execute("SELECT pg_cancel_backend(%s)", (pid,)))
        cancel.start()
        with pytest.raises(StoreLostError, match="canceling statement due to user request"), store._file.transaction():
            store._db.execute("SELECT pg_sleep(20)")
        cancel.join()


def test_a_schema_may_have_any_name(server: PostgresServer) -> None:
    with server.connect() as db:
        db.execute('CREATE SCHEMA "Pets; x"')
        try:
            with DurableStore(server.url("%22Pets;%5C%20x%22"), BUNDLE, "fleet") as store:
                assert store.size_bytes() > 100_000
        finally:
            db.execute('DROP SCHEMA "Pets; x" CASCADE')


def test_what_no_aggregator_wrote_is_one_line(server: PostgresServer, place: str) -> None:
    DurableStore(place, BUNDLE, "fleet").close()
    name = place.rsplit("%3D", 1)[1]
    with server.connect() as db:
        db.execute(f"UPDATE {name}.meta SET value = '\\x01' WHERE name = 'fleet'")
        assert "expected fleet \x01".replace("\x01", "") in _refused(place)
        db.execute(f"DROP TABLE {name}.finding")
    line = one_error_line(run("fleet", "list", "--store", place))
    assert 'expected a store as it was written, got relation "finding" does not exist' in line


def test_who_runs_on_it_is_known_and_a_dead_one_leaves_it(place: str) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from protofleet.aggregator.store.durable_store import DurableStore
        store = DurableStore(sys.argv[1], bytes(range(32)), "fleet")
        print("open", flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script, place], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert is_taken(place, KIND)
        with pytest.raises(InUseError, match="another process that runs on it"):
            DurableStore(place, BUNDLE, "fleet")
    finally:
        process.kill()
        process.communicate()
    DurableStore(place, BUNDLE, "fleet").close()
    wait(lambda: not is_taken(place, KIND))  # the server may take a moment to notice


def test_a_server_without_a_free_connection_is_one_line() -> None:
    with own_server(max_connections="4", superuser_reserved_connections="0") as full:
        place = full.new_place()
        DurableStore(place, BUNDLE, "fleet").close()
        with closing(full.connect()), closing(full.connect()), closing(full.connect()), closing(full.connect()):
            assert "expected a free connection" in one_error_line(run("fleet", "list", "--store", place))


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A real file system of 4 MB."""
    folder = Path("/tmp") / f"pf-small-{os.getpid()}"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True
    ).returncode == 0  # fmt: skip
    try:
        if not mounted:
            pytest.skip("mounting a small disk takes root")
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def test_a_full_disk_is_one_error_and_loses_nothing_that_was_committed(
    server: PostgresServer, small_disk: Path
) -> None:
    shutil.chown(small_disk, user="nobody")
    small_disk.chmod(0o700)
    place = f"{server.new_place()}%20-cdefault_tablespace%3Dsmall"
    with server.connect() as db:
        db.execute(f"CREATE TABLESPACE small LOCATION '{small_disk}'")
    try:
        with DurableStore(place, BUNDLE, "fleet") as store:
            error, committed = _until_refused(store, 20_000)
            assert "expected a server with room, got could not extend" in str(error)
            assert not isinstance(error, StoreLostError)
            assert 0 < committed < 1_000
            assert len(list(store.contributions(1, "fedproto"))) == committed
            assert store.last_round() == 0  # it goes on
    finally:
        with server.connect() as db:
            db.execute(f"DROP SCHEMA {place.split('%3D')[1].split('%20')[0]} CASCADE")
            db.execute("DROP TABLESPACE small")


def _until_refused(store: DurableStore, payload_bytes: int, committed: int = 0) -> tuple[StoreError, int]:
    """Commit batches of five until that is refused; how, and how many contributions were confirmed."""
    while True:
        try:
            store.commit([_accepted(f"{committed + i:09d}", os.urandom(payload_bytes)) for i in range(5)], {})
        except StoreError as error:
            return error, committed
        committed += 5


# ── what survives ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_kill_9_of_the_server_keeps_every_batch_that_commit_returned_from() -> None:
    with own_server() as mortal:
        place, promised = mortal.new_place(), 0
        for commits in (3, 9):
            with closing(DurableStore(place, BUNDLE, "fleet")) as store:
                killer = threading.Timer(0.02 * commits, mortal.kill)
                killer.start()
                error, promised = _until_refused(store, 2_000, promised)
                killer.join()
                assert isinstance(error, StoreLostError)
                assert "what was confirmed is safe" in str(error)
            mortal.start()
            with DurableStore(place, BUNDLE, "fleet") as store:
                held = sum(1 for _ in store.contributions(1, "fedproto"))
            assert held % 5 == 0
            assert promised <= held <= promised + 5
            promised = held


def test_a_connection_that_is_lost_before_its_commit_has_written_nothing(server: PostgresServer, place: str) -> None:
    with DurableStore(place, BUNDLE, "fleet") as store, server.connect() as db:
        found = store._db.execute("SELECT pg_backend_pid()").fetchone()

        def lose() -> None:
            with store._transaction() as within:
                within.execute("INSERT INTO meta VALUES ('x', ?)", (b"y",))
                db.execute("SELECT pg_terminate_backend(%s, 5000)", found)

        with pytest.raises(StoreLostError):
            lose()
        with pytest.raises(StoreLostError):  # and nothing is believed to be there from here on
            store.last_round()
    with DurableStore(place, BUNDLE, "fleet") as store:
        assert store.meta.get("x") is None


def test_reading_that_is_given_up_after_the_server_went_ends_quietly(server: PostgresServer, place: str) -> None:
    """A round's contributions are read one at a time; what reads them may be dropped when the connection is lost."""
    db, other = (connection.connect(place_of(place), KIND) for _ in range(2))
    with closing(other.link), closing(db.link):
        reading = db.stream_rows("SELECT generate_series(1, 100000)")
        assert next(reading) == (1,)
        other.execute("SELECT pg_terminate_backend(?, 5000)", (db.link.info.backend_pid,))
        reading.close()


def test_a_store_is_looked_for_again_only_where_that_may_help() -> None:
    away, lost, taken = StoreOutage(), StoreLostError("store"), InUseError("store")
    assert away.wait_s(lost, 0.0) is None  # it was never there
    away.opened()
    assert away.wait_s(StoreError("full"), 0.0) is None
    assert [away.wait_s(lost, 0.0) for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0, 5.0]
    assert (away.wait_s(taken, 10.0), away.wait_s(taken, 129.0), away.wait_s(taken, 131.0)) == (5.0, 5.0, None)
    away.opened()
    assert away.wait_s(taken, 500.0) == 0.5
    patient, gone = StoreOutage(patience_s=60.0), StoreAwayError("store")
    assert patient.wait_s(lost, 0.0) is None  # it is there, and refuses
    assert (patient.wait_s(gone, 0.0), patient.wait_s(gone, 59.0), patient.wait_s(gone, 61.0)) == (0.5, 1.0, None)
    assert StoreOutage().wait_s(gone, 0.0) is None


def test_an_aggregator_goes_on_when_its_server_was_killed(tmp_path: Path) -> None:
    """The same process, no contribution lost or doubled, and no device told what is not so."""
    bundle, told = tmp_path / "f.bundle", list[object]()
    sha256 = bundle_file(bundle)
    broker = make_broker("embedded", tmp_path)
    broker.start()
    with own_server() as mortal:
        place = mortal.new_place()
        asked = {"rounds": 8, "calibrate": False, "min_clients": 3}
        settings = AggregateSettings(bundle=(str(bundle),), broker=broker.url, store=place, fleet="test", **asked)  # type: ignore[arg-type]
        service = Service(settings)
        summary: dict[str, Any] = {}
        serving = threading.Thread(target=lambda: summary.update(service.run(told.append, lambda *_: None)))
        talkers = [Talker(broker.url, "test", f"d{i}", lambda a, i=i: means(i + 10 * a.round)) for i in range(3)]
        serving.start()
        try:
            for talker in talkers:
                talker.start()
            wait(lambda: _committed(place) >= 4)
            mortal.kill()
            wait(lambda: any(isinstance(event, StoreAway) for event in told))
            mortal.start()
            serving.join(60)
            assert not serving.is_alive()
        finally:
            service.stop()
            for talker in talkers:
                talker.stop()
            serving.join(30)
            broker.stop()
        assert summary["totals"]["committed"] == 24
        with DurableStore(place, sha256, "test") as store:
            assert [sorted(record.uplink_bytes) for record in store.rounds()] == [["d0", "d1", "d2"]] * 8


def test_a_signal_ends_it_though_the_store_goes_at_the_same_moment(tmp_path: Path) -> None:
    """A machine that shuts down sends SIGTERM to all: the server may be gone before what is left has been written."""
    bundle, terminated = tmp_path / "f.bundle", threading.Event()
    bundle_file(bundle)
    broker = make_broker("embedded", tmp_path)
    broker.start()
    store = str(tmp_path / "s.sqlite")
    settings = AggregateSettings(bundle=(str(bundle),), broker=broker.url, store=store, fleet="test", rounds=1)

    def told(event: object) -> None:
        if isinstance(event, LinkUp):
            terminated.set()
            raise Terminated

    def summary(_: object, __: bool) -> None:
        if terminated.is_set():
            raise StoreAwayError("store", expected="a server that goes on", got="none")

    try:
        with pytest.raises(Terminated):
            Service(settings).run(told, summary)
    finally:
        broker.stop()


def _committed(place: str) -> int:
    try:
        with read_only(place, KIND) as db:
            return int(db.execute("SELECT count(*) FROM contribution").fetchone()[0])
    except (StoreError, UsageError):
        return 0


def test_what_was_forgotten_is_in_no_file_of_the_tables(server: PostgresServer, place: str) -> None:
    marks = [os.urandom(48) for _ in range(3)]

    def there() -> list[bool]:
        with server.connect() as db:
            db.execute("CHECKPOINT")
        found = b"".join(path.read_bytes() for path in (server.folder / "data" / "base").rglob("*") if path.is_file())
        return [mark in found for mark in marks]

    with DurableStore(place, BUNDLE, "fleet") as store:
        store.open_round(1, "fedproto", 0, 0.0)
        store.commit([_accepted("b", marks[1]), _accepted("a", marks[0])], {})  # so that b is not moved over a
        store.standing.commit([Stands("a", 1, marks[2], 48)], {}, 1.0)
        assert there() == [True, True, True]
        (order, _) = give(place, "remove", "a", "me")
        store.standing.take_out(order, [], None, at=1.0, before=0, after=0, reason="it was forgotten", outcome="done")
        wait(store.standing.erase)
        assert there() == [False, True, False]
        assert list(store.contributions(1, "fedproto")) == [marks[1]]


@pytest.mark.parametrize("how", ["REPEATABLE READ; SELECT 1", "READ COMMITTED; LOCK TABLE payload"])
def test_nothing_is_erased_for_good_while_somebody_is_in_the_way(server: PostgresServer, place: str, how: str) -> None:
    """Who reads an older moment, for whom it would be kept, and who has a table; neither is waited for."""
    with DurableStore(place, BUNDLE, "fleet") as store, server.connect() as other:
        other.execute(f"SET search_path = {place.rsplit('%3D', 1)[1]}")
        other.execute(f"BEGIN ISOLATION LEVEL {how}")
        began = time.monotonic()
        release = threading.Timer(5.0, other.close)
        release.start()
        assert not store._file.erase(["payload"])
        assert time.monotonic() - began < 4
        release.cancel()
        other.execute("ROLLBACK")
        assert store._file.erase(["payload"])


def test_who_looks_beside_it_hears_of_whatever_was_committed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_WATCH_S", 0.0)
    with DurableStore(place, BUNDLE, "fleet") as store:
        look = watch(place)

        def is_heard_once() -> bool:
            """The server's own work is heard of, too; it does not go on for ever."""
            return look.changed() and any(not look.changed() for _ in range(1_000))

        assert is_heard_once()
        store.open_round(1, "fedproto", 0, 0.0)
        assert is_heard_once()
        give(place_of(place), "pause", "", "anna")
        assert is_heard_once()
        store.devices.decided("a", 1, 1.0)
        store.devices.keep(1e9, 1.0)
        assert is_heard_once()
        store.close_round(1, 1.0, 0, GlobalState(store.run, 1, 1))
        store.standing.solved([(2, 0, b"part")], "digest")
        assert is_heard_once()
        look.close()
