"""A store that several processes work on: one leads, the others validate, commit and answer beside it.

Contributions may be committed by any of them at once, exactly once each: the key (round, method, device) is unique, and
whoever comes second hears so, and answers `duplicate`. What a commit was decided on is the number `based_on`; if the
leader, or an operator, has changed anything since, nothing is written and all is decided anew
(`aggregator/database/members.py`).

Chunks of one contribution may come to different processes. Each puts what it gets into a table of the server, and
whoever finds all of them there takes the whole. See docs/decisions/185.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager

from aggregator.database import AnyPlace, Database, PostgresPlace, place_of, upsert
from aggregator.database.members import Leader, Member
from aggregator.shared_standing_store import SharedStandingTables
from aggregator.store import Accepted, DurableStore, Key, Tally
from aggregator.store_schema import COUNT, KIND
from contract.errors import StoreLostError, UsageError
from contract.messages import Chunk

__all__ = ["SharedStore"]


class SharedStore(DurableStore):
    """The store of one process among several.

    Args:
        path: a server's URL.
        leads: whether this is the one that opens and closes rounds.
        settings: a digest of what decides which contributions are taken; every commit is conditional on that being the
            leader's.
        anew: whether, of who leads, other settings than were in force may be.

    Attributes:
        standing_beside: what stands, as several processes take it.
        based_on: what decisions depend on, as a number that goes up with it.

    Raises:
        InUseError: `leads`, and another process does.
        StoreError, UsageError: as `DurableStore`; and when it is a file, of another release's version, or other
            settings are in force than these, which every transaction of one that does not lead finds out, too.
    """

    shared = True

    def __init__(
        self,
        path: AnyPlace,
        bundle: bytes,
        fleet: str,
        *,
        extends: Collection[bytes] = (),
        leads: bool,
        settings: str = "",
        anew: bool = True,
    ) -> None:
        self._claims, self._bundle, self._settings, self._anew = leads, bundle, settings, anew
        super().__init__(path, bundle, fleet, extends=extends)
        self.standing = self.standing_beside = SharedStandingTables(self._members)
        self.based_on = self.changes()

    def _open(self, path: AnyPlace) -> Database:
        where = place_of(path)
        if not isinstance(where, PostgresPlace):
            raise UsageError("--worker", expected="--store postgresql://…, which several can work on", got=where)
        self._members: Leader | Member = (
            Leader(where, KIND, self._settings, anew=self._anew)
            if self._claims
            else Member(where, KIND, self._settings)
        )
        return self._members

    def _check_claims(self) -> None:
        if not self._claims:
            raise StoreLostError(f"store {self._file.path}", expected="a run", got="none yet", hint="again in a moment")

    @property
    def leads(self) -> bool:
        """Whether this is the one that leads, or did."""
        return self._claims

    def alone(self) -> AbstractContextManager[None]:
        """What is read and written in the block no other process changes meanwhile: it is one transaction."""
        return self._members.alone()

    def changes(self) -> int:
        """Goes up with everything that decisions depend on, whoever changes it."""
        return self._members.changes()

    def may_lead(self) -> bool:
        """Whether nobody leads; a member asks."""
        assert isinstance(self._members, Member)
        return self._members.may_lead()

    def check_version(self) -> None:
        """That who leads is of this release and bundle, and one of several; a member asks once something changed."""
        assert isinstance(self._members, Member)
        self._members.check_version()
        self._members.check_company()
        with self._disk():
            (bundle,) = self._db.execute("SELECT value FROM meta WHERE name = 'bundle'").fetchone()
        if bytes(bundle) != self._bundle:
            expected, got = (f"the bundle of sha256 {one.hex()[:12]}…" for one in (bytes(bundle), self._bundle))
            hint = "the --bundle of the process that leads, for all of them"
            raise UsageError("--worker", expected=f"{expected}, which the leader has", got=got, hint=hint)

    def beat(self) -> None:
        """Say that the leader is alive."""
        self._members.beat()

    def commit(
        self, accepted: Sequence[Accepted], tally: Tally, refusals: Sequence[tuple[int, str]] = ()
    ) -> Collection[Key]:
        """As `DurableStore.commit`, beside other processes.

        Raises:
            StaleError: it was decided on what is no longer so; nothing was written.
        """
        if self._members.is_alone:  # a part of what the leader does
            return super().commit(accepted, tally, refusals)
        ordered = sorted(accepted, key=lambda a: (a.round, a.method, a.device))  # so that two never wait for each other
        with self._members.beside_others(self.based_on) as db:
            ids = self._file.fresh_ids("payload", len(ordered))
            numbered = list(zip(ids, ordered, strict=True))
            db.executemany(
                "INSERT INTO contribution VALUES (?, ?, ?, ?, ?) ON CONFLICT (round, method, device) DO NOTHING",
                [(a.round, a.method, a.device, a.received_bytes, n) for n, a in numbered],
            )
            ours = self._ours(ids)
            db.executemany(
                "INSERT INTO payload VALUES (?, ?, ?)", [(n, a.round, a.payload) for n, a in numbered if n in ours]
            )
            self.blinded.keep_seeds(
                (a.round, a.device, a.message.seed)
                for n, a in numbered
                if n in ours and a.message is not None and a.message.seed
            )
            counts = sorted((round, outcome, messages) for (round, outcome), messages in tally.items())
            db.executemany(COUNT, counts)
            db.executemany(upsert("refusal", "round, device"), sorted(refusals))
        return {(a.round, a.method, a.device) for n, a in numbered if n not in ours}

    def taken_count(self, round: int, method: str) -> tuple[int, int]:
        """How many contributions to a round are committed, and how many devices were rejected."""
        with self._disk():
            found = self._db.execute(
                "SELECT (SELECT count(*) FROM contribution WHERE round = ? AND method = ?),"
                " (SELECT count(*) FROM refusal WHERE round = ?)",
                (round, method, round),
            ).fetchone()
        return int(found[0]), int(found[1])

    def _ours(self, ids: Sequence[int]) -> set[int]:
        if not ids:
            return set()
        marks = ", ".join("?" for _ in ids)
        rows = self._db.execute(f"SELECT payload FROM contribution WHERE payload IN ({marks})", ids).fetchall()
        return {number for (number,) in rows}

    # ── chunks ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put_chunks(self, chunks: Iterable[tuple[str, Chunk, bytes]]) -> None:
        """Make chunks durable: device, chunk, and the message that it came in. One that begins another contribution
        takes the place of the chunks of the one before."""
        rows = sorted((d, c.method, c.round, c.digest, c.index, payload) for d, c, payload in chunks)
        with self._members.beside_others(None) as db:
            for device, method, digest in sorted({(row[0], row[1], row[3]) for row in rows}):
                db.execute(
                    "DELETE FROM protofleet_chunk WHERE device = ? AND method = ? AND digest <> ?",
                    (device, method, digest),
                )
            columns = "device, method, round, digest, number, payload"
            db.executemany(
                f"INSERT INTO protofleet_chunk ({columns}) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (device, method, digest, number) DO NOTHING",
                rows,
            )

    def other_chunks(self, device: str, chunk: Chunk, known: Collection[int]) -> list[bytes]:
        """The messages with the further chunks of one's contribution, by whomever they were taken."""
        with self._disk():
            rows = self._db.execute(
                "SELECT number, payload FROM protofleet_chunk WHERE device = ? AND method = ? AND digest = ?"
                " ORDER BY number",
                (device, chunk.method, chunk.digest),
            ).fetchall()
        return [payload for number, payload in rows if number not in known]

    def drop_chunks(self, devices: Iterable[str], method: str, before: int) -> None:
        """What was put together is needed no longer; nor are chunks of rounds before that one."""
        with self._members.beside_others(None) as db:
            for device in sorted(devices):
                db.execute("DELETE FROM protofleet_chunk WHERE device = ? AND method = ?", (device, method))
            db.execute("DELETE FROM protofleet_chunk WHERE round < ?", (before,))
